"""A leader of a model with states, and what most tests of it do."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from kvbm_core.runtime.leader_options import LeaderOptions
from kvbm_core.runtime.request import NULL_BLOCK, RequestState, StateOnDevice
from kvbm_core.testing.leader_bench import BenchDisk, LeaderBench
from kvbm_core.tiers.groups import GroupSpec
from kvbm_core.transfer.plan import TransferPlan
from kvbm_core.types import BlockKey

BLOCK = 4
HYBRID = (GroupSpec(0, BLOCK, is_state=True), GroupSpec(1, BLOCK, is_state=True), GroupSpec(2, BLOCK))
STATES, ATTENTION = (0, 1), 2
PROMPT = list(range(100, 133))
OTHER = list(range(300, 333))


class StatesBench(LeaderBench):
    """Device block ``1000 * group + number`` is block ``number`` of any request."""

    def __init__(
        self,
        num_slots: int = 64,
        *,
        every_tokens: int = 0,
        groups: tuple[GroupSpec, ...] = HYBRID,
        disk: BenchDisk | None = None,
    ) -> None:
        options = LeaderOptions(5.0, state_every_tokens=every_tokens)
        super().__init__(num_slots, groups=groups, disk=disk, options=options)

    def chain(self, tokens: Sequence[int], position: int) -> list[BlockKey]:
        """The keys of one group."""
        num_blocks = len(tokens) // BLOCK
        return self.keys(tokens)[position * num_blocks : (position + 1) * num_blocks]

    def states(self, tokens: Sequence[int], ends: Collection[int]) -> list[BlockKey]:
        """The keys of the states at these ends."""
        return [
            self.chain(tokens, position)[end // BLOCK - 1]
            for end in ends
            for position, group in enumerate(self.leader.groups)
            if group.is_state
        ]

    def ends(self, tokens: Sequence[int]) -> list[int]:
        """Where the host has all states."""
        every = range(BLOCK, len(tokens) + 1, BLOCK)
        return [end for end in every if all(map(self.tier.contains, self.states(tokens, [end])))]

    def attention_blocks(self, tokens: Sequence[int]) -> int:
        """How many leading KV blocks the host has."""
        return self.tier.match_prefix(self.chain(tokens, ATTENTION))

    def computes(
        self,
        state: RequestState,
        tokens: Sequence[int],
        before: int,
        after: int,
        *,
        prompt: int,
        hands_off: bool = True,
    ) -> TransferPlan | None:
        """A step of the engine, which says where the state is at its end."""
        tables = [
            range(1000 * group.index + 1, 1000 * group.index + 1 + len(tokens) // BLOCK)
            for group in self.leader.groups
        ]
        self.leader.offload(state, tokens, before, after, tables)
        if hands_off and after % BLOCK == 0:
            self.leader.offload_states(state, tokens, self.handed(after), prompt)
        return self.take_offloads()

    def handed(self, end: int) -> list[StateOnDevice]:
        """What an engine says of the states at this end."""
        return [
            StateOnDevice(position, 1000 * group.index + end // BLOCK, end)
            for position, group in enumerate(self.leader.groups)
            if group.is_state
        ]

    def serve(
        self,
        tokens: Sequence[int],
        ends: Collection[int],
        *,
        prompt: int | None = None,
        request_id: str = "r",
        finishes: bool = True,
    ) -> RequestState:
        """A request whose steps end at ``ends``, with states, and at the end of ``tokens``."""
        state = self.open(request_id)
        before = 0
        for end in sorted({*ends, len(tokens)}):
            plan = self.computes(
                state,
                tokens,
                before,
                end,
                prompt=len(tokens) if prompt is None else prompt,
                hands_off=end in ends,
            )
            if plan is not None:
                self.answer(plan)
            before = end
        if finishes:
            self.leader.finish(state)
        return state

    def tables(self, end: int) -> list[list[int]]:
        """Device blocks for a load up to ``end``, as engines give them: of states the last alone."""
        number = end // BLOCK
        return [
            [NULL_BLOCK] * (number - 1) + [1000 * group.index + number]
            if group.is_state
            else list(range(1000 * group.index + 1, 1000 * group.index + number + 1))
            for group in self.leader.groups
        ]

    def loads(self, tokens: Sequence[int], request_id: str = "loads") -> int:
        """A request that comes, loads what there is, and goes; how many tokens that were."""
        state = self.open(request_id)
        matched = self.match(state, tokens)
        if matched:
            self.answer(self.leader.onboard(state, matched, self.tables(matched)))
        self.leader.finish(state)
        return matched or 0

    def next_to_go(self, count: int) -> set[BlockKey]:
        """Evicts so many blocks of the host, which is full of what was served; which ones."""
        before = set(self.tier.keys())
        room = self.tier.capacity_blocks - len(before)
        fill = [BlockKey(bytes([250]) * 31 + bytes([i])) for i in range(room + count)]
        reservation = self.tier.reserve(fill, lambda _: frozenset())
        self.tier.abort(reservation)
        return before - set(self.tier.keys())
