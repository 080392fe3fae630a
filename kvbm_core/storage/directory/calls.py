"""The system's calls on files that a shared directory needs, in one place."""

from __future__ import annotations

import os
import time


class FileCalls:
    """As in ``os``; a test puts others in their place, which fail or hang as those of a real share do.

    All of them release the GIL while the kernel works, so that a share that hangs stops none but the calling
    thread. (``os.DirEntry.stat`` does not, in all versions of Python: folders are read by listdir and lstat.)
    """

    open = staticmethod(os.open)
    close = staticmethod(os.close)
    stat = staticmethod(os.stat)
    lstat = staticmethod(os.lstat)
    fstat = staticmethod(os.fstat)
    preadv = staticmethod(os.preadv)
    pwritev = staticmethod(os.pwritev)
    posix_fadvise = staticmethod(os.posix_fadvise)
    rename = staticmethod(os.rename)
    link = staticmethod(os.link)
    unlink = staticmethod(os.unlink)
    mkdir = staticmethod(os.mkdir)
    chmod = staticmethod(os.chmod)
    fchmod = staticmethod(os.fchmod)
    utime = staticmethod(os.utime)
    listdir = staticmethod(os.listdir)
    statvfs = staticmethod(os.statvfs)
    wall_s = staticmethod(time.time)
