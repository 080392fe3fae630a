"""A leader with a disk, and what most tests of it do."""

from __future__ import annotations

from collections.abc import Sequence

from kvbm_core.runtime.leader_options import LeaderOptions
from kvbm_core.runtime.request import RequestState
from kvbm_core.testing.leader_bench import BenchDisk, LeaderBench
from kvbm_core.transfer.plan import TierOrder, TransferPlan

PROMPT = list(range(100, 120))  # five blocks
OTHER = list(range(300, 320))
TABLE = [[11, 12, 13, 14, 15]]


def bench_of(num_slots: int = 16, disk: BenchDisk | None = None, world_size: int = 1) -> LeaderBench:
    """With a disk to which everything goes, unless ``disk`` says otherwise."""
    return LeaderBench(num_slots, world_size=world_size, disk=disk or BenchDisk(), options=LeaderOptions(5.0))


def on_disk(bench: LeaderBench, tokens: Sequence[int]) -> int:
    """How many leading blocks of ``tokens`` the disk has."""
    return bench.disk.slots.match_prefix(bench.keys(tokens))


def stored(bench: LeaderBench, tokens: Sequence[int] = PROMPT) -> TierOrder:
    """``tokens`` are in the host tier and, by one order, on the disk."""
    bench.store(tokens)
    (order,) = bench.stores()
    bench.say(order.job_id)
    bench.leader.poll()
    assert on_disk(bench, tokens) == len(tokens) // 4
    return order


def leave_host(bench: LeaderBench, blocks: Sequence[int], tokens: Sequence[int] = PROMPT) -> None:
    """These blocks of ``tokens`` are no longer in the host tier."""
    keys = bench.keys(tokens)
    bench.tier.forget([keys[block] for block in blocks])


def loading(bench: LeaderBench, request_id: str = "loader") -> tuple[RequestState, TransferPlan]:
    """A request that is being brought PROMPT's first four blocks."""
    state = bench.open(request_id)
    assert bench.match(state, PROMPT) == 16
    plan = bench.leader.onboard(state, 16, TABLE)
    assert plan is not None
    return state, plan


def load(bench: LeaderBench) -> TransferPlan:
    """A request that is brought PROMPT's first four blocks, and goes."""
    state, plan = loading(bench)
    bench.answer(plan)
    bench.leader.finish(state)
    return plan


def reads_of(plan: TransferPlan) -> TierOrder:
    """What the plan reads from the disk."""
    (reads,) = plan.reads
    return reads
