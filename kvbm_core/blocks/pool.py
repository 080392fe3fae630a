"""Which slots of a tier are free."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvbm_core.errors import IntegrityError
from kvbm_core.policy.recency import Slots, are_distinct


class SlotPool:
    """Hands out slots: those given back last come first, and those of one call ascend, so that copies
    coalesce.

    One thread only. A call that raises has changed nothing.
    """

    def __init__(self, capacity_slots: int = 0) -> None:
        self.capacity_slots = capacity_slots
        """Slots in all, used and free."""
        # Both may be longer than that: see ``expect``.
        self._used = np.zeros(capacity_slots, np.bool_)
        # Free slots: a stack of those given back, _num_returned high, and everything from _fresh on.
        self._returned = np.zeros(capacity_slots, np.int32)
        self._num_returned = 0
        self._fresh = 0

    @property
    def free_slots(self) -> int:
        """Slots that can be allocated."""
        return self._num_returned + self.capacity_slots - self._fresh

    def expect(self, capacity_slots: int) -> None:
        """There will be so many: growing up to there, however often, copies nothing."""
        more = capacity_slots - len(self._used)
        if more > 0:
            self._used = np.concatenate([self._used, np.zeros(more, np.bool_)])
            self._returned = np.concatenate([self._returned, np.zeros(more, np.int32)])

    def grow(self, capacity_slots: int, used: Slots | None = None) -> None:
        """Makes slots up to ``capacity_slots`` exist, free but for those of the new ones in ``used``.

        Raises ValueError for fewer than there are, or if ``used`` are not new ones.
        """
        old_slots = self.capacity_slots
        if capacity_slots < old_slots:
            raise ValueError(f"a pool of {old_slots} slots does not shrink to {capacity_slots}")
        if used is not None and len(used) and not old_slots <= used.min() <= used.max() < capacity_slots:
            raise ValueError(f"slots in use are not all in {old_slots}..{capacity_slots - 1}")
        self.expect(capacity_slots)
        self.capacity_slots = capacity_slots
        if used is not None and len(used):
            self._used[used] = True
            # What is free is not in one piece any more: it is handed out like slots that were given back.
            free = self._fresh + np.flatnonzero(~self._used[self._fresh : capacity_slots])
            self._returned[self._num_returned : self._num_returned + len(free)] = free[::-1]
            self._num_returned += len(free)
            self._fresh = capacity_slots

    def allocate(self, count: int) -> Slots | None:
        """Exactly ``count`` slots in ascending order, or None, and nothing is taken, if fewer are free."""
        if count < 0:
            raise ValueError(f"a count is not negative ({count})")
        if count > self.free_slots:
            return None
        num_returned = min(count, self._num_returned)
        num_fresh = count - num_returned
        self._num_returned -= num_returned
        again = np.sort(self._returned[self._num_returned : self._num_returned + num_returned])
        slots: Slots = np.concatenate(
            [again, np.arange(self._fresh, self._fresh + num_fresh, dtype=np.int32)]
        )
        self._fresh += num_fresh
        self._used[slots] = True
        return slots

    def are_used(self, slots: Slots) -> npt.NDArray[np.bool_]:
        """Which of ``slots`` are handed out."""
        used: npt.NDArray[np.bool_] = self._used[slots]
        return used

    def release(self, slots: Slots) -> None:
        """Gives slots back. Raises ValueError for a slot that is free, given twice or not of this pool."""
        if not len(slots):
            return
        if slots.min() < 0 or slots.max() >= self.capacity_slots:
            raise ValueError(f"a slot is outside the pool of {self.capacity_slots} slots")
        if not are_distinct(slots):
            raise ValueError("a slot is released twice in one call")
        if not self._used[slots].all():
            raise ValueError(f"slot {slots[~self._used[slots]][0]} is free already")
        self._used[slots] = False
        self._returned[self._num_returned : self._num_returned + len(slots)] = slots
        self._num_returned += len(slots)

    def check_integrity(self) -> None:
        """Raises IntegrityError if the books disagree. Cost grows with the capacity."""
        if self._used[self._fresh :].any():
            raise IntegrityError("pool: a slot that was never handed out is in use")
        free = np.flatnonzero(~self._used[: self._fresh])
        if not np.array_equal(np.sort(self._returned[: self._num_returned]), free):
            raise IntegrityError("pool: the free slots are not those that are not in use")
