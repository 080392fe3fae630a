"""How loads end: waits, cancels and close; results that come from two threads at once; requests that are
late.
"""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable, Collection, Iterator
from functools import partial
from pathlib import Path

import pytest

from kvbm_core.errors import Outcome
from kvbm_core.storage.disk.block_file import BlockFile
from kvbm_core.storage.host_slab import HostSlab
from kvbm_core.testing.executor_bench import HELD_JOB, LONG_S, Listener, plan
from kvbm_core.transfer.executors.disk import DiskExecutor, OnBlock
from kvbm_core.transfer.executors.pipeline import OnDone, PipelineExecutor
from kvbm_core.transfer.plan import DiskPlan, GroupMove, JobResult, TransferPlan
from kvbm_core.types import Direction
from tests.unit.test_pipeline import (
    GEOMETRY,
    LOAD,
    NUM_SLOTS,
    SLOT_BYTES,
    Bench,
    held_reads,
    load_of,
    simple_load,
)

ROUNDS = 300


# ---------------------------------------------------------------- wait, cancel, close


def test_wait_and_drain_know_of_loads(tmp_path: Path, rng: random.Random) -> None:
    gate = threading.Event()
    with held_reads(tmp_path / "x.blocks", gate, only=12) as bench:
        bench.executor.submit(simple_load(bench, rng))
        assert not bench.executor.wait([LOAD], 0.0) and not bench.executor.drain(0.0)
        assert bench.executor.wait([1, 999], 0.0) and bench.executor.poll() == []
        assert not bench.executor.cancel(999)
        with pytest.raises(ValueError, match="in flight"):
            bench.executor.submit(load_of(LOAD, [], [(9, 11)]))
        copy = plan(200, Direction.OFFLOAD, [9], [15])
        assert bench.finish(copy).outcome is Outcome.OK  # passes by
        assert LOAD not in bench.listener.ids()
        gate.set()
        assert bench.executor.drain(LONG_S) and bench.executor.wait([LOAD], 0.0)
        assert bench.listener.outcomes()[LOAD] is Outcome.OK


def test_wait_ends_after_the_listener_has_heard(tmp_path: Path, rng: random.Random) -> None:
    bench = Bench(tmp_path / "x.blocks")
    try:
        bench.executor.submit(simple_load(bench, rng, job_id=HELD_JOB))
        assert bench.listener.wait_for(HELD_JOB)
        assert not bench.executor.wait([HELD_JOB], 0.0) and not bench.executor.drain(0.0)
        bench.listener.gate.set()
        assert bench.executor.drain(LONG_S)
    finally:
        bench.close()


def test_a_plan_without_reads_can_be_cancelled_while_it_waits(tmp_path: Path) -> None:
    bench = Bench(tmp_path / "x.blocks")
    try:
        bench.executor.submit(plan(HELD_JOB, Direction.OFFLOAD, [0], [0]))
        assert bench.listener.wait_for(HELD_JOB)
        bench.executor.submit(plan(7, Direction.OFFLOAD, [1], [1]))
        assert bench.executor.cancel(7) and not bench.executor.cancel(7)
        assert bench.listener.outcomes()[7] is Outcome.REJECTED
    finally:
        bench.close()


def test_close_ends_a_load_that_is_read_once_and_leaves_no_thread(tmp_path: Path, rng: random.Random) -> None:
    threads = set(threading.enumerate())
    gate = threading.Event()
    with held_reads(tmp_path / "x.blocks", gate, only=12) as bench:
        bench.executor.submit(simple_load(bench, rng))
        waiting = simple_load_again(LOAD + 1)
        bench.executor.submit(waiting)
        closer = threading.Thread(target=bench.executor.close)
        closer.start()
        assert bench.listener.wait_for(waiting.job_id)
        gate.set()
        closer.join(LONG_S)
        assert not closer.is_alive()
        late = simple_load_again(LOAD + 2)
        bench.executor.submit(late)
        outcomes = bench.listener.outcomes()
        assert outcomes[waiting.job_id] is Outcome.REJECTED is outcomes[late.job_id]
        assert LOAD in outcomes
        ids = bench.listener.ids()
        assert all(ids.count(job_id) == 1 for job_id in (LOAD, LOAD + 1, LOAD + 2))
        assert bench.executor.drain(0.0)
        bench.executor.close()
    assert set(threading.enumerate()) == threads


def simple_load_again(job_id: int) -> TransferPlan:
    return load_of(job_id, [GroupMove(0, (1,), (1,))], [(1, 11)])


def test_a_device_that_cannot_be_made_leaves_no_disk_behind(tmp_path: Path) -> None:
    threads = set(threading.enumerate())
    host = HostSlab(NUM_SLOTS, SLOT_BYTES)
    made: list[DiskExecutor] = []

    def no_device(on_done: OnDone) -> PipelineExecutor:
        raise RuntimeError("no way to copy")

    def make_disk(on_done: OnDone) -> DiskExecutor:
        made.append(DiskExecutor(BlockFile(tmp_path / "x.blocks", GEOMETRY), host, on_done=on_done))
        return made[-1]

    with pytest.raises(RuntimeError, match="no way"):
        PipelineExecutor(no_device, make_disk, SLOT_BYTES, Listener())
    host.close()
    assert made[0]._file.fd == -1 and set(threading.enumerate()) == threads


# ---------------------------------------------------------------- two threads


class ByHand:
    """Device and disk at once: takes plans, and ends them when the test says so."""

    def __init__(self) -> None:
        self.copies: list[TransferPlan] = []
        self.reads: list[DiskPlan] = []
        self.on_block: list[OnBlock] = []
        self.events: list[JobResult | int] = []
        self.marks = 0
        self.after: list[object] = []
        self.is_waiting = False
        self.executor = PipelineExecutor(self.make_device, self.make_disk, SLOT_BYTES, self.events.append)  # type: ignore[arg-type]

    def make_device(self, on_done: OnDone) -> ByHand:
        self.copied = on_done
        return self

    def make_disk(self, on_done: OnDone) -> Disk:
        self.read = on_done
        self.disk = Disk(self)
        return self.disk

    def mark(self) -> int:
        self.marks += 1
        return self.marks

    def submit(self, plan: TransferPlan, *, deadline_s: float | None = None, after: object = None) -> None:
        self.copies.append(plan)
        self.after.append(after)

    def cancel(self, job_id: int) -> bool:
        """Of a copy that waits, if ``is_waiting``."""
        if not self.is_waiting:
            return False
        self.copied(JobResult(job_id, Outcome.REJECTED, 0, 0.0, 0.0, "cancelled"))
        return True

    def wait(self, job_ids: Collection[int], timeout_s: float) -> bool:
        return True

    def load(self) -> None:
        """A load of one block that is resident and one that is read."""
        self.executor.submit(load_of(LOAD, [GroupMove(0, (1, 2), (1, 2))], [(1, 1)]))

    def end_copy(self, index: int, outcome: Outcome = Outcome.OK) -> None:
        self.copied(
            JobResult(
                self.copies[index].job_id, outcome, 10 if outcome is Outcome.OK else 0, 0.0, 0.0, "copy"
            )
        )

    def end_read(self, outcome: Outcome = Outcome.OK, *, is_late: bool = False) -> None:
        self.read(JobResult(LOAD, outcome, 10, 1.5, 0.5, "read", is_late))


class Disk:
    """The disk's half of ByHand."""

    def __init__(self, hand: ByHand) -> None:
        self._hand = hand
        self.on_released: Callable[[int], None] = hand.events.append

    def submit(self, plan: DiskPlan, *, deadline_s: float | None, on_block: OnBlock) -> None:
        self._hand.reads.append(plan)
        self._hand.on_block.append(on_block)

    def cancel(self, job_id: int) -> bool:
        return False


@pytest.fixture
def quick_switches() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.parametrize(
    ("copy", "read", "expected"),
    [
        (Outcome.OK, Outcome.OK, {Outcome.OK}),
        (Outcome.IO_ERROR, Outcome.OK, {Outcome.IO_ERROR}),
        (Outcome.OK, Outcome.MISS, {Outcome.MISS}),
        (Outcome.IO_ERROR, Outcome.MISS, {Outcome.IO_ERROR, Outcome.MISS}),
    ],
)
@pytest.mark.usefixtures("quick_switches")
def test_ends_from_two_threads_are_one_result(copy: Outcome, read: Outcome, expected: set[Outcome]) -> None:
    for _ in range(ROUNDS):
        hand = ByHand()
        hand.load()
        hand.on_block[0](0, Outcome.OK)
        hand.end_copy(1)
        meet(partial(hand.end_copy, 0, copy), partial(hand.end_read, read))
        (result,) = hand.events
        assert isinstance(result, JobResult) and result.job_id == LOAD and result.outcome in expected
        assert result.num_bytes == (20 if result.outcome is Outcome.OK else 0)
        assert (result.detail == "read") == (result.outcome in (Outcome.OK, Outcome.MISS))
        assert hand.executor.wait([LOAD], 0.0) and hand.executor._parent_of == {}


def meet(*calls: Callable[[], None]) -> None:
    """Makes the calls in threads that start at the same time."""
    barrier = threading.Barrier(len(calls))

    def run(call: Callable[[], None]) -> None:
        barrier.wait(LONG_S)
        call()

    threads = [threading.Thread(target=run, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG_S)
        assert not thread.is_alive()


def test_copies_are_not_begun_after_a_failed_copy() -> None:
    hand = ByHand()
    hand.load()
    hand.end_copy(0, Outcome.IO_ERROR)
    hand.on_block[0](0, Outcome.OK)
    assert len(hand.copies) == 1 and hand.events == []  # the disk is not done yet
    hand.end_read()
    (result,) = hand.events
    assert isinstance(result, JobResult) and (result.outcome, result.detail) == (Outcome.IO_ERROR, "copy")


# ---------------------------------------------------------------- cancelled


def test_a_cancelled_load_begins_no_further_chunk_and_waits_for_those_that_copy() -> None:
    hand = ByHand()
    hand.load()
    assert not hand.executor.cancel(LOAD) and hand.events == []  # the resident part is being copied
    hand.on_block[0](0, Outcome.OK)
    assert len(hand.copies) == 1 and not hand.executor.wait([LOAD], 0.0)
    hand.end_copy(0)
    (result,) = hand.events
    assert isinstance(result, JobResult)
    assert (result.outcome, result.is_late, result.num_bytes) == (Outcome.REJECTED, True, 0)
    assert hand.executor.wait([LOAD], 0.0) and not hand.executor.cancel(LOAD)
    hand.end_read()
    assert hand.events == [result, LOAD]  # only now are its slots free


def test_what_waits_for_the_device_is_taken_back() -> None:
    hand = ByHand()
    hand.load()
    hand.is_waiting = True
    assert hand.executor.cancel(LOAD)
    (result,) = hand.events
    assert isinstance(result, JobResult) and result.outcome is Outcome.REJECTED and result.is_late
    hand.on_block[0](0, Outcome.OK)
    assert len(hand.copies) == 1
    hand.end_read(Outcome.TIMED_OUT, is_late=True)
    assert hand.events == [result]  # the kernel may still write
    hand.disk.on_released(LOAD)
    assert hand.events == [result, LOAD]


def test_a_load_that_is_cancelled_after_its_reads_is_not_late() -> None:
    hand = ByHand()
    hand.load()
    hand.on_block[0](0, Outcome.OK)
    hand.end_read()
    hand.is_waiting = True
    assert hand.executor.cancel(LOAD)
    (result,) = hand.events
    assert isinstance(result, JobResult)
    assert (result.outcome, result.is_late, result.num_bytes) == (Outcome.REJECTED, False, 0)


@pytest.mark.usefixtures("quick_switches")
def test_a_cancel_meets_the_last_read_and_the_end_of_the_reads() -> None:
    """Whoever comes first: one result, no copy begins after the cancel, one release if it was late."""
    for _ in range(ROUNDS):
        hand = ByHand()
        hand.load()
        hand.end_copy(0)
        answers: list[bool] = []

        def read(hand: ByHand = hand) -> None:
            hand.on_block[0](0, Outcome.OK)
            hand.end_read()

        meet(read, lambda hand=hand, answers=answers: answers.append(hand.executor.cancel(LOAD)))  # type: ignore[misc]
        if len(hand.copies) > 1:  # it had begun
            assert answers == [False] and hand.events == []
            hand.end_copy(1)
        result, *released = hand.events
        assert isinstance(result, JobResult) and result.outcome is Outcome.REJECTED
        assert released == [LOAD] * result.is_late
        assert hand.executor.wait([LOAD], 0.0) and hand.executor._reading == {}


def test_all_copies_of_a_load_start_after_the_mark_of_its_submission() -> None:
    """By whatever thread they are submitted."""
    hand = ByHand()
    hand.load()
    hand.executor.submit(load_of(LOAD + 1, [GroupMove(0, (3,), (3,))], [(3, 3)]))
    reader = threading.Thread(target=hand.on_block[0], args=(0, Outcome.OK))
    reader.start()
    reader.join(LONG_S)
    hand.on_block[1](0, Outcome.OK)
    assert hand.after == [1, 1, 2] and hand.marks == 2


# ---------------------------------------------------------------- late


def test_what_is_late_is_released_after_it_was_said_to_be_late() -> None:
    hand = ByHand()
    hand.load()
    hand.end_copy(0)
    hand.end_read(Outcome.TIMED_OUT, is_late=True)
    (result,) = hand.events
    assert isinstance(result, JobResult) and result.outcome is Outcome.TIMED_OUT and result.is_late
    hand.disk.on_released(LOAD)
    assert hand.events == [result, LOAD]


def test_a_release_that_comes_while_blocks_are_still_copied_waits_for_the_result() -> None:
    """Else whoever hears that the job is late would wait for a release that has been."""
    hand = ByHand()
    hand.load()
    hand.end_read(Outcome.TIMED_OUT, is_late=True)
    hand.disk.on_released(LOAD)
    assert hand.events == []
    hand.end_copy(0)
    result, released = hand.events
    assert isinstance(result, JobResult) and result.is_late and released == LOAD


@pytest.mark.usefixtures("quick_switches")
def test_a_release_never_overtakes_its_result() -> None:
    for _ in range(ROUNDS):
        hand = ByHand()
        hand.load()
        hand.end_read(Outcome.TIMED_OUT, is_late=True)
        meet(partial(hand.end_copy, 0), partial(hand.disk.on_released, LOAD))
        result, released = hand.events
        assert isinstance(result, JobResult) and result.is_late and released == LOAD


def test_a_late_load_holds_its_slots_until_the_disk_is_done(tmp_path: Path, rng: random.Random) -> None:
    """The same with a real file, whose disk answers only long after the deadline."""
    gate = threading.Event()
    with held_reads(tmp_path / "x.blocks", gate, only=12) as bench:
        bench.executor.disk._io_deadline_s = 0.05
        load = simple_load(bench, rng)
        late = bench.finish(load)
        assert (late.outcome, late.is_late, late.num_bytes) == (Outcome.TIMED_OUT, True, 0)
        assert bench.executor.drain(LONG_S)  # the device has nothing to do with it any more
        other = load_of(LOAD + 1, [GroupMove(0, (1,), (9,))], [(9, 13)])
        assert bench.finish(other).outcome is Outcome.OK and bench.released == []
        gate.set()
        assert bench.wait_released(LOAD)
        assert bench.finish(simple_load_again(LOAD + 2)).outcome is Outcome.OK


def test_every_block_is_in_exactly_one_part_and_parts_have_numbers_of_their_own() -> None:
    hand = ByHand()
    moves = [GroupMove(0, (1, 2, 3), (1, 2, 3)), GroupMove(1, (4, 5), (4, 5))]
    hand.executor.submit(load_of(LOAD, moves, [(3, 9), (4, 8)]))
    hand.on_block[0](1, Outcome.OK)
    hand.on_block[0](0, Outcome.OK)
    assert len({copy.job_id for copy in hand.copies}) == len(hand.copies) and all(
        c.job_id < 0 for c in hand.copies
    )
    assert all(copy.reads is None for copy in hand.copies)
    pairs = [
        (move.group, block, slot)
        for copy in hand.copies
        for move in copy.moves
        for block, slot in zip(move.device_blocks, move.slots, strict=True)
    ]
    assert sorted(pairs) == [(0, 1, 1), (0, 2, 2), (0, 3, 3), (1, 4, 4), (1, 5, 5)]
