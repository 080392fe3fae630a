"""One direction of a block file for memory of any kind: whole sectors go straight, the rest by a bounce."""

from __future__ import annotations

import ctypes
import mmap
import threading
from collections.abc import Sequence

from kvbm_core.clock import Clock
from kvbm_core.errors import Outcome
from kvbm_core.storage.disk.aio_io import make_file_io
from kvbm_core.storage.disk.block_file import BlockFile
from kvbm_core.storage.disk.lane import Lane, Record
from kvbm_core.storage.disk.record import SECTOR_BYTES, record_bytes
from kvbm_core.types import BlockKey

BOUNCE_BYTES = 16 << 20


class Side:
    """A lane, and places for blocks whose memory is not made of whole sectors. Hold ``lock`` to use it."""

    def __init__(self, file: BlockFile, clock: Clock, *, is_write: bool, first_sequence: int = 0) -> None:
        self.lock = threading.Lock()
        io = make_file_io(file.fd, is_direct=file.is_direct)
        self.lane = Lane(file, io, first_sequence=first_sequence, clock=clock)
        self._clock = clock
        self._is_write = is_write
        self._payload_bytes = file.geometry.payload_bytes
        self._place_bytes = record_bytes(self._payload_bytes) - SECTOR_BYTES
        self._num_places = max(1, BOUNCE_BYTES // self._place_bytes)
        self._memory: mmap.mmap | None = None

    def transfer(
        self, blocks: Sequence[tuple[BlockKey, int]], buffers: Sequence[memoryview], *, deadline_s: float
    ) -> list[Outcome]:
        """Writes ``buffers[i]`` as (key, slot) ``blocks[i]``, or reads it from there. See Lane for the outcomes."""
        deadline_at_s = self._clock.now_s() + deadline_s
        outcomes = [Outcome.BUSY] * len(blocks)
        addresses = [self.address_of(buffer) for buffer in buffers]
        straight = [i for i, address in enumerate(addresses) if address is not None]
        self._move(straight, [addresses[i] or 0 for i in straight], blocks, outcomes, deadline_at_s)
        by_bounce = [i for i, address in enumerate(addresses) if address is None]
        while by_bounce and (places := self._free_places()):
            turn, by_bounce = by_bounce[: len(places)], by_bounce[len(places) :]
            for i, place in zip(turn, places, strict=False):
                if self._is_write:
                    self._at(place)[:] = buffers[i].cast("B")
            self._move(turn, places[: len(turn)], blocks, outcomes, deadline_at_s)
            for i, place in zip(turn, places, strict=False):
                if not self._is_write and outcomes[i] is Outcome.OK:
                    buffers[i].cast("B")[:] = self._at(place)
        return outcomes

    def address_of(self, buffer: memoryview) -> int | None:
        """Where the disk can read or write it as it is; None if it has to be copied."""
        if self._payload_bytes % SECTOR_BYTES or not buffer.c_contiguous or buffer.readonly:
            return None
        address = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
        return address if address % SECTOR_BYTES == 0 else None

    def close(self, timeout_s: float) -> bool:
        """See Lane.close."""
        ended = self.lane.close(timeout_s)
        if not ended and self._memory is not None:
            _KEPT.append(self._memory)
        return ended

    def _move(
        self,
        chosen: Sequence[int],
        addresses: Sequence[int],
        blocks: Sequence[tuple[BlockKey, int]],
        outcomes: list[Outcome],
        deadline_at_s: float,
    ) -> None:
        if not chosen:
            return
        records = [Record(*blocks[i], address) for i, address in zip(chosen, addresses, strict=True)]
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

    def _at(self, place: int) -> memoryview:
        return memoryview((ctypes.c_char * self._payload_bytes).from_address(place)).cast("B")


_KEPT: list[mmap.mmap] = []  # places that the kernel may still write into
