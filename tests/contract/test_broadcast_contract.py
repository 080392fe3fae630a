"""The broadcast between ranks keeps the executor contract, as rank 0 of two."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvbm_core.clock import Clock
from kvbm_core.errors import Outcome
from kvbm_core.storage.host_slab import HostSlab
from kvbm_core.testing.executor_contract import (
    HELD_JOB,
    LONG_S,
    Bench,
    ExecutorContract,
    Listener,
    plan,
    two_group_memory,
)
from kvbm_core.transfer.digests import SlotDigests
from kvbm_core.transfer.executor import DeviceMemory, Executor
from kvbm_core.transfer.executors.broadcast import BroadcastExecutor
from kvbm_core.transfer.executors.broadcast_group import Group, MeetingPoint
from kvbm_core.transfer.executors.memcpy import MemcpyExecutor
from kvbm_core.transfer.jobs import MAX_QUEUED_JOBS
from kvbm_core.transfer.plan import JobResult, TransferPlan
from kvbm_core.types import Direction

pytest.importorskip("torch", reason="NOT RUN: the broadcast between ranks (needs torch)")


class PolledBroadcast(BroadcastExecutor):
    """Keeps its results for ``poll``, as the contract asks for where there is no listener."""

    results: list[JobResult]
    other: BroadcastExecutor

    def submit(self, plan: TransferPlan, *, deadline_s: float | None = None) -> None:
        """See Executor; the other rank hears of it too."""
        super().submit(plan, deadline_s=deadline_s)
        self.other.submit(plan)

    def poll(self) -> list[JobResult]:
        """See Executor."""
        taken = self.results[:]
        self.results.clear()
        return taken

    def close(self) -> None:
        """See Executor."""
        super().close()
        self.other.close()


class TestBroadcastExecutor(ExecutorContract):
    """Rank 0 of two, with another that is given the same plans."""

    def make_executor(
        self,
        device: DeviceMemory,
        host: HostSlab,
        *,
        on_done: Callable[[JobResult], None] | None,
        verify: bool,
        clock: Clock | None,
    ) -> Executor:
        digests = SlotDigests() if verify else None
        results: list[JobResult] = []
        point = MeetingPoint()
        executor = PolledBroadcast(
            device,
            Group(0, 2, point.address, point),
            on_done or results.append,
            make_loader=lambda done: MemcpyExecutor(
                device, host, max_batch_blocks=4, on_done=done, digests=digests, clock=clock
            ),
            clock=clock,
        )
        executor.results = results
        executor.other = BroadcastExecutor(
            two_group_memory(2), Group(1, 2, point.address), lambda result: None, clock=clock
        )
        return executor

    def break_copies(self, bench: Bench, broken: bool) -> None:
        executor = bench.executor
        assert isinstance(executor, BroadcastExecutor) and isinstance(executor._loader, MemcpyExecutor)
        for lanes in executor._loader._lanes:
            for lane in lanes:
                lane.device.flags.writeable = not broken

    def test_onboards_go_first_and_each_kind_in_order(self) -> None:
        """An onboard is begun first, but the way to the other ranks is longer than an offload's."""
        listener = Listener()
        with self.bench(on_done=listener) as bench:
            with self.held(bench, listener):
                for job_id, direction in enumerate(("offload", "onboard", "offload", "onboard")):
                    bench.executor.submit(plan(job_id, Direction(direction), [job_id], [job_id + 1]))
            assert bench.executor.drain(LONG_S)
            assert [job_id for job_id in listener.ids() if job_id in (1, 3)] == [1, 3]
            assert [job_id for job_id in listener.ids() if job_id in (0, 2)] == [0, 2]

    def test_the_queue_is_bounded(self) -> None:
        """Results are not kept here for a poll: what waits or runs is what counts."""
        listener = Listener()
        with self.bench(on_done=listener) as bench:
            with self.held(bench, listener):
                for job_id in range(MAX_QUEUED_JOBS + 9):
                    bench.executor.submit(plan(job_id + HELD_JOB + 1, Direction.OFFLOAD, [1], [1]))
            assert bench.executor.drain(LONG_S)
            outcomes = [result.outcome for result in listener.results]
            assert (outcomes.count(Outcome.OK), outcomes.count(Outcome.BUSY)) == (MAX_QUEUED_JOBS, 10)
