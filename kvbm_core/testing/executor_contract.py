# ruff: noqa: S101  (a conformance suite is made of asserts)
"""What every Executor must do; a test class per executor inherits from ExecutorContract (pytest)."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from unittest.mock import patch

from kvbm_core.clock import Clock, ManualClock
from kvbm_core.errors import Outcome
from kvbm_core.storage.host_slab import HostSlab
from kvbm_core.testing.executor_bench import (
    HELD_JOB,
    LONG_S,
    NUM_DEVICE_BLOCKS,
    NUM_SLOTS,
    Bench,
    Listener,
    comparison,
    is_mapped,
    plan,
    two_group_memory,
)
from kvbm_core.transfer import jobs
from kvbm_core.transfer.digests import SlotDigests
from kvbm_core.transfer.executor import Copier, DeviceMemory, Executor
from kvbm_core.transfer.executors.cuda import CopyLimits, CudaExecutor
from kvbm_core.transfer.executors.cuda_runtime import CudaRuntime
from kvbm_core.transfer.executors.memcpy import MemcpyExecutor
from kvbm_core.transfer.factory import make_executor
from kvbm_core.transfer.plan import GroupMove, JobResult, TransferPlan
from kvbm_core.types import Direction

OnDone = Callable[[JobResult], None]
Prepare = Callable[[int, int], Callable[[], None] | None]
"""See HostSlab."""
FEW_JOBS = 64
"""In place of MAX_QUEUED_JOBS: on CUDA's double each job is looked at twice, and thousands take seconds."""


@dataclass(frozen=True)
class Setup:
    """What an executor is made of; with ``digests`` it is to verify."""

    device: DeviceMemory
    host: HostSlab
    on_done: OnDone
    digests: SlotDigests | None
    clock: Clock | None

    def copier(self, on_done: OnDone) -> Copier:
        """The executor for this memory, four blocks a batch."""
        return make_executor(
            self.device,
            self.host,
            max_batch_blocks=4,
            on_done=on_done,
            digests=self.digests,
            clock=self.clock,
        )

    def cuda_copier(self, api: CudaRuntime, on_done: OnDone, max_concurrent: int = 1) -> CudaExecutor:
        """The executor for GPUs, by another than CUDA's own interface, four blocks a batch."""
        return CudaExecutor(
            self.device,
            self.host,
            api,
            limits=CopyLimits(max_concurrent, max_batch_blocks=4),
            on_done=on_done,
            digests=self.digests,
            clock=self.clock,
        )


def forbid_writes(executor: object, forbidden: bool) -> None:
    """Makes every copy to the device fail that a MemcpyExecutor is given, or work again."""
    assert isinstance(executor, MemcpyExecutor)
    for pieces in executor._pieces:
        for piece in pieces:
            piece.device.flags.writeable = not forbidden


class ExecutorContract:
    """Inherit, name the class ``Test...`` and say how to make the executor and how to make it fail."""

    bench_class: type[Bench] = Bench

    def make_executor(self, setup: Setup) -> Executor:
        """An executor that runs one job at a time."""
        raise NotImplementedError

    def break_copies(self, bench: Bench, broken: bool) -> None:
        """Makes every copy to the device fail, or work again."""
        raise NotImplementedError

    def make_memory(self) -> DeviceMemory:
        """Fresh device memory."""
        return two_group_memory()

    def make_slot_bytes(self, device: DeviceMemory) -> int:
        """The size of a slot for this memory."""
        return max(view.block_bytes for view in device.views)

    def preparation(self, prepare: Prepare | None) -> Prepare | None:
        """What the slab's memory needs, and what a test wants done before."""
        return prepare

    @contextmanager
    def bench(
        self,
        *,
        on_done: OnDone | None = None,
        verify: bool = False,
        clock: Clock | None = None,
        prepare: Prepare | None = None,
    ) -> Iterator[Bench]:
        """A fresh executor on fresh memory, closed afterwards."""
        device, results = self.make_memory(), list[JobResult]()
        host = HostSlab(NUM_SLOTS, self.make_slot_bytes(device), prepare=self.preparation(prepare))
        assert prepare is not None or host.wait_ready(LONG_S), host.failure
        on_done = on_done or results.append
        executor = self.make_executor(Setup(device, host, on_done, SlotDigests() if verify else None, clock))
        try:
            yield self.bench_class(device, host, executor, results)
        finally:
            executor.close()
            host.close()

    def finish(self, bench: Bench, submitted: TransferPlan) -> JobResult:
        """Runs one job and returns its result."""
        bench.executor.submit(submitted)
        assert bench.executor.wait([submitted.job_id], LONG_S)
        (result,) = bench.poll()
        assert result.job_id == submitted.job_id
        return result

    def test_bytes_come_back_exactly_for_every_group(self) -> None:
        blocks, slots = [9, 4, 5, 6, 11, 2, 1], [7, 3, 4, 5, 6, 0, 1]  # runs up, down to slot 0, and alone
        targets = [0, 11, 10, 9, 3, 4, 5]
        for group in (0, 1):
            with self.bench() as bench:
                before = [bench.content(group, block) for block in blocks]
                num_bytes = len(blocks) * bench.device.views[group].block_bytes
                offload = self.finish(bench, plan(1, Direction.OFFLOAD, blocks, slots, group))
                assert (offload.outcome, offload.num_bytes) == (Outcome.OK, num_bytes), offload
                bench.wipe()
                onboard = self.finish(bench, plan(2, Direction.ONBOARD, targets, slots, group))
                assert (onboard.outcome, onboard.num_bytes) == (Outcome.OK, num_bytes), onboard
                assert [bench.content(group, block) for block in targets] == before
                untouched = set(range(NUM_DEVICE_BLOCKS)) - set(targets)
                assert not any(any(bench.content(group, block)) for block in untouched)

    def test_a_plan_may_move_several_groups(self) -> None:
        with self.bench() as bench:
            moves = (GroupMove(0, (3, 4), (0, 1)), GroupMove(1, (3, 7), (2, 5)))
            before = [bench.content(0, 3), bench.content(0, 4), bench.content(1, 3), bench.content(1, 7)]
            assert self.finish(bench, TransferPlan(1, Direction.OFFLOAD, moves)).outcome is Outcome.OK
            bench.wipe()
            assert self.finish(bench, TransferPlan(2, Direction.ONBOARD, moves)).outcome is Outcome.OK
            after = [bench.content(0, 3), bench.content(0, 4), bench.content(1, 3), bench.content(1, 7)]
            assert after == before

    def test_an_empty_plan_is_ok(self) -> None:
        with self.bench() as bench:
            result = self.finish(bench, TransferPlan(1, Direction.OFFLOAD, ()))
            assert (result.outcome, result.num_bytes) == (Outcome.OK, 0)

    def test_a_result_is_delivered_once(self) -> None:
        with self.bench() as bench:
            assert self.finish(bench, plan(1, Direction.OFFLOAD, [1], [1])).seconds >= 0
            assert bench.poll() == []
        listener = Listener()
        with self.bench(on_done=listener) as bench:
            bench.executor.submit(plan(1, Direction.OFFLOAD, [1], [1]))
            assert bench.executor.wait(None, LONG_S)
            assert listener.ids() == [1] and bench.poll() == []

    @contextmanager
    def held(self, bench: Bench, listener: Listener) -> Iterator[None]:
        """While inside, the executor's thread is busy with the result of HELD_JOB and starts nothing."""
        bench.executor.submit(plan(HELD_JOB, Direction.OFFLOAD, [0], [0]))
        assert listener.wait_for(HELD_JOB)
        try:
            yield
        finally:
            listener.gate.set()

    def order_of_ends(self) -> list[int]:
        """Of offloads 0 and 2 and onboards 1 and 3, submitted in the order of their ids while HELD_JOB was
        running.
        """
        listener = Listener()
        with self.bench(on_done=listener) as bench:
            with self.held(bench, listener):
                for job_id, direction in enumerate(("offload", "onboard", "offload", "onboard")):
                    bench.executor.submit(plan(job_id, Direction(direction), [job_id], [job_id + 1]))
            assert bench.executor.wait(None, LONG_S)
            return listener.ids()

    def test_onboards_go_first_and_each_kind_in_order(self) -> None:
        assert self.order_of_ends() == [HELD_JOB, 1, 3, 0, 2]

    def test_a_job_past_its_deadline_does_not_start(self) -> None:
        listener, clock = Listener(), ManualClock(5.0)
        with self.bench(on_done=listener, clock=clock) as bench:
            bench.slot(2)[:] = 7
            with self.held(bench, listener):
                bench.executor.submit(plan(1, Direction.OFFLOAD, [1], [2]), deadline_s=1.0)
                bench.executor.submit(plan(2, Direction.OFFLOAD, [1], [3]), deadline_s=3.0)
                bench.executor.submit(plan(3, Direction.OFFLOAD, [1], [4]))
                clock.advance(2.0)
            assert bench.executor.wait(None, LONG_S)
            assert listener.outcomes() == {
                HELD_JOB: Outcome.OK,
                1: Outcome.TIMED_OUT,
                2: Outcome.OK,
                3: Outcome.OK,
            }
            assert [r.queued_s for r in listener.results if r.job_id in (1, 2)] == [2.0, 2.0]
            assert (bench.slot(2) == 7).all()

    def test_cancel_stops_only_what_waits(self) -> None:
        listener = Listener()
        with self.bench(on_done=listener) as bench:
            bench.slot(2)[:] = 7
            with self.held(bench, listener):
                bench.executor.submit(plan(1, Direction.OFFLOAD, [1], [2]))
                assert bench.executor.cancel(1)
                assert listener.outcomes()[1] is Outcome.REJECTED
                assert not bench.executor.cancel(1)
                assert not bench.executor.cancel(HELD_JOB)
                assert not bench.executor.cancel(77)
            assert bench.executor.wait(None, LONG_S)
            assert (bench.slot(2) == 7).all()

    @contextmanager
    def stalled(self, bench: Bench, listener: Listener, load: TransferPlan) -> Iterator[None]:
        """While inside, ``load`` has been submitted and cannot begin to copy."""
        with self.held(bench, listener):
            bench.executor.submit(load)
            yield

    def test_a_load_that_is_cancelled_before_it_copies_never_does(self) -> None:
        """Its device block has another owner then, who waits for nothing, and whose bytes stay."""
        listener = Listener()
        with self.bench(on_done=listener) as bench:
            for slot in (2, 5, 6):
                bench.slot(slot)[:] = 7
            with self.stalled(bench, listener, plan(1, Direction.ONBOARD, [3, 4], [2, 5])):
                assert bench.executor.cancel(1)
                assert bench.executor.wait([1], 0.0) and listener.outcomes()[1] is Outcome.REJECTED
                assert not bench.executor.cancel(1)
                for storage in bench.device.storages:
                    storage[:] = 9
            last = plan(3, Direction.ONBOARD, [6], [6])
            bench.executor.submit(last)  # behind all that was under way
            assert bench.executor.wait(None, LONG_S) and listener.outcomes()[3] is Outcome.OK
            assert set(bench.content(0, 6)) == {7}
            assert {byte for block in (3, 4) for byte in bench.content(0, block)} == {9}
            first = next(result for result in listener.results if result.job_id == 1)
            assert listener.wait_for(1, 1 + first.is_late)  # a late one has a second result
            assert listener.ids().count(1) == 1 + first.is_late

    def test_wait_and_drain_tell_whether_jobs_have_ended(self) -> None:
        listener = Listener()
        with self.bench(on_done=listener) as bench:
            with self.held(bench, listener):
                bench.executor.submit(plan(1, Direction.OFFLOAD, [1], [2]))
                assert not bench.executor.wait([1], 0.0)
                assert not bench.executor.wait(None, 0.0)
                assert bench.executor.wait([5, 6], 0.0)
            assert bench.executor.wait([1], LONG_S) and bench.executor.wait(None, LONG_S)
            assert 1 in listener.ids()

    def test_a_failing_copy_is_an_outcome_and_the_executor_goes_on(self) -> None:
        with self.bench() as bench:
            assert self.finish(bench, plan(1, Direction.OFFLOAD, [1], [1])).outcome is Outcome.OK
            self.break_copies(bench, True)
            failed = self.finish(bench, plan(2, Direction.ONBOARD, [2], [1]))
            assert failed.outcome is Outcome.IO_ERROR and failed.detail and failed.num_bytes == 0
            self.break_copies(bench, False)
            assert self.finish(bench, plan(3, Direction.ONBOARD, [2], [1])).outcome is Outcome.OK
            assert bench.content(0, 2) == bench.content(0, 1)

    def test_an_unusable_plan_is_rejected(self) -> None:
        plans = [
            plan(1, Direction.OFFLOAD, [1], [NUM_SLOTS]),
            plan(2, Direction.OFFLOAD, [NUM_DEVICE_BLOCKS], [1]),
            plan(3, Direction.OFFLOAD, [1, 2], [1]),
            plan(4, Direction.OFFLOAD, [1, 2], [3, 3]),
            plan(5, Direction.ONBOARD, [1, 1], [3, 4]),
            plan(6, Direction.OFFLOAD, [1], [1], group=2),
            plan(7, Direction.OFFLOAD, [-1], [1]),
        ]
        with self.bench() as bench:
            for unusable in plans:
                result = self.finish(bench, unusable)
                assert result.outcome is Outcome.REJECTED and result.detail, unusable

    def test_slots_that_are_not_ready_are_busy(self) -> None:
        gate = threading.Event()

        def prepare(address: int, nbytes: int) -> None:
            gate.wait(LONG_S)

        with self.bench(prepare=prepare) as bench:
            try:
                result = self.finish(bench, plan(1, Direction.OFFLOAD, [1], [1]))
                assert result.outcome is Outcome.BUSY
            finally:
                gate.set()
            assert bench.host.wait_ready(LONG_S)
            assert self.finish(bench, plan(2, Direction.OFFLOAD, [1], [1])).outcome is Outcome.OK

    def overfill(self, bench: Bench, num_queued: int) -> None:
        """Submits ten jobs more than there is room for."""
        for number in range(jobs.MAX_QUEUED_JOBS - num_queued + 10):
            bench.executor.submit(plan(HELD_JOB + 1 + number, Direction.OFFLOAD, [1], [1]))

    def test_a_job_id_in_flight_is_not_taken_again(self) -> None:
        listener = Listener()
        with self.bench(on_done=listener) as bench, self.held(bench, listener):
            try:
                bench.executor.submit(plan(HELD_JOB, Direction.OFFLOAD, [1], [2]))
            except ValueError:
                return
            raise AssertionError("a job id in flight was accepted again")

    @patch.object(jobs, "MAX_QUEUED_JOBS", FEW_JOBS)
    def test_the_queue_is_bounded(self) -> None:
        listener = Listener()
        with self.bench(on_done=listener) as bench:
            with self.held(bench, listener):
                self.overfill(bench, num_queued=1)
            assert bench.executor.wait(None, LONG_S)
            outcomes = [result.outcome for result in listener.results]
            assert (outcomes.count(Outcome.OK), outcomes.count(Outcome.BUSY)) == (FEW_JOBS, 10)
            bench.executor.submit(plan(1, Direction.OFFLOAD, [1], [1]))
            assert bench.executor.wait(None, LONG_S) and listener.outcomes()[1] is Outcome.OK

    def test_a_failing_listener_harms_nobody(self) -> None:
        def fail(result: JobResult) -> None:
            raise RuntimeError("listener")

        with self.bench(on_done=fail) as bench:
            for job_id in (1, 2):
                bench.executor.submit(plan(job_id, Direction.OFFLOAD, [1], [job_id]))
                assert bench.executor.wait([job_id], LONG_S)
            expected = bench.content(0, 1)
            assert all(bench.slot(slot).tobytes()[: len(expected)] == expected for slot in (1, 2))

    def test_verify_catches_a_flipped_byte(self) -> None:
        with self.bench(verify=True) as bench:
            for group in (0, 1):
                offload = plan(1, Direction.OFFLOAD, [1, 2], [1, 2], group)
                assert self.finish(bench, offload).outcome is Outcome.OK
                good = plan(2, Direction.ONBOARD, [5, 6], [1, 2], group)
                assert self.finish(bench, good).outcome is Outcome.OK
                bench.slot(2)[bench.device.views[group].block_bytes - 1] ^= 1
                wrong = self.finish(bench, plan(3, Direction.ONBOARD, [7, 8], [1, 2], group))
                assert wrong.outcome is Outcome.CORRUPT and "[2]" in wrong.detail
                whole = plan(4, Direction.ONBOARD, [7], [1], group)
                assert self.finish(bench, whole).outcome is Outcome.OK

    def test_verify_knows_what_was_written_last(self) -> None:
        with self.bench(verify=True) as bench:
            assert self.finish(bench, plan(1, Direction.OFFLOAD, [1], [1])).outcome is Outcome.OK
            assert self.finish(bench, plan(2, Direction.OFFLOAD, [2], [1])).outcome is Outcome.OK
            assert self.finish(bench, plan(3, Direction.ONBOARD, [3], [1])).outcome is Outcome.OK
            assert bench.content(0, 3) == bench.content(0, 2)

    def test_an_audit_finds_other_kv_and_changes_nothing(self) -> None:
        for verify in (False, True):
            for group in (0, 1):
                with self.bench(verify=verify) as bench:
                    assert self.finish(
                        bench, plan(1, Direction.OFFLOAD, [1, 2, 3], [4, 5, 6], group)
                    ).num_bytes
                    same = self.finish(bench, comparison(2, [1, 2, 3], [4, 5, 6], group))
                    assert (same.outcome, same.num_bytes) == (Outcome.OK, 0), same
                    before = [bench.content(group, block) for block in range(NUM_DEVICE_BLOCKS)]
                    other = self.finish(bench, comparison(3, [1, 9, 3], [4, 5, 6], group))
                    assert other.outcome is Outcome.CORRUPT and "[5]" in other.detail
                    bench.slot(6)[: bench.device.views[group].block_bytes] = 0
                    zeros = self.finish(bench, comparison(4, [1, 3], [4, 6], group))
                    assert zeros.outcome is Outcome.CORRUPT and "[6]" in zeros.detail
                    assert [bench.content(group, block) for block in range(NUM_DEVICE_BLOCKS)] == before

    def test_an_audit_of_numbers_that_it_cannot_read_says_so(self) -> None:
        with self.bench() as bench:
            bench.device.dtypes = ("bfloat16",)
            assert self.finish(bench, comparison(1, [1], [1], 1)).outcome is Outcome.INCOMPATIBLE

    def test_close_rejects_what_waits_and_leaves_nothing_behind(self) -> None:
        listener = Listener()
        threads_before = set(threading.enumerate())
        with self.bench(on_done=listener) as bench:
            address = bench.host.address
            with self.held(bench, listener):
                bench.executor.submit(plan(1, Direction.OFFLOAD, [1], [2]))
                closer = threading.Thread(target=bench.executor.close)
                closer.start()
                assert listener.wait_for(1)
            closer.join(LONG_S)
            assert not closer.is_alive()
            assert listener.outcomes()[HELD_JOB] is Outcome.OK
            assert listener.outcomes()[1] is Outcome.REJECTED
            bench.executor.submit(plan(2, Direction.OFFLOAD, [1], [2]))
            assert listener.outcomes()[2] is Outcome.REJECTED
            bench.executor.close()
            bench.host.close()
        kept = [t.name for t in set(threading.enumerate()) - threads_before if t.name.startswith("kvbm-")]
        assert kept == []
        gc.collect()
        assert not is_mapped(address)
