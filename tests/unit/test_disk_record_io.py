"""Record I/O: what travels together, what is called when, and that nothing of it is used up; and the memory
of a block.
"""

from __future__ import annotations

import ctypes
import gc
import weakref
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvbm_core.clock import ManualClock, SystemClock
from kvbm_core.errors import Outcome
from kvbm_core.storage.disk.allocate import FileOptions
from kvbm_core.storage.disk.block_file import BlockFile, Geometry
from kvbm_core.storage.disk.block_io import BlockIo
from kvbm_core.storage.disk.bounce import BounceBuffers, BouncedBlocks
from kvbm_core.storage.disk.io import Transfer
from kvbm_core.storage.disk.record import FREE, SECTOR_BYTES, UNREADABLE, record_bytes, slot_offset_bytes
from kvbm_core.storage.disk.record_io import (
    FIRST_PAUSE_S,
    MAX_RECORDS,
    MAX_REQUEST_RECORDS,
    READS_IN_FLIGHT_BYTES,
    REQUEST_BYTES,
    WRITES_IN_FLIGHT_BYTES,
    Record,
    RecordIo,
)
from kvbm_core.storage.late import LATE, ranges_of
from kvbm_core.testing.store_contract import LONG_S, buffers, content_of, key_of
from kvbm_core.testing.torn_disk import TornDisk, TornIo
from kvbm_core.types import BlockKey


class NotingIo(TornIo):
    """Notes what it is given, and can hold it back."""

    def __init__(self, disk: TornDisk, clock: ManualClock) -> None:
        super().__init__(disk)
        self._clock = clock
        self.calls: list[tuple[list[Transfer], bool]] = []
        self.most_bytes = 0
        self.is_stuck = False

    def submit(self, transfers: Sequence[Transfer], *, is_write: bool) -> None:
        """See FileIo."""
        self.calls.append((list(transfers), is_write))
        super().submit(transfers, is_write=is_write)
        sizes = {transfer.tag: transfer.num_bytes for call, _ in self.calls for transfer in call}
        self.most_bytes = max(self.most_bytes, sum(sizes[tag] for tag, _ in self._ended))

    def collect(self, timeout_s: float) -> list[tuple[int, int]]:
        """See FileIo."""
        if self.is_stuck:
            self._clock.advance(max(0.0, timeout_s))
            return []
        return super().collect(timeout_s)

    def close(self, timeout_s: float) -> bool:
        """See FileIo."""
        return not (self.is_stuck and self.in_flight) and super().close(timeout_s)

    @property
    def transfers(self) -> list[Transfer]:
        """All of them, in order."""
        return [transfer for call, _ in self.calls for transfer in call]


class Bench:
    """A RecordIo of a file of ``num_slots`` blocks, and memory for as many."""

    def __init__(self, folder: Path, num_slots: int, payload_bytes: int) -> None:
        geometry = Geometry(num_slots, payload_bytes, b"records".ljust(16))
        self.file = BlockFile(folder / "records.blocks", geometry, FileOptions(is_direct=False))
        self.clock = ManualClock()
        self.disk = TornDisk(bytes(geometry.file_bytes))
        self.io = NotingIo(self.disk, self.clock)
        self.record_io = RecordIo(self.file, self.io, first_sequence=100, clock=self.clock)
        self.payload_bytes = payload_bytes
        self.memory = buffers(num_slots, record_bytes(payload_bytes) - SECTOR_BYTES)

    def records(self, slots: Sequence[int], *, filled: bool = False) -> list[Record]:
        """Key n in slot n, at the n-th memory; which has its content, or zeros."""
        for slot in slots:
            memory, content = self.memory[slot], content_of(key_of(slot), self.payload_bytes)
            memory[:] = (content if filled else b"").ljust(len(memory), b"\0")
        return [Record(key_of(slot), slot, self.address(slot)) for slot in slots]

    def address(self, slot: int) -> int:
        """Where the slot's memory is."""
        return ctypes.addressof(ctypes.c_char.from_buffer(self.memory[slot]))

    def is_late(self, slot: int) -> bool:
        """Whether a request that was given up may still touch the slot's memory."""
        return LATE.holds(ranges_of(self.memory[slot]))

    def write(self, slots: Sequence[int]) -> None:
        """All of it is taken."""
        assert self.record_io.write(self.records(slots, filled=True), deadline_s=LONG_S) == [
            Outcome.OK
        ] * len(slots)

    def check_read(self, slots: Sequence[int]) -> None:
        """All of it comes back, byte by byte, in the order of the records."""
        assert self.record_io.read(self.records(slots), deadline_s=LONG_S) == [Outcome.OK] * len(slots)
        for slot in slots:
            assert self.memory[slot][: self.payload_bytes] == content_of(key_of(slot), self.payload_bytes)

    def nothing_is_used_up(self) -> None:
        """All cells are free, and nothing is in flight."""
        assert sorted(self.record_io._free_cells) == list(range(MAX_RECORDS))
        assert self.io.in_flight == self.record_io.late_requests == 0


def bench_of(tmp_path: Path, num_slots: int, payload_bytes: int = 8192) -> Bench:
    """A new one; to be closed."""
    return Bench(tmp_path, num_slots, payload_bytes)


def close(bench: Bench) -> None:
    """Nothing stays behind."""
    bench.nothing_is_used_up()
    assert bench.record_io.close(LONG_S)
    bench.file.close()


# ---------------------------------------------------------------- requests


def test_neighbours_travel_together_whatever_the_order(tmp_path: Path) -> None:
    bench = bench_of(tmp_path, 12)
    bench.write([7, 2, 1, 3, 9, 8, 5])
    offsets = [(t.offset_bytes, t.num_bytes, len(t.pieces)) for t in bench.io.transfers]
    size = record_bytes(8192)
    expected = [(1, 3), (5, 1), (7, 3)]
    assert offsets == [(slot_offset_bytes(slot, 8192), count * size, 2 * count) for slot, count in expected]
    bench.check_read([8, 1, 9, 7, 5, 3, 2])
    close(bench)


def test_a_block_asked_for_twice_is_read_twice(tmp_path: Path) -> None:
    bench = bench_of(tmp_path, 4)
    bench.write([0, 1, 2])
    target = bench.address(3)
    twice = [
        Record(key_of(1), 1, bench.address(0)),
        Record(key_of(1), 1, target),
        Record(key_of(2), 2, bench.address(2)),
    ]
    assert bench.record_io.read(twice, deadline_s=LONG_S) == [Outcome.OK] * 3
    assert bench.memory[0][:8192] == bench.memory[3][:8192] == content_of(key_of(1), 8192)
    assert bench.memory[2][:8192] == content_of(key_of(2), 8192)
    close(bench)


@pytest.mark.parametrize("payload_bytes", [100, 8192, 200_000, 3 << 20])
def test_requests_and_what_is_in_flight_have_their_limits(tmp_path: Path, payload_bytes: int) -> None:
    num_slots = min(1300, (40 << 20) // record_bytes(payload_bytes))
    bench = bench_of(tmp_path, num_slots, payload_bytes)
    bench.write(range(num_slots))
    size = record_bytes(payload_bytes)
    counts = [transfer.num_bytes // size for transfer in bench.io.transfers]
    assert sum(counts) == num_slots
    assert max(counts) == max(1, min(MAX_REQUEST_RECORDS, REQUEST_BYTES // size, num_slots))
    assert max(len(call) for call, _ in bench.io.calls) <= 4, (
        "the first ones are on their way while others are made"
    )
    # One request may go over the line, as the room is asked for before each.
    assert bench.io.most_bytes < WRITES_IN_FLIGHT_BYTES + max(REQUEST_BYTES, size)
    bench.io.most_bytes = 0
    bench.check_read(range(num_slots))
    assert 0 < bench.io.most_bytes < READS_IN_FLIGHT_BYTES + max(REQUEST_BYTES, size)
    assert {is_write for _, is_write in bench.io.calls} == {True, False}
    close(bench)


def test_each_record_is_told_once_as_it_ends(tmp_path: Path) -> None:
    bench = bench_of(tmp_path, 30)
    told: list[tuple[int, Outcome]] = []
    records = bench.records([3, 20, 4, 11], filled=True)
    assert bench.record_io.write(records, deadline_s=LONG_S) == [Outcome.OK] * 4
    strangers = [*records, Record(key_of(9), 9, bench.address(9))]
    outcomes = bench.record_io.read(
        strangers, deadline_s=LONG_S, on_ended=lambda *ended: told.extend(zip(*ended, strict=True))
    )
    assert outcomes == [Outcome.OK] * 4 + [Outcome.CORRUPT]
    assert sorted(told) == list(enumerate(outcomes))
    close(bench)


def test_sequences_grow_from_call_to_call(tmp_path: Path) -> None:
    bench = bench_of(tmp_path, 8)
    bench.write([0, 5, 1])
    bench.write([3])
    bench.write([1, 6])
    found = [each.header for each in bench.record_io.headers(range(8), deadline_s=LONG_S)]
    assert [header and header.sequence for header in found] == [101, 103, None, 102, None, 101, 103, None]
    assert [header and header.key for header in found if header] == [key_of(slot) for slot in (0, 1, 3, 5, 6)]
    some = bench.record_io.headers([6, 2, 0, 6], deadline_s=LONG_S)
    assert [each is not FREE for each in some] == [True, False, True, True]
    close(bench)


def test_nothing_to_do_is_done(tmp_path: Path) -> None:
    bench = bench_of(tmp_path, 1)
    assert bench.record_io.read([], deadline_s=0) == bench.record_io.write([], deadline_s=0) == []
    assert bench.record_io.headers([], deadline_s=0) == [] and not bench.io.calls
    close(bench)


def test_a_new_life_makes_all_records_misses(tmp_path: Path) -> None:
    bench = bench_of(tmp_path, 3)
    bench.write([0, 1, 2])
    bench.file.begin_new_life()
    assert bench.record_io.read(bench.records([0, 1, 2]), deadline_s=LONG_S) == [Outcome.MISS] * 3
    assert bench.record_io.headers(range(3), deadline_s=LONG_S) == [FREE] * 3
    close(bench)


def test_a_key_that_fits_no_record_is_refused_before_anything_is_done(tmp_path: Path) -> None:
    bench = bench_of(tmp_path, 12)
    records = bench.records(range(0, 12, 2), filled=True)
    for wrong in (b"", bytes(41)):
        with pytest.raises(ValueError, match="a key of"):
            bench.record_io.write(
                [*records, Record(BlockKey(wrong), 11, bench.address(11))], deadline_s=LONG_S
            )
        assert not bench.io.calls
        bench.nothing_is_used_up()
    close(bench)


# ---------------------------------------------------------------- what does not end


def test_late_requests_keep_their_cells_and_addresses_until_they_end(tmp_path: Path) -> None:
    bench = bench_of(tmp_path, 20)
    bench.write(range(20))
    bench.io.is_stuck = True
    told: list[tuple[int, Outcome]] = []
    records = bench.records([1, 2, 10])
    outcomes = bench.record_io.read(
        records, deadline_s=3.0, on_ended=lambda *ended: told.extend(zip(*ended, strict=True))
    )
    assert outcomes == [Outcome.TIMED_OUT] * 3 and bench.clock.now_s() == 3.0
    assert sorted(told) == [(i, Outcome.TIMED_OUT) for i in range(3)]
    assert bench.record_io.late_requests == 2 and len(bench.record_io._free_cells) == MAX_RECORDS - 3
    assert [bench.is_late(slot) for slot in (1, 2, 10, 0, 3, 9, 11)] == [True] * 3 + [False] * 4
    assert bench.record_io.read(bench.records([3]), deadline_s=0) == [Outcome.TIMED_OUT]
    assert bench.record_io.close(0) is False
    bench.io.is_stuck = False
    bench.check_read([4, 5])
    assert bench.record_io.late_requests == 0
    assert not any(bench.is_late(slot) for slot in range(20))
    close(bench)


class Thing:
    """Something that can be missed."""


def test_what_a_late_request_touches_stays_though_all_else_is_closed_and_gone(tmp_path: Path) -> None:
    bench = bench_of(tmp_path, 4, 100)
    bench.write(range(4))
    bench.io.is_stuck = True
    bounce, keep, record_io = BounceBuffers(100), Thing(), bench.record_io
    records = [Record(key_of(slot), slot, 0) for slot in (1, 3)]
    bounced = BouncedBlocks(bounce, buffers(2, 100), is_write=False)
    outcomes = record_io.read(records, deadline_s=1.0, bounced=bounced, keep=keep)
    assert outcomes == [Outcome.TIMED_OUT] * 2 and record_io.late_requests == 2
    assert record_io.close(0) is False
    kept = [weakref.ref(one) for one in (record_io, bounce, keep)]
    del bench.record_io, record_io, bounce, bounced, keep
    gc.collect()
    record_io = kept[0]()
    assert isinstance(record_io, RecordIo) and all(one() is not None for one in kept)
    bench.io.is_stuck = False
    assert record_io.close(LONG_S)
    del record_io
    gc.collect()
    assert [one() for one in kept] == [None] * 3
    bench.file.close()


def test_a_lane_without_free_cells_waits_for_late_requests(tmp_path: Path) -> None:
    bench = bench_of(tmp_path, MAX_RECORDS + 2, 64)
    bench.write(range(MAX_RECORDS + 2))
    bench.io.is_stuck = True
    for _ in range(2):
        outcomes = bench.record_io.read(bench.records(range(MAX_RECORDS + 2)), deadline_s=1.0)
        assert outcomes == [Outcome.TIMED_OUT] * (MAX_RECORDS + 2)
        bench.clock.advance(FIRST_PAUSE_S)  # until then nothing is tried
    assert not bench.record_io._free_cells, "the second time nothing was even started"
    assert bench.record_io.headers([0], deadline_s=1.0) == [UNREADABLE]
    assert bench.clock.now_s() == pytest.approx(3.0 + 2 * FIRST_PAUSE_S)
    bench.io.is_stuck = False
    bench.check_read(range(MAX_RECORDS + 2))
    close(bench)


# ---------------------------------------------------------------- blocks in any memory


@pytest.mark.parametrize("payload_bytes", [8192, 5000])
def test_memory_goes_straight_only_if_it_is_whole_sectors(tmp_path: Path, payload_bytes: int) -> None:
    geometry = Geometry(2, payload_bytes, b"blocks".ljust(16))
    file = BlockFile(tmp_path / "any.blocks", geometry, FileOptions(is_direct=False))
    writer, reader = (BlockIo(file, SystemClock(), is_write=is_write) for is_write in (True, False))
    for skew_bytes in (0, 1, 512, 4088, 4096):
        source, target = buffers(2, payload_bytes, skew_bytes=skew_bytes)
        address = ctypes.addressof(ctypes.c_char.from_buffer(source))
        is_straight = payload_bytes == 8192 and skew_bytes % SECTOR_BYTES == 0
        assert writer.pieces_of(source) == (((address, payload_bytes),) if is_straight else ())
        halves = [source[:4096], source[4096:]]
        both = ((address, 4096), (address + 4096, payload_bytes - 4096))
        assert writer.pieces_of(halves) == (both if is_straight else ())
        assert (
            writer.pieces_of(source.toreadonly())
            == writer.pieces_of([halves[0], halves[1].toreadonly()])
            == ()
        )
        key = key_of(skew_bytes)
        source[:] = content_of(key, payload_bytes)
        assert writer.transfer([(key, 1)], [source], deadline_s=LONG_S) == [Outcome.OK]
        assert reader.transfer([(key, 1)], [target], deadline_s=LONG_S) == [Outcome.OK]
        assert target == content_of(key, payload_bytes)
        assert writer.transfer([(key, 0)], [source.toreadonly()], deadline_s=LONG_S) == [Outcome.OK]
    assert writer.close(LONG_S) and reader.close(LONG_S)
    file.close()
