"""Recovery that reads what it finds, and ``kvbm disk verify``: against a plain reader; chunks; close."""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import NamedTuple

import pytest
import xxhash

from kvbm_core.config.settings import KvbmSettings
from kvbm_core.runtime.assembly import rank_options
from kvbm_core.storage.disk import recovery, scan
from kvbm_core.storage.disk.allocate import FileOptions
from kvbm_core.storage.disk.block_file import BlockFile, Geometry
from kvbm_core.storage.disk.inspect import identify
from kvbm_core.storage.disk.io import FileIo, ThreadIo, Transfer
from kvbm_core.storage.disk.nixl_io import NixlIo
from kvbm_core.storage.disk.record import SECTOR_BYTES, record_bytes, slot_offset_bytes, unpack_record
from kvbm_core.storage.disk.recovery import Found, Recovery
from kvbm_core.storage.disk.verify import verify
from kvbm_core.storage.host_slab import HostSlab
from kvbm_core.testing.file_io_contract import why_no_nixl
from kvbm_core.testing.store_contract import LONG_S
from kvbm_core.transfer.movers.disk_file import RankFile
from tests.faults.doubles import BUFFERED, FailingIo
from tests.unit.block_files import key, write
from tests.unit.test_worker_disk import Ends

SMALL = 6000
FINGERPRINT = b"checked recovery"
CHECKED = replace(BUFFERED, check_at_start=True)
NO_NIXL = why_no_nixl()


class Looked(NamedTuple):
    """What a recovery said, and counted."""

    chunks: list[tuple[int, list[Found]]]
    recovery: Recovery

    @property
    def slots(self) -> list[int]:
        return [record.slot for _, found in self.chunks for record in found]


def look(
    path: Path,
    geometry: Geometry,
    *,
    checks: bool = True,
    options: FileOptions = BUFFERED,
    make_io: Callable[[int], FileIo] | None = None,
) -> Looked:
    """Opens the file as an engine does, and waits until all that is in it has been found."""
    file, chunks = BlockFile(path, geometry, replace(options, check_at_start=checks)), []
    made = None if make_io is None else lambda: make_io(file.fd)
    looking = Recovery(file, lambda end, found: chunks.append((end, found)), make_io=made)
    assert looking.wait(LONG_S)
    looking.close()
    file.close()
    assert looking.failure is None
    return Looked(chunks, looking)


def flip(path: Path, geometry: Geometry, slot: int, byte: int) -> None:
    """Flips a bit of a record; ``byte`` counts from its header's begin."""
    at = slot_offset_bytes(slot, geometry.payload_bytes) + byte
    with path.open("r+b") as file:
        file.seek(at)
        old = file.read(1)[0]
        file.seek(at)
        file.write(bytes([old ^ 16]))


def good_slots(path: Path, geometry: Geometry) -> list[int]:
    """What a reader that knows nothing of RecordIo, RecordScan and Recovery says is good: all bits are looked
    at, and nothing but flips of them was done to this file.
    """
    data, good = path.read_bytes(), []
    for slot in range(geometry.num_slots):
        at = slot_offset_bytes(slot, geometry.payload_bytes)
        header = unpack_record(data[at : at + SECTOR_BYTES])
        payload = data[at + SECTOR_BYTES : at + SECTOR_BYTES + geometry.payload_bytes]
        if header is not None and xxhash.xxh3_128_digest(payload) == header.digest:
            good.append(slot)
    return good


def reads_of(slots: Sequence[int], geometry: Geometry) -> Callable[[Transfer, bool], bool]:
    """Chooses reads of these records' last sectors."""
    each = record_bytes(geometry.payload_bytes)
    ends = [slot_offset_bytes(slot, geometry.payload_bytes) + each for slot in slots]

    def is_chosen(transfer: Transfer, is_write: bool) -> bool:
        return any(transfer.offset_bytes < end <= transfer.offset_bytes + transfer.num_bytes for end in ends)

    return is_chosen


# ---------------------------------------------------------------- what is found


@pytest.mark.parametrize("options", [FileOptions(), BUFFERED], ids=["direct", "buffered"])
@pytest.mark.parametrize(
    ("payload_bytes", "num_slots"),
    [(4096, 700), (SMALL, 300), (64 << 10, 160), (1 << 20, 24), ((5 << 20) + 512, 6), (9 << 20, 4)],
)
def test_it_finds_what_verify_calls_good(
    tmp_path: Path, rng: Random, payload_bytes: int, num_slots: int, options: FileOptions
) -> None:
    path, geometry = tmp_path / "x.blocks", Geometry(num_slots, payload_bytes, FINGERPRINT)
    written = sorted(rng.sample(range(num_slots), num_slots * 3 // 4))
    write(path, written, geometry=geometry)
    all_bytes = SECTOR_BYTES + payload_bytes
    for slot in rng.sample(written, max(1, len(written) // 4)):
        places = (
            rng.randrange(SECTOR_BYTES),
            SECTOR_BYTES,
            all_bytes - 1,
            rng.randrange(SECTOR_BYTES, all_bytes),
        )
        flip(path, geometry, slot, rng.choice(places))
    expected = good_slots(path, geometry)
    assert 0 < len(expected) < len(written)
    found = look(path, geometry, options=options)
    assert found.slots == expected
    findings = verify(identify(path), on_bytes=lambda count: None)
    assert (findings.good, sorted(findings.damaged)) == (len(expected), sorted(set(written) - set(expected)))
    records = [record for _, chunk in found.chunks for record in chunk]
    assert [record.key for record in records] == [key(slot) for slot in expected]
    by_header = look(path, geometry, options=options, checks=False)
    assert set(by_header.slots) >= set(expected)
    assert found.recovery.damaged_blocks == len(by_header.slots) - len(expected)
    assert found.recovery.read_bytes == len(by_header.slots) * record_bytes(payload_bytes)
    assert (found.recovery.unreadable_blocks, by_header.recovery.read_bytes) == (0, 0)


def test_a_place_that_cannot_be_read_costs_its_own_record(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, geometry = tmp_path / "x.blocks", Geometry(64, SMALL, FINGERPRINT)
    write(path, range(40), geometry=geometry)
    flip(path, geometry, 30, 5000)
    with caplog.at_level(logging.INFO, "kvbm"):
        found = look(
            path, geometry, make_io=lambda fd: FailingIo(fd, reads_of([3, 17], geometry), -errno.EIO)
        )
    assert found.slots == sorted(set(range(40)) - {3, 17, 30})
    assert (found.recovery.found_blocks, found.recovery.damaged_blocks, found.recovery.unreadable_blocks) == (
        37,
        1,
        2,
    )
    lines = [record.getMessage() for record in caplog.records if str(path) in record.getMessage()]
    assert len(lines) == 2
    assert "of 40 blocks 1 are damaged and 2 cannot be read" in lines[0] and "kvbm disk verify" in lines[0]
    assert "37 blocks found, 0.00 GB checked" in lines[1]


def test_a_disk_that_fails_altogether_is_empty_and_can_be_used(tmp_path: Path) -> None:
    path, geometry = tmp_path / "x.blocks", Geometry(64, SMALL, FINGERPRINT)
    write(path, range(40), geometry=geometry)
    found = look(path, geometry, make_io=lambda fd: FailingIo(fd, lambda *_: True, -errno.EIO))
    assert found.chunks == [(64, [])]


def test_nothing_to_check_is_said_of_a_new_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "kvbm"):
        found = look(tmp_path / "x.blocks", Geometry(8, SMALL, FINGERPRINT))
    assert found.chunks == [(8, [])] and "checked" not in caplog.text


@pytest.mark.skipif(NO_NIXL is not None, reason=f"NOT RUN: checked recovery by NIXL: {NO_NIXL}")
def test_by_nixl_too(tmp_path: Path) -> None:
    path, geometry = tmp_path / "x.blocks", Geometry(64, 64 << 10, FINGERPRINT)
    write(path, range(40), geometry=geometry)
    flip(path, geometry, 30, 5000)
    regions: list[int] = []

    class Told(NixlIo):
        def register(self, address: int, nbytes: int, unit_bytes: int) -> None:
            regions.append(nbytes)
            super().register(address, nbytes, unit_bytes)

    assert look(path, geometry, make_io=Told).slots == sorted(set(range(40)) - {30})
    assert scan.IN_FLIGHT_BYTES in regions, "the memory that is read into is registered once"


# ---------------------------------------------------------------- chunks, and what is read


class CountingIo(ThreadIo):
    """How many bytes were read, and how many of records at once."""

    def __init__(self, fd: int) -> None:
        super().__init__(fd, num_threads=2)
        self.read_bytes = 0
        self.most_bytes = 0
        self._sizes: dict[int, int] = {}

    def submit(self, transfers: Sequence[Transfer], *, is_write: bool) -> None:
        """See FileIo."""
        assert not is_write
        for transfer in transfers:
            self.read_bytes += transfer.num_bytes
            payloads = [nbytes for _, nbytes in transfer.pieces if nbytes != SECTOR_BYTES]
            self._sizes[transfer.tag] = sum(payloads)
        self.most_bytes = max(self.most_bytes, sum(self._sizes.values()))
        super().submit(transfers, is_write=is_write)

    def collect(self, timeout_s: float) -> list[tuple[int, int]]:
        """See FileIo."""
        ended = super().collect(timeout_s)
        for tag, _ in ended:
            del self._sizes[tag]
        return ended


@pytest.mark.parametrize(("payload_bytes", "written"), [(64 << 10, 400), (3 << 20, 12), (9 << 20, 3)])
def test_free_slots_cost_their_header_and_memory_stays_bounded(
    tmp_path: Path, payload_bytes: int, written: int
) -> None:
    path, geometry = tmp_path / "x.blocks", Geometry(3 * written, payload_bytes, FINGERPRINT)
    write(path, range(0, 2 * written, 2), geometry=geometry)
    ios: list[CountingIo] = []

    def make_io(fd: int) -> CountingIo:
        ios.append(CountingIo(fd))
        return ios[-1]

    assert len(look(path, geometry, make_io=make_io).slots) == written
    assert ios[0].read_bytes == 3 * written * SECTOR_BYTES + written * record_bytes(payload_bytes)
    assert 0 < ios[0].most_bytes <= max(scan.IN_FLIGHT_BYTES, payload_bytes)


def test_chunks_are_small_and_the_same_on_all_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The leader takes a chunk in when all ranks have told of it."""
    geometry = Geometry(50, SMALL, FINGERPRINT)
    monkeypatch.setattr(scan, "CHUNK_SLOTS", 16)
    monkeypatch.setattr(recovery, "CHECKED_CHUNK_BYTES", 6 * record_bytes(SMALL) + 100)
    ends = [6, 12, 16, 22, 28, 32, 38, 44, 48, 50]
    contents: list[Sequence[int]] = [range(50), [1, 2, 49], range(20, 30)]
    for rank, slots in enumerate(contents):
        path = tmp_path / f"rank-{rank}.blocks"
        write(path, slots, geometry=geometry)
        flip(path, geometry, slots[1], 5000)
        found = look(path, geometry)
        assert [end for end, _ in found.chunks] == ends
        assert found.slots == [slot for slot in slots if slot != slots[1]]
        for start, (end, chunk) in zip([0, *ends], found.chunks, strict=False):
            assert all(start <= record.slot < end for record in chunk)
        assert [end for end, _ in look(path, geometry, checks=False).chunks] == [16, 32, 48, 50]


def test_records_of_a_life_that_ends_meanwhile_are_not_called_bad(tmp_path: Path) -> None:
    path, geometry = tmp_path / "x.blocks", Geometry(8, SMALL, FINGERPRINT)
    write(path, range(8), geometry=geometry)
    file = BlockFile(path, geometry, CHECKED)

    class Resetting(ThreadIo):
        """The engine forgets all when the headers have been read."""

        def submit(self, transfers: Sequence[Transfer], *, is_write: bool) -> None:
            if any(len(transfer.pieces) > 1 for transfer in transfers):
                file.begin_new_life()
            super().submit(transfers, is_write=is_write)

    chunks: list[tuple[int, list[Found]]] = []
    looking = Recovery(
        file, lambda end, found: chunks.append((end, found)), make_io=lambda: Resetting(file.fd)
    )
    assert looking.wait(LONG_S)
    looking.close()
    file.close()
    assert chunks == [(8, [])] and looking.damaged_blocks == looking.unreadable_blocks == 0


# ---------------------------------------------------------------- close


class StoppableIo(ThreadIo):
    """Its ``nth`` read of whole records waits for ``may_go``."""

    def __init__(self, fd: int, nth: int) -> None:
        super().__init__(fd, num_threads=2)
        self._left = nth
        self.num_reads = 0
        self.is_there, self.may_go = threading.Event(), threading.Event()

    def submit(self, transfers: Sequence[Transfer], *, is_write: bool) -> None:
        """See FileIo."""
        if any(len(transfer.pieces) > 1 for transfer in transfers):
            self.num_reads += 1
            if self.num_reads == self._left:
                self.is_there.set()
                assert self.may_go.wait(LONG_S)
        super().submit(transfers, is_write=is_write)


def test_close_in_the_middle_ends_it_within_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery, "CHECKED_CHUNK_BYTES", 8 * record_bytes(SMALL))
    monkeypatch.setattr(scan, "STEP_BYTES", 2 * record_bytes(SMALL))  # four reads a chunk
    monkeypatch.setattr(recovery, "STOP_TIMEOUT_S", LONG_S)  # a busy machine is no stuck disk
    path, geometry = tmp_path / "x.blocks", Geometry(64, SMALL, FINGERPRINT)
    write(path, range(64), geometry=geometry)
    files = set(os.listdir("/proc/self/fd"))
    file, chunks = BlockFile(path, geometry, CHECKED), []
    io = StoppableIo(file.fd, 6)
    looking = Recovery(file, lambda end, found: chunks.append((end, len(found))), make_io=lambda: io)
    assert io.is_there.wait(LONG_S)
    closer = threading.Thread(target=looking.close)
    closer.start()
    assert looking._stopping.wait(LONG_S)
    io.may_go.set()
    closer.join(LONG_S)
    assert not closer.is_alive() and looking.wait(0.0)
    assert chunks == [(8, 8)] and io.num_reads == 6, "what was not read whole is not told of"
    looking.close()
    file.close()
    assert set(os.listdir("/proc/self/fd")) <= files
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("kvbm-disk")]
    assert len(look(path, geometry).slots) == 64


# ---------------------------------------------------------------- who asks for it


@pytest.mark.shows("KVBM_DISK_CHECK_AT_START")
@pytest.mark.parametrize("checks", [False, True])
def test_a_worker_offers_what_its_options_say(tmp_path: Path, checks: bool) -> None:
    path = tmp_path / "rank.blocks"
    ends, host = Ends(), HostSlab(2, SECTOR_BYTES)
    assert host.wait_ready(LONG_S)
    options = replace(BUFFERED, check_at_start=checks)
    first = RankFile("disk", options, ends)
    assert first.open(path, 8, SECTOR_BYTES, "layout")
    assert first._file is not None
    geometry = first._file.geometry
    first._file.close()
    write(path, range(5), geometry=geometry)
    flip(path, geometry, 2, 5000)
    disk = RankFile("disk", options, ends)
    assert disk.open(path, 8, SECTOR_BYTES, "layout")
    mover = disk.start(host)
    disk.look()
    end, found = ends.wait_found()
    disk.close()
    mover.close()
    host.close()
    assert (end, [record.slot for record in found]) == (8, [0, 1, 3, 4] if checks else [0, 1, 2, 3, 4])


@pytest.mark.shows("KVBM_DISK_CHECK_AT_START")
@pytest.mark.parametrize(("setting", "unset"), [("true", True), ("false", False), (None, None)])
@pytest.mark.parametrize("adapter", [False, True])
def test_the_setting_wins_over_the_adapter(
    monkeypatch: pytest.MonkeyPatch, setting: str | None, unset: bool | None, adapter: bool
) -> None:
    monkeypatch.delenv("KVBM_DISK_CHECK_AT_START", raising=False)
    if setting is not None:
        monkeypatch.setenv("KVBM_DISK_CHECK_AT_START", setting)
    settings = KvbmSettings.from_env()
    assert settings.disk_check_at_start is unset
    options = rank_options(settings, check_at_start=adapter)
    assert options.disk.check_at_start is (adapter if unset is None else unset)
    assert rank_options(settings).disk.check_at_start is bool(unset)
