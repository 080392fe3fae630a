"""An eviction policy: blocks that were used once go before blocks that were used again."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator
from itertools import chain, islice

import numpy as np

from kvbm_core.errors import IntegrityError
from kvbm_core.policy.base import Spare
from kvbm_core.policy.recency import Slots


class UsedAgainLast:
    """EvictionPolicy. In both queues the least recently used goes first, and the tail before the head. Before
    them goes what is demoted.
    """

    def __init__(self) -> None:
        self._demoted: OrderedDict[int, None] = OrderedDict()
        self._once: OrderedDict[int, None] = OrderedDict()
        self._again: OrderedDict[int, None] = OrderedDict()
        self._pins: Counter[int] = Counter()
        self._to_demote: set[int] = set()  # with their last unpin

    def grow(self, capacity_slots: int) -> None:
        """Nothing here is sized by the number of slots."""

    def insert(self, slots: Slots) -> None:
        given = slots.tolist()
        if len(set(given)) < len(given) or any(self._holds(slot) for slot in given):
            raise ValueError("insert: a slot is there already, or given twice")
        self._once.update(dict.fromkeys(reversed(given)))

    def touch(self, slots: Slots) -> None:
        given = list(reversed(slots.tolist()))
        self._to_demote.difference_update(given)
        self._use(slot for slot in given if self._waits(slot))

    def demote(self, slots: Slots) -> None:
        for slot in reversed(slots.tolist()):
            if slot in self._pins:
                self._to_demote.add(slot)
            elif self._waits(slot) and slot not in self._demoted:
                self._take_out(slot)
                self._demoted[slot] = None

    def pin(self, slots: Slots) -> None:
        given = slots.tolist()
        if not all(self._holds(slot) for slot in given):
            raise KeyError("pin: a slot is unknown")
        self._pins.update(given)
        self._to_demote.update(slot for slot in given if slot in self._demoted)
        for slot in given:
            self._take_out(slot)

    def unpin(self, slots: Slots) -> None:
        given = Counter(slots.tolist())
        if any(self._pins[slot] < count for slot, count in given.items()):
            raise KeyError("unpin: a slot has fewer pins than that")
        self._pins -= given  # what has none left is no longer there
        free = [slot for slot in reversed(given) if slot not in self._pins]
        self._use(slot for slot in free if slot not in self._to_demote)
        self._demoted.update((slot, None) for slot in free if slot in self._to_demote)
        self._to_demote.difference_update(free)

    def remove(self, slots: Slots) -> None:
        given = slots.tolist()
        if any(slot in self._pins for slot in given):
            raise ValueError("remove: a slot is pinned")
        if len(set(given)) < len(given) or not all(self._holds(slot) for slot in given):
            raise KeyError("remove: a slot is unknown, or given twice")
        for slot in given:
            self._take_out(slot)

    def evict(self, count_blocks: int, spare: Spare | None = None) -> Slots | None:
        if count_blocks < 0:
            raise ValueError(f"evict: a count is not negative ({count_blocks})")
        if count_blocks > self.evictable_blocks:
            return None
        candidates = chain(self._demoted, self._once, self._again)
        victims = np.zeros(0, np.int32)
        while len(victims) < count_blocks:
            some = np.array(list(islice(candidates, count_blocks - len(victims))), np.int32)
            if not len(some):
                return None
            victims = np.concatenate([victims, some if spare is None else some[~spare(some)]])
        self.remove(victims)
        return victims

    def is_pinned(self, slot: int) -> bool:
        return slot in self._pins

    @property
    def evictable_blocks(self) -> int:
        return len(self._demoted) + len(self._once) + len(self._again)

    def check_integrity(self) -> None:
        in_queues = [*self._demoted, *self._once, *self._again]
        if len(set(in_queues) | set(self._pins)) != len(in_queues) + len(self._pins):
            raise IntegrityError("a slot is in two places")

    def _holds(self, slot: int) -> bool:
        return self._waits(slot) or slot in self._pins

    def _waits(self, slot: int) -> bool:
        return slot in self._once or slot in self._again or slot in self._demoted

    def _take_out(self, slot: int) -> None:
        self._demoted.pop(slot, None)
        self._once.pop(slot, None)
        self._again.pop(slot, None)

    def _use(self, slots: Iterator[int]) -> None:
        for slot in list(slots):
            self._take_out(slot)
            self._again[slot] = None
