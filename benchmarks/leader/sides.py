"""What is measured, as one interface: an index of resident blocks, ours or a peer's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from kvbm_core.blocks.slot_tier import BlockTier, protect_nothing
from kvbm_core.clock import SystemClock
from kvbm_core.policy.lru import LruPolicy
from kvbm_core.types import BlockKey, Tier

LEASE_S = 30.0


class Side(Protocol):
    """An index that holds at most so many blocks. ``keys`` is never timed, everything else is."""

    name: str

    def keys(self, hashes: Sequence[bytes]) -> list[Any]:
        """The side's own names for blocks: new objects each time, as a request brings them."""

    def store(self, keys: list[Any]) -> int:
        """Makes room if there is none, stores blocks that are not there; how many can be found from now
        on.
        """

    def lookup(self, keys: list[Any]) -> int | None:
        """How many leading blocks are there, and nothing else; None if it has no such call."""

    def read(self, keys: list[Any]) -> int:
        """A hit from match to release: found, pinned, made recent, unpinned. How many blocks that was."""

    def resident(self) -> int:
        """Blocks that can be found."""

    def close(self) -> None:
        """Ends threads, gives memory back."""


class OurSide:
    """kvbm's host tier with its default policy."""

    name = "kvbm"

    def __init__(self, capacity_blocks: int) -> None:
        self._tier = BlockTier(Tier.HOST, LruPolicy(), SystemClock())
        self._tier.grow(capacity_blocks)

    @property
    def evicted_blocks(self) -> int:
        """See Side."""
        return self._tier.evicted_blocks_total

    def keys(self, hashes: Sequence[bytes]) -> list[Any]:
        """See Side."""
        return [BlockKey(bytes(bytearray(each))) for each in hashes]

    def store(self, keys: list[Any]) -> int:
        """See Side."""
        reservation = self._tier.reserve(keys, protect_nothing)
        self._tier.commit(reservation)
        return len(reservation.keys)

    def lookup(self, keys: list[Any]) -> int | None:
        """See Side."""
        return self._tier.match_prefix(keys)

    def read(self, keys: list[Any]) -> int:
        """See Side."""
        found = keys[: self._tier.match_prefix(keys)]
        lease = self._tier.lease("request", found, LEASE_S)
        if lease is None:
            return 0
        self._tier.touch(found)
        self._tier.release(lease)
        return len(lease.slots)

    def resident(self) -> int:
        """See Side."""
        return self._tier.resident_blocks

    def close(self) -> None:
        """See Side."""
        self._tier.check_integrity()
