"""Every record of a block file read and checked, and damaged ones erased, by whoever is no engine."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import threading
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import xxhash

from kvbm_core.storage.disk.allocate import DirectoryBusyError, DiskError
from kvbm_core.storage.disk.files import open_regular
from kvbm_core.storage.disk.inspect import Identity, OnProgress, chunks, in_threads, judge_header, reading
from kvbm_core.storage.disk.record import (
    SECTOR_BYTES,
    FileHeader,
    RecordHeader,
    payload_digest,
    record_bytes,
    slot_offset_bytes,
)
from kvbm_core.storage.huge_pages import HUGE_PAGE_BYTES, MADV_HUGEPAGE, advise

VERIFY_THREADS = 4
READ_BYTES = 4 << 20
"""What one thread reads at a time; each has a buffer of this size, however large a record is."""
MAX_DETAILS = 20


class Verdict(NamedTuple):
    """A record looked at. ``what`` is wrong with it, empty if nothing is; ``key`` is empty if it cannot be
    known.
    """

    slot: int
    what: str = ""
    key: bytes = b""
    is_free: bool = False
    is_unreadable: bool = False


@dataclass(slots=True)
class Findings:
    """What verifying found. ``details`` are the first MAX_DETAILS of the bad ones, ``damaged`` the slots of
    all.
    """

    good: int = 0
    unreadable: int = 0
    read_bytes: int = 0
    damaged: array[int] = field(default_factory=lambda: array("Q"))
    details: list[Verdict] = field(default_factory=list)

    @property
    def records(self) -> int:
        """Good and bad."""
        return self.good + self.unreadable + len(self.damaged)

    def add(self, verdict: Verdict) -> None:
        """Counts one record; a slot that is free by now is none."""
        if verdict.is_free:
            return
        if not verdict.what:
            self.good += 1
            return
        if verdict.is_unreadable:
            self.unreadable += 1
        else:
            self.damaged.append(verdict.slot)
        if len(self.details) < MAX_DETAILS:
            self.details.append(verdict)


def occupied_slots(identity: Identity, *, on_slots: OnProgress) -> array[int]:
    """The slots that hold a record, good or not, in order. See ``scan`` for the rest."""
    occupied = array("Q")
    for chunk in chunks(identity):
        occupied.extend(chunk.occupied)
        on_slots(chunk.num_slots)
    return occupied


def verify(identity: Identity, occupied: Sequence[int], *, on_bytes: OnProgress) -> Findings:
    """Reads and checks the records in ``occupied``; ``on_bytes`` as they are read.

    A record that seems damaged while a process writes to the file is read a second time before it counts.
    OSError if the file cannot be opened.
    """
    file = identity.header
    findings = Findings()
    if file is None:
        return findings
    each_bytes = record_bytes(file.payload_bytes)
    with reading(identity.path, is_direct=True) as fd:
        checker = _Checker(fd, file)
        suspects: list[int] = []
        for verdicts in in_threads(
            checker.check, _runs(occupied, max(1, READ_BYTES // each_bytes)), VERIFY_THREADS
        ):
            for verdict in verdicts:
                if verdict.what and identity.holder is not None:
                    suspects.append(verdict.slot)
                else:
                    findings.add(verdict)
            findings.read_bytes += len(verdicts) * each_bytes
            on_bytes(len(verdicts) * each_bytes)
        for slot in suspects:  # last, so that what was being written has been written
            findings.add(checker.check(range(slot, slot + 1))[0])
    return findings


def _runs(slots: Sequence[int], most: int) -> Iterator[range]:
    """Neighbours together, at most ``most``."""
    start = 0
    for end in range(1, len(slots) + 1):
        if end == len(slots) or slots[end] != slots[end - 1] + 1 or end - start == most:
            yield range(slots[start], slots[end - 1] + 1)
            start = end


class _Checker:
    """Reads records into a buffer of the calling thread and judges them. Any thread."""

    def __init__(self, fd: int, file: FileHeader) -> None:
        self._fd = fd
        self._file = file
        self._each_bytes = record_bytes(file.payload_bytes)
        self._own = threading.local()

    def check(self, slots: range) -> list[Verdict]:
        """One verdict for each of these neighbours; those that do not fit into the buffer come one by one."""
        if len(slots) * self._each_bytes > READ_BYTES:
            return [self._check_large(slot) for slot in slots]
        buffer, each = self._buffer(), self._each_bytes
        try:
            got = self._fill(
                buffer[: len(slots) * each], slot_offset_bytes(slots[0], self._file.payload_bytes)
            )
        except OSError as error:
            if len(slots) > 1:  # one bad place shall not cost its neighbours
                return [self.check(range(slot, slot + 1))[0] for slot in slots]
            return [_unreadable(slots[0], error)]
        return [
            self._judge(slot, buffer[at * each : min((at + 1) * each, max(got, at * each))])
            for at, slot in enumerate(slots)
        ]

    def _judge(self, slot: int, record: memoryview) -> Verdict:
        header, what = judge_header(record[:SECTOR_BYTES], slot, self._file)
        payload = record[SECTOR_BYTES : SECTOR_BYTES + self._file.payload_bytes]
        return self._verdict(slot, header, what, len(payload), lambda: payload_digest(payload))

    def _check_large(self, slot: int) -> Verdict:
        """In pieces of the buffer's size."""
        buffer, at = self._buffer(), slot_offset_bytes(slot, self._file.payload_bytes)
        digest = xxhash.xxh3_128()  # what payload_digest is
        have = 0
        try:
            self._fill(buffer[:SECTOR_BYTES], at)
            header, what = judge_header(bytes(buffer[:SECTOR_BYTES]), slot, self._file)
            while not what and header is not None and have < header.payload_bytes:
                left = self._each_bytes - SECTOR_BYTES - have
                got = self._fill(buffer[: min(left, READ_BYTES)], at + SECTOR_BYTES + have)
                if not got:
                    break
                piece = buffer[: min(got, header.payload_bytes - have)]
                digest.update(piece)
                have += len(piece)
        except OSError as error:
            return _unreadable(slot, error)
        return self._verdict(slot, header, what, have, digest.digest)

    def _verdict(
        self, slot: int, header: RecordHeader | None, what: str, have_bytes: int, digest: Callable[[], bytes]
    ) -> Verdict:
        key = b"" if header is None else bytes(header.key)
        if header is None or what:
            return Verdict(slot, what, key, is_free=not what)
        if have_bytes < header.payload_bytes:
            return Verdict(slot, "the file ends before the record does", key)
        return Verdict(slot, "" if digest() == header.digest else "the payload does not verify", key)

    def _fill(self, view: memoryview, at: int) -> int:
        """Bytes read, fewer than asked for only at the file's end."""
        got = 0
        while got < len(view):
            more = os.preadv(self._fd, [view[got:]], at + got)
            got += more
            if more % SECTOR_BYTES or not more:
                break
        return got

    def _buffer(self) -> memoryview:
        if not hasattr(self._own, "view"):
            # On a page's boundary, as O_DIRECT wants it; in huge pages a read of this size is a few pieces,
            # not 1,024.
            memory = mmap.mmap(-1, READ_BYTES + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
            start = -address % HUGE_PAGE_BYTES
            advise(address + start, READ_BYTES, MADV_HUGEPAGE)
            self._own.view = memoryview(memory)[start : start + READ_BYTES]
        view: memoryview = self._own.view
        return view


def _unreadable(slot: int, error: OSError) -> Verdict:
    return Verdict(slot, error.strerror or str(error), is_unreadable=True)


# -------------------------------------------------------------------- erasing


@contextmanager
def held_for_erasing(path: Path) -> Iterator[int]:
    """``path`` locked and open for writing. DirectoryBusyError if a process has it, DiskError if that is
    impossible.
    """
    try:
        fd = open_regular(path, os.O_RDWR)
    except OSError as error:
        raise DiskError(error.errno, f"{path} cannot be written ({error.strerror})") from error
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise DirectoryBusyError(
                errno.EBUSY, f"{path} is in use by a process; stop its engine first"
            ) from error
        yield fd
    finally:
        os.close(fd)


def erase(fd: int, file: FileHeader, slots: Iterable[int]) -> int:
    """Zeros over the headers of ``slots``, durably; how many. ``fd``: see held_for_erasing. OSError if it
    fails.
    """
    count = 0
    for slot in slots:
        count += (
            os.pwrite(fd, bytes(SECTOR_BYTES), slot_offset_bytes(slot, file.payload_bytes)) == SECTOR_BYTES
        )
    os.fdatasync(fd)
    return count
