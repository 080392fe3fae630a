"""Requests that fail, or never end: the outcome says so in time, neighbours survive, and nothing is written
over.
"""

from __future__ import annotations

import ctypes
import errno
import gc
import os
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from kvbm_core.clock import ManualClock
from kvbm_core.errors import Outcome
from kvbm_core.storage.disk import bounce
from kvbm_core.storage.disk.allocate import DirectoryBusyError
from kvbm_core.storage.disk.block_file import Geometry
from kvbm_core.storage.disk.io import FileIo, Transfer
from kvbm_core.storage.disk.record import SECTOR_BYTES, slot_offset_bytes
from kvbm_core.storage.disk.record_io import RecordIo
from kvbm_core.storage.disk.recovery import Found
from kvbm_core.storage.disk.store import DiskStore
from kvbm_core.testing.store_contract import LONG_S, buffers, key_of
from tests.faults.doubles import BUFFERED, Choice, FailingIo, HeldIo, store_on
from tests.faults.versions import payload_of, put_versions, read_all

ALIGNED, ODD = 8192, 5000
NUM_SLOTS = 4
FINGERPRINT = b"requests".ljust(16)
DEADLINE_S = 5.0


def geometry_of(payload_bytes: int, num_slots: int = NUM_SLOTS) -> Geometry:
    """Of the stores here."""
    return Geometry(num_slots, payload_bytes, FINGERPRINT)


@pytest.fixture(params=[ALIGNED, ODD])
def payload_bytes(request: pytest.FixtureRequest) -> int:
    """Blocks that go straight, and blocks that go by a bounce."""
    assert isinstance(request.param, int)
    return request.param


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Of a file that is not there yet."""
    return tmp_path / "faults.blocks"


def fill(path: Path, payload_bytes: int, version: int = 1) -> None:
    """Version ``version`` of keys 0 .. 3 in slots 0 .. 3."""
    store = DiskStore(path, geometry_of(payload_bytes), BUFFERED)
    assert store.wait_recovered(LONG_S)
    put = put_versions(store, dict.fromkeys(range(NUM_SLOTS), version), payload_bytes)
    store.close()
    assert put == [Outcome.OK] * NUM_SLOTS


def touches(slot: int, payload_bytes: int, *, writes: bool) -> Choice:
    """Requests in one direction that move a part of ``slot``'s record."""
    start, stop = (slot_offset_bytes(number, payload_bytes) for number in (slot, slot + 1))

    def is_chosen(transfer: Transfer, is_write: bool) -> bool:
        end = transfer.offset_bytes + transfer.num_bytes
        return is_write is writes and transfer.offset_bytes < stop and end > start

    return is_chosen


# ---------------------------------------------------------------- requests that fail


def test_a_place_that_cannot_be_read_costs_its_own_block_alone(path: Path, payload_bytes: int) -> None:
    fill(path, payload_bytes)
    ios: list[FailingIo] = []

    def make_io(fd: int) -> FailingIo:
        ios.append(FailingIo(fd, touches(1, payload_bytes, writes=False), -errno.EIO))
        return ios[-1]

    with store_on(path, geometry_of(payload_bytes), make_io) as store:
        assert store.wait_recovered(LONG_S)
        for _ in range(3):
            outcomes, _ = read_all(store, NUM_SLOTS, payload_bytes)
            assert outcomes == [Outcome.OK, Outcome.IO_ERROR, Outcome.OK, Outcome.OK]
        assert ios[1].num_failed == 9, (
            "each time the request of all four, then that block by itself, and again"
        )
        ios[1].chosen = lambda transfer, is_write: False
        assert read_all(store, NUM_SLOTS, payload_bytes)[1] == [1] * NUM_SLOTS, "it was a fault that passed"


@pytest.mark.parametrize(
    ("result", "expected"),
    [
        (-errno.EIO, Outcome.IO_ERROR),
        (-errno.ENOSPC, Outcome.NO_SPACE),
        (-errno.EDQUOT, Outcome.NO_SPACE),
        (-errno.EFBIG, Outcome.NO_SPACE),
        (SECTOR_BYTES, Outcome.NO_SPACE),
        (0, Outcome.NO_SPACE),
    ],
)
def test_a_record_that_is_not_written_costs_itself_alone(
    path: Path, payload_bytes: int, result: int, expected: Outcome
) -> None:
    ios: list[FailingIo] = []

    def make_io(fd: int) -> FailingIo:
        ios.append(FailingIo(fd, touches(2, payload_bytes, writes=True), result))
        return ios[-1]

    with store_on(path, geometry_of(payload_bytes), make_io) as store:
        assert store.wait_recovered(LONG_S)
        put = put_versions(store, dict.fromkeys(range(NUM_SLOTS), 1), payload_bytes)
        assert put == [Outcome.OK, Outcome.OK, expected, Outcome.OK]
        outcomes, _ = read_all(store, NUM_SLOTS, payload_bytes)
        assert outcomes == [Outcome.OK, Outcome.OK, Outcome.MISS, Outcome.OK]
        assert set(store.scan()) == {key_of(0), key_of(1), key_of(3)}
        ios[0].chosen = lambda transfer, is_write: False
        assert put_versions(store, {2: 1}, payload_bytes) == [Outcome.OK], "its slot is free again"
        assert read_all(store, NUM_SLOTS, payload_bytes)[1] == [1] * NUM_SLOTS


def test_a_write_that_fails_half_way_leaves_no_wrong_bytes(path: Path, payload_bytes: int) -> None:
    """The old record's slot is used again, and the new one gets there in part."""
    fill(path, payload_bytes)

    class Halves(FailingIo):
        def submit(self, transfers: Sequence[Transfer], *, is_write: bool) -> None:
            if is_write:  # the headers arrive, and nothing else
                for transfer in transfers:
                    address, _ = transfer.pieces[0]
                    header = memoryview((ctypes.c_char * SECTOR_BYTES).from_address(address))
                    os.pwrite(self._fd, header, transfer.offset_bytes)
            super().submit(transfers, is_write=is_write)

    def make_io(fd: int) -> FileIo:
        return Halves(fd, lambda transfer, is_write: is_write, -errno.EIO)

    with store_on(path, geometry_of(payload_bytes), make_io) as store:
        assert store.wait_recovered(LONG_S)
        assert put_versions(store, {8: 2}, payload_bytes) == [Outcome.IO_ERROR]
        assert read_all(store, 9, payload_bytes)[0].count(Outcome.OK) == NUM_SLOTS - 1
    store = DiskStore(path, geometry_of(payload_bytes), BUFFERED)
    assert store.wait_recovered(LONG_S)
    outcomes, _ = read_all(store, 9, payload_bytes)
    store.close()
    assert outcomes[8] is Outcome.CORRUPT and outcomes.count(Outcome.OK) == NUM_SLOTS - 1


def test_a_header_that_cannot_be_read_at_start_costs_its_block(path: Path, payload_bytes: int) -> None:
    fill(path, payload_bytes)

    def make_io(fd: int) -> FailingIo:
        return FailingIo(fd, touches(1, payload_bytes, writes=False), -errno.EIO)

    with store_on(path, geometry_of(payload_bytes), make_io, scans=True) as store:
        assert store.wait_recovered(LONG_S)
        assert read_all(store, NUM_SLOTS, payload_bytes)[1] == [1, None, 1, 1]
        assert put_versions(store, {1: 2}, payload_bytes) == [Outcome.OK]
        assert read_all(store, NUM_SLOTS, payload_bytes)[1] == [1, 2, 1, 1]


# ---------------------------------------------------------------- requests that do not end


class Stuck:
    """A store whose requests for one slot, in one direction, are held back while ``is_stuck``."""

    def __init__(self, payload_bytes: int, slot: int, *, writes: bool) -> None:
        self.clock = ManualClock()
        self.is_stuck = True
        self._touches = touches(slot, payload_bytes, writes=writes)
        self.ios: list[HeldIo] = []

    def make_io(self, fd: int) -> HeldIo:
        """The writer's, then the reader's."""
        self.ios.append(HeldIo(fd, lambda *request: self.is_stuck and self._touches(*request), self.clock))
        return self.ios[-1]

    def let_go(self) -> None:
        """All that was held is done."""
        self.is_stuck = False
        for io in self.ios:
            io.let_go()


@pytest.fixture
def stuck_reads(payload_bytes: int) -> Iterator[Stuck]:
    """Of slot 1."""
    stuck = Stuck(payload_bytes, 1, writes=False)
    yield stuck
    assert not any(io.held for io in stuck.ios)


def until_none_is_late(record_io: RecordIo) -> None:
    """Collects what was let go."""
    end_s = time.monotonic() + LONG_S
    while record_io.late_requests:
        assert time.monotonic() < end_s
        record_io.reap()


def get_into(store: DiskStore, numbers: list[int], targets: list[memoryview]) -> list[Outcome]:
    """``get_many`` of keys by their numbers, within DEADLINE_S; what is OK is version 1."""
    outcomes = store.get_many([key_of(number) for number in numbers], targets, deadline_s=DEADLINE_S)
    for number, target, outcome in zip(numbers, targets, outcomes, strict=True):
        assert outcome is not Outcome.OK or target == payload_of(number, 1, len(target))
    return outcomes


def test_a_read_that_does_not_end_is_timed_out_at_the_deadline(
    path: Path, payload_bytes: int, stuck_reads: Stuck
) -> None:
    fill(path, payload_bytes)
    is_straight = payload_bytes == ALIGNED
    with store_on(path, geometry_of(payload_bytes), stuck_reads.make_io, clock=stuck_reads.clock) as store:
        assert store.wait_recovered(LONG_S)
        targets = buffers(2, payload_bytes)
        started_s = stuck_reads.clock.now_s()
        assert get_into(store, [1, 3], targets) == [Outcome.TIMED_OUT, Outcome.OK]
        assert stuck_reads.clock.now_s() - started_s == DEADLINE_S
        assert store.holds(targets[0]) is is_straight and not store.holds(targets[1])
        assert put_versions(store, {9: 1}, payload_bytes) == [Outcome.OK], "others are served meanwhile"
        assert get_into(store, [9, 3], buffers(2, payload_bytes)) == [Outcome.OK] * 2
        assert store.holds(targets[0]) is is_straight
        targets[0][:] = b"x" * payload_bytes
        stuck_reads.let_go()
        until_none_is_late(store._reader.record_io)
        assert not store.holds(targets[0])
        late = payload_of(1, 1, payload_bytes) if is_straight else b"x" * payload_bytes
        assert targets[0] == late, "it was written after all, or not at all"


def test_memory_of_a_late_read_is_not_freed_though_its_caller_drops_it(path: Path) -> None:
    fill(path, ALIGNED)
    stuck = Stuck(ALIGNED, 1, writes=False)
    with store_on(path, geometry_of(ALIGNED), stuck.make_io, clock=stuck.clock) as store:
        assert store.wait_recovered(LONG_S)
        targets = buffers(2, ALIGNED)
        memory = weakref.ref(targets[0].obj)
        assert get_into(store, [1, 3], targets) == [Outcome.TIMED_OUT, Outcome.OK]
        del targets
        gc.collect()
        assert memory() is not None
        stuck.let_go()
        until_none_is_late(store._reader.record_io)
        gc.collect()
        assert memory() is None


def test_places_for_copies_are_not_used_while_a_late_read_may_write_there(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(path, ODD)
    monkeypatch.setattr(bounce, "BOUNCE_BYTES", 2 * 8192)  # two places
    stuck = Stuck(ODD, 1, writes=False)
    with store_on(path, geometry_of(ODD), stuck.make_io, clock=stuck.clock) as store:
        assert store.wait_recovered(LONG_S)
        assert get_into(store, [1], buffers(1, ODD)) == [Outcome.TIMED_OUT]
        assert get_into(store, [0, 2, 3], buffers(3, ODD)) == [Outcome.OK] * 3, "one place after the other"
        assert get_into(store, [1], buffers(1, ODD)) == [Outcome.TIMED_OUT]
        assert get_into(store, [0, 2], buffers(2, ODD)) == [Outcome.BUSY] * 2, "no place is left"
        assert put_versions(store, {0: 1}, ODD) == [Outcome.OK], "writes have places of their own"
        stuck.let_go()
        until_none_is_late(store._reader.record_io)
        assert get_into(store, [0, 1, 2, 3], buffers(4, ODD)).count(Outcome.OK) >= 3


def test_a_write_that_does_not_end_keeps_its_slot_until_it_does(path: Path, payload_bytes: int) -> None:
    """A late write must not land on a block that was written to its slot since."""
    stuck = Stuck(payload_bytes, 0, writes=True)
    with store_on(path, geometry_of(payload_bytes, 2), stuck.make_io, clock=stuck.clock) as store:
        assert store.wait_recovered(LONG_S)
        started_s = stuck.clock.now_s()
        payload = memoryview(payload_of(0, 1, payload_bytes))
        assert store.put_many([key_of(0)], [payload], deadline_s=DEADLINE_S) == [Outcome.TIMED_OUT]
        assert stuck.clock.now_s() - started_s == DEADLINE_S
        assert store.contains_many([key_of(0)], deadline_s=0) == [Outcome.MISS]
        stuck.is_stuck = False
        for number in (1, 2):
            assert put_versions(store, {number: 1}, payload_bytes) == [Outcome.OK]
            assert store.resident_blocks == 1, "the other slot is waiting for the late write"
        stuck.let_go()
        until_none_is_late(store._writer.record_io)
        assert put_versions(store, {3: 1}, payload_bytes) == [Outcome.OK]
        assert read_all(store, 4, payload_bytes)[1] == [None, None, 1, 1], "and then it is free"


def test_waiting_for_another_call_counts_towards_the_deadline(path: Path) -> None:
    fill(path, ALIGNED)
    stuck = Stuck(ALIGNED, 1, writes=False)

    class SlowLock:
        """Is got after 4 s of the clock."""

        def acquire(self, timeout: float) -> bool:
            stuck.clock.advance(min(timeout, 4.0))
            return timeout >= 4.0

        def release(self) -> None:
            """Nobody waits for it."""

        __enter__, __exit__ = acquire, release

    with store_on(path, geometry_of(ALIGNED), stuck.make_io, clock=stuck.clock) as store:
        assert store.wait_recovered(LONG_S)
        lock, store._reader.lock = store._reader.lock, SlowLock()  # type: ignore[assignment]
        started_s = stuck.clock.now_s()
        assert get_into(store, [1], buffers(1, ALIGNED)) == [Outcome.TIMED_OUT]
        assert stuck.clock.now_s() - started_s == DEADLINE_S
        assert store.get_many([key_of(0)], buffers(1, ALIGNED), deadline_s=1.0) == [Outcome.BUSY]
        store._reader.lock = lock
        stuck.let_go()


def test_close_does_not_wait_for_ever_and_keeps_the_file_of_a_late_request(path: Path) -> None:
    fill(path, ALIGNED)
    stuck = Stuck(ALIGNED, 1, writes=False)
    with store_on(path, geometry_of(ALIGNED), stuck.make_io, clock=stuck.clock) as store:
        assert store.wait_recovered(LONG_S)
        target = buffers(1, ALIGNED)
        assert get_into(store, [1], target) == [Outcome.TIMED_OUT]
        fd = store._file.fd
        store.close()
        assert store.get_many([key_of(1)], target, deadline_s=LONG_S) == [Outcome.REJECTED]
        assert os.fstat(fd).st_ino == path.stat().st_ino, "its number is not somebody else's now"
        with pytest.raises(DirectoryBusyError):
            DiskStore(path, geometry_of(ALIGNED), BUFFERED)
        stuck.let_go()
        assert all(io.close(LONG_S) for io in stuck.ios)
        assert target[0] == payload_of(1, 1, ALIGNED)
        store._file.close()


# ---------------------------------------------------------------- a start that does not end


def test_a_store_serves_while_its_file_is_still_being_looked_at(path: Path, payload_bytes: int) -> None:
    fill(path, payload_bytes)
    at_work, ios = threading.Event(), list[HeldIo]()

    class Told(HeldIo):
        def collect(self, timeout_s: float) -> list[tuple[int, int]]:
            at_work.set()
            return super().collect(min(timeout_s, 0.01))

    def make_io(fd: int) -> HeldIo:
        ios.append(Told(fd, lambda transfer, is_write: True))
        return ios[-1]

    with store_on(path, geometry_of(payload_bytes), make_io, scans=True) as store:
        assert at_work.wait(LONG_S)
        assert not store.wait_recovered(0)
        assert read_all(store, NUM_SLOTS, payload_bytes)[0] == [Outcome.MISS] * NUM_SLOTS
        assert put_versions(store, {9: 1}, payload_bytes) == [Outcome.NO_SPACE], "no slot is known to be free"
        ios[0].let_go()
        assert store.wait_recovered(LONG_S)
        assert read_all(store, NUM_SLOTS, payload_bytes)[1] == [1] * NUM_SLOTS


def test_what_is_cleared_during_the_start_does_not_come_back(path: Path) -> None:
    fill(path, ALIGNED)
    judged, go_on = threading.Event(), threading.Event()

    class LateStore(DiskStore):
        def _take_in(self, end: int, found: list[Found]) -> None:
            judged.set()
            assert found and go_on.wait(LONG_S)
            super()._take_in(end, found)

    store = LateStore(path, geometry_of(ALIGNED), BUFFERED)
    assert judged.wait(LONG_S)
    store.clear()
    go_on.set()
    assert store.wait_recovered(LONG_S)
    assert list(store.scan()) == []
    put = put_versions(store, dict.fromkeys(range(NUM_SLOTS), 2), ALIGNED)
    assert put == [Outcome.OK] * NUM_SLOTS
    assert read_all(store, NUM_SLOTS, ALIGNED)[1] == [2] * NUM_SLOTS
    store.close()


def test_a_start_that_does_not_end_begins_with_an_empty_cache(path: Path, payload_bytes: int) -> None:
    fill(path, payload_bytes)
    clock = ManualClock()
    ios: list[HeldIo] = []

    def make_io(fd: int) -> HeldIo:
        ios.append(HeldIo(fd, lambda transfer, is_write: True, clock))
        return ios[-1]

    with store_on(path, geometry_of(payload_bytes), make_io, clock=clock, scans=True) as store:
        assert store.wait_recovered(LONG_S)
        assert list(store.scan()) == []
        assert (
            put_versions(store, dict.fromkeys(range(NUM_SLOTS), 2), payload_bytes) == [Outcome.OK] * NUM_SLOTS
        )
        ios[0].let_go()  # into cells that nobody looks at any more
        assert ios[0].close(LONG_S)
        assert read_all(store, NUM_SLOTS, payload_bytes)[1] == [2] * NUM_SLOTS
