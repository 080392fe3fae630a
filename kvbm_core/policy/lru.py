"""Least recently used goes first."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

import numpy as np
import numpy.typing as npt

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
        # What goes first. None: nothing was demoted yet, as with most models.
        self._demoted: _Demoted | None = None

    def grow(self, capacity_slots: int) -> None:
        """See EvictionPolicy."""
        self._queue.grow(capacity_slots)
        self._pins = np.concatenate(
            [self._pins, np.zeros(max(0, capacity_slots - len(self._pins)), np.int32)]
        )
        if self._demoted is not None:
            self._demoted.grow(capacity_slots)

    def insert(self, slots: Slots) -> None:
        """See EvictionPolicy."""
        if not are_distinct(slots):
            raise ValueError("insert: a slot is given twice")
        if self._waiting(slots).any() or self._pins[slots].any():
            raise ValueError("insert: a slot is there already")
        self._queue.append(slots[::-1])

    def touch(self, slots: Slots) -> None:
        """See EvictionPolicy."""
        once = _first_mentions(slots[self._waiting(slots)])
        if self._demoted is None:
            self._queue.remove(once)
        else:
            self._queue.remove(once[self._queue.holds(once)])
            self._demoted.revive(slots)
        self._queue.append(once[::-1])

    def demote(self, slots: Slots) -> None:
        """See EvictionPolicy."""
        if self._demoted is None:
            self._demoted = _Demoted(len(self._pins))
        once = _first_mentions(slots[self._queue.holds(slots)])
        self._queue.remove(once)
        self._demoted.queue.append(once[::-1])
        self._demoted.is_due[slots[self._pins[slots] > 0]] = True

    def pin(self, slots: Slots) -> None:
        """See EvictionPolicy."""
        queued = self._queue.holds(slots)
        waiting = queued if self._demoted is None else queued | self._demoted.queue.holds(slots)
        if not (waiting | (self._pins[slots] > 0)).all():
            raise KeyError("pin: a slot is unknown")
        is_distinct = are_distinct(slots)
        self._count(slots, 1, is_distinct)
        if self._demoted is not None:
            self._demoted.pin(slots)
        self._queue.remove(slots[queued] if is_distinct else _first_mentions(slots[queued]))

    def unpin(self, slots: Slots) -> None:
        """See EvictionPolicy."""
        is_distinct = are_distinct(slots)
        self._count(slots, -1, is_distinct)
        left = self._pins[slots]
        if (left < 0).any():
            self._count(slots, 1, is_distinct)
            raise KeyError("unpin: a slot has fewer pins than that")
        free = slots[left == 0] if is_distinct else _first_mentions(slots[left == 0])
        if self._demoted is not None:
            free = self._demoted.take_due(free)
        self._queue.append(free[::-1])

    def _count(self, slots: Slots, change: int, is_distinct: bool) -> None:
        if is_distinct:
            self._pins[slots] += change
        else:
            np.add.at(self._pins, slots, change)

    def _waiting(self, slots: Slots) -> npt.NDArray[np.bool_]:
        """Which of them are here and not pinned."""
        queued = self._queue.holds(slots)
        return queued if self._demoted is None else queued | self._demoted.queue.holds(slots)

    def remove(self, slots: Slots) -> None:
        """See EvictionPolicy."""
        if self._pins[slots].any():
            raise ValueError("remove: a slot is pinned")
        if not self._waiting(slots).all() or not are_distinct(slots):
            raise KeyError("remove: a slot is unknown, or given twice")
        self._take(slots)

    def _take(self, slots: Slots) -> None:
        if self._demoted is not None:
            slots = self._demoted.take(slots)
        self._queue.remove(slots)

    def evict(self, count_blocks: int, spare: Spare | None = None) -> Slots | None:
        """See EvictionPolicy."""
        if count_blocks < 0:
            raise ValueError(f"evict: a count is not negative ({count_blocks})")
        if count_blocks > self.evictable_blocks:
            return None
        found: list[Slots] = [np.zeros(0, np.int32)]
        missing = count_blocks
        for slots in self._oldest() if missing else ():
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
        self._take(victims)
        return victims

    def _oldest(self) -> Iterator[Slots]:
        if self._demoted is None or not len(self._demoted.queue):
            return self._queue.oldest()
        return chain(self._demoted.queue.oldest(), self._queue.oldest())

    def is_pinned(self, slot: int) -> bool:
        """See EvictionPolicy."""
        return bool(self._pins[slot])

    @property
    def evictable_blocks(self) -> int:
        """See EvictionPolicy."""
        return len(self._queue) + (0 if self._demoted is None else len(self._demoted.queue))

    def check_integrity(self) -> None:
        """See EvictionPolicy."""
        self._queue.check_integrity()
        if (self._pins < 0).any():
            raise IntegrityError("lru: a slot is pinned less than never")
        if self._waiting(np.flatnonzero(self._pins).astype(np.int32)).any():
            raise IntegrityError("lru: a slot is both pinned and evictable")
        if self._demoted is not None:
            self._demoted.check_integrity(self._queue, self._pins)


class _Demoted:
    """``queue``: what goes before all others. ``is_due``: pinned slots that go there with their last pin."""

    def __init__(self, capacity_slots: int) -> None:
        self.queue = RecencyLog()
        self.queue.grow(capacity_slots)
        self.is_due = np.zeros(capacity_slots, np.bool_)

    def grow(self, capacity_slots: int) -> None:
        more = capacity_slots - len(self.is_due)
        if more > 0:
            self.queue.grow(capacity_slots)
            self.is_due = np.append(self.is_due, np.zeros(more, np.bool_))

    def take(self, slots: Slots) -> Slots:
        """Takes out those that are here; the others."""
        here = self.queue.holds(slots)
        self.queue.remove(_first_mentions(slots[here]))
        return slots[~here]

    def pin(self, slots: Slots) -> None:
        """Those that are here come back with their last pin."""
        self.is_due[slots[self.queue.holds(slots)]] = True
        self.take(slots)

    def take_due(self, slots: Slots) -> Slots:
        """Takes in those that come back; the others."""
        due = self.is_due[slots]
        self.is_due[slots] = False
        self.queue.append(slots[due][::-1])
        return slots[~due]

    def revive(self, slots: Slots) -> None:
        """They are demoted no more."""
        self.take(slots)
        self.is_due[slots] = False

    def check_integrity(self, others: RecencyLog, pins: Slots) -> None:
        self.queue.check_integrity()
        slots = np.concatenate([*self.queue.oldest(), np.zeros(0, np.int32)])
        if others.holds(slots).any():
            raise IntegrityError("lru: a slot is demoted, and is not")
        if (pins[self.is_due] == 0).any():
            raise IntegrityError("lru: a slot without pins waits for its last one")


def _first_mentions(slots: Slots) -> Slots:
    """``slots`` without what is repeated: its first place, which is nearest to the head, counts."""
    if are_distinct(slots):
        return slots
    return np.array(list(dict.fromkeys(slots.tolist())), np.int32)
