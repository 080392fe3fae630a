"""Twins of the product's fast parts: slow, and so plain that they can be seen to be right."""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet

from kvbm_core.types import BlockKey


class NaiveLru:
    """LruPolicy's twin: every key has a stamp of its last use, and evict sorts them all."""

    def __init__(self) -> None:
        self._call = 0
        self._stamps: dict[BlockKey, tuple[int, int]] = {}
        self._pins: dict[BlockKey, int] = {}

    def _use(self, keys: Sequence[BlockKey]) -> None:
        # A later call is more recent; within a call an earlier position is.
        self._call += 1
        for position, key in enumerate(keys):
            if not self.is_pinned(key):
                self._stamps[key] = max(self._stamps[key], (self._call, -position))

    def insert(self, keys: Sequence[BlockKey]) -> None:
        """See EvictionPolicy."""
        if len(set(keys)) != len(keys) or any(key in self._stamps for key in keys):
            raise ValueError("insert: a key is not new")
        for key in keys:
            self._stamps[key] = (0, 0)
            self._pins[key] = 0
        self._use(keys)

    def touch(self, keys: Sequence[BlockKey]) -> None:
        """See EvictionPolicy."""
        self._use([key for key in keys if key in self._stamps])

    def pin(self, keys: Sequence[BlockKey]) -> None:
        """See EvictionPolicy."""
        for key in keys:
            if key not in self._stamps:
                raise KeyError(key)
        for key in keys:
            self._pins[key] += 1

    def unpin(self, keys: Sequence[BlockKey]) -> None:
        """See EvictionPolicy."""
        for key in keys:
            if self._pins.get(key, 0) < list(keys).count(key):
                raise KeyError(key)
        for key in keys:
            self._pins[key] -= 1
        self._use(keys)

    def remove(self, key: BlockKey) -> None:
        """See EvictionPolicy."""
        if self.is_pinned(key):
            raise ValueError("remove: the key is pinned")
        del self._stamps[key]
        del self._pins[key]

    def evict(self, count_blocks: int, protected: AbstractSet[BlockKey] = frozenset()) -> list[BlockKey] | None:
        """See EvictionPolicy."""
        if count_blocks < 0:
            raise ValueError("evict: a count is not negative")
        allowed = [key for key in self._stamps if not self.is_pinned(key) and key not in protected]
        victims = sorted(allowed, key=lambda key: self._stamps[key])[:count_blocks]
        if len(victims) < count_blocks:
            return None
        for key in victims:
            self.remove(key)
        return victims

    def is_pinned(self, key: BlockKey) -> bool:
        """See EvictionPolicy."""
        return self._pins.get(key, 0) > 0

    @property
    def evictable_blocks(self) -> int:
        """See EvictionPolicy."""
        return sum(1 for key in self._stamps if not self.is_pinned(key))

    def check_integrity(self) -> None:
        """Nothing to check: the two dicts have the same keys by construction."""
