"""Which slots of a tier are free."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heappush

from kvbm_core.errors import IntegrityError
from kvbm_core.types import SlotId


class SlotPool:
    """Hands out slots, lowest first, so that slots taken together are mostly neighbours and copies coalesce.

    One thread only. A call that raises has changed nothing.
    """

    def __init__(self, capacity_slots: int = 0) -> None:
        # 1 = handed out. From _fresh on all slots are free; free ones below it are in the heap _returned.
        self._used = bytearray(capacity_slots)
        self._returned: list[SlotId] = []
        self._fresh = 0

    @property
    def capacity_slots(self) -> int:
        """Slots in all, used and free."""
        return len(self._used)

    @property
    def free_slots(self) -> int:
        """Slots that can be allocated."""
        return len(self._returned) + len(self._used) - self._fresh

    def grow(self, capacity_slots: int) -> None:
        """Makes slots up to ``capacity_slots`` exist. Raises ValueError for fewer than there are."""
        if capacity_slots < len(self._used):
            raise ValueError(f"a pool of {len(self._used)} slots does not shrink to {capacity_slots}")
        self._used.extend(bytes(capacity_slots - len(self._used)))

    def allocate(self, count: int) -> list[SlotId] | None:
        """Exactly ``count`` slots in ascending order, or None, and nothing is taken, if fewer are free."""
        if count < 0:
            raise ValueError(f"a count is not negative ({count})")
        if count > self.free_slots:
            return None
        if count >= len(self._returned):
            slots = sorted(self._returned)
            self._returned.clear()
        else:
            slots = [heappop(self._returned) for _ in range(count)]
        for slot in slots:
            self._used[slot] = 1
        num_fresh = count - len(slots)
        end = self._fresh + num_fresh
        self._used[self._fresh : end] = b"\1" * num_fresh
        slots += map(SlotId, range(self._fresh, end))
        self._fresh = end
        return slots

    def release(self, slots: Sequence[SlotId]) -> None:
        """Gives slots back. Raises ValueError for a slot that is free, given twice or not of this pool."""
        used = self._used
        if not slots:
            return
        if min(slots) < 0 or max(slots) >= len(used):
            raise ValueError(f"a slot is outside the pool of {len(used)} slots")
        if len(set(slots)) != len(slots):
            raise ValueError("a slot is released twice in one call")
        for slot in slots:
            if not used[slot]:
                raise ValueError(f"slot {slot} is free already")
        for slot in slots:
            used[slot] = 0
        returned = self._returned
        # One heapify of many is cheaper than their pushes, and still in proportion to len(slots).
        if len(slots) * 8 > len(returned):
            returned.extend(slots)
            heapify(returned)
        else:
            for slot in slots:
                heappush(returned, slot)

    def check_integrity(self) -> None:
        """Raises IntegrityError if the books disagree. Cost grows with the capacity."""
        if any(self._used[self._fresh :]):
            raise IntegrityError("pool: a slot that was never handed out is in use")
        free = [slot for slot in range(self._fresh) if not self._used[slot]]
        if sorted(self._returned) != free:
            raise IntegrityError("pool: the free slots are not those that are not in use")
