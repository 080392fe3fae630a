"""Opens a file for blocks, finds out what its directory supports, and gives it its space."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import logging
import mmap
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from kvbm_core.config import KvbmSettings
from kvbm_core.storage.disk.files import NotAFileError, ProcessFile
from kvbm_core.storage.disk.record import SECTOR_BYTES

ZEROS_BYTES = 16 << 20
STAT_BLOCK_BYTES = 512
FALLOC_FL_KEEP_SIZE, FALLOC_FL_PUNCH_HOLE = 1, 2
SETTING = "DYN_KVBM_DISK_CACHE_DIR"
AUTO = "auto"
OFF = "off"

log = logging.getLogger("kvbm")


class DiskError(OSError):
    """A directory or file that cannot hold blocks; the text is one line that says what to do."""


class DirectoryBusyError(DiskError):
    """Another process has the file."""


@dataclass(frozen=True, slots=True)
class FileOptions:
    """``is_direct``: past the page cache, where that works. ``opens_direct``: asked for at open, not after
    it.

    ``zero_fill``: where space cannot be reserved, it is written full of zeros; else the file stays sparse.
    ``io``: see ``chosen_file_io``. ``io_deadline_s``: a read or write that takes longer is given up.
    ``check_at_start``: what is on the disk is offered once all of its bytes have been read and checked.
    ``to_device``: how blocks are read straight into a device's memory, see transfer/movers/disk_direct.py; or
    OFF. ``directory``: for a rank that is on another machine than the leader, whose folder it does not find.
    """

    is_direct: bool = True
    opens_direct: bool = False
    zero_fill: bool = False
    io: str = AUTO
    io_deadline_s: float = 10.0
    check_at_start: bool = False
    to_device: str = OFF
    directory: str = ""

    @staticmethod
    def of(settings: KvbmSettings, *, io_deadline_s: float, check_at_start: bool) -> FileOptions:
        """As the settings have the rest."""
        return FileOptions(
            is_direct=not settings.disk_disable_o_direct,
            opens_direct=settings.disk_allocator_type == "open-direct",
            zero_fill=settings.disk_zerofill_fallback,
            io=settings.disk_io,
            io_deadline_s=io_deadline_s,
            check_at_start=check_at_start,
            to_device=settings.way_to_device,
            directory=settings.disk_cache_dir,
        )


class OpenFile(ProcessFile):
    """An open file. ``is_direct``: all addresses, sizes and offsets must be whole sectors."""

    def __init__(self, path: Path, flags: int, options: FileOptions) -> None:
        self.is_direct = False
        self.is_reserved = False
        if options.is_direct and options.opens_direct:
            try:
                super().__init__(path, flags | os.O_DIRECT)
                self.is_direct = True
                return
            except NotAFileError:
                raise
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
        super().__init__(path, flags)
        self.is_direct = options.is_direct and not options.opens_direct and _set_direct(self.fd, True)


def open_file(path: Path, options: FileOptions) -> OpenFile:
    """Opens or creates ``path`` and locks it. DirectoryBusyError if another process has it, else
    DiskError.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        opened = OpenFile(path, os.O_RDWR | os.O_CREAT, options)
    except OSError as error:
        raise disk_error(path, error) from error
    try:
        opened.lock()
        _leave_direct_unless_it_works(opened)
    except OSError as error:
        opened.close()
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            raise DirectoryBusyError(errno.EBUSY, f"kvbm: {path}: another process uses it") from error
        raise disk_error(path, error) from error
    return opened


def open_to_read(path: Path, options: FileOptions) -> OpenFile:
    """Opens ``path``, which another process may have locked and be writing. OSError if that fails."""
    opened = OpenFile(path, os.O_RDONLY, options)
    try:
        _leave_direct_unless_it_works(opened)
    except OSError:
        opened.close()
        raise
    return opened


def reserve(opened: OpenFile, num_bytes: int, options: FileOptions) -> None:
    """Makes the file ``num_bytes`` long, with its space reserved if that is possible. DiskError if there is
    too little; then the space that was taken for it so far is given back.

    What is in it stays, up to the new length.
    """
    before = os.fstat(opened.fd)
    try:
        if before.st_size > num_bytes:
            os.ftruncate(opened.fd, num_bytes)
        if num_bytes - before.st_blocks * STAT_BLOCK_BYTES > _free_bytes(opened.path):
            # Before any of it is taken: a full file system is everybody's trouble.
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        opened.is_reserved = _fallocate(opened.fd, num_bytes)
        if not opened.is_reserved and options.zero_fill:
            _fill_with_zeros(opened.fd, num_bytes)
            opened.is_reserved = True
        elif not opened.is_reserved:
            os.ftruncate(opened.fd, num_bytes)
            log.warning(
                "kvbm: %s: space cannot be reserved here, the file is sparse; the disk may fill up",
                opened.path,
            )
    except OSError as error:
        _give_back(opened.fd, before)
        room = os.statvfs(opened.path.parent)
        raise DiskError(
            error.errno,
            f"kvbm: {opened.path}: {error.strerror} for {num_bytes / 1e9:.2f} GB "
            f"({room.f_bavail * room.f_frsize / 1e9:.2f} GB are free, as df says);"
            f" {remedy_for(error)}",
        ) from error


def _free_bytes(path: Path) -> int:
    """What this user may still take of the file system."""
    room = os.statvfs(path.parent)
    return (room.f_bavail if os.geteuid() else room.f_bfree) * room.f_frsize


def _give_back(fd: int, before: os.stat_result) -> None:
    """The space that a failed ``reserve`` took: beyond the file's earlier end, and in its holes.

    What an earlier engine stored stays. So does space that it had reserved and not written yet.
    """
    size = min(before.st_size, os.fstat(fd).st_size)
    with suppress(OSError):
        os.ftruncate(fd, size)
        if before.st_blocks * STAT_BLOCK_BYTES < size:  # it was sparse
            for start, end in _holes(fd, size):
                _call_fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, start, end - start)


def _holes(fd: int, size: int) -> list[tuple[int, int]]:
    """Where nothing was ever written, whether it has space or not."""
    holes: list[tuple[int, int]] = []
    at = 0
    while at < size:
        start = os.lseek(fd, at, os.SEEK_HOLE)
        if start >= size:
            break
        try:
            at = os.lseek(fd, start, os.SEEK_DATA)
        except OSError as error:
            if error.errno != errno.ENXIO:  # no data after it
                raise
            at = size
        holes.append((start, at))
    return holes


def _set_direct(fd: int, is_direct: bool) -> bool:
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_DIRECT if is_direct else flags & ~os.O_DIRECT)
    except OSError:
        return False
    return True


def _leave_direct_unless_it_works(opened: OpenFile) -> None:
    if opened.is_direct and not _reads_directly(opened.fd):
        _set_direct(opened.fd, False)
        opened.is_direct = False


def _reads_directly(fd: int) -> bool:
    """Whether sector by sector works; some file systems accept the flag and want larger pieces."""
    with mmap.mmap(-1, SECTOR_BYTES) as sector:
        try:
            os.preadv(fd, [sector], 0)
        except OSError as error:
            if error.errno == errno.EINVAL:
                return False
            raise
    return True


def _fallocate(fd: int, num_bytes: int) -> bool:
    """False where the file system does not know it. os.posix_fallocate would write into each block
    instead.
    """
    return _call_fallocate(fd, 0, 0, num_bytes)


def _call_fallocate(fd: int, mode: int, start: int, num_bytes: int) -> bool:
    fallocate = ctypes.CDLL(None, use_errno=True).fallocate
    fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    while fallocate(fd, mode, start, num_bytes) != 0:
        code = ctypes.get_errno()
        if code in (errno.EOPNOTSUPP, errno.ENOSYS):
            return False
        if code != errno.EINTR:
            raise OSError(code, os.strerror(code))
    return True


def _fill_with_zeros(fd: int, num_bytes: int) -> None:
    """From the present end on; what is there stays."""
    size = os.fstat(fd).st_size // SECTOR_BYTES * SECTOR_BYTES
    with mmap.mmap(-1, ZEROS_BYTES) as zeros:
        view = memoryview(zeros)
        try:
            while size < num_bytes:
                size += os.pwritev(fd, [view[: min(ZEROS_BYTES, num_bytes - size)]], size)
        finally:
            view.release()


def disk_error(path: Path, error: OSError) -> DiskError:
    """What went wrong with a file, and what to do, in one line."""
    return DiskError(error.errno, f"kvbm: {path}: {error.strerror}; {remedy_for(error)}")


def remedy_for(error: OSError) -> str:
    """What to do about an error of a file or its directory."""
    if isinstance(error, NotAFileError) or error.errno == errno.ELOOP:
        return "remove it"
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return "set a smaller DYN_KVBM_DISK_CACHE_GB, or make room"
    if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
        return f"set {SETTING} to a directory that can be written"
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return "raise the limit of open files (ulimit -n)"
    return f"set {SETTING} to a directory on a local disk"
