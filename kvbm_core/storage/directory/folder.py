"""A rank's folder in a shared directory: made, and used only if those who can write to it are trusted."""

from __future__ import annotations

import errno
import mmap
import os
import secrets
import stat
from contextlib import suppress
from pathlib import Path

from kvbm_core.storage.directory.calls import FileCalls
from kvbm_core.storage.directory.names import TOP, temporary_name
from kvbm_core.storage.disk.record import SECTOR_BYTES
from kvbm_core.storage.names import Meaning

SETTING = "KVBM_REMOTE_URL"


class Folder:
    """``path``/kvbm1/namespace/shard. Any thread; nothing here ends before the file system answers.

    Whoever can write into these folders can have an engine load KV of their making. They belong to this user
    (or root) and nobody else can write there, unless ``trusts_group``: then the folder's group may. ``path``
    itself may be anybody's. It is never made: where it is a mount that is not there, nothing may be written
    below.
    """

    def __init__(self, path: Path, meaning: Meaning, calls: FileCalls, *, trusts_group: bool) -> None:
        self.path = path
        self.namespace = path / TOP / meaning.namespace_folder
        self.shard = self.namespace / meaning.shard_folder
        self.life = meaning.life
        self.trusts_group = trusts_group
        self.calls = calls
        self.takes_direct = False
        """Whether files can be opened with O_DIRECT; known once it is open."""
        self._device: int | None = None  # of ``path`` when it was opened
        self._uid = os.geteuid()
        self._gid = -1

    @property
    def is_open(self) -> bool:
        """Whether ``open`` has ever succeeded."""
        return self._device is not None

    def open(self) -> None:
        """Makes what is missing and looks whose it is. OSError, whose text says what to do if somebody else
        can write there.
        """
        device = self.calls.stat(self.path).st_dev
        for folder in (self.namespace.parent, self.namespace, self.shard):
            self.make(folder)
        self._probe()
        self.check()
        self._gid = self.calls.lstat(self.shard).st_gid
        self._device = device

    def check(self) -> None:
        """Whether others can write to the folders that are there. OSError, whose text says what to do."""
        for folder in (self.namespace.parent, self.namespace, self.shard):
            with suppress(FileNotFoundError):
                self._check(folder)

    def restore(self) -> None:
        """The shard's folder is missing: makes it anew if it was removed. OSError if ``path`` is now another
        file system: then a mount has gone, and comes back with the folder.
        """
        if self._device is not None and self.calls.stat(self.path).st_dev != self._device:
            raise OSError(errno.ENODEV, "another file system is mounted there now", str(self.path))
        self.open()

    def make(self, folder: Path) -> None:
        """``folder``, if it is not there. FileNotFoundError if the one above it is missing."""
        mode = 0o2770 if self.trusts_group else 0o700
        try:
            self.calls.lstat(folder)
            return
        except FileNotFoundError:
            pass
        try:
            self.calls.mkdir(folder, mode)
        except FileExistsError:
            return
        if self.trusts_group:  # whatever the umask
            with suppress(OSError):
                self.calls.chmod(folder, mode)

    def accepts(self, status: os.stat_result) -> bool:
        """Whether a file of ours, or of someone trusted."""
        mode = status.st_mode
        is_ours = status.st_uid == self._uid
        if self.trusts_group:
            is_trusted = (is_ours or status.st_gid == self._gid) and not mode & stat.S_IWOTH
        else:
            is_trusted = is_ours and not mode & (stat.S_IWGRP | stat.S_IWOTH)
        return stat.S_ISREG(mode) and is_trusted

    def create(self, path: Path, *, is_direct: bool) -> int:
        """A new file, open for writing. OSError; FileNotFoundError if its folder is missing."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = self.calls.open(path, flags | (os.O_DIRECT if is_direct else 0), self._file_mode)
        if self.trusts_group:  # whatever the umask: a hit by another user renews its time
            with suppress(OSError):
                self.calls.fchmod(fd, self._file_mode)
        return fd

    # ---------------------------------------------------------------- inside

    @property
    def _file_mode(self) -> int:
        return 0o660 if self.trusts_group else 0o600

    def _probe(self) -> None:
        """Learns from a file of our own what this share takes us for (root is often nobody there), and
        whether it has O_DIRECT. What cannot be written to, nobody's records come from us.
        """
        path = self.shard / temporary_name("probe", secrets.token_hex(8))
        try:
            fd = self.create(path, is_direct=False)
        except OSError:
            return
        try:
            self._uid = self.calls.fstat(fd).st_uid
        finally:
            self.calls.close(fd)
            self.calls.unlink(path)
        self.takes_direct = self._try_direct()

    def _try_direct(self) -> bool:
        path = self.shard / temporary_name("probe", secrets.token_hex(8))
        try:
            fd = self.create(path, is_direct=True)
        except OSError:
            with suppress(OSError):  # some file systems refuse the flag after having made the file
                self.calls.unlink(path)
            return False
        try:
            with mmap.mmap(-1, SECTOR_BYTES) as sector:
                return self.calls.pwritev(fd, [sector], 0) == SECTOR_BYTES
        except OSError:
            return False
        finally:
            self.calls.close(fd)
            self.calls.unlink(path)

    def _check(self, folder: Path) -> None:
        status = self.calls.lstat(folder)
        if not stat.S_ISDIR(status.st_mode):
            raise OSError(errno.EPERM, f"{folder} is no folder; remove it")
        is_fellow = self.trusts_group and status.st_gid in {os.getegid(), *os.getgroups()}
        if status.st_uid not in {self._uid, 0} and not is_fellow:
            raise OSError(
                errno.EPERM,
                f"{folder} belongs to another user (uid {status.st_uid}); name a directory of your own, or "
                "share it with a group (docs/remote.md)",
            )
        others = stat.S_IWOTH if self.trusts_group else stat.S_IWGRP | stat.S_IWOTH
        if status.st_mode & others:
            raise OSError(
                errno.EPERM,
                f"others can write to {folder} (mode {stat.S_IMODE(status.st_mode):o}); chmod go-w it if you "
                "trust what is in it, or share it with a group (docs/remote.md)",
            )
