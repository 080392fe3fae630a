"""Extents: runs of consecutive blocks that a shared store keeps as one object, and where they begin and end.

A chain of blocks is cut at 0, 1, 2, 4, 8 ... and, from the size of a full extent on, at its multiples. The
cuts depend on positions alone, so every engine gives the same run the same name. The first blocks are small
extents: a short prefix that many prompts share is found without what follows it, and one look-up of the first
block tells whether a store has anything of a prompt. When a chain ends within an extent, the rest is cut into
smaller powers of two.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

from kvbm_core.errors import Outcome
from kvbm_core.storage.base import Memory
from kvbm_core.types import BlockKey

EXTENT_BYTES = 4 << 20
MAX_EXTENT_BLOCKS = 512


class Extent(NamedTuple):
    """``num_blocks`` consecutive blocks of one group. ``keys`` are the keys of its last blocks, in order: of
    all blocks to store the extent, of those that are wanted to read it, of the last one at least to look for
    it.
    """

    num_blocks: int
    keys: tuple[BlockKey, ...]


@runtime_checkable
class ExtentStore(Protocol):
    """A BlockStore that keeps extents too. What is said of a BlockStore's calls holds for these."""

    def contains_extents(self, extents: Sequence[Extent], *, deadline_s: float) -> list[Outcome]:
        """One outcome per extent, as ``contains_many``."""

    def put_extents(
        self, extents: Sequence[Extent], payloads: Sequence[Sequence[Memory]], *, deadline_s: float
    ) -> list[Outcome]:
        """One outcome per extent, as ``put_many``; ``payloads[i]`` are one memory per key of extent i."""

    def get_extents(
        self, extents: Sequence[Extent], targets: Sequence[Sequence[Memory]], *, deadline_s: float
    ) -> list[list[Outcome]]:
        """Fills ``targets[i]``, one per key of extent i: the last blocks of it. One outcome per target."""


def extent_blocks(block_bytes: int, extent_bytes: int = EXTENT_BYTES) -> int:
    """How many blocks a full extent has: a power of two."""
    most = max(1, min(MAX_EXTENT_BLOCKS, extent_bytes // max(1, block_bytes)))
    return 1 << (most.bit_length() - 1)


def extent_at(position: int, full_blocks: int) -> range:
    """The extent with block ``position``, of a chain that does not end within it."""
    if position >= full_blocks:
        start = position // full_blocks * full_blocks
        return range(start, start + full_blocks)
    size = 1 << max(0, position.bit_length() - 1)
    start = 0 if position == 0 else size
    return range(start, start + size)


def extent_before(start: int, full_blocks: int) -> range:
    """The extent that ends where one begins: at block ``start``, which is not the first."""
    whole = extent_at(start - 1, full_blocks)
    if whole.stop == start:
        return whole
    behind = start - whole.start  # its chain has ended: the smaller ones there get smaller and smaller
    return range(start - (behind & -behind), start)


def extents_within(first: int, end: int, full_blocks: int) -> Iterator[range]:
    """The extents that have a block in ``first`` to ``end`` - 1 and do not reach beyond it."""
    position = first
    while position < end:
        extent = extent_at(position, full_blocks)
        if extent.stop > end:
            return
        yield extent
        position = extent.stop


def tail_extents(end: int, full_blocks: int) -> Iterator[range]:
    """The smaller extents at the end of a chain of ``end`` blocks: what ``extents_within`` leaves of it."""
    if end <= 0:
        return
    position = extent_at(end, full_blocks).start
    while position < end:
        size = 1 << ((end - position).bit_length() - 1)
        yield range(position, position + size)
        position += size


def smaller_extents(position: int, end: int, full_blocks: int) -> Iterator[range]:
    """The smaller extents that may hold block ``position`` if its chain has ended within
    ``extent_at(position)``: the largest first, none that reaches beyond ``end``.
    """
    whole = extent_at(position, full_blocks)
    size = len(whole) // 2
    while size:
        start = whole.start + (position - whole.start) // size * size
        if start + size <= end:
            yield range(start, start + size)
        size //= 2


def extent_number(position: int, full_blocks: int) -> int:
    """How many extents lie before ``extent_at(position)``."""
    if position < full_blocks:
        return position.bit_length()
    return full_blocks.bit_length() - 1 + position // full_blocks


def extent_numbered(number: int, full_blocks: int) -> range:
    """The extent that has ``number`` others before it."""
    num_growing = full_blocks.bit_length()
    if number < num_growing:
        return extent_at((1 << number) >> 1, full_blocks)
    return extent_at((number - num_growing + 1) * full_blocks, full_blocks)
