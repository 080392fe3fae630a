"""One replay of a trace: a device cache, a host tier and a disk tier of given sizes, under one admission
policy.

What decides is the product's own Leader with its tiers; there is no engine, no bytes move and every transfer
ends at once. A block of the trace is one block of the leader, and one token to it: the trace's ids stand in
for tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvbm_core.blocks.slot_tier import BlockTier
from kvbm_core.clock import Clock, ManualClock
from kvbm_core.errors import IntegrityError, Outcome
from kvbm_core.observe.metrics import Metrics
from kvbm_core.policy.admission import AdmissionPolicy, AdmitAll
from kvbm_core.policy.frequency import FrequencyFilter
from kvbm_core.policy.named import PolicyMaker, make_policy
from kvbm_core.replay.trace import Request, Trace
from kvbm_core.runtime.handshake import Handshake, RankAnswer, SlotsFound, SlotsReady
from kvbm_core.runtime.leader import Leader, LeaderParts
from kvbm_core.runtime.leader_options import LeaderOptions
from kvbm_core.runtime.request import RequestState
from kvbm_core.storage.disk.recovery import Found
from kvbm_core.tiers.groups import GroupSpec
from kvbm_core.tiers.lower import LowerTierMaker
from kvbm_core.tiers.slotted import slotted_tier
from kvbm_core.tokens.namespace import KeyNamespace
from kvbm_core.transfer.plan import JobResult, OrderKind, TierOrder
from kvbm_core.types import Tier

_ONE_TOKEN_BLOCKS = (GroupSpec(0, 1),)
_DISK = "disk"
_RANK = 0


class Policy(NamedTuple):
    """Which blocks a disk takes in; ``make`` answers a new one. A candidate is not in the product.
    ``evicting``: which blocks of host and disk go.
    """

    name: str
    make: Callable[[Clock], AdmissionPolicy]
    is_candidate: bool = False
    evicting: PolicyMaker = make_policy


def admit_all(clock: Clock) -> AdmissionPolicy:
    """Everything, whatever the time."""
    return AdmitAll()


FILTER = Policy("filter", FrequencyFilter)
"""The default."""
EVERYTHING = Policy("all", admit_all)
"""DYN_KVBM_DISABLE_DISK_OFFLOAD_FILTER."""
POLICIES = (EVERYTHING, FILTER)
"""What the product has."""


class Sizes(NamedTuple):
    """Blocks of each tier. A disk of 0 is none."""

    device_blocks: int
    host_blocks: int
    disk_blocks: int


@dataclass(slots=True)
class Tally:
    """What a replay counted. Tokens are those of prompts; a tail that fills no block is always computed."""

    input_tokens: int = 0
    device_tokens: int = 0
    host_tokens: int = 0
    disk_tokens: int = 0
    computed_tokens: int = 0
    written_blocks: int = 0
    read_blocks: int = 0

    @property
    def hit_tokens(self) -> int:
        """Found in any tier."""
        return self.device_tokens + self.host_tokens + self.disk_tokens

    @property
    def hit_rate(self) -> float:
        """Of all prompt tokens, 0 to 1."""
        return self.hit_tokens / max(1, self.input_tokens)

    @property
    def writes_per_read(self) -> float | None:
        """Blocks written to disk for each block read from it; None if none was read."""
        return self.written_blocks / self.read_blocks if self.read_blocks else None


class Replay:
    """A machine that serves one request after the other. ``seed`` makes other keys; no count depends on
    it.
    """

    _options = LeaderOptions()

    def __init__(
        self, sizes: Sizes, policy: Policy, block_tokens: int, seed: int = 1, found: Sequence[Found] = ()
    ) -> None:
        self.tally = Tally()
        self._block_tokens = block_tokens
        self._root = KeyNamespace(f"trace {seed}").root()
        self._clock = ManualClock()
        self._sent: list[TierOrder] = []
        self._handshake = Handshake(1, lambda block_bytes: sizes.host_blocks, clock=self._clock)
        lower = self._lower_tiers(sizes, policy)
        self._leader = Leader(
            _ONE_TOKEN_BLOCKS,
            BlockTier(Tier.HOST, policy.evicting(), self._clock),
            self._handshake,
            clock=self._clock,
            metrics=Metrics(has_host_tier=True),
            options=self._options,
            parts=LeaderParts(lower, self._sent.append),
        )
        host_blocks = sizes.host_blocks
        self._handshake.inbox.append(SlotsReady(host_blocks, host_blocks, 1, 1, "replay"))
        if sizes.disk_blocks > 0:
            self._handshake.found.append(SlotsFound(_DISK, _RANK, sizes.disk_blocks, list(found)))
        self._leader.poll()
        self._leader.catch_up()
        self._device = BlockTier(Tier.DEVICE, make_policy(), self._clock)
        self._device.grow(sizes.device_blocks)

    def _lower_tiers(self, sizes: Sizes, policy: Policy) -> tuple[LowerTierMaker, ...]:
        if not sizes.disk_blocks:
            return ()
        return (slotted_tier(_DISK, Tier.DISK, policy.make(self._clock), policy.evicting),)

    def serve(self, request: Request) -> None:
        """The request comes at its time, takes what the tiers have, computes the rest and leaves it
        behind.
        """
        leader, tally, tokens = self._leader, self.tally, self._block_tokens
        self._clock.advance(max(0.0, request.at_s - self._clock.now_s()))
        ids = request.ids
        state = leader.open("request", self._root, None)
        state.chain.extend(ids)
        on_device = self._device.match_prefix(state.keys(0)[: request.reusable_blocks])
        in_host, on_disk = self._bring_up(state, request, on_device)
        found_blocks = on_device + in_host + on_disk
        # The engine computes the rest, and it is written through.
        leader.offload(state, ids, found_blocks, len(ids), [_table(ids)])
        job = leader.take_offloads()
        if job is not None:
            self._answer(job.job_id)
        leader.finish(state)
        self._answer_orders()
        self._keep_on_device(state)
        tally.input_tokens += request.prompt_tokens
        tally.device_tokens += on_device * tokens
        tally.host_tokens += in_host * tokens
        tally.disk_tokens += on_disk * tokens
        tally.computed_tokens += request.prompt_tokens - found_blocks * tokens
        tally.read_blocks += on_disk

    def _bring_up(self, state: RequestState, request: Request, on_device: int) -> tuple[int, int]:
        """What lies below the device is loaded. Blocks that the host had, and that the disk had."""
        leader, ids = self._leader, request.ids
        while (found := leader.match(state, ids, on_device, request.reusable_blocks)) is None:
            self._answer_orders()  # a store that others share is asked
        if not found:
            return 0, 0
        plan = leader.onboard(state, found, [_table(ids)])
        if plan is None:
            raise IntegrityError("blocks were promised and could not be loaded")
        self._answer(plan.job_id)
        on_disk = sum(len(order.keys) for order in plan.reads)
        return found - on_disk, on_disk

    def _answer(self, job_id: int, failed: Mapping[int, Outcome] = {}) -> None:
        outcome = next(iter(failed.values()), Outcome.OK)
        result = JobResult(job_id, outcome, 1, 0.0, 0.0, failed=tuple(failed.items()))
        self._handshake.inbox.append(RankAnswer(_RANK, result))
        self._leader.poll()

    def _answer_orders(self) -> None:
        """Does what has been ordered since."""
        while self._sent:
            orders, self._sent[:] = list(self._sent), []
            for order in orders:
                self._answer(order.job_id, self._do(order))
                if order.kind is OrderKind.STORE:
                    self.tally.written_blocks += len(order.keys)

    def _do(self, order: TierOrder) -> Mapping[int, Outcome]:
        """What of it failed, as a JobResult says it."""
        return {}

    def _keep_on_device(self, state: RequestState) -> None:
        """As engines do: the whole prompt is most recent, and its tail goes before its head."""
        self._device.commit(self._device.reserve(state.keys(0), lambda _: state.own_keys()))
        self._device.touch(state.keys(0))

    def check(self) -> None:
        """Raises IntegrityError unless the counts add up and the product's own metrics say the same."""
        tally, tokens = self.tally, self._block_tokens
        if tally.hit_tokens + tally.computed_tokens != tally.input_tokens:
            raise IntegrityError(
                f"{tally.hit_tokens} tokens hit and {tally.computed_tokens} computed are not "
                f"{tally.input_tokens}"
            )
        below = (tally.host_tokens + tally.disk_tokens) // tokens
        series = self._leader.metrics.snapshot()
        for name, counted in (
            ("kvbm_matched_tokens", below),  # one token each
            ("kvbm_onboard_blocks_d2d", tally.read_blocks),
            ("kvbm_offload_blocks_h2d", tally.written_blocks),
        ):
            if series[name] != counted:
                raise IntegrityError(f"{name} says {series[name]:.0f}, counted were {counted}")
        self._leader.check_integrity()
        self._device.check_integrity()


def _table(ids: Sequence[int]) -> range:
    """Device blocks for a prompt; which ones makes no difference, as no bytes move."""
    return range(1, len(ids) + 1)


def replay(
    trace: Trace,
    sizes: Sizes,
    policy: Policy,
    seed: int = 1,
    told: Callable[[int], None] = lambda served: None,
) -> Tally:
    """Serves all requests of ``trace``. IntegrityError if the counts do not add up. ``told`` hears now and
    then how many have been served.
    """
    machine = Replay(sizes, policy, trace.block_tokens, seed)
    for number, request in enumerate(trace.requests):
        machine.serve(request)
        if not number % 256:
            told(number)
    machine.check()
    if machine.tally.input_tokens != trace.prompt_tokens:
        raise IntegrityError("a request was not served")
    return machine.tally


def reusable_tokens(trace: Trace) -> int:
    """Tokens that a cache which never forgets would have: no policy and no size finds more."""
    seen: set[int] = set()
    blocks = 0
    for request in trace.requests:
        reusable = request.ids[: request.reusable_blocks]
        blocks += next((i for i, block in enumerate(reusable) if block not in seen), len(reusable))
        seen.update(request.ids)
    return blocks * trace.block_tokens
