"""One replay of a trace: a device cache, a host tier and a disk tier of given sizes, under one admission
policy.

What decides is the product's own Leader with its DiskTier; there is no engine, no bytes move and every
transfer ends at once. A block of the trace is one block of the leader, and one token to it: the trace's ids
stand in for tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from benchmarks.suite import WrongAnswer, expect
from benchmarks.trace.policies import Policy
from benchmarks.trace.requests import BLOCK_TOKENS, Request
from kvbm_core.blocks.slot_tier import BlockTier
from kvbm_core.policy.lru import LruPolicy
from kvbm_core.runtime.request import RequestState
from kvbm_core.testing.leader_bench import BenchDisk, LeaderBench
from kvbm_core.tiers.groups import GroupSpec
from kvbm_core.tokens.namespace import KeyNamespace
from kvbm_core.types import Tier

ONE_TOKEN_BLOCKS = (GroupSpec(0, 1),)


class Sizes(NamedTuple):
    """Blocks of each tier."""

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
    def writes_per_read(self) -> float | None:
        """Blocks written to disk for each block read from it; None if none was read."""
        return self.written_blocks / self.read_blocks if self.read_blocks else None


class Replay:
    """A machine that serves one request after the other. ``seed`` makes other keys; no count depends on
    it.
    """

    def __init__(self, sizes: Sizes, policy: Policy, seed: int) -> None:
        self.tally = Tally()
        self._root = KeyNamespace(f"trace {seed}").root()
        disk = BenchDisk(sizes.disk_blocks, policy.make)
        self._bench = LeaderBench(sizes.host_blocks, groups=ONE_TOKEN_BLOCKS, disk=disk)
        self._device = BlockTier(Tier.DEVICE, LruPolicy(), self._bench.clock)
        self._device.grow(sizes.device_blocks)

    def serve(self, request: Request) -> None:
        """The request comes at its time, takes what the tiers have, computes the rest and leaves it
        behind.
        """
        bench, tally = self._bench, self.tally
        bench.clock.advance(request.timestamp / 1000 - bench.clock.now_s())
        ids = request.full_block_ids
        state = bench.leader.open("request", self._root, None)
        state.chain.extend(ids)
        on_device = self._device.match_prefix(state.keys(0)[: request.reusable_blocks])
        in_host, on_disk = self._bring_up(state, request, on_device)
        found_blocks = on_device + in_host + on_disk
        # The engine computes the rest, and it is written through.
        bench.leader.offload(state, ids, found_blocks, len(ids), [_table(ids)])
        plan = bench.take_offloads()
        if plan is not None:
            bench.answer(plan)
        bench.leader.finish(state)
        tally.written_blocks += bench.write_to_disk()
        self._keep_on_device(state)
        tally.input_tokens += request.input_length
        tally.device_tokens += on_device * BLOCK_TOKENS
        tally.host_tokens += in_host * BLOCK_TOKENS
        tally.disk_tokens += on_disk * BLOCK_TOKENS
        tally.computed_tokens += len(range(found_blocks * BLOCK_TOKENS, request.input_length))
        tally.read_blocks += on_disk

    def _bring_up(self, state: RequestState, request: Request, on_device: int) -> tuple[int, int]:
        """What lies below the device is loaded. Blocks that the host had, and that the disk had."""
        bench, ids = self._bench, request.full_block_ids
        found = bench.leader.match(state, ids, on_device, request.reusable_blocks)
        if not found:
            return 0, 0
        plan = bench.leader.onboard(state, found, [_table(ids)])
        if plan is None:
            raise WrongAnswer("blocks were promised and could not be loaded")
        bench.answer(plan)
        self.tally.written_blocks += bench.write_to_disk()  # what has become worth it with this hit
        on_disk = sum(len(order.keys) for order in plan.reads)
        return found - on_disk, on_disk

    def _keep_on_device(self, state: RequestState) -> None:
        """As engines do: the whole prompt is most recent, and its tail goes before its head."""
        self._device.commit(self._device.reserve(state.keys(0), lambda _: state.own_keys()))
        self._device.touch(state.keys(0))

    def check(self) -> None:
        """Raises WrongAnswer unless the counts add up and the product's own metrics say the same."""
        tally = self.tally
        expect(
            tally.hit_tokens + tally.computed_tokens == tally.input_tokens,
            f"{tally.hit_tokens} tokens hit and {tally.computed_tokens} computed are not "
            f"{tally.input_tokens}",
        )
        below = (tally.host_tokens + tally.disk_tokens) // BLOCK_TOKENS
        for series, counted in (
            ("kvbm_matched_tokens", below),  # one token each
            ("kvbm_onboard_blocks_d2d", tally.read_blocks),
            ("kvbm_offload_blocks_h2d", tally.written_blocks),
        ):
            said = self._bench.metric(series)
            expect(said == counted, f"{series} says {said:.0f}, counted were {counted}")
        self._bench.assert_idle()
        self._device.check_integrity()


def _table(ids: Sequence[int]) -> range:
    """Device blocks for a prompt; which ones makes no difference, as no bytes move."""
    return range(1, len(ids) + 1)


def replay(requests: Sequence[Request], sizes: Sizes, policy: Policy, seed: int) -> Tally:
    """Serves all of ``requests``. WrongAnswer if the counts do not add up."""
    machine = Replay(sizes, policy, seed)
    for request in requests:
        machine.serve(request)
    machine.check()
    expect(
        machine.tally.input_tokens == sum(request.input_length for request in requests),
        "a request was not served",
    )
    return machine.tally


def reusable_tokens(requests: Sequence[Request]) -> int:
    """Tokens that a cache which never forgets would have: no policy and no size finds more."""
    seen: set[int] = set()
    tokens = 0
    for request in requests:
        ids = request.full_block_ids
        reusable = ids[: request.reusable_blocks]
        tokens += BLOCK_TOKENS * next(
            (i for i, block in enumerate(reusable) if block not in seen), len(reusable)
        )
        seen.update(ids)
    return tokens
