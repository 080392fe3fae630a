"""Twins of the product's fast parts: slow, and so plain that they can be seen to be right."""

from __future__ import annotations

from kvbm_core.policy.base import Spare
from kvbm_core.policy.recency import Slots, as_slots


class NaiveLru:
    """LruPolicy's twin: every slot has a stamp of its last use, and evict sorts them all."""

    def __init__(self) -> None:
        self._call = 0
        self._stamps: dict[int, tuple[int, int]] = {}
        self._pins: dict[int, int] = {}
        self._demoted: set[int] = set()

    def _use(self, slots: list[int]) -> None:
        # A later call is more recent; within a call an earlier position is.
        self._call += 1
        for position, slot in enumerate(slots):
            if not self.is_pinned(slot):
                self._stamps[slot] = max(self._stamps[slot], (self._call, -position))

    def grow(self, capacity_slots: int) -> None:
        """See EvictionPolicy."""

    def insert(self, slots: Slots) -> None:
        """See EvictionPolicy."""
        numbers = slots.tolist()
        if len(set(numbers)) != len(numbers) or any(slot in self._stamps for slot in numbers):
            raise ValueError("insert: a slot is not new")
        for slot in numbers:
            self._stamps[slot] = (0, 0)
            self._pins[slot] = 0
        self._use(numbers)

    def touch(self, slots: Slots) -> None:
        """See EvictionPolicy."""
        numbers = [slot for slot in slots.tolist() if slot in self._stamps]
        self._demoted.difference_update(numbers)
        self._use(numbers)

    def demote(self, slots: Slots) -> None:
        """See EvictionPolicy."""
        numbers = [slot for slot in slots.tolist() if slot in self._stamps and slot not in self._demoted]
        self._demoted.update(numbers)
        self._use(numbers)

    def pin(self, slots: Slots) -> None:
        """See EvictionPolicy."""
        for slot in slots.tolist():
            if slot not in self._stamps:
                raise KeyError(slot)
        for slot in slots.tolist():
            self._pins[slot] += 1

    def unpin(self, slots: Slots) -> None:
        """See EvictionPolicy."""
        numbers = slots.tolist()
        for slot in numbers:
            if self._pins.get(slot, 0) < numbers.count(slot):
                raise KeyError(slot)
        for slot in numbers:
            self._pins[slot] -= 1
        self._use(numbers)

    def remove(self, slots: Slots) -> None:
        """See EvictionPolicy."""
        numbers = slots.tolist()
        if any(self.is_pinned(slot) for slot in numbers):
            raise ValueError("remove: a slot is pinned")
        if len(set(numbers)) != len(numbers) or not self._stamps.keys() >= set(numbers):
            raise KeyError("remove: a slot is unknown, or given twice")
        for slot in numbers:
            del self._stamps[slot]
            del self._pins[slot]
            self._demoted.discard(slot)

    def evict(self, count_blocks: int, spare: Spare | None = None) -> Slots | None:
        """See EvictionPolicy."""
        if count_blocks < 0:
            raise ValueError("evict: a count is not negative")
        allowed = [slot for slot in self._stamps if not self.is_pinned(slot)]
        if spare is not None:
            allowed = [slot for slot in allowed if not spare(as_slots([slot]))[0]]
        victims = sorted(allowed, key=lambda slot: (slot not in self._demoted, self._stamps[slot]))
        del victims[count_blocks:]
        if len(victims) < count_blocks:
            return None
        self.remove(as_slots(victims))
        return as_slots(victims)

    def is_pinned(self, slot: int) -> bool:
        """See EvictionPolicy."""
        return self._pins.get(slot, 0) > 0

    @property
    def evictable_blocks(self) -> int:
        """See EvictionPolicy."""
        return sum(1 for slot in self._stamps if not self.is_pinned(slot))

    def check_integrity(self) -> None:
        """Nothing to check: the two dicts have the same keys by construction."""
