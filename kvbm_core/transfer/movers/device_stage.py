"""Places for records in a device's own memory: read to by whoever reaches it, checked there, then spread."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvbm_core.storage.disk.device_digest import SECTOR_WORDS, block_factors, sector_factors
from kvbm_core.storage.disk.record import SECTOR_BYTES, payload_digest
from kvbm_core.transfer.executor import DeviceMemory, StreamMark
from kvbm_core.transfer.executors.device_rows import DeviceRows

STAGE_BYTES = 64 << 20
"""Twice the reads in flight, and more: while some are checked and spread the disk has others."""
_DIGEST_WORDS = 4


class DeviceStage(DeviceRows):
    """Whole records, header and all, of blocks of ``payload_bytes``, which are whole sectors; one in each
    place. Places are addresses on the device, at a sector's boundary.

    All of it belongs to one thread, inside ``bound``: memory is taken there, and what the device says is
    known, or done, on return.
    """

    def __init__(self, device: DeviceMemory, payload_bytes: int, most_bytes: int = STAGE_BYTES) -> None:
        super().__init__(device)
        self.place_bytes = SECTOR_BYTES + payload_bytes
        self.num_places = max(2, most_bytes // self.place_bytes)
        self.address = 0
        self._free: list[int] = []

    @property
    def gpu(self) -> int | None:
        """The number of the device; None: host memory."""
        return None if self.device.type == "cpu" else int(self.device.index)

    @property
    def staged_bytes(self) -> Any:
        """All places, a 1-D uint8 tensor from ``address`` on."""
        return self._staging

    def _allocate(self) -> None:
        num_bytes = self.num_places * self.place_bytes
        raw = self._torch.zeros(num_bytes + SECTOR_BYTES, dtype=self._torch.uint8, device=self.device)
        start = -raw.data_ptr() % SECTOR_BYTES
        self._staging = raw[start : start + num_bytes]
        self._wait()
        self._words = self._in_words(self._staging)
        self.address = int(self._staging.data_ptr())
        # The first is taken first, so that neighbours lie side by side at least in the beginning.
        self._free = list(range(self.address, self.address + num_bytes, self.place_bytes))[::-1]
        self._sector_factors = self._on_device(sector_factors())
        self._block_factors = self._on_device(block_factors(self.place_bytes // SECTOR_BYTES - 1))

    # ---------------------------------------------------------------- places

    @property
    def num_free(self) -> int:
        """See Places."""
        return len(self._free)

    def take(self) -> int:
        """A place; IndexError if there is none."""
        return self._free.pop()

    def give(self, place: int) -> None:
        """See Places."""
        self._free.append(place)

    # ---------------------------------------------------------------- what is in them

    def look(self, places: Sequence[int]) -> list[tuple[bytes, bytes]]:
        """See DeviceBlocks: of each its first sector and the digest of the rest, in one copy to the host."""
        torch = self._torch
        words = self._staging.view(torch.int32).view(self.num_places, -1, SECTOR_WORDS)
        words = words.index_select(0, self._rows(places))
        wide, hashes = words[:, 1:].to(torch.int64), []
        for factors in self._sector_factors:
            hashes.append((wide * factors).sum(-1))
        halves = torch.stack(hashes).view(torch.int32).to(torch.int64)  # [set, place, half]
        own = self._block_factors[:, None]
        sums = (halves * own[..., :-1]).sum(-1) + own[..., -1]
        digests = sums.t().contiguous().view(torch.int32)
        found = torch.cat((words[:, 0], digests), 1).cpu().numpy()
        return [(row[:-_DIGEST_WORDS].tobytes(), row[-_DIGEST_WORDS:].tobytes()) for row in found]

    def payload_digest(self, place: int) -> bytes:
        """See DeviceBlocks."""
        start = place - self.address
        payload = self._staging[start + SECTOR_BYTES : start + self.place_bytes]
        return payload_digest(payload.cpu().numpy())

    def spread(self, group: int, blocks: Sequence[int], places: Sequence[int], mark: StreamMark) -> None:
        """Writes what is in ``places`` to these device blocks, after what ``mark`` stands for."""
        if self._stream is not None and mark is not None:
            self._stream.wait_event(mark)
        numbers = self._torch.tensor(blocks, dtype=self._torch.int64, device=self.device)
        rows, word = self._rows(places), self._word_bytes
        first = self._words.storage_offset()  # as_strided counts from the storage's start
        try:
            for piece in self._pieces[group]:
                source = self._torch.as_strided(
                    self._words,
                    (piece.count, self.num_places, piece.piece_bytes // word),
                    (piece.piece_bytes // word, self.place_bytes // word, 1),
                    first + (SECTOR_BYTES + piece.content_bytes) // word,
                )
                piece.device.index_copy_(1, numbers, source.index_select(1, rows))
        finally:
            self._wait()  # also when it fails midway: who hears of it may use the blocks at once

    def _rows(self, places: Sequence[int]) -> Any:
        rows = [(place - self.address) // self.place_bytes for place in places]
        return self._torch.tensor(rows, dtype=self._torch.int64, device=self.device)

    def _on_device(self, factors: Any) -> Any:
        return self._torch.tensor(factors, dtype=self._torch.int64, device=self.device)
