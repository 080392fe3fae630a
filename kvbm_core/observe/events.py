"""What happened to blocks, in words of no engine; adapters translate for routers."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from kvbm_core.types import SequenceHash


@dataclass(frozen=True, slots=True)
class BlockStored:
    """Blocks became available: a run of one prefix, in order, ``token_ids`` being those of all of them."""

    block_hashes: tuple[SequenceHash, ...]
    parent_hash: SequenceHash | None
    token_ids: tuple[int, ...]
    block_size_tokens: int
    medium: str
    adapter: str = ""


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    """Blocks are no longer available in ``medium``."""

    block_hashes: tuple[SequenceHash, ...]
    medium: str


@dataclass(frozen=True, slots=True)
class AllCleared:
    """No block is available any more."""


CacheEvent = BlockStored | BlockRemoved | AllCleared


class EventBuffer:
    """
    Events on their way to the engine, in order, bounded. Thread safe.

    Over the limit, stored events go first: whoever misses one takes a block for absent, which costs a hit.
    Whoever misses a removal takes an absent block for present, so removals get as much room again.
    """

    def __init__(self, capacity_events: int = 65536) -> None:
        self._capacity = capacity_events
        self._lock = threading.Lock()
        self._events: list[CacheEvent] = []
        self._dropped = 0

    def append(self, event: CacheEvent) -> bool:
        """Adds an event. False if it had to be dropped. AllCleared replaces all that is waiting."""
        with self._lock:
            if isinstance(event, AllCleared):
                self._events.clear()
            limit = self._capacity if isinstance(event, BlockStored) else 2 * self._capacity
            if len(self._events) >= limit:
                self._dropped += 1
                return False
            self._events.append(event)
            return True

    def take(self) -> list[CacheEvent]:
        """All waiting events, oldest first; the buffer is empty afterwards."""
        with self._lock:
            events, self._events = self._events, []
            return events

    @property
    def dropped(self) -> int:
        """Events dropped since the start."""
        with self._lock:
            return self._dropped
