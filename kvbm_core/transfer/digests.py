"""Remembers what was in each slot, to notice bytes that changed on the way (the ``verify`` option)."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator

import numpy as np
import numpy.typing as npt

from kvbm_core.layout.view import BlockView
from kvbm_core.transfer.plan import TransferPlan


def device_blocks_of(plan: TransferPlan) -> Iterator[tuple[int, int, int]]:
    """``(group, device_block, slot)`` of every block of the plan."""
    for move in plan.moves:
        for device_block, slot in zip(move.device_blocks, move.slots, strict=True):
            yield move.group, device_block, slot


def gather(view: BlockView, storages: list[npt.NDArray[np.uint8]], block: int) -> npt.NDArray[np.uint8]:
    """The content of a block, read piece by piece: slow, and independent of how executors copy."""
    return np.concatenate([storages[s][offset : offset + n] for s, offset, n in view.regions(block)])


class SlotDigests:
    """xxh3_128 of the device bytes that went to each slot. Thread safe."""

    def __init__(self) -> None:
        import xxhash

        self._digest = xxhash.xxh3_128_digest
        self._lock = threading.Lock()
        self._of_slot: dict[int, bytes] = {}

    def record(self, slot: int, content: npt.NDArray[np.uint8]) -> None:
        """``content`` was copied to ``slot``."""
        digest = self._digest(content.data)
        with self._lock:
            self._of_slot[slot] = digest

    def forget(self, slots: Iterable[int]) -> None:
        """These slots are filled by somebody else."""
        with self._lock:
            for slot in slots:
                self._of_slot.pop(slot, None)

    def matches(self, slot: int, content: npt.NDArray[np.uint8]) -> bool:
        """False if ``slot`` was filled from other bytes; a slot that no offload filled cannot be judged."""
        with self._lock:
            expected = self._of_slot.get(slot)
        return expected is None or expected == self._digest(content.data)
