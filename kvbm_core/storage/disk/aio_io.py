"""Reads and writes of one file by Linux AIO, where there is such a thing; by threads where there is not."""

from __future__ import annotations

import errno
from collections.abc import Sequence
from itertools import chain

import numpy as np

from kvbm_core.native import native
from kvbm_core.storage.disk.io import FileIo, ThreadIo, Transfer, tags_of

has_aio = hasattr(native, "Aio")
"""Whether the native module is there and was built with Linux' headers; the kernel may still have no AIO."""


class AioIo:
    """FileIo with at most ``depth`` requests in the kernel and no thread; for files opened with O_DIRECT.

    Works on any file, but without O_DIRECT ``submit`` waits for the data. OSError where there is no AIO.
    """

    def __init__(self, fd: int, depth: int = 32) -> None:
        if native is None or not has_aio:
            raise OSError(errno.ENOSYS, "the native module is missing or without AIO")
        self._aio = native.Aio(fd, depth)
        self._tags: set[int] = set()

    def submit(self, transfers: Sequence[Transfer], *, is_write: bool) -> None:
        """See FileIo; a call that raises has submitted nothing."""
        new = tags_of(transfers, self._tags)
        pieces = chain.from_iterable(chain.from_iterable(transfer.pieces for transfer in transfers))
        self._aio.submit(
            is_write,
            np.array([transfer.tag for transfer in transfers], np.int64),
            np.array([transfer.offset_bytes for transfer in transfers], np.int64),
            np.array([len(transfer.pieces) for transfer in transfers], np.int32),
            np.fromiter(pieces, np.uint64),
        )
        self._tags |= new

    def collect(self, timeout_s: float) -> list[tuple[int, int]]:
        """See FileIo."""
        ended = self._aio.collect(timeout_s)
        self._tags.difference_update([tag for tag, _ in ended])
        return ended

    @property
    def in_flight(self) -> int:
        """See FileIo."""
        return self._aio.in_flight

    def close(self, timeout_s: float) -> bool:
        """See FileIo; what the kernel does not end is left to it, with all that it needs."""
        return self._aio.close(timeout_s)


def make_file_io(fd: int, *, is_direct: bool, depth: int = 128) -> FileIo:
    """The best there is for ``fd``: AIO for a file opened with O_DIRECT where kernel and module have it, else
    threads.

    ``depth`` is for AIO alone.
    """
    if is_direct:
        try:
            return AioIo(fd, depth)
        except OSError:  # no such system call, or the machine's fs.aio-max-nr is used up
            pass
    return ThreadIo(fd)
