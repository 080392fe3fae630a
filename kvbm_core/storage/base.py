"""The seam for tiers that are not memory: disk, object store, peer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol, runtime_checkable

from kvbm_core.errors import Outcome
from kvbm_core.types import BlockKey, is_block_key

Memory = memoryview | Sequence[memoryview]
"""A block's bytes in memory: one piece, or several that make it up in this order (its layers; its keys and
values).
"""


def parts_of(memory: Memory) -> Sequence[memoryview]:
    """The pieces in order."""
    return (memory,) if isinstance(memory, memoryview) else memory


def plain_parts(memory: Memory) -> list[memoryview]:
    """Its pieces that are not empty, as bytes."""
    parts = (part for part in parts_of(memory) if part.nbytes)
    return [part if part.format == "B" and part.ndim == 1 else part.cast("B") for part in parts]


def check_blocks(keys: Sequence[BlockKey], buffers: Sequence[Memory], payload_bytes: int) -> None:
    """ValueError unless each key is a block's and has memory of that size, none of it with gaps."""
    fits = len(keys) == len(buffers)
    for parts in map(parts_of, buffers):
        fits &= sum(part.nbytes for part in parts) == payload_bytes and all(
            part.c_contiguous for part in parts
        )
    if not fits:
        raise ValueError(f"each key needs memory of exactly {payload_bytes} bytes, no piece of it with gaps")
    if not all(map(is_block_key, keys)):
        raise ValueError("a key is a SequenceHash and, but for group 0, the number of its group")


def check_targets(targets: Sequence[Memory]) -> None:
    """ValueError if one of them cannot be written to."""
    if any(part.readonly for target in targets for part in parts_of(target)):
        raise ValueError("a target is read-only")


class BlockStore(Protocol):
    """Keeps blocks under their keys. Safe to call from any thread.

    Every ``*_many`` call answers with one Outcome per key, in order, within ``deadline_s`` seconds, and
    raises only for misuse. A store may forget a block at any time (MISS) but never answers OK with other
    bytes than were put: what does not verify is CORRUPT. Why it fails it logs itself, once, and once that it
    works again; but that it does not answer is said by whoever asks. Memory that it may still touch when a
    call has returned is in ``late.LATE`` before, and until then.
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


class ReadsAlone:
    """What a BlockStore has where only others put blocks and remove them."""

    def put_many(
        self, keys: Sequence[BlockKey], payloads: Sequence[Memory], *, deadline_s: float
    ) -> list[Outcome]:
        """See BlockStore: REJECTED."""
        return [Outcome.REJECTED] * len(keys)

    def remove_many(self, keys: Sequence[BlockKey], *, deadline_s: float) -> list[Outcome]:
        """See BlockStore: REJECTED."""
        return [Outcome.REJECTED] * len(keys)

    def scan(self) -> Iterator[BlockKey]:
        """See BlockStore: nobody can tell."""
        return iter(())


@runtime_checkable
class HasSources(Protocol):
    """Stores of one kind, each at an address of its own."""

    def at(self, source: str) -> BlockStore:
        """The one at this address. Never waits: what cannot be reached says so when it is asked."""
