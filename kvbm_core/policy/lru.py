"""Least recently used goes first."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from itertools import islice

from kvbm_core.errors import IntegrityError
from kvbm_core.types import BlockKey


class LruPolicy:
    """EvictionPolicy: least recently used first, and within one call the tail first.

    Pinned keys stand outside the queue, so no step meets them; evict costs O(count + protected keys met).
    """

    def __init__(self) -> None:
        # Next to go first. OrderedDict, not dict: taking the first key of a dict rescans the holes before it.
        self._queue: OrderedDict[BlockKey, None] = OrderedDict()
        self._pins: dict[BlockKey, int] = {}

    def insert(self, keys: Sequence[BlockKey]) -> None:
        """See EvictionPolicy."""
        new = dict.fromkeys(reversed(keys))
        if len(new) != len(keys):
            raise ValueError("insert: a key is given twice")
        if not (self._queue.keys().isdisjoint(new) and self._pins.keys().isdisjoint(new)):
            raise ValueError("insert: a key is there already")
        self._queue.update(new)

    def touch(self, keys: Sequence[BlockKey]) -> None:
        """See EvictionPolicy."""
        queue = self._queue
        for key in reversed(keys):
            if key in queue:
                queue.move_to_end(key)

    def pin(self, keys: Sequence[BlockKey]) -> None:
        """See EvictionPolicy."""
        queue, pins = self._queue, self._pins
        for key in keys:
            if key not in queue and key not in pins:
                raise KeyError(key)
        for key in keys:
            if key in pins:
                pins[key] += 1
            else:
                del queue[key]
                pins[key] = 1

    def unpin(self, keys: Sequence[BlockKey]) -> None:
        """See EvictionPolicy."""
        queue, pins = self._queue, self._pins
        for key, count in Counter(keys).items():
            if pins.get(key, 0) < count:
                raise KeyError(key)
        for key in reversed(keys):
            count = pins[key] - 1
            if count:
                pins[key] = count
            else:
                del pins[key]
                queue[key] = None

    def remove(self, key: BlockKey) -> None:
        """See EvictionPolicy."""
        if key in self._pins:
            raise ValueError("remove: the key is pinned")
        del self._queue[key]

    def evict(self, count_blocks: int, protected: AbstractSet[BlockKey] = frozenset()) -> list[BlockKey] | None:
        """See EvictionPolicy."""
        if count_blocks < 0:
            raise ValueError(f"evict: a count is not negative ({count_blocks})")
        queue = self._queue
        if count_blocks > len(queue):
            return None
        candidates = (key for key in queue if key not in protected) if protected else iter(queue)
        victims = list(islice(candidates, count_blocks))
        if len(victims) < count_blocks:
            return None
        for key in victims:
            del queue[key]
        return victims

    def is_pinned(self, key: BlockKey) -> bool:
        """See EvictionPolicy."""
        return key in self._pins

    @property
    def evictable_blocks(self) -> int:
        """See EvictionPolicy."""
        return len(self._queue)

    def check_integrity(self) -> None:
        """See EvictionPolicy."""
        if not self._queue.keys().isdisjoint(self._pins):
            raise IntegrityError("lru: a key is both pinned and evictable")
        if any(count < 1 for count in self._pins.values()):
            raise IntegrityError("lru: a key is pinned less than once")
