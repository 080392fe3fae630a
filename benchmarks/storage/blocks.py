"""The bytes that go to the disk and come back: one half of a host slab is written from, the other is read
into.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from benchmarks.storage.sides import Rates
from benchmarks.suite import CannotRun, expect
from benchmarks.timing import timed
from kvbm_core.storage.disk.record import SECTOR_BYTES
from kvbm_core.storage.host_slab import HostSlab
from kvbm_core.storage.memory_room import available_memory
from kvbm_core.types import SEQUENCE_HASH_BYTES, BlockKey

WAIT_S = 120.0
COMPARED_BYTES = 4 << 20
SPARE_BYTES = 1 << 30
WORD_BYTES = 8

Words = npt.NDArray[np.uint64]


class Blocks:
    """``num_blocks`` of ``block_bytes`` (whole sectors), random.

    Block i is slot i of the slab, and comes back to slot ``num_blocks + i``. CannotRun if there is too little
    memory.
    """

    def __init__(self, num_blocks: int, block_bytes: int, seed: int) -> None:
        self.num_blocks = num_blocks
        self.block_bytes = block_bytes
        self.total_bytes = num_blocks * block_bytes
        if available_memory().available_bytes < 2 * self.total_bytes + SPARE_BYTES:
            raise CannotRun(
                f"too little memory: {(2 * self.total_bytes + SPARE_BYTES) / 1e9:.1f} GB must be free"
            )
        self.slab = HostSlab(2 * num_blocks, block_bytes)
        if not self.slab.wait_ready(WAIT_S):
            raise CannotRun(
                f"no memory for {2 * self.total_bytes / 1e9:.1f} GB of blocks: {self.slab.failure}"
            )
        words: Words = self.slab.array.view(np.uint64)
        self._source, self._target = words[: len(words) // 2], words[len(words) // 2 :]
        draw = np.random.default_rng(seed)
        for start in range(0, len(self._source), COMPARED_BYTES):
            piece = self._source[start : start + COMPARED_BYTES]
            piece[:] = draw.integers(0, 1 << 64, len(piece), np.uint64)
        self._stamp = 0
        names = random.Random(f"keys {seed}")
        self.keys = [BlockKey(names.randbytes(SEQUENCE_HASH_BYTES)) for _ in range(num_blocks)]

    def source_address(self, block: int) -> int:
        """Where its bytes are."""
        return self.slab.address + block * self.block_bytes

    def target_address(self, block: int) -> int:
        """Where they shall come back to."""
        return self.slab.address + self.total_bytes + block * self.block_bytes

    def turn(self, name: str, write: Callable[[], None], read: Callable[[], None]) -> Rates:
        """Both timed. Every sector has never been written like this before, and is gone before it is read."""
        self._stamp += 1
        self._source[:: SECTOR_BYTES // WORD_BYTES] = self._stamp
        write_s, _ = timed(write)
        self._target[:] = 0
        read_s, _ = timed(read)
        self.check(name)
        return Rates(self.total_bytes / write_s / 1e9, self.total_bytes / read_s / 1e9)

    def check(self, name: str) -> None:
        """What came back is what was written."""
        step = COMPARED_BYTES // WORD_BYTES
        for start in range(0, len(self._source), step):
            same = np.array_equal(self._source[start : start + step], self._target[start : start + step])
            expect(same, f"{name}: wrong bytes came back, blocks of {self.block_bytes >> 10} KiB")

    def close(self) -> None:
        """Gives the memory back; nothing may be in flight."""
        del self._source, self._target
        self.slab.close()
