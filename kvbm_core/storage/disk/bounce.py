"""Bounce buffers: places for blocks whose own memory the disk cannot use. One is taken when a block's turn
comes, then given back.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Sequence

from kvbm_core.errors import Outcome
from kvbm_core.storage.base import Memory, parts_of
from kvbm_core.storage.disk.io import TakesMemory
from kvbm_core.storage.disk.record import SECTOR_BYTES, record_bytes
from kvbm_core.storage.huge_pages import HUGE_PAGE_BYTES, MADV_HUGEPAGE, advise

BOUNCE_BYTES = 64 << 20
"""Twice the reads in flight, and more: while some are checked and copied the disk has others."""


class BounceBuffers:
    """Places of one direction, each for a block of ``payload_bytes``. One thread only, but for ``num_free``.

    As many as go into ``most_bytes`` (BOUNCE_BYTES), but one at least.
    """

    def __init__(self, payload_bytes: int, most_bytes: int | None = None) -> None:
        self.payload_bytes = payload_bytes
        self.place_bytes = record_bytes(payload_bytes) - SECTOR_BYTES
        self._num_places = max(1, (most_bytes or BOUNCE_BYTES) // self.place_bytes)
        self._memory: mmap.mmap | None = None
        self._first = 0
        self._bytes = memoryview(b"")  # of all places
        self._free: list[int] | None = None

    @property
    def num_free(self) -> int:
        """Places that can be taken."""
        return self._num_places if self._free is None else len(self._free)

    def take(self) -> int:
        """The address of a place; IndexError if there is none."""
        return self._places().pop()

    def register(self, io: TakesMemory) -> None:
        """Tells ``io`` of all places."""
        self._places()
        io.register(self._first, self._num_places * self.place_bytes, self.place_bytes)

    def _places(self) -> list[int]:
        """Those that are free; their memory is made with the first use."""
        if self._free is None:
            num_bytes = self._num_places * self.place_bytes
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
            self._memory = mmap.mmap(-1, num_bytes + HUGE_PAGE_BYTES, flags=flags)
            first = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
            first += -first % HUGE_PAGE_BYTES
            advise(first, num_bytes, MADV_HUGEPAGE)
            self._first = first
            self._bytes = memoryview((ctypes.c_char * num_bytes).from_address(first)).cast("B")
            self._free = list(range(first, first + num_bytes, self.place_bytes))
        return self._free

    def bytes_of(self, place: int) -> memoryview:
        """The memory of a block in this place."""
        start = place - self._first
        return self._bytes[start : start + self.payload_bytes]

    def give(self, place: int) -> None:
        """It can be taken again."""
        assert self._free is not None, "no place was taken"  # noqa: S101
        self._free.append(place)


class BouncedBlocks:
    """The blocks of one call that pass through ``bounce``: written from ``buffers``, or read into them."""

    def __init__(self, bounce: BounceBuffers, buffers: Sequence[Memory], *, is_write: bool) -> None:
        self.bounce = bounce
        self._buffers = buffers
        self._is_write = is_write

    def part(self, indices: Sequence[int]) -> BouncedBlocks:
        """The same for a call of these blocks alone."""
        return BouncedBlocks(
            self.bounce, [self._buffers[index] for index in indices], is_write=self._is_write
        )

    def begin(self, index: int) -> int:
        """The place of block ``index``, with its bytes if it is to be written."""
        place = self.bounce.take()
        if self._is_write:
            self._copy(place, self._buffers[index])
        return place

    def end(self, index: int, place: int, outcome: Outcome) -> None:
        """It has been moved, or not; the place is free."""
        if not self._is_write and outcome is Outcome.OK:
            self._copy(place, self._buffers[index])
        self.bounce.give(place)

    def _copy(self, place: int, buffer: Memory) -> None:
        at, start = self.bounce.bytes_of(place), 0
        for part in parts_of(buffer):
            end = start + part.nbytes
            if part.nbytes and self._is_write:
                at[start:end] = _as_bytes(part)
            elif part.nbytes:
                _as_bytes(part)[:] = at[start:end]
            start = end


def _as_bytes(part: memoryview) -> memoryview:
    return part if part.format == "B" and part.ndim == 1 else part.cast("B")
