"""Files that are damaged, cut, mixed up or somebody else's: each block is right or a miss, and the store goes
on.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

from kvbm_core.errors import Outcome
from kvbm_core.storage.disk.allocate import DiskError
from kvbm_core.storage.disk.block_file import BlockFile, Geometry
from kvbm_core.storage.disk.record import (
    FIRST_SLOT_BYTES,
    FORMAT_VERSION,
    SECTOR_BYTES,
    RecordHeader,
    pack_record,
    payload_digest,
    record_bytes,
    slot_offset_bytes,
    unpack_file,
    unpack_record,
)
from kvbm_core.storage.disk.record_io import Record, RecordIo
from kvbm_core.storage.disk.store import DiskStore
from kvbm_core.testing.file_io_contract import memory_of
from kvbm_core.testing.store_contract import LONG_S, key_of
from kvbm_core.testing.torn_disk import TornDisk, TornIo
from kvbm_core.types import BlockKey
from tests.faults.doubles import BUFFERED
from tests.faults.versions import payload_of, put_versions, read_all

NUM_SLOTS = 4
PAYLOAD_BYTES = 8192
GEOMETRY = Geometry(NUM_SLOTS, PAYLOAD_BYTES, b"damage".ljust(16))
RECORD_BYTES = record_bytes(PAYLOAD_BYTES)
VERSION_FIELD = range(8, 10)
"""Where the file's header says its format's version."""
NUM_PAYLOAD_FLIPS = 10_000
NUM_REAL_FLIPS = 200


def slot_at(slot: int) -> int:
    """Where a slot begins in the file."""
    return slot_offset_bytes(slot, PAYLOAD_BYTES)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file with versions 1 of keys 0 .. 3 in slots 0 .. 3."""
    path = tmp_path / "damaged.blocks"
    store = DiskStore(path, GEOMETRY, BUFFERED)
    assert store.wait_recovered(LONG_S)
    assert put_versions(store, dict.fromkeys(range(NUM_SLOTS), 1), PAYLOAD_BYTES) == [Outcome.OK] * NUM_SLOTS
    store.close()
    return path


def damage(path: Path, at: int, content: bytes) -> None:
    """Overwrites a part of the file."""
    with path.open("r+b") as file:
        file.seek(at)
        file.write(content)


def reopened(path: Path, geometry: Geometry = GEOMETRY) -> list[Outcome]:
    """What a new store finds of the four keys, all bytes checked; then it is used again, twice."""
    store = DiskStore(path, geometry, BUFFERED)
    try:
        assert store.wait_recovered(LONG_S)
        outcomes, _ = read_all(store, NUM_SLOTS, geometry.payload_bytes)
        for version in (2, 3):
            put = put_versions(store, dict.fromkeys(range(NUM_SLOTS), version), geometry.payload_bytes)
            assert put == [Outcome.OK] * NUM_SLOTS
            assert read_all(store, NUM_SLOTS, geometry.payload_bytes)[1] == [version] * NUM_SLOTS
    finally:
        store.close()
    return outcomes


# ---------------------------------------------------------------- single bits


class InMemory:
    """One record read by a RecordIo, from a disk that is a bytearray."""

    def __init__(self, path: Path) -> None:
        self.disk = TornDisk(path.read_bytes())
        self.file = BlockFile(path, GEOMETRY, BUFFERED)
        self.record_io = RecordIo(self.file, TornIo(self.disk))
        self.memory = memory_of(PAYLOAD_BYTES).data
        self._record = Record(key_of(1), 1, memory_of_address(self.memory))

    def read(self) -> Outcome:
        """Of key 1 in slot 1."""
        return self.record_io.read([self._record], deadline_s=LONG_S)[0]

    def found(self) -> RecordHeader | None:
        """As the scan at start sees slot 1."""
        return self.record_io.headers([1], deadline_s=LONG_S)[0].header

    def close(self) -> None:
        """Releases the file."""
        assert self.record_io.close(LONG_S)
        self.file.close()


def memory_of_address(memory: memoryview) -> int:
    """Where it begins."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


@pytest.fixture
def record(path: Path) -> InMemory:
    """Slot 1 of the file, whole."""
    record = InMemory(path)
    assert record.read() is Outcome.OK and record.memory == payload_of(1, 1, PAYLOAD_BYTES)
    assert record.found() is not None
    return record


def test_a_flipped_bit_in_any_byte_of_a_records_header_is_found(record: InMemory, rng: Random) -> None:
    for at in range(slot_at(1), slot_at(1) + SECTOR_BYTES):
        bit = 1 << rng.randrange(8)
        record.disk.image[at] ^= bit
        assert record.read() is Outcome.CORRUPT, f"byte {at - slot_at(1)} of the header, bit {bit}"
        assert record.found() is None
        record.disk.image[at] ^= bit
    assert record.read() is Outcome.OK
    record.close()


def test_a_flipped_bit_in_ten_thousand_places_of_a_payload_is_found(record: InMemory, rng: Random) -> None:
    first = slot_at(1) + SECTOR_BYTES
    for place in rng.sample(range(8 * PAYLOAD_BYTES), NUM_PAYLOAD_FLIPS):
        record.disk.image[first + place // 8] ^= 1 << place % 8
        assert record.read() is Outcome.CORRUPT, f"bit {place} of the payload"
        record.disk.image[first + place // 8] ^= 1 << place % 8
    assert record.read() is Outcome.OK
    record.close()


def test_a_flipped_bit_in_any_byte_of_the_files_header_is_found(path: Path, rng: Random) -> None:
    sector = bytearray(path.read_bytes()[:SECTOR_BYTES])
    assert unpack_file(bytes(sector)) is not None
    for at in range(SECTOR_BYTES):
        bit = 1 << rng.randrange(8)
        sector[at] ^= bit
        assert unpack_file(bytes(sector)) is None, f"byte {at}, bit {bit}"
        sector[at] ^= bit


def test_flipped_bits_are_found_in_a_real_file(path: Path, rng: Random) -> None:
    """Through the store, from the disk: a record's header and payload, and the neighbours come back whole."""
    whole = path.read_bytes()
    store = DiskStore(path, GEOMETRY, BUFFERED)
    assert store.wait_recovered(LONG_S)
    for _ in range(NUM_REAL_FLIPS):
        slot, place = (
            rng.randrange(NUM_SLOTS),
            rng.choice((rng.randrange(SECTOR_BYTES), rng.randrange(RECORD_BYTES))),
        )
        at = slot_at(slot) + place
        damage(path, at, bytes([whole[at] ^ 1 << rng.randrange(8)]))
        outcomes, _ = read_all(store, NUM_SLOTS, PAYLOAD_BYTES)
        assert outcomes == [Outcome.CORRUPT if n == slot else Outcome.OK for n in range(NUM_SLOTS)]
        assert read_all(store, NUM_SLOTS, PAYLOAD_BYTES)[0][slot] is Outcome.MISS, "it is forgotten"
        assert put_versions(store, {slot: 1}, PAYLOAD_BYTES) == [Outcome.OK], (
            "into the slot that is free again"
        )
    store.close()


def test_flipped_bits_in_a_real_files_header_cost_the_cache_or_are_told(path: Path, rng: Random) -> None:
    whole = path.read_bytes()
    for at in (*range(0, 80, 3), *VERSION_FIELD, *rng.sample(range(80, SECTOR_BYTES), 20), SECTOR_BYTES - 1):
        path.write_bytes(whole)
        bit = (
            rng.randrange(8) if whole[at] != 1 else rng.randrange(1, 8)
        )  # of version 1 it would leave 0: none of ours
        damage(path, at, bytes([whole[at] ^ 1 << bit]))
        if at in VERSION_FIELD:
            with pytest.raises(DiskError, match="is of format"):
                DiskStore(path, GEOMETRY, BUFFERED)
        else:
            assert reopened(path) == [Outcome.MISS] * NUM_SLOTS, f"byte {at}"


# ---------------------------------------------------------------- cut, zeroed, mixed up

OK4, MISS4 = [Outcome.OK] * 4, [Outcome.MISS] * 4


@pytest.mark.parametrize(
    ("length", "expected"),
    [
        (0, MISS4),
        (1, MISS4),
        (SECTOR_BYTES - 1, MISS4),
        (SECTOR_BYTES, MISS4),
        (FIRST_SLOT_BYTES, MISS4),
        (slot_at(1) + 100, [Outcome.OK] + [Outcome.MISS] * 3),
        (slot_at(1) + SECTOR_BYTES, [Outcome.OK, Outcome.CORRUPT] + [Outcome.MISS] * 2),
        (slot_at(2) - 1, [Outcome.OK, Outcome.CORRUPT] + [Outcome.MISS] * 2),
        (slot_at(4) - 5000, [Outcome.OK] * 3 + [Outcome.CORRUPT]),
        (slot_at(4) + 12345, OK4),
    ],
)
def test_a_file_of_another_length(path: Path, length: int, expected: list[Outcome]) -> None:
    content = path.read_bytes()
    path.write_bytes(content[:length].ljust(length, b"x"))
    assert reopened(path) == expected
    assert path.stat().st_size == GEOMETRY.file_bytes


def test_a_file_that_is_cut_while_it_is_open(path: Path) -> None:
    store = DiskStore(path, GEOMETRY, BUFFERED)
    assert store.wait_recovered(LONG_S)
    os.truncate(path, slot_at(2) + SECTOR_BYTES + 100)
    assert read_all(store, NUM_SLOTS, PAYLOAD_BYTES)[0] == [Outcome.OK] * 2 + [Outcome.MISS] * 2
    assert put_versions(store, {2: 2, 3: 2}, PAYLOAD_BYTES) == [Outcome.OK] * 2
    assert read_all(store, NUM_SLOTS, PAYLOAD_BYTES)[1] == [1, 1, 2, 2]
    store.close()


@pytest.mark.parametrize(
    ("start", "stop", "expected"),
    [
        (0, FIRST_SLOT_BYTES, MISS4),
        (SECTOR_BYTES, FIRST_SLOT_BYTES, OK4),
        (slot_at(1), slot_at(2), [Outcome.OK, Outcome.MISS, Outcome.OK, Outcome.OK]),
        (slot_at(1) + SECTOR_BYTES, slot_at(3), [Outcome.OK, Outcome.CORRUPT, Outcome.MISS, Outcome.OK]),
        (
            slot_at(2) + SECTOR_BYTES + 512,
            slot_at(2) + SECTOR_BYTES + 1024,
            [*OK4[:2], Outcome.CORRUPT, Outcome.OK],
        ),
        (0, slot_at(4), MISS4),
    ],
)
def test_ranges_of_zeros(path: Path, start: int, stop: int, expected: list[Outcome]) -> None:
    damage(path, start, bytes(stop - start))
    assert reopened(path) == expected


def test_records_in_each_others_slots_do_not_count(path: Path) -> None:
    content = path.read_bytes()
    first, second = (content[slot_at(slot) : slot_at(slot + 1)] for slot in (0, 2))
    damage(path, slot_at(2), first)
    damage(path, slot_at(0), second)
    assert reopened(path) == [Outcome.MISS, Outcome.OK, Outcome.MISS, Outcome.OK]


def test_records_swapped_while_the_file_is_open_are_misses(path: Path) -> None:
    content = path.read_bytes()
    store = DiskStore(path, GEOMETRY, BUFFERED)
    assert store.wait_recovered(LONG_S)
    for slot, other in ((0, 2), (2, 0), (3, 1)):
        damage(path, slot_at(slot), content[slot_at(other) : slot_at(other + 1)])
    assert read_all(store, NUM_SLOTS, PAYLOAD_BYTES)[0] == [
        Outcome.MISS,
        Outcome.OK,
        Outcome.MISS,
        Outcome.MISS,
    ]
    store.close()


def test_a_record_of_another_slot_is_no_second_copy(path: Path) -> None:
    content = path.read_bytes()
    damage(path, slot_at(3), content[slot_at(1) : slot_at(2)])
    assert reopened(path) == [*OK4[:3], Outcome.MISS]


def strange_record(path: Path, change: Callable[[RecordHeader], RecordHeader]) -> None:
    """Slot 1's header says something else, with a checksum that is right."""
    at = slot_at(1)
    header = unpack_record(path.read_bytes()[at : at + SECTOR_BYTES])
    assert header is not None
    damage(path, at, pack_record(change(header)))


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda header: header._replace(life=bytes(16)), Outcome.MISS),
        (lambda header: header._replace(fingerprint=bytes(16)), Outcome.INCOMPATIBLE),
        (lambda header: header._replace(payload_bytes=PAYLOAD_BYTES - 1), Outcome.INCOMPATIBLE),
        (lambda header: header._replace(payload_bytes=2**31), Outcome.INCOMPATIBLE),
        (lambda header: header._replace(payload_bytes=2**60), Outcome.CORRUPT),  # no record has so many
        (lambda header: header._replace(slot=2), Outcome.MISS),
        (lambda header: header._replace(key=key_of(7)), Outcome.MISS),
        (lambda header: header._replace(key=BlockKey(header.key[:-1])), Outcome.MISS),  # no key of a block
        (lambda header: header._replace(key=BlockKey(header.key + bytes(1))), Outcome.MISS),
        (lambda header: header._replace(digest=payload_digest(memoryview(b""))), Outcome.CORRUPT),
    ],
)
def test_a_record_of_something_else_in_a_blocks_place(
    path: Path, change: Callable[[RecordHeader], RecordHeader], expected: Outcome
) -> None:
    """A whole record, but not this file's, not of these blocks, not of this key."""
    store = DiskStore(path, GEOMETRY, BUFFERED)
    assert store.wait_recovered(LONG_S)
    strange_record(path, change)
    assert read_all(store, NUM_SLOTS, PAYLOAD_BYTES)[0] == [Outcome.OK, expected, Outcome.OK, Outcome.OK]
    assert read_all(store, NUM_SLOTS, PAYLOAD_BYTES)[0][1] is Outcome.MISS, "it is forgotten"
    store.close()
    found = reopened(path)
    assert found[0] is found[2] is found[3] is Outcome.OK
    assert found[1] in (Outcome.MISS, Outcome.CORRUPT)


def test_a_file_of_other_blocks_is_begun_anew(path: Path) -> None:
    for geometry in (
        Geometry(NUM_SLOTS, PAYLOAD_BYTES, b"other".ljust(16)),
        Geometry(NUM_SLOTS, PAYLOAD_BYTES + 1, GEOMETRY.fingerprint),
        Geometry(NUM_SLOTS, 100, GEOMETRY.fingerprint),
    ):
        assert reopened(path, geometry) == MISS4
    assert reopened(path) == MISS4, "it was not kept aside"


def test_a_file_with_room_for_other_numbers_keeps_what_fits(path: Path) -> None:
    store = DiskStore(path, Geometry(2, PAYLOAD_BYTES, GEOMETRY.fingerprint), BUFFERED)
    assert store.wait_recovered(LONG_S)
    assert read_all(store, NUM_SLOTS, PAYLOAD_BYTES)[1] == [1, 1, None, None]
    store.close()
    store = DiskStore(path, Geometry(9, PAYLOAD_BYTES, GEOMETRY.fingerprint), BUFFERED)
    assert store.wait_recovered(LONG_S)
    assert read_all(store, NUM_SLOTS, PAYLOAD_BYTES)[1] == [1, 1, None, None]
    store.close()


def test_a_file_of_no_format_of_ours_is_begun_anew(tmp_path: Path, rng: Random) -> None:
    for number, content in enumerate((rng.randbytes(3 << 20), rng.randbytes(5000), b"Dear diary,\n" * 1000)):
        path = tmp_path / f"{number}.blocks"
        path.write_bytes(content)
        assert reopened(path) == MISS4


@pytest.mark.parametrize("version", [FORMAT_VERSION + 1, 77, 65535])
def test_a_file_of_another_version_is_left_as_it_is(path: Path, version: int) -> None:
    damage(path, VERSION_FIELD.start, version.to_bytes(2, "little"))
    content, changed_ns = path.read_bytes(), path.stat().st_mtime_ns
    for geometry in (GEOMETRY, Geometry(1, 1, bytes(16)), Geometry(50, 100_000, bytes(16))):
        with pytest.raises(DiskError, match=f"is of format {version}, this kvbm writes {FORMAT_VERSION}"):
            DiskStore(path, geometry)
    assert path.read_bytes() == content and path.stat().st_mtime_ns == changed_ns
