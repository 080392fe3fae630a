"""What is in block files, looked at from outside: found, identified, counted and verified, also while an
engine runs.

Files are opened for reading only and closed again. Any thread may call anything here.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from enum import Enum
from itertools import islice
from pathlib import Path
from typing import NamedTuple, TypeVar

from kvbm_core.storage.disk.block_file import SUFFIX
from kvbm_core.storage.disk.files import NotAFileError, open_regular
from kvbm_core.storage.disk.record import (
    FIRST_SLOT_BYTES,
    FORMAT_VERSION,
    SECTOR_BYTES,
    FileHeader,
    RecordHeader,
    foreign_version,
    record_bytes,
    slot_offset_bytes,
    unpack_file,
    unpack_record,
)

SCAN_THREADS = 16
CHUNK_SLOTS = 512
AGE_LIMITS_S = (3600, 86_400, 604_800)
"""Up to an hour, a day, a week; what is older makes a fourth group."""
LIFE_FIELD = slice(16, 32)
LOCKS = Path("/proc/locks")

In = TypeVar("In")
Out = TypeVar("Out")


class Kind(str, Enum):
    """What a file turned out to be."""

    BLOCKS = "blocks"
    FOREIGN = "foreign_format"
    DAMAGED = "damaged_header"
    EMPTY = "empty"
    OTHER = "not_a_block_file"
    UNREADABLE = "unreadable"


class Holder(NamedTuple):
    """Who has the file; ``pid`` is None where it cannot be known (another container, another machine)."""

    pid: int | None


@dataclass(frozen=True, slots=True)
class Identity:
    """``header`` is there for BLOCKS alone; for the other kinds ``detail`` says what is the matter."""

    path: Path
    kind: Kind
    detail: str = ""
    version: int | None = None
    header: FileHeader | None = None
    file_bytes: int = 0
    allocated_bytes: int = 0
    holder: Holder | None = None

    @property
    def reachable_slots(self) -> int:
        """Slots that begin before the file ends: a damaged length does not make anyone read for ever."""
        if self.header is None:
            return 0
        there_bytes = max(0, self.file_bytes - FIRST_SLOT_BYTES)
        return min(self.header.num_slots, -(-there_bytes // record_bytes(self.header.payload_bytes)))


@dataclass(slots=True)
class Contents:
    """``ages``: used slots by AGE_LIMITS_S, and the older ones. ``oldest_ns``, ``newest_ns``: sequences, wall
    clock.
    """

    used: int = 0
    damaged: int = 0
    unreadable: int = 0
    oldest_ns: int | None = None
    newest_ns: int | None = None
    ages: list[int] = field(default_factory=lambda: [0] * (len(AGE_LIMITS_S) + 1))

    def add(self, sequence: int, now_ns: int) -> None:
        """Counts one used slot."""
        self.used += 1
        self.oldest_ns = sequence if self.oldest_ns is None else min(self.oldest_ns, sequence)
        self.newest_ns = sequence if self.newest_ns is None else max(self.newest_ns, sequence)
        self.ages[sum(now_ns - sequence > limit_s * 10**9 for limit_s in AGE_LIMITS_S)] += 1


OnProgress = Callable[[int], None]

# -------------------------------------------------------------------- which files there are


def find_files(root: Path, on_error: Callable[[OSError], None]) -> Iterator[Path]:
    """``root`` itself, or what it is a link to, if it is no folder; else every file below it that is named
    like a block file, in order.
    """
    if not root.is_dir():
        yield root.resolve() if root.is_symlink() else root
        return
    for folder, folders, names in os.walk(root, onerror=on_error):
        folders.sort()
        yield from (Path(folder, name) for name in sorted(names) if name.endswith(SUFFIX))


def identify(path: Path, *, is_held_by_us: bool = False) -> Identity:
    """What ``path`` is. Reads its first sector; no errors, they are a kind too."""
    try:
        with reading(path) as fd:
            status = os.fstat(fd)
            sector = os.pread(fd, SECTOR_BYTES, 0)
            holder = None if is_held_by_us else find_holder(fd)
    except NotAFileError as error:
        return Identity(path, Kind.OTHER, str(error.strerror))
    except OSError as error:
        return Identity(path, Kind.UNREADABLE, error.strerror or str(error))
    header = unpack_file(sector)
    kind, detail, version = (Kind.BLOCKS, "", FORMAT_VERSION) if header else _other_kind(sector)
    return Identity(path, kind, detail, version, header, status.st_size, status.st_blocks * 512, holder)


def _other_kind(sector: bytes) -> tuple[Kind, str, int | None]:
    if not any(sector):
        return Kind.EMPTY, "nothing has been written to it", None
    version = foreign_version(sector) if len(sector) == SECTOR_BYTES else None
    if version is not None:
        return Kind.FOREIGN, f"format {version}; this kvbm reads format {FORMAT_VERSION}", version
    if sector.startswith(b"KVBMFILE"):
        return Kind.DAMAGED, "the file's header does not verify; an engine begins it anew", None
    return Kind.OTHER, "none of kvbm's files", None


def find_holder(fd: int) -> Holder | None:
    """Who has locked the file.

    The list of locks first: reading it disturbs nobody. It lacks other containers' locks, so that a shared
    lock is tried then and given back at once; only an engine that starts in those microseconds could meet it.
    """
    status = os.fstat(fd)
    name = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
    lines: list[str] = []
    with suppress(OSError):
        lines = LOCKS.read_text(encoding="ascii").splitlines()
    for line in lines:
        fields = line.split()
        if fields[1:2] == ["FLOCK"] and fields[3:4] == ["WRITE"] and fields[5:6] == [name]:
            return Holder(int(fields[4]))
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return Holder(None)
    except OSError:  # no locks on this file system: then no engine could take the file either
        return None
    fcntl.flock(fd, fcntl.LOCK_UN)
    return None


@contextmanager
def reading(path: Path, *, is_direct: bool = False) -> Iterator[int]:
    """``path`` open for reading alone. OSError if that fails.

    ``is_direct``: past the page cache where that works, so that the disk is what is read, and the cache stays
    as it is.
    """
    fd = _open_direct(path) if is_direct else None
    if fd is None:
        fd = open_regular(path, os.O_RDONLY)
    try:
        yield fd
    finally:
        os.close(fd)


def _open_direct(path: Path) -> int | None:
    try:
        fd = open_regular(path, os.O_RDONLY | os.O_DIRECT)
    except OSError:
        return None
    try:
        with mmap.mmap(-1, SECTOR_BYTES) as sector:  # some file systems take the flag and want larger pieces
            os.preadv(fd, [sector], 0)
    except OSError:
        os.close(fd)
        return None
    return fd


# -------------------------------------------------------------------- headers alone


def judge_header(sector: bytes | memoryview, slot: int, file: FileHeader) -> tuple[RecordHeader | None, str]:
    """The header of a record of this life of the file; what is wrong with it, if anything; (None, "") for a
    free slot.

    A slot may hold what an earlier life, or another geometry, left there. That is free. A damaged header
    counts if its life is ours but for a few bits.
    """
    header = unpack_record(sector)
    if header is None:
        life = bytes(sector[LIFE_FIELD])
        alike = sum(ours == theirs for ours, theirs in zip(file.life, life, strict=False))
        return None, "the header does not verify" if alike >= len(file.life) // 2 else ""
    if header.life != file.life:
        return None, ""
    if header.slot != slot:
        return header, f"it belongs into slot {header.slot}"
    if (header.fingerprint, header.payload_bytes) != (file.fingerprint, file.payload_bytes):
        return header, "it is of another geometry than the file"
    return header, ""


def scan(identity: Identity, *, now_ns: int, on_slots: OnProgress) -> Contents:
    """Reads the header of every slot, many at a time; ``on_slots(count)`` as it goes. OSError if it does not
    open.
    """
    contents = Contents()
    for chunk in chunks(identity):
        for found in chunk.sequences:
            contents.add(found, now_ns)
        contents.damaged += len(chunk.damaged)
        contents.unreadable += chunk.unreadable
        on_slots(chunk.num_slots)
    return contents


@dataclass(slots=True)
class Chunk:
    """Neighbouring slots; ``occupied`` are those that hold a record, good or not, or that cannot be read."""

    num_slots: int
    occupied: list[int] = field(default_factory=list)
    sequences: list[int] = field(default_factory=list)
    damaged: list[int] = field(default_factory=list)
    unreadable: int = 0


def chunks(identity: Identity) -> Iterator[Chunk]:
    """All slots, in order. OSError if the file cannot be opened."""
    file, num_slots = identity.header, identity.reachable_slots
    if file is None:
        return
    with reading(identity.path) as fd:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)  # the payloads between the headers are not wanted
        ranges = (range(at, min(at + CHUNK_SLOTS, num_slots)) for at in range(0, num_slots, CHUNK_SLOTS))
        yield from in_threads(lambda slots: _scan_chunk(fd, slots, file), ranges, SCAN_THREADS)


def _scan_chunk(fd: int, slots: range, file: FileHeader) -> Chunk:
    chunk = Chunk(len(slots))
    for slot in slots:
        try:
            sector = os.pread(fd, SECTOR_BYTES, slot_offset_bytes(slot, file.payload_bytes))
        except OSError:
            chunk.unreadable += 1
            chunk.occupied.append(slot)
            continue
        header, what = judge_header(sector, slot, file)
        if what:
            chunk.damaged.append(slot)
        elif header is not None:
            chunk.sequences.append(header.sequence)
        if what or header is not None:
            chunk.occupied.append(slot)
    return chunk


def in_threads(task: Callable[[In], Out], items: Iterable[In], num_threads: int) -> Iterator[Out]:
    """``task`` of every item, in order, in threads; only so many results wait that memory stays bounded."""
    waiting: deque[Future[Out]] = deque()
    left = iter(items)
    pool = ThreadPoolExecutor(num_threads, thread_name_prefix="kvbm-disk-look")
    try:
        waiting.extend(pool.submit(task, item) for item in islice(left, 2 * num_threads))
        while waiting:
            result = waiting.popleft().result()
            waiting.extend(pool.submit(task, item) for item in islice(left, 1))
            yield result
    finally:
        pool.shutdown(cancel_futures=True)
