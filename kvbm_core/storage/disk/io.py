"""Reads and writes of one file, many in flight: the interface, and the way by threads."""

from __future__ import annotations

import ctypes
import errno
import os
import queue
import threading
import time
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from typing import NamedTuple, Protocol, runtime_checkable


class Transfer(NamedTuple):
    """One request: ``pieces`` are (address, bytes) in memory, neighbours in the file from ``offset_bytes``
    on.

    ``tag`` is the caller's, different from those of all requests in flight.
    """

    tag: int
    offset_bytes: int
    pieces: Sequence[tuple[int, int]]

    @property
    def num_bytes(self) -> int:
        """Of all pieces."""
        return sum(nbytes for _, nbytes in self.pieces)


def tags_of(transfers: Sequence[Transfer], in_flight: AbstractSet[int]) -> set[int]:
    """The tags of new requests. ValueError for one that is in flight, or given twice."""
    tags = {transfer.tag for transfer in transfers}
    if len(tags) < len(transfers) or not in_flight.isdisjoint(tags):
        raise ValueError(f"of the requests {tags} one is in flight, or given twice")
    return tags


class FileIo(Protocol):
    """Moves bytes between memory and one open file. One thread only.

    Memory that is in flight must not be given back, whatever became of whoever asked: nothing that was
    submitted can be called back. ``kvbm_core.testing.file_io_contract`` is the test that every implementation
    must pass.
    """

    def submit(self, transfers: Sequence[Transfer], *, is_write: bool) -> None:
        """Starts them, in any order; does not wait for any of them.

        ValueError for a tag that is in flight or given twice, or after ``close``; then nothing has been
        started.
        """

    def collect(self, timeout_s: float) -> list[tuple[int, int]]:
        """(tag, bytes moved or -errno) of those that have ended, at least one unless ``timeout_s`` goes by.

        Fewer bytes than were asked for are no error here: the end of the file, or of the space on it.
        """

    @property
    def in_flight(self) -> int:
        """How many have been submitted and not collected."""

    def close(self, timeout_s: float) -> bool:
        """Waits for what is in flight, discards its results and ends all threads. May be called again.

        False if something is still in flight: the file has to stay open then, or another file with its number
        would be written to.
        """


@runtime_checkable
class TakesMemory(Protocol):
    """A FileIo that is faster when it knows beforehand which memory it will be used with."""

    def register(self, address: int, nbytes: int, unit_bytes: int) -> None:
        """Tells of memory that stays where it is until ``close``, and is used by whole units from its start
        on.

        It need not be there yet: a unit is touched when it is first used.
        """


class ThreadIo:
    """FileIo by preadv and pwritev in ``num_threads`` threads."""

    def __init__(self, fd: int, num_threads: int = 8) -> None:
        self._fd = fd
        self._waiting: queue.SimpleQueue[tuple[Transfer, bool] | None] = queue.SimpleQueue()
        self._ended: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()
        self._tags: set[int] = set()
        self._is_closed = False
        names = (f"kvbm-disk-{number}" for number in range(num_threads))
        self._threads = [threading.Thread(target=self._work, name=name, daemon=True) for name in names]
        for thread in self._threads:
            thread.start()

    def submit(self, transfers: Sequence[Transfer], *, is_write: bool) -> None:
        """See FileIo."""
        if self._is_closed:
            raise ValueError("this is closed")
        self._tags |= tags_of(transfers, self._tags)
        for transfer in transfers:
            self._waiting.put((transfer, is_write))

    def collect(self, timeout_s: float) -> list[tuple[int, int]]:
        """See FileIo."""
        ended: list[tuple[int, int]] = []
        try:
            if self._tags:
                ended.append(self._ended.get(timeout=max(0.0, timeout_s)))
            while True:
                ended.append(self._ended.get_nowait())
        except queue.Empty:
            pass
        self._tags.difference_update(tag for tag, _ in ended)
        return ended

    @property
    def in_flight(self) -> int:
        """See FileIo."""
        return len(self._tags)

    def close(self, timeout_s: float) -> bool:
        """See FileIo; threads that are stuck in the kernel are left behind."""
        ends_at_s = time.monotonic() + timeout_s
        if not self._is_closed:
            self._is_closed = True
            for _ in self._threads:
                self._waiting.put(None)
        for thread in self._threads:
            thread.join(max(0.0, ends_at_s - time.monotonic()))
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        while self.collect(0.0):
            pass
        return not self._threads

    def _work(self) -> None:
        while (task := self._waiting.get()) is not None:
            transfer, is_write = task
            try:
                result = _move(self._fd, transfer, is_write=is_write)
            except OSError as error:
                result = -(error.errno or errno.EIO)
            except Exception:  # whoever waits for this one must hear of it
                result = -errno.EINVAL
            self._ended.put((transfer.tag, result))


def _move(fd: int, transfer: Transfer, *, is_write: bool) -> int:
    buffers = [(ctypes.c_char * nbytes).from_address(address) for address, nbytes in transfer.pieces]
    call = os.pwritev if is_write else os.preadv
    return call(fd, buffers, transfer.offset_bytes)
