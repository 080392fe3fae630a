"""Blocks between a slab and a real block file: round trips, failures, requests that end late."""

from __future__ import annotations

import errno
import random
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvbm_core.clock import ManualClock
from kvbm_core.errors import Outcome
from kvbm_core.storage.disk.allocate import FileOptions
from kvbm_core.storage.disk.io import Transfer
from kvbm_core.storage.disk.record import SECTOR_BYTES
from kvbm_core.storage.host_slab import HostSlab
from kvbm_core.testing.executor_bench import HELD_JOB, LONG_S
from kvbm_core.testing.store_contract import key_of
from kvbm_core.transfer.movers.disk import DiskMover
from kvbm_core.transfer.plan import OrderKind, TierOrder
from tests.faults.doubles import BUFFERED, FailingIo
from tests.unit.disk_mover_bench import (
    DOWN,
    NOT_THERE,
    NUM_DISK_SLOTS,
    NUM_SLOTS,
    SLOT_BYTES,
    UP,
    Bench,
    GatedIo,
    bench_fixture,  # noqa: F401
    bench_on,
    found_in,
    late_slots,
    order,
    path_fixture,  # noqa: F401
    touches,
)

# ---------------------------------------------------------------- what works


@pytest.mark.parametrize("options", [FileOptions(), BUFFERED], ids=["direct", "buffered"])
def test_bytes_come_back_exactly(path: Path, options: FileOptions, rng: random.Random) -> None:
    bench = Bench(path, options=options)
    try:
        slots, disk_slots = [5, 0, 1, 2, 7], [9, 30, 3, 4, 5]  # alone, neighbours, out of order
        contents = bench.fill(rng, slots)
        down = bench.run(order(1, DOWN, slots, disk_slots))
        assert (down.outcome, down.num_bytes, down.is_late) == (Outcome.OK, 5 * SLOT_BYTES, False)
        bench.wipe()
        targets, numbers = [3, 6, 4, 0, 1], [2, 0, 4, 1, 3]
        up = bench.run(order(2, UP, targets, [disk_slots[i] for i in numbers]))
        assert (up.outcome, up.num_bytes, up.detail) == (Outcome.OK, 5 * SLOT_BYTES, "")
        assert [bench.slot(slot) for slot in targets] == [contents[i] for i in numbers]
        assert not any(any(bench.slot(slot)) for slot in set(range(NUM_SLOTS)) - set(targets))
        assert late_slots(bench.host) == []
    finally:
        bench.close()


def test_another_process_reads_what_was_written(bench: Bench, path: Path, rng: random.Random) -> None:
    (content,) = bench.fill(rng, [2])
    assert bench.run(order(1, DOWN, [2], [7])).outcome is Outcome.OK
    bench.close()
    again = Bench(path)
    try:
        assert again.run(order(1, UP, [6], [7])).outcome is Outcome.OK
        assert again.slot(6) == content
    finally:
        again.close()


def test_each_block_is_told_before_its_job_ends(bench: Bench) -> None:
    assert bench.run(order(1, DOWN, [0, 1, 2, 3], [4, 9, 6, 11])).outcome is Outcome.OK
    told: list[tuple[int, Outcome]] = []
    threads: set[str] = set()

    def on_blocks(numbers: Sequence[int], outcomes: Sequence[Outcome]) -> None:
        told.extend(zip(numbers, outcomes, strict=True))
        threads.add(threading.current_thread().name)
        assert bench.listener.ids() == [1]

    keys = (key_of(4), key_of(9), key_of(6), key_of(99))  # another one is in 11
    bench.submit(TierOrder(2, "disk", UP, keys, (3, 4, 5, 6), (4, 9, 6, 11)), on_blocks=on_blocks)
    assert bench.result(2).outcome is Outcome.MISS
    assert sorted(told) == [(0, Outcome.OK), (1, Outcome.OK), (2, Outcome.OK), (3, Outcome.MISS)]
    assert threads == {"kvbm-disk-reader"}


def test_a_read_does_not_wait_for_a_write(bench: Bench) -> None:
    assert bench.run(order(1, DOWN, [0], [0])).outcome is Outcome.OK
    with bench.writer_held():
        bench.submit(order(2, DOWN, [1], [1]))
        assert bench.run(order(3, UP, [2], [0])).outcome is Outcome.OK
        assert not bench.mover.wait([2], 0.0) and not bench.mover.wait(None, 0.0)
    assert bench.mover.wait(None, LONG_S) and bench.result(2).outcome is Outcome.OK


# ---------------------------------------------------------------- what does not


@pytest.mark.parametrize(
    "wrong",
    [
        TierOrder(1, "disk", DOWN, (key_of(1),), (0, 1), (0, 1)),
        TierOrder(1, "disk", DOWN, (key_of(1), key_of(2)), (0,), (0, 1)),
        order(1, DOWN, [NUM_SLOTS], [0]),
        order(1, DOWN, [0], [NUM_DISK_SLOTS]),
        order(1, UP, [-1], [0]),
        order(1, UP, [0], [-1]),
        order(1, DOWN, [0, 1], [3, 3]),
        order(1, UP, [2, 2], [0, 1]),
    ],
    ids=["keys", "slots", "slot", "disk slot", "slot<0", "disk slot<0", "target twice", "slot twice"],
)
def test_an_order_that_cannot_be_is_rejected_and_touches_nothing(bench: Bench, wrong: TierOrder) -> None:
    bench.host.array[:] = 7
    result = bench.run(wrong)
    assert result.outcome is Outcome.REJECTED and result.detail and "\n" not in result.detail
    assert (bench.host.array == 7).all()
    assert bench.run(order(2, DOWN, [0], [0])).outcome is Outcome.OK


def test_slots_of_another_size_are_misuse(bench: Bench, path: Path) -> None:
    host = HostSlab(1, SLOT_BYTES + SECTOR_BYTES)
    with pytest.raises(ValueError, match="records of"):
        DiskMover(bench.file, host)
    host.close()


def test_a_job_id_in_flight_is_not_taken_again(bench: Bench) -> None:
    with bench.writer_held(), pytest.raises(ValueError, match="in flight"):
        bench.submit(order(HELD_JOB, DOWN, [1], [1]))


def test_what_waits_too_long_does_not_start(path: Path) -> None:
    clock = ManualClock(5.0)
    bench = Bench(path, clock)
    try:
        with bench.writer_held():
            bench.submit(order(1, DOWN, [1], [1]), deadline_s=1.0)
            bench.submit(order(2, DOWN, [2], [2]), deadline_s=3.0)
            clock.advance(2.0)
        first = bench.result(1)
        assert (first.outcome, first.is_late, first.queued_s) == (Outcome.TIMED_OUT, False, 2.0)
        assert bench.result(2).outcome is Outcome.OK
        assert bench.run(order(3, UP, [3], [1])).outcome in NOT_THERE
    finally:
        bench.close()


@pytest.mark.parametrize(
    ("is_write", "moved", "outcome"),
    [
        (True, -errno.ENOSPC, Outcome.NO_SPACE),
        (True, -errno.EIO, Outcome.IO_ERROR),
        (True, SECTOR_BYTES, Outcome.NO_SPACE),
        (False, -errno.EIO, Outcome.IO_ERROR),
        (False, 0, Outcome.MISS),
    ],
    ids=["write ENOSPC", "write EIO", "write short", "read EIO", "read short"],
)
def test_a_failing_disk_is_an_outcome_and_the_mover_goes_on(
    path: Path, is_write: bool, moved: int, outcome: Outcome
) -> None:
    with bench_on(path, lambda fd: FailingIo(fd, touches(5, is_write=is_write), moved)) as bench:
        down = bench.run(order(1, DOWN, [0, 1, 2], [1, 5, 9]))
        up = bench.run(order(2, UP, [3, 4, 6], [1, 5, 9]))
        failed = down if is_write else up
        assert failed.outcome is outcome and failed.num_bytes == 2 * SLOT_BYTES and not failed.is_late
        assert failed.failed == ((1 if is_write else 4, outcome),)
        assert failed.detail.startswith(f"1 of 3 blocks: {outcome}")
        assert [bench.slot(3), bench.slot(6)] == [bench.slot(0), bench.slot(2)]
        assert bench.run(order(3, DOWN, [0], [6])).outcome is Outcome.OK
        assert bench.run(order(4, UP, [7], [6])).outcome is Outcome.OK
        assert len(bench.listener.ids()) == 4 and late_slots(bench.host) == []


def test_a_failing_listener_of_blocks_fails_its_job_alone(bench: Bench) -> None:
    def fail(*ended: object) -> None:
        raise RuntimeError("no place for it")

    assert bench.run(order(1, DOWN, [0, 1], [0, 1])).outcome is Outcome.OK
    bench.submit(order(2, UP, [2, 3], [0, 1]), on_blocks=fail)
    failed = bench.result(2)
    assert failed.outcome is Outcome.IO_ERROR and "no place for it" in failed.detail
    assert bench.run(order(3, UP, [2, 3], [0, 1])).outcome is Outcome.OK


def test_one_lost_block_costs_no_other(bench: Bench, rng: random.Random) -> None:
    contents = bench.fill(rng, [0, 1, 2])
    assert bench.run(order(1, DOWN, [0, 1, 2], [4, 5, 6])).outcome is Outcome.OK
    keys = (key_of(4), key_of(99), key_of(6), key_of(7))  # another one is in 5, none in 7
    result = bench.run(TierOrder(2, "disk", UP, keys, (3, 4, 5, 6), (4, 5, 6, 7)))
    assert result.outcome is Outcome.MISS and result.num_bytes == 2 * SLOT_BYTES
    failed = result.failures((3, 4, 5, 6))
    assert set(failed) == {4, 6} and failed[4] is Outcome.MISS and failed[6] in NOT_THERE
    assert [bench.slot(3), bench.slot(5)] == [contents[0], contents[2]]


def test_orders_without_end_do_not_fill_the_queue(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Results go to whoever gave the order: none is kept for somebody who never asks."""
    monkeypatch.setattr("kvbm_core.transfer.jobs.MAX_QUEUED_JOBS", 4)
    for job_id in range(1, 10):
        assert bench.run(order(job_id, (DOWN, UP)[job_id % 2 == 0], [1], [1])).outcome is Outcome.OK


def test_a_disk_is_not_asked_which_blocks_it_has(bench: Bench) -> None:
    """Its books are the leader's."""
    find = TierOrder(1, "disk", OrderKind.FIND, (key_of(1),))
    bench.submit(find)
    assert bench.result(1).outcome is Outcome.REJECTED


def test_cancel_takes_back_a_read_that_has_not_begun(path: Path) -> None:
    gate, begun = threading.Event(), threading.Event()

    def chosen(transfer: Transfer, is_write: bool) -> bool:
        begun.set()
        return not is_write

    with bench_on(path, lambda fd: GatedIo(fd, chosen, None, gate)) as bench:
        bench.submit(order(1, UP, [0], [0]))
        assert begun.wait(LONG_S)
        bench.submit(order(2, UP, [1], [1]))
        assert bench.mover.cancel(2) and not bench.mover.cancel(1) and not bench.mover.cancel(3)
        assert bench.result(2).outcome is Outcome.REJECTED and bench.listener.ids() == [2]
        gate.set()
        assert bench.result(1).outcome in NOT_THERE


# ---------------------------------------------------------------- late


def test_a_listener_that_fails_while_the_disk_still_reads_leaves_its_memory_late(path: Path) -> None:
    """The order has failed, but the kernel goes on to write into its slots."""
    gate, clock = threading.Event(), ManualClock()
    with (
        pytest.MonkeyPatch.context() as patch,
        bench_on(path, lambda fd: GatedIo(fd, touches(9, is_write=False), clock, gate), clock) as bench,
    ):
        patch.setattr("kvbm_core.storage.disk.record_io.MAX_REQUEST_RECORDS", 1)
        assert bench.run(order(1, DOWN, [0, 1], [4, 9])).outcome is Outcome.OK

        def fail(*ended: object) -> None:
            raise RuntimeError("no place for it")

        bench.submit(order(2, UP, [5, 6], [4, 9]), on_blocks=fail)
        failed = bench.result(2)
        assert (failed.outcome, failed.is_late) == (Outcome.IO_ERROR, True)
        assert late_slots(bench.host) == [6]
        gate.set()
        assert bench.last_result(2).outcome is Outcome.IO_ERROR


def test_a_late_read_keeps_its_slots_until_it_ends(path: Path, rng: random.Random) -> None:
    gate, clock = threading.Event(), ManualClock()
    with bench_on(path, lambda fd: GatedIo(fd, touches(6, is_write=False), clock, gate), clock) as bench:
        contents = bench.fill(rng, [0, 1, 2, 3])
        assert bench.run(order(1, DOWN, [0, 1, 2, 3], [4, 6, 8, 9])).outcome is Outcome.OK
        bench.wipe()
        late = bench.run(order(2, UP, [5, 6], [4, 6]))
        assert (late.outcome, late.is_late) == (Outcome.TIMED_OUT, True)
        assert late.seconds == pytest.approx(LONG_S)
        # Meanwhile others are served. The second one starts after the first has been followed by a look at
        # what ended.
        for job_id, disk_slot, content in ((3, 8, contents[2]), (4, 9, contents[3])):
            assert bench.run(order(job_id, UP, [7], [disk_slot])).outcome is Outcome.OK
            assert bench.slot(7) == content
        assert bench.run(order(5, DOWN, [7], [10])).outcome is Outcome.OK
        assert len(bench.results(2)) == 1 and not any(bench.slot(6))
        assert late_slots(bench.host) == [6]
        gate.set()
        assert bench.last_result(2).outcome is Outcome.TIMED_OUT
        assert bench.slot(6) == contents[1]  # what the disk wrote there, long after
        assert bench.run(order(6, UP, [5, 6], [4, 6])).outcome is Outcome.OK
        assert len(bench.results(2)) == 2 and late_slots(bench.host) == []


def test_a_late_write_keeps_its_slots_until_it_ends(path: Path) -> None:
    gate, clock = threading.Event(), ManualClock()
    with bench_on(path, lambda fd: GatedIo(fd, touches(6, is_write=True), clock, gate), clock) as bench:
        late = bench.run(order(1, DOWN, [0, 1], [4, 6]))
        assert (late.outcome, late.is_late) == (Outcome.TIMED_OUT, True)
        assert bench.run(order(2, DOWN, [2], [7])).outcome is Outcome.OK
        assert bench.run(order(3, UP, [3], [6])).outcome in NOT_THERE
        assert len(bench.results(1)) == 1 and late_slots(bench.host) == [1]
        gate.set()
        assert bench.last_result(1).outcome is Outcome.TIMED_OUT
        assert bench.run(order(4, DOWN, [2], [8])).outcome is Outcome.OK
        assert len(bench.results(1)) == 2 and late_slots(bench.host) == []
    assert found_in(path) == {key_of(n) for n in (4, 6, 7, 8)}
