"""Files opened for this process alone: regular ones, whose locks no forked child keeps."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import threading
from contextlib import suppress
from pathlib import Path


class NotAFileError(OSError):
    """Something else has the name of a file: a pipe, a device, a socket, a folder."""


def open_regular(path: Path, flags: int, mode: int = 0o600) -> int:
    """As ``os.open``; never waits for whoever has the other end of a pipe. OSError, or NotAFileError.

    A link is an error too (ELOOP): what it leads to may belong to anybody.
    """
    with suppress(FileNotFoundError):
        status = os.lstat(path)  # first: opening a device may do something to it
        if not (stat.S_ISLNK(status.st_mode) or stat.S_ISDIR(status.st_mode)):
            _check(path, status)
    fd = os.open(path, flags | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_NOCTTY | os.O_CLOEXEC, mode)
    try:
        _check(path, os.fstat(fd))
        fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) & ~os.O_NONBLOCK)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _check(path: Path, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise NotAFileError(errno.EINVAL, "no regular file", str(path))


class ProcessFile:
    """An open file of this process. Children that it forks, before they execute anything, close it.

    A lock by ``flock`` belongs to the open file and not to a process: a child that kept the file would keep
    the lock when this process is killed. (POSIX' record locks are not inherited, but end with the closing of
    any other descriptor of the file, also of a library's.) A fork that does not go through Python keeps it.
    """

    def __init__(self, path: Path, flags: int) -> None:
        self.path = path
        with _forking:
            self.fd = open_regular(path, flags)
            _files.add(self)

    def lock(self) -> None:
        """For this open file alone. OSError: EWOULDBLOCK if another one has it."""
        fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def close(self) -> None:
        """Gives up the file and its lock; idempotent."""
        with _forking:
            fd, self.fd = self.fd, -1
            _files.discard(self)
            if fd >= 0:
                os.close(fd)


_forking = threading.RLock()
"""No process is forked between the opening of a file and its being noted here."""
_files: set[ProcessFile] = set()


def _close_in_child() -> None:
    for file in _files:
        with suppress(OSError):
            os.close(file.fd)
        file.fd = -1
    _files.clear()
    _forking.release()


os.register_at_fork(before=_forking.acquire, after_in_parent=_forking.release, after_in_child=_close_in_child)
