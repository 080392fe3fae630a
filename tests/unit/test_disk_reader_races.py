"""Reading along while the writer writes, and reads that take their time."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

from kvbm_core.clock import ManualClock
from kvbm_core.errors import Outcome
from kvbm_core.storage.disk import block_io
from kvbm_core.storage.disk.reader import DiskReader
from kvbm_core.storage.disk.record import SECTOR_BYTES, slot_offset_bytes
from kvbm_core.storage.disk.store import DiskStore
from kvbm_core.testing.store_contract import LONG_S, buffers, content_of
from kvbm_core.types import BlockKey
from tests.faults.doubles import FailingIo, HeldIo
from tests.unit.disk_reading import (
    BUFFERED,
    GEOMETRY,
    KEYS,
    MISS,
    OK,
    PAYLOAD_BYTES,
    contained,
    get,
    no_open_files_are_left,  # noqa: F401
    path_fixture,  # noqa: F401
    put,
    reader_fixture,  # noqa: F401
    writer_fixture,  # noqa: F401
    writer_of,
)


def test_many_threads_read_while_the_writer_goes_on(
    writer: DiskStore, reader: DiskReader, rng: Random
) -> None:
    failures: list[BaseException] = []
    seen: set[Outcome] = set()
    ends = threading.Event()

    def work(seed: int) -> None:
        own = Random(seed)
        try:
            while not ends.is_set():
                keys = own.sample(KEYS, own.randrange(1, 6))
                seen.update(get(reader, keys) if own.random() < 0.8 else contained(reader, keys))
                assert set(reader.scan()) <= set(KEYS)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(rng.getrandbits(32),)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for turn in range(150):
        keys = rng.sample(KEYS, rng.randrange(1, 5))
        writer.put_many(keys, [memoryview(content_of(key, PAYLOAD_BYTES)) for key in keys], deadline_s=LONG_S)
        if turn % 40 == 39:
            writer.clear()
    ends.set()
    for thread in threads:
        thread.join(LONG_S)
    if failures:
        raise failures[0]
    assert seen == {OK, MISS}
    held = list(writer.scan())
    assert get(reader, held) == [OK] * len(held), "all that is there is found"


# ---------------------------------------------------------------- reads that take their time


def test_a_late_read_holds_its_memory_also_after_its_file_was_left(
    path: Path, writer: DiskStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = ManualClock()
    made: list[HeldIo] = []

    def make(fd: int, *, is_direct: bool) -> HeldIo:
        made.append(HeldIo(fd, lambda transfer, is_write: True, clock))
        return made[-1]

    put(writer, KEYS[:2])
    writer.close()
    late, other = buffers(2, PAYLOAD_BYTES)
    reader = DiskReader(path, GEOMETRY, BUFFERED, clock=clock)
    with monkeypatch.context() as patch:
        patch.setattr(block_io, "make_file_io", make)
        assert not reader.holds(late)
        assert reader.get_many(KEYS[:1], [late], deadline_s=1.0) == [Outcome.TIMED_OUT]
    assert reader.holds(late) and not reader.holds(other)
    assert contained(reader, KEYS[:1]) == [OK], "late is not gone"
    path.unlink()
    second = writer_of(path)
    put(second, KEYS[2:3])
    assert reader.get_many(KEYS[2:3], [other], deadline_s=LONG_S) == [OK]
    assert len(made) == 1 and reader.holds(late) and not reader.holds(other)
    made[0].let_go()
    while reader.holds(late):
        pass
    assert late == content_of(KEYS[0], PAYLOAD_BYTES)
    reader.close()
    second.close()


class MeanwhileIo(HeldIo):
    """Before a read begins, and after it has ended, something else happens."""

    def __init__(self, fd: int, before: Callable[[], None], after: Callable[[], None]) -> None:
        super().__init__(fd, lambda transfer, is_write: True)
        self._before, self._after = before, after

    def collect(self, timeout_s: float) -> list[tuple[int, int]]:
        """See FileIo."""
        if not self.held:
            return super().collect(timeout_s)
        self._before()
        self.let_go()
        ended = super().collect(timeout_s)
        self._after()
        return ended


@pytest.mark.parametrize("comes_back", [False, True])
def test_what_changes_while_it_is_read_is_a_miss_and_what_is_newer_is_not_forgotten(
    writer: DiskStore, reader: DiskReader, monkeypatch: pytest.MonkeyPatch, comes_back: bool
) -> None:
    def replace(old: list[BlockKey], new: list[BlockKey]) -> None:
        writer.remove_many(old, deadline_s=LONG_S)
        put(writer, new)
        assert contained(reader, old + new) == [MISS] * 4 + [OK] * 4, "somebody else hears of it"

    def before() -> None:
        replace(KEYS[:4], KEYS[4:8])

    def after() -> None:
        if comes_back:
            replace(KEYS[4:8], KEYS[:4])  # in the same slots

    put(writer, KEYS[:4])
    with monkeypatch.context() as patch:
        patch.setattr(block_io, "make_file_io", lambda fd, *, is_direct: MeanwhileIo(fd, before, after))
        assert get(reader, KEYS[:4]) == [MISS] * 4
    held, gone = (KEYS[:4], KEYS[4:8]) if comes_back else (KEYS[4:8], KEYS[:4])
    assert get(reader, held) == [OK] * 4 and get(reader, gone) == [MISS] * 4


def test_a_record_that_is_half_written_over_is_a_miss(
    writer: DiskStore, reader: DiskReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    def tear() -> None:
        with writer._file.path.open("r+b") as file:
            file.seek(slot_offset_bytes(1, PAYLOAD_BYTES) + SECTOR_BYTES + PAYLOAD_BYTES // 2)
            file.write(bytes(PAYLOAD_BYTES // 2))

    put(writer, KEYS[:4])
    with monkeypatch.context() as patch:
        patch.setattr(block_io, "make_file_io", lambda fd, *, is_direct: MeanwhileIo(fd, tear, lambda: None))
        assert get(reader, KEYS[:4]) == [OK, MISS, OK, OK]
    assert contained(reader, KEYS[:4]) == [OK, MISS, OK, OK]


def test_what_the_disk_did_not_take_is_not_told(
    path: Path, reader: DiskReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make(fd: int, *, is_direct: bool) -> FailingIo:
        return FailingIo(
            fd, lambda transfer, is_write: is_write and transfer.offset_bytes == second_at, -errno.EIO
        )

    second_at = slot_offset_bytes(1, PAYLOAD_BYTES)
    with monkeypatch.context() as patch:
        patch.setattr(block_io, "make_file_io", make)
        writer = writer_of(path)
    outcomes = [
        writer.put_many([key], [memoryview(content_of(key, PAYLOAD_BYTES))], deadline_s=LONG_S)[0]
        for key in KEYS[:3]
    ]
    assert outcomes == [OK, Outcome.IO_ERROR, Outcome.IO_ERROR], "the slot is the next one's too"
    assert contained(reader, KEYS[:3]) == get(reader, KEYS[:3]) == [OK, MISS, MISS]
    writer.close()
