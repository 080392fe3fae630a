# ruff: noqa: S101  (a conformance suite is made of asserts)
"""What every FileIo must do: subclass the class, say how to make one, run pytest. The files are real ones."""

from __future__ import annotations

import errno
import mmap
import os
import tempfile
import threading
import unittest
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import NamedTuple

import numpy as np

from kvbm_core.native import Bytes
from kvbm_core.storage.disk.aio_io import AioIo, has_aio
from kvbm_core.storage.disk.io import FileIo, Transfer
from kvbm_core.storage.disk.nixl_io import NixlIo

UNIT_BYTES = 4096
"""What O_DIRECT asks of addresses, offsets and lengths at most."""
FILE_UNITS = 40
"""Of the files of random batches."""
LONG_S = 120.0
"""Longer than anything here takes; a wait that needs it has failed."""
AGES_S = 3600.0
"""Longer than a test may take."""

Results = dict[int, int]


def why_no_aio() -> str | None:
    """Why AioIo cannot be tested here; None if it can."""
    if not has_aio:
        return "no native module, or one built without Linux' headers"
    try:
        AioIo(0, depth=1).close(0)
    except OSError as error:
        if error.errno in (errno.ENOSYS, errno.EPERM):
            return f"this kernel, or what it runs in, has none: {error}"
    return None


def why_no_nixl() -> str | None:
    """Why NixlIo cannot be tested here; None if it can, by its POSIX plugin."""
    with tempfile.TemporaryFile() as file:
        try:
            NixlIo(file.fileno()).close(LONG_S)
        except OSError as error:
            return str(error.strerror)
    return None


def memory_of(num_bytes: int) -> Bytes:
    """Zeros that begin with a page."""
    return np.frombuffer(mmap.mmap(-1, max(1, num_bytes)), np.uint8)[:num_bytes]


def random_bytes(num_bytes: int, seed: int = 1) -> bytes:
    """The same for the same seed."""
    return Random(seed).randbytes(num_bytes)  # noqa: S311 (a test's randomness)


def finish(io: FileIo) -> Results:
    """Collects everything: the results by tag."""
    results: Results = {}
    while io.in_flight:
        before = io.in_flight
        ended = io.collect(LONG_S)
        assert ended, f"{io.in_flight} requests do not end"
        assert io.in_flight == before - len(ended), "what is collected is in flight no more"
        assert not results.keys() & dict(ended).keys() and len(dict(ended)) == len(ended), (
            "a tag is collected once"
        )
        results.update(ended)
    return results


def moved(transfers: Sequence[Transfer]) -> Results:
    """The results of transfers that move everything."""
    return {transfer.tag: transfer.num_bytes for transfer in transfers}


def whole(memory: Bytes, tag: int = 0, offset_bytes: int = 0) -> Transfer:
    """A request of one piece, all of ``memory``."""
    return Transfer(tag, offset_bytes, [(memory.ctypes.data, len(memory))])


def scattered(rng: Random, memory: Bytes, count: int) -> tuple[list[Transfer], list[int]]:
    """``count`` requests in random order that move all of ``memory``, and which of its units each of the file
    is.
    """
    units = list(range(len(memory) // UNIT_BYTES))
    cuts = [0, *sorted(rng.sample(range(1, len(units)), count - 1)), len(units)]
    rng.shuffle(units)
    pieces = [(memory.ctypes.data + unit * UNIT_BYTES, UNIT_BYTES) for unit in units]
    transfers = [Transfer(100 + n, cuts[n] * UNIT_BYTES, pieces[cuts[n] : cuts[n + 1]]) for n in range(count)]
    rng.shuffle(transfers)
    return transfers, units


class Shape(NamedTuple):
    """A request by its lengths, in units: of the gap in the file before it, and of each piece."""

    is_write: bool
    gap: int
    pieces: Sequence[int]


def random_batches(rng: Random) -> list[list[Shape]]:
    """Some batches, of which a part reaches past FILE_UNITS."""

    def shape() -> Shape:
        return Shape(
            rng.random() < 0.5, rng.randrange(3), [rng.randrange(4) for _ in range(rng.randrange(6))]
        )

    return [[shape() for _ in range(rng.randrange(12))] for _ in range(rng.randrange(1, 5))]


class Batch:
    """Requests of which no two touch the same bytes, and what a file that is a bytearray makes of them."""

    def __init__(self, shapes: Sequence[Shape], twin: bytearray, unit_bytes: int, rng: Random) -> None:
        self.memory = memory_of(sum(sum(shape.pieces) for shape in shapes) * unit_bytes)
        self.memory[:] = np.frombuffer(random_bytes(len(self.memory), rng.getrandbits(32)), np.uint8)
        self.transfers: list[tuple[Transfer, bool]] = []
        self.expected: Results = {}
        self._reads: dict[int, bytes] = {}
        at = used = 0
        for tag, shape in enumerate(shapes):
            at += shape.gap * unit_bytes
            pieces: list[tuple[int, int]] = []
            for units in shape.pieces:
                pieces.append((self.memory.ctypes.data + used, units * unit_bytes))
                used += units * unit_bytes
            rng.shuffle(pieces)
            self._add(Transfer(tag - 2**62, at, pieces), shape.is_write, twin)
            at += self.transfers[-1][0].num_bytes
        rng.shuffle(self.transfers)

    def _add(self, transfer: Transfer, is_write: bool, twin: bytearray) -> None:
        there = slice(transfer.offset_bytes, transfer.offset_bytes + transfer.num_bytes)
        is_write = is_write and there.stop <= len(
            twin
        )  # where the file grows, it depends on the order what others read
        if is_write:
            twin[there] = self.content_of(transfer, transfer.num_bytes)
        else:
            self._reads[transfer.tag] = bytes(twin[there])
        self.expected[transfer.tag] = transfer.num_bytes if is_write else len(self._reads[transfer.tag])
        self.transfers.append((transfer, is_write))

    def content_of(self, transfer: Transfer, num_bytes: int) -> bytes:
        """The first bytes of a request's memory, in the order of its pieces."""
        starts = [(address - self.memory.ctypes.data, nbytes) for address, nbytes in transfer.pieces]
        return b"".join(self.memory[start : start + nbytes].tobytes() for start, nbytes in starts)[:num_bytes]

    def check(self, results: Results) -> None:
        """Each did what the twin did."""
        assert results == self.expected
        for transfer, is_write in self.transfers:
            if not is_write:
                assert self.content_of(transfer, results[transfer.tag]) == self._reads[transfer.tag]


class FileIoContract(ABC):
    """The promises of ``storage.disk.io.FileIo``."""

    is_direct = False
    """Whether the files are opened with O_DIRECT."""

    @abstractmethod
    def make_io(self, fd: int) -> FileIo:
        """A new FileIo for an open file."""

    @contextmanager
    def opened(
        self, content: bytes = b"", access: int = os.O_RDWR, *, is_direct: bool | None = None
    ) -> Iterator[tuple[FileIo, Path]]:
        """A FileIo, and the file that it is for; closed, and the file gone, afterwards."""
        is_direct = self.is_direct if is_direct is None else is_direct
        with tempfile.TemporaryDirectory(prefix="kvbm-file-io-") as folder:
            path = Path(folder, "file")
            path.write_bytes(content)
            try:
                fd = os.open(path, access | (os.O_DIRECT if is_direct else 0))
            except OSError as error:
                raise unittest.SkipTest(f"NOT RUN: O_DIRECT in {tempfile.gettempdir()}: {error}") from None
            try:
                io = self.make_io(fd)
                yield io, path
                assert io.close(LONG_S), "what is in flight ends"
            finally:
                os.close(fd)

    def test_what_was_written_is_read_back(self) -> None:
        rng = Random(1)  # noqa: S311 (a test's randomness)
        content = random_bytes(600 * UNIT_BYTES)
        memory = memory_of(len(content))
        memory[:] = np.frombuffer(content, np.uint8)
        with self.opened() as (io, path):
            transfers, units = scattered(rng, memory, 200)
            io.submit(transfers, is_write=True)
            assert finish(io) == moved(transfers)
            written = memory.reshape(-1, UNIT_BYTES)[units].tobytes()
            assert path.read_bytes() == written
            memory[:] = 0
            transfers, units = scattered(rng, memory, 150)
            for transfer in transfers:
                io.submit([transfer], is_write=False)
            assert finish(io) == moved(transfers)
            assert memory.reshape(-1, UNIT_BYTES)[units].tobytes() == written

    def test_all_of_many_requests_are_in_flight_until_they_are_collected(self) -> None:
        content = random_bytes(500 * UNIT_BYTES)
        memory = memory_of(len(content))
        with self.opened(content) as (io, _):
            transfers, units = scattered(Random(2), memory, 500)  # noqa: S311 (a test's randomness)
            io.submit(transfers[:300], is_write=False)
            io.submit([], is_write=True)
            io.submit(transfers[300:], is_write=False)
            assert io.in_flight == 500
            assert finish(io) == moved(transfers)
            assert memory.reshape(-1, UNIT_BYTES)[units].tobytes() == content

    def test_reads_end_with_the_file(self) -> None:
        content = random_bytes(2 * UNIT_BYTES + 100)
        memory = memory_of(12 * UNIT_BYTES)
        parts = memory.reshape(4, -1)
        with self.opened(content) as (io, path):
            offsets = [0, 2 * UNIT_BYTES, 3 * UNIT_BYTES, 2**40]
            io.submit(
                [whole(part, n, at) for n, (part, at) in enumerate(zip(parts, offsets, strict=True))],
                is_write=False,
            )
            assert finish(io) == {0: len(content), 1: 100, 2: 0, 3: 0}
            assert parts[0].tobytes()[: len(content)] == content
            assert parts[1].tobytes()[:100] == content[-100:]
            io.submit([Transfer(0, 0, [])], is_write=False)
            io.submit([Transfer(1, 0, [])], is_write=True)
            assert finish(io) == {0: 0, 1: 0}, "requests of nothing"
            assert path.read_bytes() == content, "no request past the end made the file longer"

    def test_writes_to_a_file_open_for_reading_fail_alone(self) -> None:
        content = random_bytes(40 * UNIT_BYTES)
        memory = memory_of(len(content))
        with self.opened(content, os.O_RDONLY) as (io, path):
            expected: Results = {}
            for n, part in enumerate(memory.reshape(40, -1)):
                is_write = n % 3 == 1
                io.submit([whole(part, n, n * UNIT_BYTES)], is_write=is_write)
                expected[n] = -errno.EBADF if is_write else UNIT_BYTES
            assert finish(io) == expected
            self._compare(memory, content, expected)
            assert path.read_bytes() == content

    def test_requests_that_the_kernel_refuses_fail_alone(self) -> None:
        content = random_bytes(40 * UNIT_BYTES)
        memory = memory_of(len(content))
        nowhere = 1  # the first page is nobody's
        with self.opened(content) as (io, _):
            transfers, expected = list[Transfer](), dict[int, int]()
            for n, part in enumerate(memory.reshape(40, -1)):
                good = whole(part, n, n * UNIT_BYTES)
                refused = {
                    3: (-errno.EINVAL, good._replace(offset_bytes=-UNIT_BYTES)),
                    5: (-errno.EFAULT, good._replace(pieces=[(nowhere * UNIT_BYTES, UNIT_BYTES)])),
                    7: (
                        -errno.EINVAL,
                        good._replace(pieces=[(part.ctypes.data, 0)] * (os.sysconf("SC_IOV_MAX") + 1)),
                    ),
                }
                expected[n], transfer = refused.get(n % 10, (UNIT_BYTES, good))
                transfers.append(transfer)
            io.submit(transfers, is_write=False)
            assert finish(io) == expected
            self._compare(memory, content, expected)

    def test_requests_that_do_not_suit_o_direct_fail_alone(self) -> None:
        content = random_bytes(40 * UNIT_BYTES)
        memory = memory_of(len(content))
        with self.opened(content, is_direct=True) as (io, path):
            self._skip_unless_refused(path)
            good = [whole(part, n, n * UNIT_BYTES) for n, part in enumerate(memory.reshape(40, -1))]
            expected = {n: -errno.EINVAL if n % 4 == 0 else UNIT_BYTES for n in range(40)}
            io.submit(
                [t._replace(offset_bytes=t.offset_bytes + 1) if t.tag % 4 == 0 else t for t in good],
                is_write=False,
            )
            assert finish(io) == expected
            self._compare(memory, content, expected)
            io.submit([whole(memory[:100])], is_write=True)
            assert finish(io) == {0: -errno.EINVAL}, "nor does a length"
            assert path.read_bytes() == content

    @staticmethod
    def _compare(memory: Bytes, content: bytes, expected: Results) -> None:
        """Unit n of ``memory`` was read where ``expected`` says so, and is untouched elsewhere."""
        for n, result in expected.items():
            unit = slice(n * UNIT_BYTES, (n + 1) * UNIT_BYTES)
            assert memory[unit].tobytes() == (content[unit] if result > 0 else bytes(UNIT_BYTES)), n

    @staticmethod
    def _skip_unless_refused(path: Path) -> None:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
        try:
            os.preadv(fd, [mmap.mmap(-1, UNIT_BYTES)], 1)
        except OSError:
            return
        finally:
            os.close(fd)
        raise unittest.SkipTest(
            f"NOT RUN: the file system of {tempfile.gettempdir()} takes any request with O_DIRECT"
        )

    def test_a_tag_is_in_flight_once(self) -> None:
        content = random_bytes(UNIT_BYTES)
        memory = memory_of(3 * UNIT_BYTES)
        first, second, third = (whole(part, 7) for part in memory.reshape(3, -1))
        with self.opened(content) as (io, _):
            io.submit([first], is_write=False)
            self._refuses(io, [second])
            assert io.in_flight == 1
            assert finish(io) == {7: UNIT_BYTES}
            io.submit([third], is_write=False)
            assert finish(io) == {7: UNIT_BYTES}, "a tag can be used again once it was collected"
            assert memory.tobytes() == content + bytes(UNIT_BYTES) + content, (
                "the refused one was not started"
            )
            self._refuses(io, [first, second])
            finish(io)

    @staticmethod
    def _refuses(io: FileIo, transfers: Sequence[Transfer]) -> None:
        try:
            io.submit(transfers, is_write=False)
        except ValueError:
            return
        raise AssertionError("ValueError was not raised")

    def test_nothing_is_collected_where_nothing_is_in_flight(self) -> None:
        with self.opened(bytes(UNIT_BYTES)) as (io, _):
            assert io.collect(0) == [] and io.collect(-1) == [] and io.collect(AGES_S) == []
            io.submit([whole(memory_of(UNIT_BYTES))], is_write=False)
            finish(io)
            assert io.in_flight == 0 and io.collect(AGES_S) == []

    def test_close_waits_ends_all_threads_and_can_be_repeated(self) -> None:
        content = random_bytes(200 * UNIT_BYTES)
        memory = memory_of(len(content))
        before = set(threading.enumerate())
        with self.opened(content) as (io, _):
            io.submit(
                [whole(part, n, n * UNIT_BYTES) for n, part in enumerate(memory.reshape(200, -1))],
                is_write=False,
            )
            assert io.close(LONG_S)
            assert memory.tobytes() == content, "all that was submitted has been done"
            assert set(threading.enumerate()) <= before
            assert io.close(0) and io.close(LONG_S)

    def test_random_batches_do_what_a_bytearray_does(self) -> None:
        for seed in range(20):
            rng = Random(seed)  # noqa: S311 (a test's randomness)
            self.walk(random_batches(rng), 37, rng)

    def walk(self, batches: Sequence[Sequence[Shape]], unit_bytes: int, rng: Random) -> None:
        """Batch after batch, each submitted in random portions and partly collected in between."""
        unit_bytes = UNIT_BYTES if self.is_direct else unit_bytes
        twin = bytearray(random_bytes(FILE_UNITS * unit_bytes))
        with self.opened(bytes(twin)) as (io, path):
            for shapes in batches:
                batch, results = Batch(shapes, twin, unit_bytes, rng), dict[int, int]()
                left = batch.transfers
                while left:
                    count = rng.randrange(1, 9)
                    portion, left = left[:count], left[count:]
                    for is_write in (True, False):
                        io.submit(
                            [transfer for transfer, writes in portion if writes == is_write],
                            is_write=is_write,
                        )
                    if rng.random() < 0.5:
                        results.update(io.collect(0))
                batch.check({**results, **finish(io)})
                assert path.read_bytes() == twin
