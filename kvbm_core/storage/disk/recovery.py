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
from kvbm_core.storage.disk.lane import Lane
from kvbm_core.storage.disk.payload_check import PayloadCheck
from kvbm_core.storage.disk.record import RecordHeader, record_bytes
from kvbm_core.storage.numa import leave_bound_core
from kvbm_core.types import SEQUENCE_HASH_BYTES, BlockKey

CHUNK_SLOTS = 4096
"""Read together."""
REPORT_SLOTS = 256
"""Told together: whoever takes them in does so in well under a millisecond."""
CHECKED_CHUNK_BYTES = 256 << 20
"""Whoever wants to write waits for the first chunk: a fraction of a second, also where all of it is read."""
CHUNK_DEADLINE_S = 60.0
STOP_TIMEOUT_S = 1.0
"""What a disk that is asked for something has for it when the search is to end."""
SCAN_DEPTH = 128

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


def is_block_key(key: bytes) -> bool:
    """Whether a registry takes it; a record may hold another one."""
    return len(key) == SEQUENCE_HASH_BYTES or (len(key) == SEQUENCE_HASH_BYTES + 1 and key[-1] != 0)


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
    found. That takes as long as reading all of them does, at most PayloadCheck.IN_FLIGHT_BYTES at a time.
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
        self._lane: Lane | None = None
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
        if self._lane is not None:
            self._lane.stop(STOP_TIMEOUT_S)
        self._thread.join(3 * STOP_TIMEOUT_S)
        return not (self._thread.is_alive() or self._is_left_behind)

    def _work(self) -> None:
        leave_bound_core()
        started_s = self._clock.now_s()
        try:
            if self._file.was_empty:
                self._on_chunk(self._file.geometry.num_slots, [])
            else:
                self._scan()
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

    def _scan(self) -> None:
        num_slots = self._file.geometry.num_slots
        io = self._make_io()
        self._lane = lane = Lane(self._file, io, clock=self._clock)
        check = PayloadCheck(self._file, lane, io) if self._file.options.check_at_start else None
        try:
            for start in range(0, num_slots, CHUNK_SLOTS):
                if self._stopping.is_set():
                    return
                slots = range(start, min(start + CHUNK_SLOTS, num_slots))
                headers = lane.headers(slots, deadline_s=CHUNK_DEADLINE_S)
                self._take_chunk(check, slots, headers)
        finally:
            if not lane.close(STOP_TIMEOUT_S):
                self._is_left_behind = True
                if check is not None:
                    check.keep_memory()

    def _take_chunk(
        self, check: PayloadCheck | None, slots: range, headers: Sequence[RecordHeader | None]
    ) -> None:
        """Reports those of ``headers``, of ``slots``, that are good, a few at a time."""
        most = REPORT_SLOTS
        if check is not None:
            most = min(most, max(1, CHECKED_CHUNK_BYTES // record_bytes(self._file.geometry.payload_bytes)))
        for at in range(0, len(slots), most):
            there = [header for header in headers[at : at + most] if header is not None]
            if check is not None:
                there = self._checked(check, there)
            if self._stopping.is_set():
                return
            self._report(slots[at : at + most].stop, there)
            time.sleep(0)  # whoever waits for what this thread holds, the interpreter too, has its turn

    def _checked(self, check: PayloadCheck, headers: Sequence[RecordHeader]) -> list[RecordHeader]:
        good = check.good_of(headers, self._stopping.is_set)
        self.damaged_blocks = check.outcomes[Outcome.CORRUPT]
        self.unreadable_blocks = check.outcomes[Outcome.IO_ERROR] + check.outcomes[Outcome.TIMED_OUT]
        self.read_bytes = check.read_bytes
        return good

    def _report(self, end: int, headers: Sequence[RecordHeader]) -> None:
        found = [
            Found(header.slot, header.key, header.sequence) for header in headers if is_block_key(header.key)
        ]
        self.found_blocks += len(found)
        self._on_chunk(end, found)
