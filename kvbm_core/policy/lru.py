"""Least recently used goes first."""

from __future__ import annotations

import numpy as np

from kvbm_core.errors import IntegrityError
from kvbm_core.policy.base import Spare
from kvbm_core.policy.recency import RecencyLog, Slots, are_distinct


class LruPolicy:
    """EvictionPolicy: least recently used first, and within one call the tail first.

    Pinned slots stand outside the queue, so no step meets them; evict costs O(count + slots spared).
    """

    def __init__(self) -> None:
        self._queue = RecencyLog()
        self._pins = np.zeros(0, np.int32)

    def grow(self, capacity_slots: int) -> None:
        """See EvictionPolicy."""
        self._queue.grow(capacity_slots)
        self._pins = np.concatenate(
            [self._pins, np.zeros(max(0, capacity_slots - len(self._pins)), np.int32)]
        )

    def insert(self, slots: Slots) -> None:
        """See EvictionPolicy."""
        if not are_distinct(slots):
            raise ValueError("insert: a slot is given twice")
        if self._queue.holds(slots).any() or self._pins[slots].any():
            raise ValueError("insert: a slot is there already")
        self._queue.append(slots[::-1])

    def touch(self, slots: Slots) -> None:
        """See EvictionPolicy."""
        once = _first_mentions(slots[self._queue.holds(slots)])
        self._queue.remove(once)
        self._queue.append(once[::-1])

    def pin(self, slots: Slots) -> None:
        """See EvictionPolicy."""
        queued = self._queue.holds(slots)
        if not (queued | (self._pins[slots] > 0)).all():
            raise KeyError("pin: a slot is unknown")
        self._count(slots, 1)
        self._queue.remove(_first_mentions(slots[queued]))

    def unpin(self, slots: Slots) -> None:
        """See EvictionPolicy."""
        self._count(slots, -1)
        left = self._pins[slots]
        if (left < 0).any():
            self._count(slots, 1)
            raise KeyError("unpin: a slot has fewer pins than that")
        self._queue.append(_first_mentions(slots[left == 0])[::-1])

    def _count(self, slots: Slots, change: int) -> None:
        if are_distinct(slots):
            self._pins[slots] += change
        else:
            np.add.at(self._pins, slots, change)

    def remove(self, slots: Slots) -> None:
        """See EvictionPolicy."""
        if self._pins[slots].any():
            raise ValueError("remove: a slot is pinned")
        if not self._queue.holds(slots).all() or not are_distinct(slots):
            raise KeyError("remove: a slot is unknown, or given twice")
        self._queue.remove(slots)

    def evict(self, count_blocks: int, spare: Spare | None = None) -> Slots | None:
        """See EvictionPolicy."""
        if count_blocks < 0:
            raise ValueError(f"evict: a count is not negative ({count_blocks})")
        if count_blocks > len(self._queue):
            return None
        found: list[Slots] = [np.zeros(0, np.int32)]
        missing = count_blocks
        for slots in self._queue.oldest() if missing else ():
            start = 0
            while missing and start < len(slots):
                some = slots[start : start + missing]
                start += len(some)
                found.append(some if spare is None else some[~spare(some)])
                missing -= len(found[-1])
            if not missing:
                break
        if missing:
            return None
        victims = np.concatenate(found)
        self._queue.remove(victims)
        return victims

    def is_pinned(self, slot: int) -> bool:
        """See EvictionPolicy."""
        return bool(self._pins[slot])

    @property
    def evictable_blocks(self) -> int:
        """See EvictionPolicy."""
        return len(self._queue)

    def check_integrity(self) -> None:
        """See EvictionPolicy."""
        self._queue.check_integrity()
        if (self._pins < 0).any():
            raise IntegrityError("lru: a slot is pinned less than never")
        if self._queue.holds(np.flatnonzero(self._pins).astype(np.int32)).any():
            raise IntegrityError("lru: a slot is both pinned and evictable")


def _first_mentions(slots: Slots) -> Slots:
    """``slots`` without what is repeated: its first place, which is nearest to the head, counts."""
    if are_distinct(slots):
        return slots
    return np.array(list(dict.fromkeys(slots.tolist())), np.int32)
