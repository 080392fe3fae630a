"""The broadcast between ranks keeps the executor contract, as rank 0 of two."""

from __future__ import annotations

import pytest

from kvbm_core.testing.executor_bench import Bench, two_group_memory
from kvbm_core.testing.executor_contract import ExecutorContract, Setup, forbid_writes
from kvbm_core.transfer.executor import Executor
from kvbm_core.transfer.executors.broadcast import BroadcastExecutor
from kvbm_core.transfer.executors.broadcast_group import Group, MeetingPoint
from kvbm_core.transfer.plan import TransferPlan
from tests.unit.test_broadcast_executor import connected

pytest.importorskip("torch", reason="NOT RUN: the broadcast between ranks (needs torch)")


class TwoRanks(BroadcastExecutor):
    """Rank 0; the other is given the same plans."""

    other: BroadcastExecutor

    def submit(self, plan: TransferPlan, *, deadline_s: float | None = None) -> None:
        """See Executor."""
        super().submit(plan, deadline_s=deadline_s)
        self.other.submit(plan)

    def close(self) -> None:
        """See Executor."""
        super().close()
        self.other.close()


class TestBroadcastExecutor(ExecutorContract):
    """Rank 0 of two."""

    def make_executor(self, setup: Setup) -> Executor:
        assert setup.on_done is not None
        point = MeetingPoint()
        group, others_group = connected(
            [Group(0, (0, 1), point.address, point), Group(1, (0, 1), point.address)]
        )
        executor = TwoRanks(setup.device, group, setup.on_done, make_loader=setup.copier, clock=setup.clock)
        executor.other = BroadcastExecutor(
            two_group_memory(2), others_group, lambda result: None, clock=setup.clock
        )
        return executor

    def break_copies(self, bench: Bench, broken: bool) -> None:
        assert isinstance(bench.executor, BroadcastExecutor)
        forbid_writes(bench.executor._loader, broken)

    def test_onboards_go_first_and_each_kind_in_order(self) -> None:
        """An onboard is begun first, but the way to the other ranks is longer than an offload's."""
        order = self.order_of_ends()
        assert [job_id for job_id in order if job_id in (1, 3)] == [1, 3]
        assert [job_id for job_id in order if job_id in (0, 2)] == [0, 2]
