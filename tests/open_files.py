"""Which files this process has open: for tests that leave none."""

from __future__ import annotations

import os
from contextlib import suppress


def open_files() -> list[str]:
    """Paths, each as often as it is open. Without sockets and pipes: those of earlier tests may go at any
    time, when the garbage collector finds them.
    """
    paths = []
    for fd in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # the folder's own, which is closed by now
            paths.append(os.readlink(f"/proc/self/fd/{fd}"))
    return sorted(path for path in paths if path.startswith("/") and not path.startswith("/proc/"))
