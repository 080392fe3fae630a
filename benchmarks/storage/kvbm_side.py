"""kvbm's block file and its record I/O, used as a worker uses them: a batch of blocks at a time, straight
from the slab.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Sequence
from unittest.mock import patch

from benchmarks.storage.blocks import Blocks
from benchmarks.storage.sides import Rates
from benchmarks.suite import expect
from kvbm_core.errors import Outcome
from kvbm_core.storage.disk import record_io
from kvbm_core.storage.disk.block_file import BlockFile
from kvbm_core.storage.disk.io import FileIo
from kvbm_core.storage.disk.record import DIGEST_BYTES
from kvbm_core.storage.disk.record_io import Record, RecordIo

BATCH_BYTES = 64 << 20
DEADLINE_S = 60.0
CLOSE_TIMEOUT_S = 30.0

Batches = list[list[int]]
Order = Callable[[int, int, random.Random], Batches]
"""``order(num_blocks, batch_blocks, draw)``: every block once."""


def as_prompts(num_blocks: int, batch_blocks: int, draw: random.Random) -> Batches:
    """Neighbouring slots in each batch, as a prompt is stored; the batches in any order, as prompts come
    back.
    """
    batches = _cut(list(range(num_blocks)), batch_blocks)
    draw.shuffle(batches)
    return batches


def scattered(num_blocks: int, batch_blocks: int, draw: random.Random) -> Batches:
    """Single blocks at random: no two of a batch are neighbours."""
    batches: Batches = []
    for parity in (0, 1):
        blocks = list(range(parity, num_blocks, 2))
        draw.shuffle(blocks)
        batches += _cut(blocks, batch_blocks)
    draw.shuffle(batches)
    return batches


def _cut(blocks: Sequence[int], batch_blocks: int) -> Batches:
    return [list(blocks[start : start + batch_blocks]) for start in range(0, len(blocks), batch_blocks)]


class KvbmSide:
    """A Side with record I/O of its own, both ways, on ``file``, where block i is in slot i. After
    WrongAnswer only to be closed.
    """

    def __init__(
        self,
        name: str,
        file: BlockFile,
        blocks: Blocks,
        make_io: Callable[[], FileIo],
        *,
        order: Order,
        seed: int,
    ) -> None:
        self.name = name
        self._file = file
        self._blocks = blocks
        self._order = order
        self._draw = random.Random(f"{name} {seed}")
        self._writer = RecordIo(file, make_io(), first_sequence=1)
        self._reader = RecordIo(file, make_io())

    def turn(self) -> Rates:
        """See Side."""
        written = self._batches(self._blocks.source_address)
        to_read = self._batches(self._blocks.target_address)
        return self._blocks.turn(self.name, lambda: self._write(written), lambda: self._read(to_read))

    def close(self) -> None:
        """See Side."""
        ended = [record_io.close(CLOSE_TIMEOUT_S) for record_io in (self._writer, self._reader)]
        expect(all(ended), f"{self.name}: requests did not end")

    def _batches(self, address_of: Callable[[int], int]) -> list[list[Record]]:
        blocks = self._blocks
        batch_blocks = max(1, BATCH_BYTES // blocks.block_bytes)
        return [
            [Record(blocks.keys[block], block, address_of(block)) for block in batch]
            for batch in self._order(blocks.num_blocks, batch_blocks, self._draw)
        ]

    def _write(self, batches: list[list[Record]]) -> None:
        for batch in batches:
            self._expect_ok(self._writer.write(batch, deadline_s=DEADLINE_S))
        os.fdatasync(self._file.fd)

    def _read(self, batches: list[list[Record]]) -> None:
        for batch in batches:
            self._expect_ok(self._reader.read(batch, deadline_s=DEADLINE_S))

    def _expect_ok(self, outcomes: list[Outcome]) -> None:
        found = set(outcomes)
        expect(found == {Outcome.OK}, f"{self.name}: blocks ended as {', '.join(sorted(map(str, found)))}")


class WithoutChecksum(KvbmSide):
    """The same, but the bytes of a block are not looked at; its header still is. For comparison only."""

    def turn(self) -> Rates:
        """See Side."""
        with patch.object(record_io, "payload_digest", lambda payload: bytes(DIGEST_BYTES)):
            return super().turn()
