"""One block, one file: written under a name of its own and renamed, read and checked."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import xxhash

from kvbm_core.clock import Clock
from kvbm_core.errors import Outcome
from kvbm_core.observe.log import RateLimitedLogger, TroubleLog
from kvbm_core.storage.base import Memory, plain_parts
from kvbm_core.storage.directory.folder import SETTING, Folder
from kvbm_core.storage.directory.names import file_name, temporary_name
from kvbm_core.storage.disk.record import (
    SECTOR_BYTES,
    FileHeader,
    RecordHeader,
    judge_record,
    pack_record_into,
    record_bytes,
    unpack_record,
)
from kvbm_core.storage.names import fan_folder
from kvbm_core.types import BlockKey

USE_EVERY_S = 3600.0
"""A hit renews a file's time, which says when it was last used, at most so often."""
MAX_PIECES = 1024
"""Linux takes no more pieces of memory in one call (UIO_MAXIOV)."""
READ_FLAGS = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_NOCTTY | os.O_CLOEXEC
"""A pipe is not waited for, and a link not followed."""
NOT_THERE = frozenset({errno.ENOENT, errno.ESTALE, errno.ELOOP, errno.ENOTDIR, errno.EISDIR, errno.ENXIO})
FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})

Move = Callable[[int, Sequence[memoryview], int], int]

CHECK_EVERY_S = 60.0
"""Whose the folders are, and who can write to them, is looked at again after so long."""
REMEDIES = {
    errno.ENOENT: "; make it, or mount the file system that it is on",
    errno.ENOTDIR: "; name a directory",
    errno.EACCES: "; let the engine's user write there",
    errno.ENOSPC: "; make room, or set a smaller KVBM_REMOTE_CACHE_GB",
    errno.EDQUOT: "; raise the quota, or set a smaller KVBM_REMOTE_CACHE_GB",
    errno.EROFS: "; mount it so that it can be written to",
}

limited_log = RateLimitedLogger()


class RecordFiles:
    """Blocks of one folder. Any thread; nothing here ends before the file system answers.

    A file is a header's sector and the payload, filled up to whole sectors. It appears under its name when
    all of it has been handed to the file system: close() sends it to a server that is shared, so a reader
    on any machine finds a whole record or none. It is not fsynced: after a loss of power a file may have its
    length and not its bytes, which its checksum tells, and the cost is one miss; fsync would cost each block
    a journal's commit (a third to a half of the speed on a local disk).

    O_DIRECT where it works and the memory lies on sectors: it costs a third of the CPU (0.14 s/GB for reads
    of 2 MiB against 0.45), is as fast for what no cache has, and leaves the page cache to others. Elsewhere
    the pages are given back after use.
    """

    def __init__(
        self, folder: Folder, fingerprint: bytes, payload_bytes: int, clock: Clock, *, is_direct: bool
    ) -> None:
        self._folder = folder
        self._clock = clock
        self._check_at_s = float("-inf")
        self._trouble = TroubleLog(clock=clock)
        self._calls = folder.calls
        self._header = FileHeader(folder.life, fingerprint, payload_bytes, 1)
        self._payload_bytes = payload_bytes
        self._padding = bytes(record_bytes(payload_bytes) - SECTOR_BYTES - payload_bytes)
        self._is_direct = is_direct
        self._sectors = threading.local()  # one a thread, on a sector's boundary
        self.file_bytes = record_bytes(payload_bytes)

    def has(self, key: BlockKey) -> Outcome:
        """OK or MISS, by name, length and owner."""
        try:
            is_good = self._is_good(self._calls.lstat(self._path(key)))
            self._worked("looked for")
            return Outcome.OK if is_good else Outcome.MISS
        except OSError as error:
            return self._failed(error, "looked for")

    def read(self, key: BlockKey, target: Memory) -> Outcome:
        """OK: ``target`` holds what was put. What does not verify is removed, so that it can be put anew."""
        path, pieces = self._path(key), plain_parts(target)
        try:
            fd, is_direct = self._open(path, is_direct=self._can_be_direct(pieces))
            try:
                status = self._calls.fstat(fd)
                if not self._folder.accepts(status):
                    return Outcome.MISS
                outcome = self._read(fd, key, pieces, status, is_direct=is_direct)
                if outcome is Outcome.OK:
                    self._used(fd, status)
            finally:
                self._calls.close(fd)
            if outcome is not Outcome.OK:
                self._remove_bad(path, status, outcome)
            self._worked("read")
            return outcome
        except OSError as error:
            return self._failed(error, "read")

    def write(self, key: BlockKey, payload: Memory, is_given_up: Callable[[], bool]) -> Outcome:
        """OK: it can be read. A block that is there already is not written again.

        What is given up while it is written is not renamed: its memory may have changed meanwhile.
        """
        path = self._path(key)
        try:
            if self._is_used(path):
                return Outcome.OK
            temporary = path.parent / temporary_name(path.name, secrets.token_hex(8))
            pieces = plain_parts(payload)
            is_direct = self._can_be_direct(pieces)
            fd = self._create(temporary, is_direct=is_direct)
            is_renamed = False
            try:
                self._write(fd, key, pieces, is_direct=is_direct)
                if is_given_up():
                    return Outcome.TIMED_OUT
                self._calls.rename(temporary, path)
                is_renamed = True
                self._worked("written")
                return Outcome.OK
            finally:
                if not is_renamed:
                    with suppress(OSError):
                        self._calls.unlink(temporary)
        except OSError as error:
            return self._failed(error, "written", is_write=True)

    def remove(self, key: BlockKey) -> Outcome:
        """OK, or MISS if it was not there."""
        try:
            self._calls.unlink(self._path(key))
            self._worked("removed")
            return Outcome.OK
        except OSError as error:
            return self._failed(error, "removed")

    def open_folder(self) -> Outcome:
        """OK if the folder is there and can be trusted; that is looked at every CHECK_EVERY_S."""
        now_s = self._clock.now_s()
        if now_s < self._check_at_s:
            return Outcome.OK
        try:
            (self._folder.check if self._folder.is_open else self._folder.open)()
        except OSError as error:
            line = "kvbm: %s: %s cannot be used: %s%s; the engine serves without it until it can"
            self._trouble.failed(
                "used", error.errno, line, SETTING, self._folder.path, error.strerror, _remedy_for(error)
            )
            return Outcome.IO_ERROR
        self._check_at_s = now_s + CHECK_EVERY_S
        self._trouble.worked("used", "kvbm: %s: %s is used again", SETTING, self._folder.path)
        return Outcome.OK

    # ---------------------------------------------------------------- reading

    def _read(
        self,
        fd: int,
        key: BlockKey,
        pieces: Sequence[memoryview],
        status: os.stat_result,
        *,
        is_direct: bool,
    ) -> Outcome:
        if status.st_size != self.file_bytes:
            return Outcome.CORRUPT
        sector = self._sector()
        wanted_bytes = SECTOR_BYTES + self._payload_bytes
        if _move(self._calls.preadv, fd, [sector, *pieces]) != wanted_bytes:
            return Outcome.CORRUPT
        if not is_direct:
            self._give_back_pages(fd)
        header = unpack_record(sector)
        outcome = judge_record(header, key, 0, self._header)
        if header is None or outcome is not Outcome.OK:
            return outcome
        return Outcome.OK if _digest(pieces) == header.digest else Outcome.CORRUPT

    def _open(self, path: Path, *, is_direct: bool) -> tuple[int, bool]:
        if is_direct:
            try:
                return self._calls.open(path, READ_FLAGS | os.O_DIRECT), True
            except OSError as error:
                if error.errno != errno.EINVAL:  # a pipe has none
                    raise
        return self._calls.open(path, READ_FLAGS), False

    def _remove_bad(self, path: Path, seen: os.stat_result, outcome: Outcome) -> None:
        """Unless another one has been put there in the meantime."""
        limited_log.warning(("bad", outcome), "kvbm: %s: %s; it is removed", path, outcome)
        with suppress(OSError):
            now = self._calls.lstat(path)
            if (now.st_ino, now.st_mtime_ns) == (seen.st_ino, seen.st_mtime_ns):
                self._calls.unlink(path)

    # ---------------------------------------------------------------- writing

    def _is_used(self, path: Path) -> bool:
        try:
            status = self._calls.lstat(path)
        except FileNotFoundError:
            return False
        if not self._is_good(status):
            return False
        self._used(path, status)
        return True

    def _create(self, temporary: Path, *, is_direct: bool) -> int:
        for make_missing in (self._folder.make, self._restore):
            try:
                return self._folder.create(temporary, is_direct=is_direct)
            except FileNotFoundError:
                with suppress(FileNotFoundError):
                    make_missing(temporary.parent)
        return self._folder.create(temporary, is_direct=is_direct)

    def _restore(self, fan: Path) -> None:
        self._folder.restore()
        self._folder.make(fan)

    def _write(self, fd: int, key: BlockKey, pieces: Sequence[memoryview], *, is_direct: bool) -> None:
        """Writes all of it and closes ``fd``: only then has a server that is full said so."""
        try:
            sector = self._sector()
            header = RecordHeader(
                self._header.life,
                self._header.fingerprint,
                0,
                time.time_ns(),
                self._payload_bytes,
                key,
                _digest(pieces),
            )
            pack_record_into(sector, header)
            padding = [memoryview(self._padding)] if self._padding else []
            if _move(self._calls.pwritev, fd, [sector, *pieces, *padding]) != self.file_bytes:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            if not is_direct:
                self._give_back_pages(fd)
        except BaseException:
            with suppress(OSError):
                self._calls.close(fd)
            raise
        self._calls.close(fd)

    # ---------------------------------------------------------------- both

    def _path(self, key: BlockKey) -> Path:
        name = file_name(key)
        return self._folder.shard / fan_folder(name) / name

    def _is_good(self, status: os.stat_result) -> bool:
        return self._folder.accepts(status) and status.st_size == self.file_bytes

    def _used(self, file: int | Path, status: os.stat_result) -> None:
        if self._calls.wall_s() - status.st_mtime > USE_EVERY_S:
            with suppress(OSError):  # a share that is read-only, or a file of another user
                self._calls.utime(file)

    def _can_be_direct(self, pieces: Sequence[memoryview]) -> bool:
        return (
            self._is_direct
            and self._folder.takes_direct
            and not self._padding
            and all(_is_on_sectors(piece) for piece in pieces)
        )

    def _sector(self) -> memoryview:
        sector: memoryview | None = getattr(self._sectors, "sector", None)
        if sector is None:
            sector = self._sectors.sector = memoryview(mmap.mmap(-1, SECTOR_BYTES))
        return sector

    def _give_back_pages(self, fd: int) -> None:
        with suppress(OSError):
            self._calls.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def _failed(self, error: OSError, what: str, *, is_write: bool = False) -> Outcome:
        if error.errno in FULL:
            outcome = Outcome.NO_SPACE
        elif error.errno in NOT_THERE and not is_write:
            return Outcome.MISS
        else:
            outcome = Outcome.IO_ERROR
        line = "kvbm: %s: blocks in %s cannot be %s: %s%s; the engine serves without them"
        self._trouble.failed(
            what, error.errno, line, SETTING, self._folder.path, what, error.strerror, _remedy_for(error)
        )
        return outcome

    def _worked(self, what: str) -> None:
        self._trouble.worked(what, "kvbm: %s: blocks in %s are %s again", SETTING, self._folder.path, what)


def _remedy_for(error: OSError) -> str:
    return REMEDIES.get(error.errno or 0, "")


def _move(call: Move, fd: int, pieces: Sequence[memoryview]) -> int:
    """Bytes moved: all, or as many as there are, or are taken. OSError."""
    left = list(pieces)
    moved_bytes = 0
    while left:
        count = call(fd, left[:MAX_PIECES], moved_bytes)
        if count <= 0:
            break
        moved_bytes += count
        while left and count >= left[0].nbytes:
            count -= left.pop(0).nbytes
        if left and count:
            left[0] = left[0][count:]
    return moved_bytes


def _digest(pieces: Sequence[memoryview]) -> bytes:
    state = xxhash.xxh3_128()
    for piece in pieces:
        state.update(piece)
    return state.digest()


def _is_on_sectors(piece: memoryview) -> bool:
    if piece.readonly or piece.nbytes % SECTOR_BYTES:
        return False
    return ctypes.addressof(ctypes.c_char.from_buffer(piece)) % SECTOR_BYTES == 0
