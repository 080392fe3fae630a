"""How large a model's folder may grow where no engine is told: the first one writes it there for all."""

from __future__ import annotations

import errno
import logging
import os
import re
import secrets
import stat
from contextlib import suppress
from pathlib import Path

from kvbm_core.observe.log import RateLimitedLogger
from kvbm_core.storage.directory.calls import FileCalls
from kvbm_core.storage.directory.folder import Folder
from kvbm_core.storage.directory.names import temporary_name
from kvbm_core.storage.directory.record_files import READ_FLAGS

SIZE = "size"
"""A number of bytes in decimal digits, in the model's folder; 0: no limit."""
SHARE = 0.5
"""Of what is free when the first engine comes."""
LEAST_BYTES = 1 << 20
"""Of less nobody makes a size: the file system is full, and may have room again."""
MOST_TEXT_BYTES = 64

_NUMBER = re.compile(rb"\d{1,19}\s*")
_NO_LINKS = frozenset({errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP, errno.EMLINK})

limited_log = RateLimitedLogger(interval_s=3600.0)


class SharedSize:
    """Of ``folder``. The file gets its name by a link when it is whole: of two that write at the same moment
    both go by the same number. Whoever changes the file changes the size.
    """

    def __init__(self, folder: Folder) -> None:
        self._folder = folder
        self._path = folder.namespace / SIZE
        self._own_bytes: int | None = None
        self._told_bytes: int | None = None

    def look(self) -> int | None:
        """Bytes; 0: no limit; None: nobody can tell yet. Raises nothing."""
        with suppress(OSError):
            try:
                return self._read()
            except FileNotFoundError:
                self._write()
                return self._read()
        return None

    def _read(self) -> int:
        """As ``look``. OSError."""
        try:
            num_bytes = read_size(self._path, self._folder.calls)
        except ValueError as error:
            line = "kvbm: %s; remove it, or set KVBM_REMOTE_CACHE_GB; until then this engine keeps to %g GB"
            self._own_bytes = self._own_bytes or self._share_bytes()
            limited_log.warning(self._path, line, error, self._own_bytes / 1e9)
            return self._own_bytes
        if num_bytes != self._told_bytes:
            self._told_bytes = num_bytes
            line = "kvbm: %s: %s for this model, as the file says; KVBM_REMOTE_CACHE_GB sets another size"
            limited_log.log(logging.INFO, (self._path, num_bytes), line, self._path, size_text(num_bytes))
        return num_bytes

    def _share_bytes(self) -> int:
        status = self._folder.calls.statvfs(self._folder.namespace)
        return int(status.f_bavail * status.f_frsize * SHARE)

    def _write(self) -> None:
        """Unless there is one by then. OSError."""
        calls, num_bytes = self._folder.calls, self._share_bytes()
        if num_bytes < LEAST_BYTES:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        temporary = self._path.with_name(temporary_name(SIZE, secrets.token_hex(8)))
        fd = self._folder.create(temporary, is_direct=False)
        try:
            try:
                calls.pwritev(fd, [f"{num_bytes}\n".encode()], 0)
            finally:
                calls.close(fd)
            try:
                calls.link(temporary, self._path)
            except FileExistsError:
                pass
            except OSError as error:
                if error.errno not in _NO_LINKS:
                    raise
                calls.rename(temporary, self._path)  # the last one counts, for all that look again
        finally:
            with suppress(OSError):
                calls.unlink(temporary)


def size_text(num_bytes: int | None) -> str:
    """For people; 0 and None: no limit."""
    return f"{num_bytes / 1e9:g} GB" if num_bytes else "no limit of size"


def read_size(path: Path, calls: FileCalls) -> int:
    """Bytes; 0: no limit. FileNotFoundError, or a ValueError whose text begins with the path."""
    try:
        fd = calls.open(path, READ_FLAGS)
        try:
            text = bytearray(MOST_TEXT_BYTES)
            is_file = stat.S_ISREG(calls.fstat(fd).st_mode)
            del text[calls.preadv(fd, [text], 0) if is_file else 0 :]
        finally:
            calls.close(fd)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    if _NUMBER.fullmatch(text) is None:
        raise ValueError(f"{path} holds no number of bytes")
    return int(text)
