"""The folder of this user's sockets on this machine."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path


def private_place() -> Path:
    """Where all engines of this user have theirs; nobody has made it yet, maybe."""
    return Path(tempfile.gettempdir()) / f"kvbm-{os.getuid()}"


def is_private(folder: Path) -> bool:
    """Whether it is a folder that only this user can enter."""
    try:
        found = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077
