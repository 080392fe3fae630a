"""Linux AIO with nothing around it: what the disk gives to whoever keeps as many bytes in memory as kvbm
does.

fio reads all of a file into the same few buffers, which stay in the CPU's cache. A cache of blocks cannot:
each block has a place of its own. On virtual disks, whose host copies the bytes into the guest, that alone
costs up to a third of fio's rate.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable

from benchmarks.storage.blocks import Blocks
from benchmarks.storage.sides import Rates
from benchmarks.suite import expect
from kvbm_core.storage.disk.io import FileIo, Transfer

SUBMITTED = 32
IN_FLIGHT = 256
DEADLINE_S = 60.0
CLOSE_TIMEOUT_S = 30.0


class AioSide:
    """A Side that moves each block by one request in random order: no header, no checksum, no bookkeeping.

    Block i is at ``i * block_bytes`` of the file ``fd``, which it leaves without any header: the file must be
    of no use to anybody else afterwards.
    """

    def __init__(
        self, name: str, fd: int, blocks: Blocks, make_io: Callable[[], FileIo], *, seed: int
    ) -> None:
        self.name = name
        self._fd = fd
        self._blocks = blocks
        self._io = make_io()
        self._draw = random.Random(f"{name} {seed}")

    def turn(self) -> Rates:
        """See Side."""
        written = self._transfers(self._blocks.source_address)
        to_read = self._transfers(self._blocks.target_address)
        return self._blocks.turn(
            self.name, lambda: self._write(written), lambda: self._move(to_read, is_write=False)
        )

    def close(self) -> None:
        """See Side."""
        expect(self._io.close(CLOSE_TIMEOUT_S), f"{self.name}: requests did not end")

    def _transfers(self, address_of: Callable[[int], int]) -> list[list[Transfer]]:
        size, order = self._blocks.block_bytes, list(range(self._blocks.num_blocks))
        self._draw.shuffle(order)
        transfers = [Transfer(block, block * size, ((address_of(block), size),)) for block in order]
        return [transfers[start : start + SUBMITTED] for start in range(0, len(transfers), SUBMITTED)]

    def _write(self, transfers: list[list[Transfer]]) -> None:
        self._move(transfers, is_write=True)
        os.fdatasync(self._fd)

    def _move(self, transfers: list[list[Transfer]], *, is_write: bool) -> None:
        for some in transfers:
            self._io.submit(some, is_write=is_write)
            self._collect(IN_FLIGHT)
        self._collect(0)

    def _collect(self, most_in_flight: int) -> None:
        while self._io.in_flight > most_in_flight:
            ended = self._io.collect(DEADLINE_S)
            expect(bool(ended), f"{self.name}: nothing ended within {DEADLINE_S:.0f} s")
            expect(
                all(moved == self._blocks.block_bytes for _, moved in ended), f"{self.name}: a request failed"
            )
