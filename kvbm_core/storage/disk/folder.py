"""The folder of one engine's block files below DYN_KVBM_DISK_CACHE_DIR."""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import stat
import threading
from itertools import count
from pathlib import Path

from kvbm_core.errors import ConfigError
from kvbm_core.storage.disk.allocate import SETTING
from kvbm_core.storage.disk.block_file import SUFFIX
from kvbm_core.storage.disk.files import NotAFileError, ProcessFile, open_regular
from kvbm_core.storage.disk.inspect import find_holder
from kvbm_core.storage.disk.record import SECTOR_BYTES, foreign_version

TOP = "kvbm"
LOCK = "lock"
NEXT = "next"
"""Locked by whoever tries to take the folder, and held by the one who waits for it."""
CLAIM = "claim"
MAX_CLAIM_BYTES = 4096
MAX_ENGINES = 64
LOCK_RETRY_S = 0.1
PF_EXITING = 0x4
SIGKILL_BIT = 1 << 8

log = logging.getLogger("kvbm")


class DiskFolder:
    """Takes the first free folder for a layout and an identity, so that an engine finds again what it left.

    ``identity``: of the model, the same again when its weights have changed: engines of different models find
    their own folders in whatever order they start, and nothing is left behind by a model that is trained on.
    Several engines with the same layout and identity have a folder each. The lock goes with the process.
    A folder whose last engine was killed, and is still giving its memory back, is ours as soon as that has
    ended; meanwhile its files are locked. ``claim``: what other processes of the same engine know it by (see
    ``claimed_folder``). ConfigError, one line, if the directory cannot be used.
    """

    def __init__(self, directory: Path, fingerprint: str, claim: str = "", *, identity: str = "") -> None:
        self._lock: ProcessFile | None = None
        self._next: ProcessFile | None = None
        self._closing = threading.Event()
        self._waiter: threading.Thread | None = None
        self.claim = ""
        """What others know this folder by; empty if it could not be written."""
        name = _name_of(fingerprint, identity)
        try:
            for number in count():
                if number == MAX_ENGINES:
                    raise ConfigError(
                        SETTING, directory, f"{MAX_ENGINES} engines use it already; set another directory"
                    )
                self.path = directory / TOP / f"{name}-{number}"
                if self._take():
                    if claim and _write_claim(self.path / CLAIM, claim):
                        self.claim = claim
                    return
        except NotAFileError as error:
            self.close()
            raise ConfigError(
                SETTING, directory, f"{error.filename} is no regular file; remove it"
            ) from error
        except OSError as error:
            self.close()
            remedy = f"{error.strerror}; set it to a directory on a local disk that can be written"
            raise ConfigError(SETTING, directory, remedy) from error
        except BaseException:
            self.close()
            raise

    def _take(self) -> bool:
        """False if another engine has it, or another version of kvbm left its files there."""
        self.path.parent.parent.mkdir(parents=True, exist_ok=True)
        for folder in (self.path.parent, self.path):
            folder.mkdir(exist_ok=True, mode=0o700)
            _check_owner(folder)
        self._next = ProcessFile(self.path / NEXT, os.O_RDWR | os.O_CREAT)
        self._lock = ProcessFile(self.path / LOCK, os.O_RDWR | os.O_CREAT)
        is_taken = _try_to_lock(self._next)
        if is_taken and not _try_to_lock(self._lock):
            is_taken = _is_held_by_ending_process(self._lock)
            if is_taken and not self._is_foreign():
                log.warning(
                    "kvbm: %s: the engine that had it is still ending; the disk tier joins when it has",
                    self.path,
                )
                self._waiter = threading.Thread(target=self._wait, name="kvbm-disk-folder", daemon=True)
                self._waiter.start()
                return True
        if not is_taken or self._is_foreign():
            self._let_go()
            return False
        self._next.close()
        return True

    def _is_foreign(self) -> bool:
        for path in self.path.glob(f"*{SUFFIX}"):
            version = _version_of(path)
            if version is not None:
                log.warning("kvbm: %s is of format %d, not this kvbm's; it is left as it is", path, version)
                return True
        return False

    def _wait(self) -> None:
        lock = self._lock
        while lock is not None and not self._closing.wait(LOCK_RETRY_S):
            if _try_to_lock(lock):
                if self._next is not None:
                    self._next.close()
                return

    def close(self) -> None:
        """Another engine may have it from now on; idempotent."""
        self._closing.set()
        if self._waiter is not None:
            self._waiter.join()
        self._let_go()

    def _let_go(self) -> None:
        for file in (self._lock, self._next):
            if file is not None:
                file.close()


def claimed_folder(directory: Path, fingerprint: str, claim: str, *, identity: str = "") -> Path | None:
    """The folder that a DiskFolder of another process took with this claim; None while there is none."""
    name = _name_of(fingerprint, identity)
    for number in range(MAX_ENGINES):
        folder = directory / TOP / f"{name}-{number}"
        if has_claim(folder, claim):
            return folder
    return None


def has_claim(folder: Path, claim: str) -> bool:
    """Whether this is the folder that a DiskFolder of another process took with this claim."""
    try:
        _check_owner(folder)
        return _read(folder / CLAIM, MAX_CLAIM_BYTES) == claim.encode()
    except (OSError, ConfigError):
        return False


def _name_of(fingerprint: str, identity: str) -> str:
    return hashlib.sha256(f"{fingerprint}\0{identity}".encode()).hexdigest()[:16]


def _check_owner(folder: Path) -> None:
    """Whoever can write there can make this engine load KV of their making. ConfigError for a folder not our
    own.
    """
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
        remedy = f"{folder} belongs to another user, or is no folder; set a directory of your own"
        raise ConfigError(SETTING, folder.parent, remedy)
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        remedy = (
            f"others can write to {folder} (mode {stat.S_IMODE(status.st_mode):o}); "
            "chmod go-w it if you trust what is in it, or set a directory of your own"
        )
        raise ConfigError(SETTING, folder.parent, remedy)


def _try_to_lock(file: ProcessFile) -> bool:
    try:
        file.lock()
    except OSError as error:
        if error.errno != errno.EWOULDBLOCK:
            raise
        return False
    return True


def _is_held_by_ending_process(file: ProcessFile) -> bool:
    """Whether who has it was killed and does not run any more, as far as can be seen from here."""
    _, pid = find_holder(file.fd)
    if pid is None:
        return False
    process = Path("/proc") / str(pid)
    try:
        state, *fields = (process / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        lines = (process / "status").read_text(encoding="utf-8").splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return True
    except OSError:
        return False
    pending = [int(line.split()[1], 16) for line in lines if line.startswith(("SigPnd:", "ShdPnd:"))]
    return state in "ZX" or bool(int(fields[5]) & PF_EXITING) or any(bits & SIGKILL_BIT for bits in pending)


def _write_claim(path: Path, claim: str) -> bool:
    try:
        fd = open_regular(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        try:
            os.write(fd, claim.encode())
        finally:
            os.close(fd)
    except OSError as error:  # a full disk: other processes do not find it, this one goes on
        log.warning("kvbm: %s: %s; other ranks find nothing here", path, error.strerror)
        return False
    return True


def _read(path: Path, num_bytes: int) -> bytes:
    fd = open_regular(path, os.O_RDONLY)
    try:
        return os.read(fd, num_bytes)
    finally:
        os.close(fd)


def _version_of(path: Path) -> int | None:
    try:
        sector = _read(path, SECTOR_BYTES)
    except NotAFileError:  # whoever is to open it will say so
        return None
    return foreign_version(sector) if len(sector) == SECTOR_BYTES else None
