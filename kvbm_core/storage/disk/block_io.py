"""One direction of a block file for memory of any kind: whole sectors go straight, the rest by bounce
buffers.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from functools import partial

from kvbm_core.clock import Clock
from kvbm_core.errors import Outcome
from kvbm_core.storage.base import Memory, parts_of
from kvbm_core.storage.disk.aio_io import make_file_io
from kvbm_core.storage.disk.allocate import AUTO
from kvbm_core.storage.disk.block_file import BlockFile
from kvbm_core.storage.disk.bounce import BounceBuffers, BouncedBlocks
from kvbm_core.storage.disk.choose import chosen_file_io
from kvbm_core.storage.disk.record import SECTOR_BYTES
from kvbm_core.storage.disk.record_io import MAX_RECORD_PIECES, Record, RecordIo
from kvbm_core.types import BlockKey


class BlockIo:
    """A RecordIo, and bounce buffers for blocks whose memory is not made of whole sectors. Hold ``lock`` to
    use it.

    ``is_straight`` False: all blocks pass through those places. DiskError if the file's options name a way of
    I/O that cannot be had.
    """

    def __init__(
        self,
        file: BlockFile,
        clock: Clock,
        *,
        is_write: bool,
        first_sequence: int = 0,
        is_straight: bool = True,
    ) -> None:
        self.lock = threading.Lock()
        io = file.options.io
        make_io = make_file_io if io == AUTO else partial(chosen_file_io, kind=io)
        file_io = make_io(file.fd, is_direct=file.is_direct)
        self.record_io = RecordIo(file, file_io, first_sequence=first_sequence, clock=clock)
        self._clock = clock
        self._is_write = is_write
        self._is_straight = is_straight
        self._bounce = BounceBuffers(file.geometry.payload_bytes)

    def transfer(
        self, blocks: Sequence[tuple[BlockKey, int]], buffers: Sequence[Memory], *, deadline_s: float
    ) -> list[Outcome]:
        """Writes ``buffers[i]`` as (key, slot) ``blocks[i]``, or reads it from there, twice if need be.

        See RecordIo for the outcomes.

        BUSY: late requests hold all places that it would have to pass through.
        """
        deadline_at_s = self._clock.now_s() + deadline_s
        outcomes = [Outcome.BUSY] * len(blocks)
        pieces = [self.pieces_of(buffer) for buffer in buffers]
        straight = {
            i: Record(*blocks[i], own[0][0], own if len(own) > 1 else ())
            for i, own in enumerate(pieces)
            if own
        }
        self._move(straight, outcomes, deadline_at_s, keep=buffers)
        by_bounce = {i: Record(*blocks[i], 0) for i, own in enumerate(pieces) if not own}
        self.record_io.reap()
        if self._bounce.num_free:
            bounced = BouncedBlocks(self._bounce, [buffers[i] for i in by_bounce], is_write=self._is_write)
            self._move(by_bounce, outcomes, deadline_at_s, bounced)
        return outcomes

    def pieces_of(self, buffer: Memory) -> tuple[tuple[int, int], ...]:
        """(address, bytes) of what the disk can read or write as it is; empty if it has to be copied."""
        parts = parts_of(buffer) if self._is_straight else ()
        if len(parts) > MAX_RECORD_PIECES or any(
            part.readonly or part.nbytes % SECTOR_BYTES for part in parts
        ):
            return ()
        pieces = tuple(
            (ctypes.addressof(ctypes.c_char.from_buffer(part)), part.nbytes) for part in parts if part.nbytes
        )
        return () if any(address % SECTOR_BYTES for address, _ in pieces) else pieces

    def close(self, timeout_s: float) -> bool:
        """See RecordIo.close."""
        return self.record_io.close(timeout_s)

    def _move(
        self,
        records: dict[int, Record],
        outcomes: list[Outcome],
        deadline_at_s: float,
        bounced: BouncedBlocks | None = None,
        keep: object = None,
    ) -> None:
        if records:
            left_s = deadline_at_s - self._clock.now_s()
            move = self.record_io.write if self._is_write else self.record_io.read
            moved = move(list(records.values()), deadline_s=left_s, bounced=bounced, keep=keep)
            for i, outcome in zip(records, moved, strict=True):
                outcomes[i] = outcome
