"""The folder of one engine's block files below DYN_KVBM_DISK_CACHE_DIR."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import logging
import os
import stat
from contextlib import suppress
from itertools import count
from pathlib import Path

from kvbm_core.errors import ConfigError
from kvbm_core.storage.disk.allocate import SETTING
from kvbm_core.storage.disk.block_file import SUFFIX
from kvbm_core.storage.disk.record import SECTOR_BYTES, foreign_version

TOP = "kvbm"
LOCK = "lock"
CLAIM = "claim"
MAX_ENGINES = 64

log = logging.getLogger("kvbm")


class DiskFolder:
    """Takes the first free folder for a layout, so that an engine finds again what it left.

    Several engines with the same layout have a folder each. The lock goes with the process. ``claim``: what
    other processes of the same engine know it by (see ``claimed_folder``). ConfigError, one line, if the
    directory cannot be used.
    """

    def __init__(self, directory: Path, fingerprint: str, claim: str = "") -> None:
        self._fd = -1
        name = _name_of(fingerprint)
        try:
            for number in count():
                if number == MAX_ENGINES:
                    raise ConfigError(
                        SETTING, directory, f"{MAX_ENGINES} engines use it already; set another directory"
                    )
                self.path = directory / TOP / f"{name}-{number}"
                if self._take():
                    if claim:
                        with suppress(
                            OSError
                        ):  # a full disk: other processes do not find it, this one goes on
                            (self.path / CLAIM).write_text(claim, encoding="utf-8")
                    return
        except OSError as error:
            self.close()
            remedy = f"{error.strerror}; set it to a directory on a local disk that can be written"
            raise ConfigError(SETTING, directory, remedy) from error

    def _take(self) -> bool:
        """False if another engine has it, or another version of kvbm left its files there."""
        self.path.parent.parent.mkdir(parents=True, exist_ok=True)
        for folder in (self.path.parent, self.path):
            folder.mkdir(exist_ok=True, mode=0o700)
            _check_owner(folder)
        self._fd = os.open(self.path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno != errno.EWOULDBLOCK:
                raise
            self.close()
            return False
        for path in self.path.glob(f"*{SUFFIX}"):
            version = _version_of(path)
            if version is not None:
                log.warning("kvbm: %s is of format %d, not this kvbm's; it is left as it is", path, version)
                self.close()
                return False
        return True

    def close(self) -> None:
        """Another engine may have it from now on; idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def claimed_folder(directory: Path, fingerprint: str, claim: str) -> Path | None:
    """The folder that a DiskFolder of another process took with this claim; None while there is none."""
    for number in range(MAX_ENGINES):
        folder = directory / TOP / f"{_name_of(fingerprint)}-{number}"
        try:
            _check_owner(folder)
            if (folder / CLAIM).read_text(encoding="utf-8") == claim:
                return folder
        except (OSError, UnicodeError, ConfigError):
            continue
    return None


def _name_of(fingerprint: str) -> str:
    return hashlib.sha256(fingerprint.encode()).hexdigest()[:16]


def _check_owner(folder: Path) -> None:
    """Whoever can write there can make this engine load KV of their making. ConfigError for a folder not our
    own.
    """
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & stat.S_IWOTH:
        remedy = f"{folder} belongs to another user, or others can write to it; set a directory of your own"
        raise ConfigError(SETTING, folder.parent, remedy)


def _version_of(path: Path) -> int | None:
    with path.open("rb") as file:
        sector = file.read(SECTOR_BYTES)
    return foreign_version(sector) if len(sector) == SECTOR_BYTES else None
