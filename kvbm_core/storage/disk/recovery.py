"""What an earlier process left in a block file, found in the background."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import groupby
from typing import NamedTuple

from kvbm_core.clock import Clock, SystemClock
from kvbm_core.errors import Outcome
from kvbm_core.storage.disk.aio_io import make_file_io
from kvbm_core.storage.disk.allocate import AUTO
from kvbm_core.storage.disk.block_file import BlockFile
from kvbm_core.storage.disk.choose import chosen_file_io
from kvbm_core.storage.disk.io import FileIo
from kvbm_core.storage.disk.record import RecordHeader, SlotHeader
from kvbm_core.storage.disk.scan import SCAN_DEPTH, RecordScan
from kvbm_core.storage.numa import leave_bound_core
from kvbm_core.types import BlockKey, is_block_key

REPORT_SLOTS = 256
"""Told together: whoever takes them in does so in well under a millisecond."""
CHECKED_CHUNK_BYTES = 256 << 20
"""Whoever wants to write waits for the first chunk: a fraction of a second, also where all of it is read."""
STOP_TIMEOUT_S = 1.0
"""What a disk that is asked for something has for it when the search is to end."""

log = logging.getLogger("kvbm")


class Found(NamedTuple):
    """A record whose header verifies; ``sequence`` grows with the time of writing."""

    slot: int
    key: BlockKey
    sequence: int


OnChunk = Callable[[int, list[Found]], None]
"""``on_chunk(end, found)``: all slots below ``end`` have been looked at, ``found`` are those of the newest
chunk.
"""


def batches_of(found: Sequence[Found]) -> list[list[tuple[BlockKey, int]]]:
    """(key, slot) in the order of writing; blocks written in one call together, in the order of their
    slots.
    """
    ordered = sorted(found, key=lambda record: (record.sequence, record.slot))
    groups = groupby(ordered, key=lambda record: record.sequence)
    return [[(record.key, record.slot) for record in group] for _, group in groups]


class Recovery:
    """Looks at the header of every slot, in a thread of its own; a new file is done at once.

    ``on_chunk`` is called in that thread, slots in ascending order, the last time with ``end`` = all slots,
    also if the disk fails in between: what could not be read is simply not there. The ends of chunks follow
    from the geometry and ``check_at_start`` alone: all ranks of an engine have the same. Where the file's
    options say ``check_at_start``, what is behind the headers is read too, and only records that verify are
    found. That takes as long as reading all of them does, at most scan.IN_FLIGHT_BYTES at a time.
    ``make_io``: how it reads; as is best for the file, or as its options say, unless given.
    """

    def __init__(
        self,
        file: BlockFile,
        on_chunk: OnChunk,
        clock: Clock | None = None,
        make_io: Callable[[], FileIo] | None = None,
    ) -> None:
        self._file = file
        self._on_chunk = on_chunk
        self._clock = clock or SystemClock()
        self._make_io = make_io or self._make_best_io
        self._stopping = threading.Event()
        self._scan: RecordScan | None = None
        self._is_left_behind = False
        self._done = threading.Event()
        self.found_blocks = 0
        self.damaged_blocks = 0
        self.unreadable_blocks = 0
        self.read_bytes = 0
        """Of whole records, good or not, that were read to be checked."""
        self.failure: str | None = None
        self._thread = threading.Thread(target=self._work, name="kvbm-disk-recovery", daemon=True)
        self._thread.start()

    def wait(self, timeout_s: float) -> bool:
        """Waits until every slot has been looked at; False if time ran out."""
        return self._done.wait(timeout_s)

    def close(self) -> bool:
        """Stops it and waits for it, some seconds at most; idempotent. Not to be called from ``on_chunk``.

        False if something may still be read by the file's number: the file has to stay open.
        """
        self._stopping.set()
        if self._scan is not None:
            self._scan.stop(STOP_TIMEOUT_S)
        self._thread.join(3 * STOP_TIMEOUT_S)
        return not (self._thread.is_alive() or self._is_left_behind)

    def _work(self) -> None:
        leave_bound_core()
        started_s = self._clock.now_s()
        try:
            if self._file.was_empty:
                self._on_chunk(self._file.geometry.num_slots, [])
            else:
                self._look_through()
        except Exception as error:  # the cache begins empty; the reason must not get lost
            self.failure = f"{type(error).__name__}: {error}"
            log.warning("kvbm: %s: what is in it could not be read: %s", self._file.path, self.failure)
            self._on_chunk(self._file.geometry.num_slots, [])
        finally:
            self._done.set()
        self._tell(self._clock.now_s() - started_s)

    def _make_best_io(self) -> FileIo:
        io = self._file.options.io
        make = make_file_io if io == AUTO else partial(chosen_file_io, kind=io)
        return make(self._file.fd, is_direct=self._file.is_direct, depth=SCAN_DEPTH)

    def _tell(self, took_s: float) -> None:
        path, num_bad = self._file.path, self.damaged_blocks + self.unreadable_blocks
        if num_bad:
            log.warning(
                "kvbm: %s: of %d blocks %d are damaged and %d cannot be read; they are left out "
                "(kvbm disk verify names them; if they become more, the disk is failing)",
                path,
                self.found_blocks + num_bad,
                self.damaged_blocks,
                self.unreadable_blocks,
            )
        if self.read_bytes:
            read_gb = self.read_bytes / 1e9
            log.info(
                "kvbm: %s: %d blocks found, %.2f GB checked, in %.1f s",
                path,
                self.found_blocks,
                read_gb,
                took_s,
            )
        elif self.found_blocks:
            log.info("kvbm: %s: %d blocks found in %.1f s", path, self.found_blocks, took_s)

    def _look_through(self) -> None:
        self._scan = scan = RecordScan(self._file, self._make_io(), self._clock)
        try:
            if self._stopping.is_set():  # since before ``close`` could have stopped the scan
                return
            for slots, found in scan.chunks():
                if self._stopping.is_set():
                    return
                self._take_chunk(scan, slots, found)
        finally:
            self._is_left_behind = not scan.close(STOP_TIMEOUT_S)

    def _take_chunk(self, scan: RecordScan, slots: range, found: Sequence[SlotHeader]) -> None:
        """Reports those that are good, a few at a time."""
        checks, most = self._file.options.check_at_start, REPORT_SLOTS
        if checks:
            most = min(most, max(1, CHECKED_CHUNK_BYTES // scan.record_bytes))
        for at in range(0, len(slots), most):
            there = [each.header for each in found[at : at + most] if each.header is not None]
            if checks:
                there = self._checked(scan, there)
            if self._stopping.is_set():
                return
            self._report(slots[at : at + most].stop, there)
            time.sleep(0)  # whoever waits for what this thread holds, the interpreter too, has its turn

    def _checked(self, scan: RecordScan, headers: Sequence[RecordHeader]) -> list[RecordHeader]:
        good = []
        for header, outcome in scan.check(headers):
            self.read_bytes += scan.record_bytes
            self.damaged_blocks += outcome is Outcome.CORRUPT
            self.unreadable_blocks += outcome in (Outcome.IO_ERROR, Outcome.TIMED_OUT)
            if outcome is Outcome.OK:
                good.append(header)
            if self._stopping.is_set():
                break
        return good

    def _report(self, end: int, headers: Sequence[RecordHeader]) -> None:
        found = [
            Found(header.slot, header.key, header.sequence) for header in headers if is_block_key(header.key)
        ]
        self.found_blocks += len(found)
        self._on_chunk(end, found)
