"""Every record of a block file read and checked, and damaged ones erased, by whoever is no engine."""

from __future__ import annotations

import errno
import fcntl
import os
from array import array
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from kvbm_core.errors import Outcome
from kvbm_core.storage.disk.allocate import DirectoryBusyError, DiskError
from kvbm_core.storage.disk.files import open_regular
from kvbm_core.storage.disk.inspect import Identity, OnProgress, scanning
from kvbm_core.storage.disk.record import (
    SECTOR_BYTES,
    UNREADABLE,
    FileHeader,
    RecordHeader,
    SlotHeader,
    slot_offset_bytes,
)
from kvbm_core.storage.disk.scan import RecordScan

MAX_DETAILS = 20


class Verdict(NamedTuple):
    """A record looked at. ``what`` is wrong with it, empty if nothing is; ``key`` is empty if it cannot be
    known.
    """

    slot: int
    what: str = ""
    key: bytes = b""
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
        """Counts one record."""
        if not verdict.what:
            self.good += 1
            return
        if verdict.is_unreadable:
            self.unreadable += 1
        else:
            self.damaged.append(verdict.slot)
        if len(self.details) < MAX_DETAILS:
            self.details.append(verdict)


def verify(identity: Identity, *, on_bytes: OnProgress) -> Findings:
    """Reads and checks all records; ``on_bytes`` as they are read.

    A record that seems damaged while a process writes to the file is read a second time before it counts.
    OSError if the file cannot be opened.
    """
    findings = Findings()
    if identity.header is None:
        return findings
    with scanning(identity) as scan:
        suspects: list[int] = []
        for slots, found in scan.chunks():
            for verdict in _verdicts(scan, identity, slots, found):
                if verdict.what and identity.is_in_use:
                    suspects.append(verdict.slot)
                else:
                    findings.add(verdict)
                findings.read_bytes += scan.record_bytes
                on_bytes(scan.record_bytes)
        for slot in suspects:  # last, so that what was being written has been written
            for verdict in _verdicts(scan, identity, [slot], scan.headers([slot])):
                findings.add(verdict)
    return findings


def _verdicts(
    scan: RecordScan, identity: Identity, slots: Sequence[int], found: Sequence[SlotHeader]
) -> Iterator[Verdict]:
    """One for each record; one that was overwritten between its header and its bytes is none."""
    whole: list[RecordHeader] = []
    for slot, each in zip(slots, found, strict=True):
        if each.flaw:
            yield Verdict(slot, each.flaw, each.key, is_unreadable=each is UNREADABLE)
        elif each.header is not None:
            end_bytes = slot_offset_bytes(slot, each.header.payload_bytes) + scan.record_bytes
            if end_bytes <= identity.file_bytes:
                whole.append(each.header)
            else:
                yield Verdict(slot, "the file ends before the record does", each.header.key)
    for header, outcome in scan.check(whole):
        if outcome in (Outcome.OK, Outcome.CORRUPT):
            what = "" if outcome is Outcome.OK else "the payload does not verify"
            yield Verdict(header.slot, what, header.key)
        elif outcome in (Outcome.IO_ERROR, Outcome.TIMED_OUT):
            yield Verdict(header.slot, UNREADABLE.flaw, header.key, is_unreadable=True)


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
