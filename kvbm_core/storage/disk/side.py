"""One direction of a block file for memory of any kind: whole sectors go straight, the rest by a bounce."""

from __future__ import annotations

import ctypes
import mmap
import threading
from collections.abc import Sequence

from kvbm_core.clock import Clock
from kvbm_core.errors import Outcome
from kvbm_core.storage.base import Memory, parts_of
from kvbm_core.storage.disk.aio_io import make_file_io
from kvbm_core.storage.disk.block_file import BlockFile
from kvbm_core.storage.disk.lane import MAX_RECORD_PIECES, Lane, Record
from kvbm_core.storage.disk.record import SECTOR_BYTES, record_bytes
from kvbm_core.types import BlockKey

BOUNCE_BYTES = 16 << 20


class Side:
    """A lane, and places for blocks whose memory is not made of whole sectors. Hold ``lock`` to use it.

    ``is_straight`` False: all blocks pass through those places.
    """

    def __init__(
        self, file: BlockFile, clock: Clock, *, is_write: bool, first_sequence: int = 0, is_straight: bool = True
    ) -> None:
        self.lock = threading.Lock()
        io = make_file_io(file.fd, is_direct=file.is_direct)
        self.lane = Lane(file, io, first_sequence=first_sequence, clock=clock)
        self._clock = clock
        self._is_write = is_write
        self._is_straight = is_straight
        self._payload_bytes = file.geometry.payload_bytes
        self._place_bytes = record_bytes(self._payload_bytes) - SECTOR_BYTES
        self._num_places = max(1, BOUNCE_BYTES // self._place_bytes)
        self._memory: mmap.mmap | None = None

    def transfer(
        self, blocks: Sequence[tuple[BlockKey, int]], buffers: Sequence[Memory], *, deadline_s: float
    ) -> list[Outcome]:
        """Writes ``buffers[i]`` as (key, slot) ``blocks[i]``, or reads it from there. See Lane for the outcomes."""
        deadline_at_s = self._clock.now_s() + deadline_s
        outcomes = [Outcome.BUSY] * len(blocks)
        pieces = [self.pieces_of(buffer) for buffer in buffers]
        straight = [i for i, found in enumerate(pieces) if found]
        self._move(straight, [pieces[i] for i in straight], blocks, outcomes, deadline_at_s)
        by_bounce = [i for i, found in enumerate(pieces) if not found]
        while by_bounce and (places := self._free_places()):
            turn, by_bounce = by_bounce[: len(places)], by_bounce[len(places) :]
            for i, place in zip(turn, places, strict=False):
                if self._is_write:
                    self._copy(place, buffers[i], is_write=True)
            bounced = [((place, self._place_bytes),) for place in places[: len(turn)]]
            self._move(turn, bounced, blocks, outcomes, deadline_at_s)
            for i, place in zip(turn, places, strict=False):
                if not self._is_write and outcomes[i] is Outcome.OK:
                    self._copy(place, buffers[i], is_write=False)
        return outcomes

    def pieces_of(self, buffer: Memory) -> tuple[tuple[int, int], ...]:
        """(address, bytes) of what the disk can read or write as it is; empty if it has to be copied."""
        parts = parts_of(buffer) if self._is_straight else ()
        if len(parts) > MAX_RECORD_PIECES or any(part.readonly or part.nbytes % SECTOR_BYTES for part in parts):
            return ()
        pieces = tuple(
            (ctypes.addressof(ctypes.c_char.from_buffer(part)), part.nbytes) for part in parts if part.nbytes
        )
        return () if any(address % SECTOR_BYTES for address, _ in pieces) else pieces

    def close(self, timeout_s: float) -> bool:
        """See Lane.close."""
        ended = self.lane.close(timeout_s)
        if not ended and self._memory is not None:
            _KEPT.append(self._memory)
        return ended

    def _move(
        self,
        chosen: Sequence[int],
        pieces: Sequence[tuple[tuple[int, int], ...]],
        blocks: Sequence[tuple[BlockKey, int]],
        outcomes: list[Outcome],
        deadline_at_s: float,
    ) -> None:
        if not chosen:
            return
        records = [
            Record(*blocks[i], address=own[0][0], pieces=own if len(own) > 1 else ())
            for i, own in zip(chosen, pieces, strict=True)
        ]
        left_s = deadline_at_s - self._clock.now_s()
        move = self.lane.write if self._is_write else self.lane.read
        for i, outcome in zip(chosen, move(records, deadline_s=left_s), strict=True):
            outcomes[i] = outcome

    def _free_places(self) -> list[int]:
        """Addresses of the places that no late request holds."""
        if self._memory is None:
            self._memory = mmap.mmap(-1, self._num_places * self._place_bytes)
        first = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        places = range(first, first + self._num_places * self._place_bytes, self._place_bytes)
        return [place for place in places if not self.lane.holds(place)]

    def _copy(self, place: int, buffer: Memory, *, is_write: bool) -> None:
        at = memoryview((ctypes.c_char * self._payload_bytes).from_address(place)).cast("B")
        for part in parts_of(buffer):
            if part.nbytes and is_write:
                at[: part.nbytes] = part.cast("B")
            elif part.nbytes:
                part.cast("B")[:] = at[: part.nbytes]
            at = at[part.nbytes :]


_KEPT: list[mmap.mmap] = []  # places that the kernel may still write into
