"""Which block is in which slot of a block file, told by the process that writes it to others that read it.

A file beside the block file. Version 1, little-endian: a header, then entries, the latest last; the last
entry of a slot, and of a key, counts. It is begun anew whenever the block file is opened or cleared, and put
in place by rename, so a reader that has it open can tell. It is a hint: what an entry leads to is checked by
the record's own header and digest. So nothing of it has to be complete, or to survive a crash.
"""

from __future__ import annotations

import logging
import os
import secrets
import struct
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import xxhash

from kvbm_core.storage.disk.allocate import DiskError
from kvbm_core.storage.disk.block_file import LIFE_BYTES, BlockFile, Geometry
from kvbm_core.storage.disk.files import open_regular
from kvbm_core.storage.disk.record import MAX_KEY_BYTES
from kvbm_core.types import BlockKey

LOG_SUFFIX = ".slots"
LOG_VERSION = 1
ENTRY_BYTES = 64
HEADER_BYTES = 2 * ENTRY_BYTES  # whole entries: none of them crosses a page's boundary
MAX_ENTRIES_PER_SLOT = 4
"""With more of them the log is written again, with one for each slot."""
CHUNK_ENTRIES = 4096
"""What a reader takes in at once: some milliseconds."""

_MAGIC = b"KVBMSLOT"
# magic, version, bytes of an entry; id of the log, life, fingerprint, bytes of a block, slots; xxh3_64 of all
# before
_HEADER = struct.Struct("<8sHH4x16s16s16sQQ")
# key, slot, bytes of the key; xxh3_64 of all before, seeded with the id of the log
_ENTRY = struct.Struct("<40sQH6x")
_SUM = struct.Struct("<Q")
_SUM_AT = ENTRY_BYTES - _SUM.size

Block = tuple[BlockKey, int]
"""A key and its slot."""

log = logging.getLogger("kvbm")


class LogHeader(NamedTuple):
    """``log_id``: 16 random bytes; entries of another log do not verify. The rest as in the block file's
    header.
    """

    log_id: bytes
    life: bytes
    fingerprint: bytes
    payload_bytes: int
    num_slots: int


def log_path(path: Path) -> Path:
    """The log of the block file ``path``."""
    return path.with_suffix(LOG_SUFFIX)


def withdraw_log(path: Path) -> None:
    """Readers of the block file ``path`` find nothing from now on. DiskError if the log cannot be removed."""
    try:
        log_path(path).unlink(missing_ok=True)
    except OSError as error:
        raise DiskError(error.errno, f"kvbm: {log_path(path)}: {error.strerror}; remove it") from error


def pack_header(header: LogHeader) -> bytes:
    """HEADER_BYTES of them."""
    body = _HEADER.pack(_MAGIC, LOG_VERSION, ENTRY_BYTES, *header)
    return (body + _SUM.pack(xxhash.xxh3_64_intdigest(body))).ljust(HEADER_BYTES, b"\0")


def unpack_header(data: bytes) -> LogHeader | None:
    """The header of a log, or None if these bytes are none of this version."""
    if len(data) != HEADER_BYTES or not data.startswith(_MAGIC):
        return None
    fields = _HEADER.unpack_from(data)
    if _SUM.unpack_from(data, _HEADER.size)[0] != xxhash.xxh3_64_intdigest(data[: _HEADER.size]):
        return None
    return LogHeader(*fields[3:]) if fields[1:3] == (LOG_VERSION, ENTRY_BYTES) else None


def pack_entry(block: Block, header: LogHeader) -> bytes:
    """ENTRY_BYTES of them. ValueError for a key that no record holds."""
    key, slot = block
    if not 0 < len(key) <= MAX_KEY_BYTES:
        raise ValueError(f"a key of {len(key)} bytes does not go into a record")
    body = _ENTRY.pack(key, slot, len(key))
    return body + _SUM.pack(xxhash.xxh3_64_intdigest(body, _seed(header)))


def unpack_entry(data: bytes, header: LogHeader) -> Block | None:
    """The block of an entry of this log; None if it does not verify, or names a slot that is not there."""
    body = data[:_SUM_AT]
    if len(data) != ENTRY_BYTES or _SUM.unpack_from(data, _SUM_AT)[0] != xxhash.xxh3_64_intdigest(
        body, _seed(header)
    ):
        return None
    key, slot, key_bytes = _ENTRY.unpack(body)
    is_sound = 0 < key_bytes <= MAX_KEY_BYTES and slot < header.num_slots
    return (BlockKey(key[:key_bytes]), slot) if is_sound else None


def _seed(header: LogHeader) -> int:
    return int.from_bytes(header.log_id[:8], "little")


class SlotLog:
    """The writer's end, for whoever has the block file open. Safe to call from any thread.

    What the disk does not take is logged and missing for readers; the next ``append`` tries to tell them all
    again. DiskError if a log of earlier can neither be replaced nor removed.
    """

    def __init__(self, file: BlockFile) -> None:
        self._file = file
        self._path = log_path(file.path)
        self._lock = threading.Lock()
        self._newest: dict[int, bytes] = {}
        """Each slot's last entry, in the order in which they were appended."""
        self._fd = -1
        self._identity = (0, 0)
        self._end_bytes = 0
        self._is_failing = False
        self.begin()

    def begin(self) -> None:
        """An empty log of the file's present life in place of whatever is there."""
        geometry = self._file.geometry
        with self._lock:
            self._newest.clear()
            self._header = LogHeader(
                secrets.token_bytes(LIFE_BYTES),
                self._file.life,
                geometry.fingerprint,
                geometry.payload_bytes,
                geometry.num_slots,
            )
            if not self._rewrite():
                withdraw_log(self._file.path)

    def append(self, blocks: Sequence[Block]) -> None:
        """These blocks can be read from now on. The caller sees to the order of calls that concern the same
        slots.
        """
        if not blocks:
            return
        with self._lock:
            entries = [pack_entry(block, self._header) for block in blocks]
            for (_, slot), entry in zip(blocks, entries, strict=True):
                self._newest.pop(slot, None)
                self._newest[slot] = entry
            data = b"".join(entries)
            most_bytes = HEADER_BYTES + MAX_ENTRIES_PER_SLOT * self._header.num_slots * ENTRY_BYTES
            if self._end_bytes + len(data) > most_bytes or not self._is_whole():
                self._rewrite()
                return
            start_bytes, self._end_bytes = self._end_bytes, self._end_bytes + len(data)
            with suppress(OSError):  # whatever is not written: then the file is shorter than it should be
                os.pwrite(self._fd, data, start_bytes)

    def close(self) -> None:
        """Idempotent. The log stays: what it says is still so."""
        with self._lock:
            fd, self._fd = self._fd, -1
            if fd >= 0:
                os.close(fd)

    def _is_whole(self) -> bool:
        """Whether the file is still in its place, and as long as what was written."""
        try:
            status = os.stat(self._path)
        except OSError:
            return False
        return _identity_of(status) == self._identity and status.st_size == self._end_bytes

    def _rewrite(self) -> bool:
        """A new file with one entry for each slot, put in place; False if the disk does not take it."""
        data = pack_header(self._header) + b"".join(self._newest.values())
        temporary = self._path.with_name(self._path.name + "-new")
        try:
            with suppress(FileNotFoundError):
                temporary.unlink()  # left by a process that was killed, or a pipe that would take it all
            fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                if os.write(fd, data) != len(data):
                    raise DiskError("the disk is full")
                temporary.rename(self._path)
            except BaseException:
                os.close(fd)
                with suppress(OSError):
                    temporary.unlink()
                raise
        except OSError as error:
            if not self._is_failing:
                log.warning("kvbm: %s: %s; other processes do not see new blocks", self._path, error)
            self._is_failing = True
            return False
        old, self._fd = self._fd, fd
        if old >= 0:
            os.close(old)
        self._identity, self._end_bytes, self._is_failing = _identity_of(os.fstat(fd)), len(data), False
        return True


class LogFollower:
    """A reader's end: what was appended since. One thread at a time.

    ``header``: of the log that is followed, another object each time that one is opened; None: there is none,
    or it is of other blocks.
    """

    def __init__(self, path: Path, geometry: Geometry) -> None:
        self.header: LogHeader | None = None
        self._path = log_path(path)
        self._meaning = (geometry.fingerprint, geometry.payload_bytes)
        self._fd = -1
        self._identity = (0, 0)
        self._at_bytes = 0
        self._settled_bytes = 0

    def read_on(self) -> list[Block] | None:
        """The next entries, CHUNK_ENTRIES at most, those that do not verify left out; None if there are none
        now.

        Look at ``header`` afterwards: the entries are of that log.
        """
        try:
            size_bytes = self._size_bytes()
            num_entries = min(CHUNK_ENTRIES, (size_bytes - self._at_bytes) // ENTRY_BYTES)
            if self.header is None or num_entries < 1:
                return None
            data = os.pread(self._fd, num_entries * ENTRY_BYTES, self._at_bytes)
        except OSError:
            self.close()
            return None
        if len(data) < ENTRY_BYTES:  # it was cut a moment ago
            return None
        blocks: list[Block] = []
        for at in range(0, len(data) // ENTRY_BYTES * ENTRY_BYTES, ENTRY_BYTES):
            block = unpack_entry(data[at : at + ENTRY_BYTES], self.header)
            if block is not None:
                blocks.append(block)
            elif self._at_bytes >= self._settled_bytes:
                # It may have been read before all of it was there: the next call looks at it once more.
                self._settled_bytes = size_bytes
                break
            self._at_bytes += ENTRY_BYTES
        return blocks

    def close(self) -> None:
        """Idempotent; there is no log until the next ``read_on``."""
        self.header = None
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _size_bytes(self) -> int:
        """Of the log at the path; it is opened if another one was open, or it was cut. OSError if that
        fails.
        """
        status = os.stat(self._path)
        is_same = self.header is not None and _identity_of(status) == self._identity
        if is_same and status.st_size >= self._at_bytes:
            return status.st_size
        self.close()
        self._fd = open_regular(self._path, os.O_RDONLY)
        header = unpack_header(os.pread(self._fd, HEADER_BYTES, 0))
        if header is None or (header.fingerprint, header.payload_bytes) != self._meaning:
            self.close()
            return 0
        status = os.fstat(self._fd)
        self.header, self._identity = header, _identity_of(status)
        self._at_bytes, self._settled_bytes = HEADER_BYTES, 0
        return status.st_size


def _identity_of(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino
