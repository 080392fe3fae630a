"""Memory between the caller's arrays and the tiers."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from kvbm_core.layout.view import BlockView, Segment
from kvbm_core.library.arrays import Bytes
from kvbm_core.transfer.executor import DeviceMemory

STAGE_BYTES = 64 << 20


class Stage:
    """Blocks that the tiers take for a device's. Safe to call from any thread.

    Callers bring arrays of their own in each call; the tiers copy from and to memory that they have known
    from the beginning.
    """

    def __init__(self, block_bytes: int, most_blocks: int) -> None:
        self.num_blocks = max(1, min(most_blocks, STAGE_BYTES // block_bytes))
        self._block_bytes = block_bytes
        self._bytes = np.zeros(self.num_blocks * block_bytes, np.uint8)
        self._changed = threading.Condition()
        self._free = list(range(self.num_blocks))

    @property
    def memory(self) -> DeviceMemory:
        """For the tiers."""
        segment = Segment(0, 0, self._block_bytes, self._block_bytes)
        return DeviceMemory((BlockView(self.num_blocks, (segment,)),), [self._bytes])

    def block(self, number: int) -> Bytes:
        """The bytes of a block."""
        return self._bytes[number * self._block_bytes : (number + 1) * self._block_bytes]

    @contextmanager
    def borrowed(self, most_blocks: int) -> Iterator[list[int]]:
        """At least one block, and at most so many; waits while others have all."""
        with self._changed:
            self._changed.wait_for(lambda: self._free)
            blocks = [self._free.pop() for _ in range(min(most_blocks, len(self._free)))]
        try:
            yield blocks
        finally:
            with self._changed:
                self._free += blocks
                self._changed.notify_all()
