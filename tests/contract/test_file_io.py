"""Every FileIo keeps the contract, gives back what it took, and outlives a request that does not end."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbm_core.native import native
from kvbm_core.storage.disk import aio_io, nixl_io
from kvbm_core.storage.disk.aio_io import AioIo, make_file_io
from kvbm_core.storage.disk.io import FileIo, ThreadIo, Transfer
from kvbm_core.storage.disk.nixl_io import NixlIo
from kvbm_core.testing.file_io_contract import (
    LONG_S,
    UNIT_BYTES,
    FileIoContract,
    Shape,
    finish,
    memory_of,
    whole,
    why_no_aio,
    why_no_nixl,
)

NO_AIO = why_no_aio()
needs_aio = pytest.mark.skipif(NO_AIO is not None, reason=f"NOT RUN: asynchronous disk I/O: {NO_AIO}")
NO_NIXL = why_no_nixl()
needs_nixl = pytest.mark.skipif(NO_NIXL is not None, reason=f"NOT RUN: disk I/O by NIXL: {NO_NIXL}")


class TestThreadIo(FileIoContract):
    def make_io(self, fd: int) -> FileIo:
        return ThreadIo(fd)


class TestThreadIoDirect(TestThreadIo):
    is_direct = True


@needs_aio
class TestAioIo(FileIoContract):
    def make_io(self, fd: int) -> FileIo:
        return AioIo(fd)


@needs_aio
class TestAioIoDirect(TestAioIo):
    is_direct = True


@needs_aio
class TestAioIoOneByOne(TestAioIoDirect):
    def make_io(self, fd: int) -> FileIo:
        return AioIo(fd, depth=1)


@needs_nixl
class TestNixlIo(FileIoContract):
    def make_io(self, fd: int) -> FileIo:
        return NixlIo(fd)


@needs_nixl
class TestNixlIoDirect(TestNixlIo):
    is_direct = True


@needs_nixl
class TestNixlIoByAio(TestNixlIoDirect):
    """As in a container that forbids io_uring."""

    def make_io(self, fd: int) -> FileIo:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(nixl_io, "QUEUES", ("aio",))
            return NixlIo(fd)


SUITES = [
    TestThreadIo,
    TestThreadIoDirect,
    pytest.param(TestAioIo, marks=needs_aio),
    pytest.param(TestAioIoDirect, marks=needs_aio),
    pytest.param(TestNixlIo, marks=needs_nixl),
    pytest.param(TestNixlIoDirect, marks=needs_nixl),
]
MAKERS = [
    pytest.param(ThreadIo, id="ThreadIo"),
    pytest.param(AioIo, id="AioIo", marks=needs_aio),
    pytest.param(NixlIo, id="NixlIo", marks=needs_nixl),
]
Maker = Callable[[int], FileIo]
SHAPES = st.builds(Shape, st.booleans(), st.integers(0, 3), st.lists(st.integers(0, 4), max_size=6))


@pytest.mark.parametrize("suite", SUITES)
@given(
    batches=st.lists(st.lists(SHAPES, max_size=20), max_size=4),
    unit_bytes=st.sampled_from([1, 37, UNIT_BYTES]),
    seed=st.integers(0, 99),
)
@settings(max_examples=40)
def test_any_batches_do_what_a_bytearray_does(
    suite: type[FileIoContract], batches: list[list[Shape]], unit_bytes: int, seed: int
) -> None:
    suite().walk(batches, unit_bytes, Random(seed))


# ---------------------------------------------------------------- the contract itself


class HidesShortCounts(ThreadIo):
    """Says that all bytes were moved."""

    def submit(self, transfers: Sequence[Transfer], *, is_write: bool) -> None:
        self.asked = {transfer.tag: transfer.num_bytes for transfer in transfers}
        super().submit(transfers, is_write=is_write)

    def collect(self, timeout_s: float) -> list[tuple[int, int]]:
        return [(tag, max(result, self.asked.get(tag, 0))) for tag, result in super().collect(timeout_s)]


class TurnsPiecesRound(ThreadIo):
    def submit(self, transfers: Sequence[Transfer], *, is_write: bool) -> None:
        super().submit([t._replace(pieces=t.pieces[::-1]) for t in transfers], is_write=is_write)


class AllowsAnyTag(ThreadIo):
    def submit(self, transfers: Sequence[Transfer], *, is_write: bool) -> None:
        self._tags.clear()
        super().submit(transfers, is_write=is_write)


class LeavesThreads(ThreadIo):
    def close(self, timeout_s: float) -> bool:
        finish(self)
        return True


@pytest.mark.parametrize(
    ("broken", "test"),
    [
        (HidesShortCounts, "test_reads_end_with_the_file"),
        (HidesShortCounts, "test_writes_to_a_file_open_for_reading_fail_alone"),
        (TurnsPiecesRound, "test_what_was_written_is_read_back"),
        (TurnsPiecesRound, "test_random_batches_do_what_a_bytearray_does"),
        (AllowsAnyTag, "test_a_tag_is_in_flight_once"),
        (LeavesThreads, "test_close_waits_ends_all_threads_and_can_be_repeated"),
    ],
)
def test_the_contract_catches_a_broken_file_io(broken: type[ThreadIo], test: str) -> None:
    made: list[ThreadIo] = []

    class Suite(FileIoContract):
        def make_io(self, fd: int) -> FileIo:
            made.append(broken(fd))
            return made[-1]

    with pytest.raises(AssertionError):
        getattr(Suite(), test)()
    for io in made:
        ThreadIo.close(io, LONG_S)


# ---------------------------------------------------------------- which one


@pytest.fixture
def fd(tmp_path: Path) -> int:
    """A file of one unit; closed by whoever uses it, or with the process."""
    path = tmp_path / "file"
    path.write_bytes(bytes(UNIT_BYTES))
    return os.open(path, os.O_RDWR)


@needs_aio
def test_files_with_o_direct_get_aio(fd: int) -> None:
    for is_direct, kind in ((True, AioIo), (False, ThreadIo)):
        io = make_file_io(fd, is_direct=is_direct)
        assert type(io) is kind
        assert io.close(LONG_S)
    os.close(fd)


def test_threads_do_it_where_there_is_no_aio(fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aio_io, "native", None)
    with pytest.raises(OSError, match="native module"):
        AioIo(fd)
    io = make_file_io(fd, is_direct=True)
    assert type(io) is ThreadIo
    assert io.close(LONG_S)
    os.close(fd)


@needs_aio
def test_threads_do_it_where_the_kernel_has_no_room_for_so_many(fd: int) -> None:
    for depth in (0, -1, 2**31 - 1):
        with pytest.raises(OSError):
            AioIo(fd, depth)
        io = make_file_io(fd, is_direct=True, depth=depth)
        assert type(io) is ThreadIo
        assert io.close(LONG_S)
    os.close(fd)


# ---------------------------------------------------------------- what is given back


def open_files() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("make", MAKERS)
def test_close_gives_back_files_and_threads(make: Maker, fd: int) -> None:
    files, threads = open_files(), threading.active_count()
    for _ in range(10):
        io = make(fd)
        io.submit([whole(memory_of(UNIT_BYTES))], is_write=False)
        assert io.close(LONG_S)
    assert open_files() == files and threading.active_count() == threads
    os.close(fd)


@needs_aio
def test_a_dropped_aio_gives_back_its_context(fd: int) -> None:
    """The kernel counts the requests that all contexts have room for, and refuses one with room for too
    many.
    """
    used, most = (int(Path("/proc/sys/fs", name).read_text()) for name in ("aio-nr", "aio-max-nr"))
    depth = max(1, (most - used) // 4)
    for _ in range(8):
        io = AioIo(fd, depth)
        io.submit([whole(memory_of(UNIT_BYTES))], is_write=False)
        finish(io)
        del io
    os.close(fd)


@pytest.mark.parametrize("make", MAKERS)
def test_memory_does_not_grow_with_the_requests(make: Maker, fd: int) -> None:
    io, memory = make(fd), memory_of(UNIT_BYTES)
    pieces = [(memory.ctypes.data + n, 1) for n in range(64)]
    refused = [(UNIT_BYTES, 1)] * 64
    before = 0
    for turn in range(110):
        transfers = [Transfer(n, 0, refused if n == 50 else pieces) for n in range(100)]
        io.submit(transfers, is_write=False)
        assert finish(io) == {n: -errno.EFAULT if n == 50 else 64 for n in range(100)}
        if turn == 9:
            before = resident_bytes()
    # Kept requests would be 10,000 * 64 iovecs of 16 bytes: 10 MiB.
    assert resident_bytes() - before < 5 << 20
    assert io.close(LONG_S)
    os.close(fd)


# ---------------------------------------------------------------- what does not end


def test_a_thread_that_is_stuck_does_not_hold_close(fd: int) -> None:
    go_on = threading.Event()

    class Held(ThreadIo):
        def _work(self) -> None:
            assert go_on.wait(LONG_S)
            super()._work()

    io, memory = Held(fd), memory_of(UNIT_BYTES)
    io.submit([whole(memory, 3)], is_write=False)
    assert io.collect(0) == [] and io.collect(0.01) == [] and io.in_flight == 1
    assert io.close(0) is False
    assert io.in_flight == 1
    go_on.set()
    assert io.close(LONG_S) and io.close(0)
    os.close(fd)


@needs_aio
def test_the_native_aio_checks_its_arguments(fd: int) -> None:
    assert native is not None
    aio, memory = native.Aio(fd, 4), memory_of(UNIT_BYTES)
    one, count = np.zeros(1, np.int64), np.ones(1, np.int32)
    pieces = np.array([memory.ctypes.data, UNIT_BYTES], np.uint64)
    for wrong in (
        (one, one, count, pieces[:1]),
        (one, one, count + 1, pieces),
        (one, one, -count, pieces),
        (one, one, 0 * count, pieces),
        (one, one[:0], count, pieces),
        (one, one, count[:0], pieces),
        (one.astype(np.int32), one, count, pieces),
        (one, one, one, pieces),
        (one, one, count, pieces.astype(np.int64)),
        (np.zeros(2, np.int64), np.zeros(2, np.int64), np.ones(2, np.int32), pieces),
    ):
        with pytest.raises(ValueError):
            aio.submit(False, *wrong)
    assert aio.in_flight == 0
    aio.submit(False, one, one, count, pieces.reshape(1, 2))
    assert aio.collect(LONG_S) == [(0, UNIT_BYTES)]
    with pytest.raises(TypeError):
        aio.collect("soon")  # type: ignore[arg-type]
    assert aio.collect(float("nan")) == [] and aio.close(float("inf"))
    with pytest.raises(ValueError, match="closed"):
        aio.submit(False, one, one, count, pieces)
    os.close(fd)
