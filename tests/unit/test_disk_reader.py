"""Reading along in another store's file: what it has is found, what it has no more is not, whatever becomes
of it.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvbm_core.errors import Outcome
from kvbm_core.storage.disk import block_io, scan
from kvbm_core.storage.disk.allocate import FileOptions
from kvbm_core.storage.disk.block_file import BlockFile, BlockFileView, Geometry
from kvbm_core.storage.disk.reader import DiskReader
from kvbm_core.storage.disk.slot_log import log_path
from kvbm_core.storage.disk.store import DiskStore
from kvbm_core.testing.store_contract import LONG_S, buffers
from kvbm_core.types import BlockKey
from tests.unit.disk_reading import (
    BUFFERED,
    GEOMETRY,
    KEYS,
    MISS,
    NUM_SLOTS,
    OK,
    PAYLOAD_BYTES,
    REJECTED,
    contained,
    get,
    no_open_files_are_left,  # noqa: F401
    nothing_is_there,
    open_files,
    path_fixture,  # noqa: F401
    put,
    reader_fixture,  # noqa: F401
    writer_fixture,  # noqa: F401
    writer_of,
)

# ---------------------------------------------------------------- what is there


def test_a_reader_that_comes_first_finds_nothing_until_there_is_something(
    path: Path, reader: DiskReader
) -> None:
    nothing_is_there(reader)
    writer = writer_of(path)
    nothing_is_there(reader)
    put(writer, KEYS[:3])
    assert contained(reader, KEYS[:4]) == get(reader, KEYS[:4]) == [OK, OK, OK, MISS]
    writer.close()
    assert get(reader, KEYS[3::-1]) == [MISS, OK, OK, OK], "it goes on without its writer"


@pytest.mark.parametrize("is_direct", [False, True])
@pytest.mark.parametrize("reads_straight", [False, True])
@pytest.mark.parametrize("size", [PAYLOAD_BYTES, 5003])
def test_what_the_writer_puts_is_got(path: Path, is_direct: bool, reads_straight: bool, size: int) -> None:
    geometry, options = Geometry(NUM_SLOTS, size, bytes(16)), FileOptions(is_direct=is_direct)
    writer = DiskStore(path, geometry, options, shares=True)
    if writer._file.is_direct is not is_direct:
        writer.close()
        pytest.skip("NOT RUN: O_DIRECT in the temporary directory: the file system has none")
    assert writer.wait_recovered(LONG_S)
    readers = [DiskReader(path, geometry, options, reads_straight=reads_straight) for _ in range(2)]
    for number in range(0, 12, 2):
        put(writer, KEYS[number : number + 2], size)
        for reader in readers:
            assert get(reader, [KEYS[number + 1], KEYS[number], KEYS[number + 1]], size) == [OK] * 3
            assert set(reader.scan()) == set(KEYS[max(0, number - 2) : number + 2])
            opened = reader._opened
            assert opened is not None and opened.view.is_direct is is_direct
    for store in (*readers, writer):
        store.close()


def test_what_was_evicted_is_a_miss_and_what_was_removed_stays_until_its_slot_is_used(
    writer: DiskStore, reader: DiskReader
) -> None:
    put(writer, KEYS[:4])
    assert get(reader, KEYS[:4]) == [OK] * 4
    writer.remove_many(KEYS[:1], deadline_s=LONG_S)
    assert get(reader, KEYS[:4]) == [OK] * 4, "nobody has said so, and the bytes are right"
    put(writer, KEYS[4:5])  # where the removed one was
    assert get(reader, KEYS[:5]) == [MISS, OK, OK, OK, OK]
    put(writer, KEYS[8:12])
    assert contained(reader, KEYS) == get(reader, KEYS) == [MISS] * 8 + [OK] * 4 + [MISS] * 4
    assert set(reader.scan()) == set(KEYS[8:12])


def test_an_entry_that_leads_to_something_else_is_a_miss_and_forgotten(
    writer: DiskStore, reader: DiskReader
) -> None:
    put(writer, KEYS[:4])
    assert contained(reader, KEYS[:4]) == [OK] * 4
    log = log_path(writer._file.path)
    kept, silent = log.read_bytes(), writer._log
    writer._log = None
    put(writer, KEYS[4:5])  # and the log does not say so
    assert log.read_bytes() == kept
    (evicted,) = (key for key in KEYS[:4] if writer.contains_many([key], deadline_s=LONG_S) == [MISS])
    others = [key for key in KEYS[:4] if key != evicted]
    assert contained(reader, [evicted]) == [OK], "by what is known"
    assert get(reader, [*others, evicted]) == [OK, OK, OK, MISS]
    assert contained(reader, [*others, evicted]) == [OK, OK, OK, MISS]
    writer._log = silent


def test_a_writer_that_clears_takes_all_with_it(writer: DiskStore, reader: DiskReader) -> None:
    put(writer, KEYS[:4])
    assert get(reader, KEYS[:4]) == [OK] * 4
    for number in range(3):
        writer.clear()
        nothing_is_there(reader)
        put(writer, KEYS[number : number + 2])
        assert set(reader.scan()) == set(KEYS[number : number + 2])
        assert get(reader, KEYS[number : number + 2]) == [OK] * 2


def test_a_clear_that_the_disk_does_not_take_leaves_nothing_either(
    writer: DiskStore, reader: DiskReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(fd: int) -> None:
        raise OSError(5, "Input/output error")

    put(writer, KEYS[:4])
    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", fails)
        with pytest.raises(OSError, match="Input/output"):
            writer.clear()
    nothing_is_there(reader)
    put(writer, KEYS[:2])
    assert get(reader, KEYS[:3]) == [OK, OK, MISS]


def test_what_an_earlier_process_left_is_told_when_it_is_found(path: Path, reader: DiskReader) -> None:
    first = writer_of(path)
    put(first, KEYS[:4])
    first.close()
    log_path(path).unlink()
    nothing_is_there(reader)
    second = writer_of(path)
    assert set(reader.scan()) == set(KEYS[:4]) and get(reader, KEYS[:4]) == [OK] * 4
    second.close()


def test_of_two_records_of_a_block_the_one_counts_that_the_writer_took(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = writer_of(path)
    for key in KEYS[:4]:
        put(first, [key])
    for key in (KEYS[3], KEYS[0]):
        first.remove_many([key], deadline_s=LONG_S)
    put(first, [KEYS[3]])  # where key 0 was; what is in the last slot is free now
    first.close()
    monkeypatch.setattr(scan, "CHUNK_SLOTS", 2)
    second, reader = writer_of(path), DiskReader(path, GEOMETRY, BUFFERED)
    assert set(reader.scan()) == set(second.scan()) == set(KEYS[1:4])
    put(second, KEYS[4:5])
    assert get(reader, KEYS[1:5]) == [OK] * 4, "none of them was in the slot that was free"
    for store in (reader, second):
        store.close()


def test_a_restarted_writer_costs_the_reader_nothing(path: Path, reader: DiskReader) -> None:
    for number in range(5):
        writer = writer_of(path)
        assert get(reader, KEYS[: min(number, 4)]) == [OK] * min(number, 4)
        put(writer, KEYS[: min(number + 1, 4)])
        writer.close()
    assert get(reader, KEYS[:4]) == [OK] * 4


def test_a_file_of_another_meaning_is_none_until_ours_is_back(path: Path, reader: DiskReader) -> None:
    writer = writer_of(path)
    put(writer, KEYS[:4])
    writer.close()
    for other in (Geometry(4, PAYLOAD_BYTES, bytes(16)), Geometry(4, 4096, GEOMETRY.fingerprint)):
        assert get(reader, KEYS[:4]) == [OK] * 4
        writer = writer_of(path, other)
        nothing_is_there(reader)
        put(writer, KEYS[:4], other.payload_bytes)
        nothing_is_there(reader)
        writer.close()
        writer = writer_of(path)
        nothing_is_there(reader)
        put(writer, KEYS[:4])
        writer.close()


def test_a_smaller_file_is_known_by_its_log(path: Path, reader: DiskReader) -> None:
    writer = writer_of(path)
    put(writer, KEYS[:4])
    assert set(reader.scan()) == set(KEYS[:4])
    writer.close()
    writer = writer_of(path, Geometry(2, PAYLOAD_BYTES, GEOMETRY.fingerprint))
    left = set(writer.scan())
    assert len(left) == 2 and set(reader.scan()) == left and get(reader, list(left)) == [OK, OK]
    writer.close()


def test_a_writer_that_does_not_share_leaves_no_log(path: Path, reader: DiskReader) -> None:
    writer = writer_of(path)
    put(writer, KEYS[:4])
    writer.close()
    assert log_path(path).exists() and get(reader, KEYS[:4]) == [OK] * 4
    alone = writer_of(path, shares=False)
    assert not log_path(path).exists()
    nothing_is_there(reader)
    put(alone, KEYS[4:8])
    nothing_is_there(reader)
    alone.close()


def test_a_new_file_in_the_place_of_the_old_is_opened(path: Path, reader: DiskReader) -> None:
    writer = writer_of(path)
    put(writer, KEYS[:4])
    assert get(reader, KEYS[:4]) == [OK] * 4
    before = open_files()
    for number in range(4):
        writer.close()
        path.unlink()
        if number % 2:
            assert set(get(reader, KEYS)) <= {OK, MISS}
        writer = writer_of(path)
        put(writer, KEYS[number : number + 2])
        assert get(reader, KEYS[:6]) == [OK if number <= i < number + 2 else MISS for i in range(6)]
        assert open_files() == before, "the old one is closed"
    writer.close()


def test_a_log_without_a_file_is_a_miss(path: Path, reader: DiskReader) -> None:
    writer = writer_of(path)
    put(writer, KEYS[:2])
    writer.close()
    path.unlink()
    assert get(reader, KEYS[:2]) == [MISS] * 2


def test_a_file_that_cannot_be_opened_is_an_error_of_its_own(
    writer: DiskStore, reader: DiskReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*args: object, **more: object) -> None:
        raise OSError(24, "Too many open files")

    put(writer, KEYS[:2])
    assert contained(reader, KEYS[:2]) == [OK] * 2
    before = open_files()
    for name in ("files.open_regular", "allocate._reads_directly"):
        with monkeypatch.context() as patch:
            patch.setattr(f"kvbm_core.storage.disk.{name}", fails)
            patch.setattr(reader, "_options", FileOptions(is_direct=name != "_open"))
            assert get(reader, KEYS[:3]) == [Outcome.IO_ERROR] * 2 + [MISS]
    with monkeypatch.context() as patch:
        patch.setattr(block_io, "make_file_io", fails)
        assert get(reader, KEYS[:3]) == [Outcome.IO_ERROR] * 2 + [MISS]
    assert open_files() == before
    assert get(reader, KEYS[:3]) == [OK, OK, MISS], "nothing was forgotten for that"


# ---------------------------------------------------------------- misuse, end, threads


def test_only_the_writer_writes(writer: DiskStore, reader: DiskReader) -> None:
    put(writer, KEYS[:2])
    assert reader.put_many(KEYS[2:4], buffers(2, PAYLOAD_BYTES), deadline_s=LONG_S) == [REJECTED] * 2
    assert reader.remove_many(KEYS[:2], deadline_s=LONG_S) == [REJECTED] * 2
    assert contained(reader, KEYS[:4]) == [OK, OK, MISS, MISS]


def test_memory_and_keys_that_cannot_be_used_are_refused(writer: DiskStore, reader: DiskReader) -> None:
    put(writer, KEYS[:1])
    for keys, targets, what in (
        (KEYS[:1], buffers(1, PAYLOAD_BYTES - 1), "bytes"),
        (KEYS[:2], buffers(1, PAYLOAD_BYTES), "bytes"),
        ([BlockKey(b"short")], buffers(1, PAYLOAD_BYTES), "SequenceHash"),
        (KEYS[:1], [memoryview(bytes(PAYLOAD_BYTES))], "read-only"),
    ):
        with pytest.raises(ValueError, match=what):
            reader.get_many(keys, targets, deadline_s=LONG_S)
    assert get(reader, KEYS[:1]) == [OK]


def test_a_call_without_time_answers_and_takes_in_some(writer: DiskStore, reader: DiskReader) -> None:
    put(writer, KEYS[:4])
    assert reader.contains_many(KEYS[:5], deadline_s=0.0) == [OK] * 4 + [MISS]
    outcomes = reader.get_many(KEYS[:5], buffers(5, PAYLOAD_BYTES), deadline_s=-1.0)
    assert set(outcomes) <= {MISS, Outcome.BUSY, Outcome.TIMED_OUT}
    assert get(reader, KEYS[:5]) == [OK] * 4 + [MISS]


def test_after_close_everything_is_rejected(path: Path, writer: DiskStore) -> None:
    put(writer, KEYS[:2])
    for was_used in (False, True):
        reader = DiskReader(path, GEOMETRY, BUFFERED)
        if was_used:
            assert get(reader, KEYS[:2]) == [OK] * 2
        reader.close()
        reader.close()
        assert contained(reader, KEYS[:2]) == get(reader, KEYS[:2]) == [REJECTED] * 2


def test_a_view_is_not_the_files_owner(path: Path, writer: DiskStore) -> None:
    view = BlockFileView(path, GEOMETRY, BUFFERED)
    with pytest.raises(OSError):
        view.begin_new_life()
    view.close()
    with pytest.raises(OSError, match="another process uses it"):
        BlockFile(path, GEOMETRY, BUFFERED)
