"""The seam for tiers that are not memory: disk, object store, peer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from kvbm_core.errors import Outcome
from kvbm_core.types import BlockKey

Memory = memoryview | Sequence[memoryview]
"""A block's bytes in memory: one piece, or several that make it up in this order (its layers; its keys and
values).
"""


def parts_of(memory: Memory) -> Sequence[memoryview]:
    """The pieces in order."""
    return (memory,) if isinstance(memory, memoryview) else memory


class BlockStore(Protocol):
    """Keeps blocks under their keys. Safe to call from any thread.

    Every ``*_many`` call answers with one Outcome per key, in order, within ``deadline_s`` seconds, and
    raises only for misuse. A store may forget a block at any time (MISS) but never answers OK with other
    bytes than were put: what does not verify is CORRUPT.
    """

    def contains_many(self, keys: Sequence[BlockKey], *, deadline_s: float) -> list[Outcome]:
        """OK or MISS; OK does not promise that a later get succeeds."""

    def put_many(
        self, keys: Sequence[BlockKey], payloads: Sequence[Memory], *, deadline_s: float
    ) -> list[Outcome]:
        """OK means that the block can be got; it does not mean that it survives a crash."""

    def get_many(
        self, keys: Sequence[BlockKey], targets: Sequence[Memory], *, deadline_s: float
    ) -> list[Outcome]:
        """Fills each target of its block's exact size; a target whose outcome is not OK holds garbage.

        It need not be divided into pieces as the payload was.
        """

    def remove_many(self, keys: Sequence[BlockKey], *, deadline_s: float) -> list[Outcome]:
        """OK or MISS; after OK the key is not contained."""

    def scan(self) -> Iterator[BlockKey]:
        """The keys held now, in no order; blocks put or removed meanwhile may or may not be among them."""

    def close(self) -> None:
        """Releases threads and files; idempotent. Later calls answer REJECTED."""
