"""Which way a file is read and written: the best there is, or the one that a setting names."""

from __future__ import annotations

import errno

from kvbm_core.storage.disk.aio_io import AioIo, make_file_io
from kvbm_core.storage.disk.allocate import AUTO, DiskError
from kvbm_core.storage.disk.io import FileIo, ThreadIo
from kvbm_core.storage.disk.nixl_io import NixlIo

SETTING = "KVBM_DISK_IO"
_PLUGINS = {"nixl-posix": "POSIX", "nixl-gds": "GDS", "nixl-gds-mt": "GDS_MT"}


def chosen_file_io(fd: int, *, is_direct: bool, kind: str = AUTO, depth: int = 128) -> FileIo:
    """``kind`` is a value of KVBM_DISK_IO; "auto" is never refused. DiskError, one line, for one that cannot
    be had.

    ``depth`` is for AIO alone.
    """
    if kind == AUTO:
        return make_file_io(fd, is_direct=is_direct, depth=depth)
    if kind == "threads":
        return ThreadIo(fd)
    try:
        return AioIo(fd, depth) if kind == "aio" else NixlIo(fd, _PLUGINS[kind])
    except OSError as error:
        # Nothing else is taken in its place: who named one wants to hear that it is not there.
        raise DiskError(
            error.errno or errno.ENOTSUP, f"kvbm: {SETTING}={kind}: {error.strerror}, or set {SETTING}={AUTO}"
        ) from error
