"""The directory of the disk tier: rights, room, what its file system can, and how fast it is."""

from __future__ import annotations

import errno
import json
import mmap
import os
import re
import secrets
import shutil
import stat
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

from kvbm_core.cli.doctor.check import Check, Finding, Subject, error, note, ok, warning
from kvbm_core.config import KvbmSettings
from kvbm_core.identity.digest import file_system_of
from kvbm_core.storage.disk.allocate import FileOptions, OpenFile, open_file, remedy_for, reserve
from kvbm_core.storage.disk.choose import SETTING, chosen_file_io
from kvbm_core.storage.disk.inspect import find_files
from kvbm_core.storage.disk.io import FileIo, Transfer

FOLDER = "kvbm"
"""In the directory; what the engine makes there is private to its user."""
PROBE_PREFIX = ".kvbm-doctor-"
PROBE_BYTES = 128 << 20
PIECE_BYTES = 2 << 20
PIECES_AT_ONCE = 8
PROBE_S = 2.0
"""For writing, and again for reading; a slow disk is given less to do."""
SLOW_BYTES_PER_S = 5e8
FIO_S = 2
IN_MEMORY = {"tmpfs", "ramfs"}
OVER_NETWORK = {"nfs", "nfs4", "cifs", "smb3", "lustre", "ceph", "gpfs", "beegfs", "9p", "glusterfs"}
_GB = 1e9
_PROBE_NAME = re.compile(rf"\S*/{re.escape(PROBE_PREFIX)}\w+: ")


class NoFileError(OSError):
    """No file can be made there."""


def look_at_folder(subject: Subject) -> Iterator[Finding]:
    """Whether this user can keep files there, and nobody else can change them."""
    settings = subject.settings
    if not settings.has_disk_tier:
        return
    directory, there = Path(settings.disk_cache_dir), _nearest(settings)
    try:
        with _probe_file(there, _options(settings)):
            pass
    except OSError as problem:
        yield error(f"{there}: {_reason(problem)}", remedy_for(problem))
        return
    folder = directory / FOLDER
    if folder.exists() or folder.is_symlink():
        status = folder.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
            remedy = "set DYN_KVBM_DISK_CACHE_DIR to a directory of your own"
            yield error(f"{folder} belongs to another user, or is no folder", remedy)
            return
        if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            remedy = f"chmod go-w {folder} if you trust what is in it, or set a directory of your own"
            yield error(f"others can write to {folder} (mode {stat.S_IMODE(status.st_mode):o})", remedy)
            return
    yield ok(f"{directory} can be written" if there == directory else f"{directory} can be made")
    kind = _file_system(subject, there)
    if kind in IN_MEMORY:
        remedy = "set DYN_KVBM_DISK_CACHE_DIR to a directory on a disk, or make the host tier larger instead"
        yield warning(f"{there} is in memory ({kind}): a restart of the machine forgets it", remedy)
    elif kind in OVER_NETWORK or kind.startswith("fuse"):
        remedy = "use a local disk; to share blocks, set KVBM_REMOTE_URL=file://DIRECTORY"
        yield warning(f"{there} is on a network or in user space ({kind})", remedy)


def look_at_space(subject: Subject) -> Iterator[Finding]:
    """Free space, with what older files of kvbm's have already, against the tier's size."""
    settings = subject.settings
    if not settings.has_disk_tier:
        return
    there = _nearest(settings)
    room = os.statvfs(there)
    free_bytes = (room.f_bavail if os.geteuid() else room.f_bfree) * room.f_frsize
    own_bytes = sum(_allocated(path) for path in find_files(Path(settings.disk_cache_dir), lambda _: None))
    wanted_gb = settings.disk_cache_gb if settings.disk_cache_override_num_blocks is None else None
    has = f"{free_bytes / _GB:.1f} GB are free in {there}"
    if own_bytes:
        has += f", and kvbm has {own_bytes / _GB:.1f} GB there"
    if wanted_gb is None:
        yield ok(has)
    elif wanted_gb * _GB > free_bytes + own_bytes:
        seen = f"the disk tier is to have {wanted_gb:g} GB: {has}"
        yield error(seen, "set a smaller DYN_KVBM_DISK_CACHE_GB, or make room")
    else:
        yield ok(has)


def look_at_direct(subject: Subject) -> Iterator[Finding]:
    """O_DIRECT, space that can be reserved, and the way of reading and writing that the settings name."""
    settings = subject.settings
    if not settings.has_disk_tier:
        return
    there, options = _nearest(settings), _options(settings)
    try:
        with _probe_file(there, options) as opened:
            if options.is_direct and not opened.is_direct:
                remedy = "use ext4 or xfs on a local disk, or set DYN_KVBM_DISK_DISABLE_O_DIRECT=1"
                yield warning(
                    "O_DIRECT does not work there: each block is kept in the page cache too", remedy
                )
            else:
                yield ok(f"O_DIRECT {'works' if opened.is_direct else 'is switched off'}")
            reserve(opened, PIECE_BYTES, options)
            if not opened.is_reserved:
                remedy = "set DYN_KVBM_DISK_ZEROFILL_FALLBACK=1, or use ext4 or xfs"
                yield warning("space cannot be reserved there: the disk may fill up under kvbm", remedy)
            if not settings.disk_io.startswith("nixl"):  # which has a check of its own
                io = chosen_file_io(opened.fd, is_direct=opened.is_direct, kind=settings.disk_io)
                yield ok(f"read and written by {type(io).__name__.removesuffix('Io').lower() or 'threads'}")
                io.close(1.0)
    except NoFileError:
        yield _no_file(there)
    except OSError as problem:
        is_way = SETTING in str(problem)
        yield error(f"{there}: {_reason(problem)}", f"set {SETTING}=auto" if is_way else remedy_for(problem))


def look_at_speed(subject: Subject) -> Iterator[Finding]:
    """A short probe by kvbm's own way of reading and writing, and fio's word where it is installed."""
    settings = subject.settings
    if not settings.has_disk_tier:
        return
    there, options = _nearest(settings), _options(settings)
    room = os.statvfs(there)
    if room.f_bavail * room.f_frsize < 4 * PROBE_BYTES:
        yield note(f"{there} has too little room to measure its speed")
        return
    try:
        with _probe_file(there, options) as opened:
            written, read = _speeds(opened)
    except NoFileError:
        yield _no_file(there)
        return
    except OSError as problem:
        yield error(f"{there}: {_reason(problem)}", remedy_for(problem))
        return
    seen = f"writes {written / _GB:.3g} GB/s, reads {read / _GB:.3g} GB/s, in a probe of seconds"
    fio = shutil.which("fio")
    if fio is not None and (by_fio := _read_by_fio(fio, there)):
        seen += f"; fio reads {by_fio / _GB:.3g} GB/s"
    if read < SLOW_BYTES_PER_S:
        yield note(seen, "blocks may come sooner by computing them: take an NVMe disk, or no disk tier")
    else:
        yield ok(seen)


# -------------------------------------------------------------------- inside


def _options(settings: KvbmSettings) -> FileOptions:
    return FileOptions.of(settings, io_deadline_s=settings.disk_deadline_s, check_at_start=False)


def _nearest(settings: KvbmSettings) -> Path:
    """The directory, or the one above that is there: the engine makes what is missing."""
    path = Path(settings.disk_cache_dir).absolute()
    while not path.exists() and path != path.parent:
        path = path.parent
    return path


@contextmanager
def _probe_file(there: Path, options: FileOptions) -> Iterator[OpenFile]:
    """A file of the engine's kind, whose name is gone before it is used. NoFileError."""
    if not there.is_dir():
        raise NoFileError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
    path = there / f"{PROBE_PREFIX}{secrets.token_hex(8)}"
    try:
        opened = open_file(path, options)
    except OSError as problem:
        raise NoFileError(problem.errno, problem.strerror) from problem
    finally:
        with suppress(OSError):
            path.unlink()
    try:
        yield opened
    finally:
        opened.close()


def _reason(problem: OSError) -> str:
    text = str(problem.strerror or problem).removeprefix("kvbm: ")
    return _PROBE_NAME.sub("", text).partition(";")[0].partition(", or set")[0]


def _no_file(there: Path) -> Finding:
    return note(f"not looked at: no file can be made in {there}, see disk-folder")


def _allocated(path: Path) -> int:
    with suppress(OSError):
        return path.stat().st_blocks * 512
    return 0


def _file_system(subject: Subject, path: Path) -> str:
    """Its kind, as the kernel says; empty if unknown."""
    try:
        device = os.stat(path).st_dev
    except OSError:
        return ""
    return file_system_of(device, subject.told("proc/self/mountinfo"))


def _speeds(opened: OpenFile) -> tuple[float, float]:
    """Bytes per second, written and read. OSError."""
    with mmap.mmap(-1, PIECES_AT_ONCE * PIECE_BYTES) as memory:
        array = np.frombuffer(memory, dtype=np.uint8)
        array[:] = np.random.default_rng().integers(0, 256, array.nbytes, dtype=np.uint8)
        address = int(array.ctypes.data)
        io = chosen_file_io(opened.fd, is_direct=opened.is_direct)
        try:
            written, num_bytes = _move(io, address, PROBE_BYTES, is_write=True)
            os.fsync(opened.fd)
            if not opened.is_direct:
                os.posix_fadvise(opened.fd, 0, 0, os.POSIX_FADV_DONTNEED)
            read, _ = _move(io, address, num_bytes, is_write=False)
        finally:
            is_over = io.close(PROBE_S)
            del array
        if not is_over:
            raise TimeoutError(errno.ETIMEDOUT, "the disk does not answer")
        return written, read


def _move(io: FileIo, address: int, num_bytes: int, *, is_write: bool) -> tuple[float, int]:
    """Bytes per second, and bytes: fewer than ``num_bytes`` if that takes too long."""
    started_s, moved, offset = time.monotonic(), 0, 0
    free = list(range(PIECES_AT_ONCE))
    places: dict[int, int] = {}
    while offset < num_bytes or places:
        is_late = time.monotonic() - started_s > PROBE_S
        while free and offset < num_bytes and not is_late:
            place = free.pop()
            tag = offset // PIECE_BYTES
            places[tag] = place
            io.submit(
                [Transfer(tag, offset, [(address + place * PIECE_BYTES, PIECE_BYTES)])], is_write=is_write
            )
            offset += PIECE_BYTES
        if is_late and not places:
            break
        ended = io.collect(PROBE_S * 5)
        if not ended:
            raise TimeoutError(errno.ETIMEDOUT, "the disk does not answer")
        for tag, result in ended:
            if result < 0:
                raise OSError(-result, os.strerror(-result))
            moved += result
            free.append(places.pop(tag))
    return moved / max(time.monotonic() - started_s, 1e-9), moved


def _read_by_fio(fio: str, there: Path) -> float:
    """Bytes per second; 0 if fio does not say."""
    with tempfile.NamedTemporaryFile(dir=there, prefix=PROBE_PREFIX) as file:
        command = [fio, "--name=kvbm", f"--filename={file.name}", "--rw=read", "--bs=2M", "--iodepth=8"]
        command += ["--ioengine=libaio", "--direct=1", f"--size={PROBE_BYTES}", f"--runtime={FIO_S}"]
        command += ["--output-format=json"]
        try:
            done = subprocess.run(  # noqa: S603 - the user's own fio, by its path
                command, capture_output=True, timeout=FIO_S * 5, check=False
            )
            answer: Any = json.loads(done.stdout)
            return float(answer["jobs"][0]["read"]["bw_bytes"])
        except (OSError, subprocess.TimeoutExpired, ValueError, LookupError, TypeError):
            return 0.0


CHECKS = (
    Check(
        "disk-folder", "rights in DYN_KVBM_DISK_CACHE_DIR, and what kind of file system it is", look_at_folder
    ),
    Check("disk-space", "free space against the size of the disk tier", look_at_space),
    Check("disk-direct", "O_DIRECT, reserving space, and KVBM_DISK_IO", look_at_direct),
    Check(
        "disk-speed", "how fast blocks are written and read there: a probe of seconds", look_at_speed, 45.0
    ),
)
