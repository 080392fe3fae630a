"""Blocks of the own disk for other instances: read beside the mover, into memory that is no host slot."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvbm_core.clock import SystemClock
from kvbm_core.errors import Outcome
from kvbm_core.peers.copies import Bytes
from kvbm_core.storage.disk.block_io import BlockIo
from kvbm_core.transfer.movers.disk_file import RankFile
from kvbm_core.types import BlockKey

STOP_TIMEOUT_S = 1.0
CLOSE_TIMEOUT_S = 1.0


class DiskCopies:
    """Reads of one block file. ``read`` by one thread, ``close`` by any: the file closes it first."""

    def __init__(self, file: RankFile) -> None:
        opened = file.opened
        self._payload_bytes = opened.geometry.payload_bytes
        # By way of its own places: what a late request still writes reaches nothing of ours.
        self._io = BlockIo(opened, SystemClock(), is_write=False, is_straight=False)
        self._is_closed = False
        file.stop_first(self.close)

    def read(
        self, blocks: Sequence[tuple[BlockKey, int]], copies: Sequence[Bytes], *, deadline_s: float
    ) -> list[Outcome]:
        """Fills ``copies[i]`` with the first bytes of (key, place) ``blocks[i]``. Outcomes: see RecordIo."""
        whole = [
            copy if len(copy) == self._payload_bytes else np.empty(self._payload_bytes, np.uint8)
            for copy in copies
        ]
        with self._io.lock:
            if self._is_closed:
                return [Outcome.REJECTED] * len(blocks)
            outcomes = self._io.transfer(blocks, [one.data for one in whole], deadline_s=deadline_s)
        for copy, one in zip(copies, whole, strict=True):
            if one is not copy:  # blocks on disk are filled up to whole sectors
                np.copyto(copy, one[: len(copy)])
        return outcomes

    def close(self) -> bool:
        """See DiskMover.stop_others."""
        self._io.record_io.stop(STOP_TIMEOUT_S)
        with self._io.lock:
            is_first, self._is_closed = not self._is_closed, True
            return self._io.close(CLOSE_TIMEOUT_S) if is_first else True
