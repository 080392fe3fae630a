"""What is in block files, looked at from outside: found, identified, counted and verified, also while an
engine runs.

Files are opened for reading only and closed again. Any thread may call anything here.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from kvbm_core.storage.disk.aio_io import make_file_io
from kvbm_core.storage.disk.block_file import SUFFIX, BlockFileView, Geometry
from kvbm_core.storage.disk.files import NotAFileError, open_regular
from kvbm_core.storage.disk.record import (
    FIRST_SLOT_BYTES,
    FORMAT_VERSION,
    SECTOR_BYTES,
    UNREADABLE,
    FileHeader,
    foreign_version,
    record_bytes,
    unpack_file,
)
from kvbm_core.storage.disk.scan import SCAN_DEPTH, RecordScan

CLOSE_TIMEOUT_S = 5.0
AGE_LIMITS_S = (3600, 86_400, 604_800)
"""Up to an hour, a day, a week; what is older makes a fourth group."""
LOCKS = Path("/proc/locks")


class Kind(str, Enum):
    """What a file turned out to be."""

    BLOCKS = "blocks"
    FOREIGN = "foreign_format"
    DAMAGED = "damaged_header"
    EMPTY = "empty"
    OTHER = "not_a_block_file"
    UNREADABLE = "unreadable"


@dataclass(frozen=True, slots=True)
class Identity:
    """``header`` is there for BLOCKS alone; for the other kinds ``detail`` says what is the matter.
    ``is_in_use`` and ``pid``: see ``find_holder``.
    """

    path: Path
    kind: Kind
    detail: str = ""
    version: int | None = None
    header: FileHeader | None = None
    file_bytes: int = 0
    allocated_bytes: int = 0
    is_in_use: bool = False
    pid: int | None = None

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

    @property
    def occupied(self) -> int:
        """Slots with a record, good or not."""
        return self.used + self.damaged + self.unreadable

    @staticmethod
    def sum_of(several: Iterable[Contents]) -> Contents:
        """All of them together."""
        total = Contents()
        for each in several:
            total.used += each.used
            total.damaged += each.damaged
            total.unreadable += each.unreadable
            total.oldest_ns = min(filter(None, (total.oldest_ns, each.oldest_ns)), default=None)
            total.newest_ns = max(filter(None, (total.newest_ns, each.newest_ns)), default=None)
            total.ages = [sum(pair) for pair in zip(total.ages, each.ages, strict=True)]
        return total


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
            in_use = (False, None) if is_held_by_us else find_holder(fd)
    except NotAFileError as error:
        return Identity(path, Kind.OTHER, str(error.strerror))
    except OSError as error:
        return Identity(path, Kind.UNREADABLE, error.strerror or str(error))
    header = unpack_file(sector)
    kind, detail, version = (Kind.BLOCKS, "", FORMAT_VERSION) if header else _other_kind(sector)
    return Identity(path, kind, detail, version, header, status.st_size, status.st_blocks * 512, *in_use)


def _other_kind(sector: bytes) -> tuple[Kind, str, int | None]:
    if not any(sector):
        return Kind.EMPTY, "nothing has been written to it", None
    version = foreign_version(sector) if len(sector) == SECTOR_BYTES else None
    if version is not None:
        return Kind.FOREIGN, f"format {version}; this kvbm reads format {FORMAT_VERSION}", version
    if sector.startswith(b"KVBMFILE"):
        return Kind.DAMAGED, "the file's header does not verify; an engine begins it anew", None
    return Kind.OTHER, "none of kvbm's files", None


def find_holder(fd: int) -> tuple[bool, int | None]:
    """Whether a process has locked the file, and which one: None where that cannot be known (another
    container, another machine).

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
            return True, int(fields[4])
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True, None
    except OSError:  # no locks on this file system: then no engine could take the file either
        return False, None
    fcntl.flock(fd, fcntl.LOCK_UN)
    return False, None


@contextmanager
def reading(path: Path) -> Iterator[int]:
    """``path`` open for reading alone. OSError if that fails."""
    fd = open_regular(path, os.O_RDONLY)
    try:
        yield fd
    finally:
        os.close(fd)


# -------------------------------------------------------------------- what is in a file


@contextmanager
def scanning(identity: Identity) -> Iterator[RecordScan]:
    """To read the slots of a file of kind BLOCKS. OSError if it cannot be opened."""
    header = identity.header
    if header is None:
        raise ValueError(f"{identity.path} is no block file")
    geometry = Geometry(max(1, identity.reachable_slots), header.payload_bytes, header.fingerprint)
    file = BlockFileView(identity.path, geometry)
    file.life = header.life
    scan = RecordScan(file, make_file_io(file.fd, is_direct=file.is_direct, depth=SCAN_DEPTH))
    try:
        yield scan
    finally:
        if scan.close(CLOSE_TIMEOUT_S):
            file.close()


def scan(identity: Identity, *, now_ns: int, on_slots: OnProgress) -> Contents:
    """Reads the header of every slot, many at a time; ``on_slots(count)`` as it goes. OSError if it does not
    open.
    """
    contents = Contents()
    if identity.header is None:
        return contents
    with scanning(identity) as all_slots:
        for slots, found in all_slots.chunks():
            for each in found:
                if each.header is not None:
                    contents.add(each.header.sequence, now_ns)
                elif each is UNREADABLE:
                    contents.unreadable += 1
                elif each.flaw:
                    contents.damaged += 1
            on_slots(len(slots))
    return contents
