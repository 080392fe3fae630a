"""One file of slots: its identity, its life, its place for each record."""

from __future__ import annotations

import logging
import mmap
import os
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from kvbm_core.storage.disk.allocate import (
    DiskError,
    FileOptions,
    OpenFile,
    disk_error,
    open_file,
    open_to_read,
    reserve,
)
from kvbm_core.storage.disk.record import (
    FIRST_SLOT_BYTES,
    FORMAT_VERSION,
    MAX_PAYLOAD_BYTES,
    SECTOR_BYTES,
    FileHeader,
    foreign_version,
    pack_file,
    record_bytes,
    slot_offset_bytes,
    unpack_file,
)

LIFE_BYTES = 16
SUFFIX = ".blocks"

log = logging.getLogger("kvbm")


@dataclass(frozen=True, slots=True)
class Geometry:
    """What the slots are for: ``num_slots`` blocks of ``payload_bytes``; ``fingerprint``: 16 bytes, what they
    mean.
    """

    num_slots: int
    payload_bytes: int
    fingerprint: bytes

    def __post_init__(self) -> None:
        is_possible = self.num_slots > 0 and 0 < self.payload_bytes <= MAX_PAYLOAD_BYTES
        if not is_possible or len(self.fingerprint) != LIFE_BYTES:
            raise ValueError(f"no geometry of a block file: {self}")

    @property
    def file_bytes(self) -> int:
        """Of the whole file."""
        return FIRST_SLOT_BYTES + self.num_slots * record_bytes(self.payload_bytes)


class BlockFile:
    """An open block file. Opening one that fits takes up what is in it; another one of this version is begun
    anew.

    Raises DiskError (one line) if the directory cannot hold it, or another version of kvbm wrote it, and
    DirectoryBusyError if another process has it. One thread only.
    """

    def __init__(self, path: Path, geometry: Geometry, options: FileOptions | None = None) -> None:
        self.geometry = geometry
        self.options = options or FileOptions()
        self.was_empty = True
        self._open: OpenFile = open_file(path, self.options)
        try:
            self.life = self._take_up()
            reserve(self._open, geometry.file_bytes, self.options)
            self._write_header()
        except BaseException as error:
            self._open.close()
            if isinstance(error, OSError) and not isinstance(error, DiskError):
                raise disk_error(path, error) from error
            raise

    @property
    def fd(self) -> int:
        """The file descriptor; -1 once closed."""
        return self._open.fd

    @property
    def path(self) -> Path:
        """Where it is."""
        return self._open.path

    @property
    def header(self) -> FileHeader:
        """As it stands in the file's first sector."""
        return FileHeader(
            self.life, self.geometry.fingerprint, self.geometry.payload_bytes, self.geometry.num_slots
        )

    @property
    def is_direct(self) -> bool:
        """Whether it is read and written past the page cache."""
        return self._open.is_direct

    @property
    def is_reserved(self) -> bool:
        """Whether its space is its own, so that the disk cannot fill up under it."""
        return self._open.is_reserved

    def begin_new_life(self) -> None:
        """Forgets all records, durably: they belong to a life that is over. OSError if the disk does not take
        it.
        """
        self.life = secrets.token_bytes(LIFE_BYTES)
        self._write_header()
        os.fdatasync(self.fd)

    def erase(self, slots: Iterable[int]) -> None:
        """Forgets the records in these slots, durably. What they held stays there until others are written
        over it, without a header that says what it is. OSError if the disk does not take it.
        """
        with mmap.mmap(-1, SECTOR_BYTES) as sector:
            for slot in slots:
                offset = slot_offset_bytes(slot, self.geometry.payload_bytes)
                if os.pwritev(self.fd, [sector], offset) != SECTOR_BYTES:
                    raise DiskError(f"kvbm: {self.path}: a record could not be erased")
        os.fdatasync(self.fd)

    def close(self) -> None:
        """Idempotent."""
        self._open.close()

    def _take_up(self) -> bytes:
        sector = _read_sector(self.fd)
        version = foreign_version(sector) if sector else None
        if version is not None:
            raise DiskError(
                f"kvbm: {self.path} is of format {version}, this kvbm writes {FORMAT_VERSION}; it "
                "is left as it is"
            )
        header = unpack_file(sector) if sector else None
        known = None if header is None else (header.payload_bytes, header.fingerprint)
        if header is not None and known == (self.geometry.payload_bytes, self.geometry.fingerprint):
            self.was_empty = False
            return header.life
        return secrets.token_bytes(LIFE_BYTES)

    def _write_header(self) -> None:
        with mmap.mmap(-1, SECTOR_BYTES) as sector:  # page-aligned, as direct writes want it
            sector[:] = pack_file(self.header)
            written = os.pwritev(self.fd, [sector], 0)
        if written != SECTOR_BYTES:
            raise DiskError(f"kvbm: {self.path}: the file's header could not be written")


class BlockFileView(BlockFile):
    """A block file that another process has open, to be read; it cannot be begun anew.

    ``life`` is for the caller to set: only its writer knows. OSError if it cannot be opened.
    """

    def __init__(self, path: Path, geometry: Geometry, options: FileOptions | None = None) -> None:
        self.geometry = geometry
        self.options = options or FileOptions()
        self.was_empty = False
        self.life = bytes(LIFE_BYTES)
        self._open = open_to_read(path, self.options)


def _read_sector(fd: int) -> bytes:
    with mmap.mmap(-1, SECTOR_BYTES) as sector:
        return sector[:SECTOR_BYTES] if os.preadv(fd, [sector], 0) == SECTOR_BYTES else b""
