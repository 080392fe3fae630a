"""The interface of eviction policies."""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from typing import Protocol

from kvbm_core.types import BlockKey


class EvictionPolicy(Protocol):
    """Chooses which of a tier's blocks goes when room is needed. Knows keys only: no slots, no bytes.

    Keys are given head first, in prefix order: of the keys of one call the tail is evicted before the head,
    as a tail without its head is of no use. A sequence that arrives in several calls is touched as a whole
    after each. One thread only. A call that raises has changed nothing.
    ``kvbm_core.testing.policy_contract`` is the test that every policy must pass.
    """

    def insert(self, keys: Sequence[BlockKey]) -> None:
        """Adds ``keys``, unpinned and most recent. Raises ValueError if one is there or given twice."""

    def touch(self, keys: Sequence[BlockKey]) -> None:
        """``keys`` have been used again. Unknown and pinned keys are ignored."""

    def pin(self, keys: Sequence[BlockKey]) -> None:
        """Keeps ``keys`` until as many unpins; counted, once per mention. KeyError if one is unknown."""

    def unpin(self, keys: Sequence[BlockKey]) -> None:
        """Takes back one pin per mention; the last one makes the key most recent.

        Raises KeyError if a key has fewer pins than that.
        """

    def remove(self, key: BlockKey) -> None:
        """Takes ``key`` out. Raises KeyError if it is unknown, ValueError if it is pinned."""

    def evict(self, count_blocks: int, protected: AbstractSet[BlockKey] = frozenset()) -> list[BlockKey] | None:
        """Takes out and returns exactly ``count_blocks`` keys, not pinned, not protected, next to go first.

        None, and nothing has changed, if there are not so many. Raises ValueError for a negative count.
        """

    def is_pinned(self, key: BlockKey) -> bool:
        """Whether ``key`` is here and pinned."""

    @property
    def evictable_blocks(self) -> int:
        """How many keys are not pinned."""

    def check_integrity(self) -> None:
        """Raises IntegrityError if the policy's own books disagree. Cost grows with their size."""
