"""What an earlier process left in a block file, found in the background."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import NamedTuple

from kvbm_core.clock import Clock, SystemClock
from kvbm_core.storage.disk.aio_io import make_file_io
from kvbm_core.storage.disk.block_file import BlockFile
from kvbm_core.storage.disk.io import FileIo
from kvbm_core.storage.disk.lane import Lane
from kvbm_core.storage.numa import leave_bound_core
from kvbm_core.types import SEQUENCE_HASH_BYTES, BlockKey

CHUNK_SLOTS = 4096
CHUNK_DEADLINE_S = 60.0
SCAN_DEPTH = 128

log = logging.getLogger("kvbm")


class Found(NamedTuple):
    """A record whose header verifies; ``sequence`` grows with the time of writing."""

    slot: int
    key: BlockKey
    sequence: int


OnChunk = Callable[[int, list[Found]], None]
"""``on_chunk(end, found)``: all slots below ``end`` have been looked at, ``found`` are those of the newest chunk."""


def is_block_key(key: bytes) -> bool:
    """Whether a registry takes it; a record may hold another one."""
    return len(key) == SEQUENCE_HASH_BYTES or (len(key) == SEQUENCE_HASH_BYTES + 1 and key[-1] != 0)


def batches_of(found: Sequence[Found]) -> list[list[tuple[BlockKey, int]]]:
    """(key, slot) in the order of writing; blocks written in one call together, in the order of their slots."""
    ordered = sorted(found, key=lambda record: (record.sequence, record.slot))
    groups = groupby(ordered, key=lambda record: record.sequence)
    return [[(record.key, record.slot) for record in group] for _, group in groups]


class Recovery:
    """Looks at the header of every slot, in a thread of its own; a new file is done at once.

    ``on_chunk`` is called in that thread, slots in ascending order, the last time with ``end`` = all slots, also if
    the disk fails in between: what could not be read is simply not there. ``make_io``: how it reads; as is best for
    the file unless given.
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
        self._done = threading.Event()
        self.found_blocks = 0
        self.failure: str | None = None
        self._thread = threading.Thread(target=self._work, name="kvbm-disk-recovery", daemon=True)
        self._thread.start()

    def wait(self, timeout_s: float) -> bool:
        """Waits until every slot has been looked at; False if time ran out."""
        return self._done.wait(timeout_s)

    def close(self) -> None:
        """Stops it and waits for it; idempotent. Not to be called from ``on_chunk``."""
        self._stopping.set()
        self._thread.join()

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
        if self.found_blocks:
            took_s = self._clock.now_s() - started_s
            log.info("kvbm: %s: %d blocks found in %.1f s", self._file.path, self.found_blocks, took_s)

    def _make_best_io(self) -> FileIo:
        return make_file_io(self._file.fd, is_direct=self._file.is_direct, depth=SCAN_DEPTH)

    def _scan(self) -> None:
        num_slots = self._file.geometry.num_slots
        lane = Lane(self._file, self._make_io(), clock=self._clock)
        try:
            for start in range(0, num_slots, CHUNK_SLOTS):
                if self._stopping.is_set():
                    return
                slots = range(start, min(start + CHUNK_SLOTS, num_slots))
                headers = lane.headers(slots, deadline_s=CHUNK_DEADLINE_S)
                found = [
                    Found(header.slot, header.key, header.sequence)
                    for header in headers
                    if header is not None and is_block_key(header.key)
                ]
                self.found_blocks += len(found)
                self._on_chunk(slots.stop, found)
        finally:
            lane.close(CHUNK_DEADLINE_S)
