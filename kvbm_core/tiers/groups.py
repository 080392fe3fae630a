"""The engine's KV cache groups, and how far a prefix reaches when every group must agree.

A group with full attention needs every block of the prefix; one with a sliding window needs only the blocks
that the next token can see; one with states (Mamba, gated delta net) needs the one state after the prefix's
last token. The answer is the longest length on which all groups agree.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvbm_core.types import BlockKey


class Residents(Protocol):
    """Which blocks are there; a BlockTier is one."""

    def match_prefix(self, keys: Sequence[BlockKey]) -> int:
        """How many leading ``keys`` are there."""

    def contains(self, key: BlockKey) -> bool:
        """Whether ``key`` is there."""


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """One KV cache group: its block size, and its window (None = full attention, or states).

    ``is_state``: a block is not the KV of its tokens, but the state of the group's layers after the last of
    them. There are such blocks for some ends of blocks only, and whoever goes on needs one of them alone.
    """

    index: int
    block_size_tokens: int
    window_tokens: int | None = None
    is_state: bool = False

    @property
    def needs_all(self) -> bool:
        """Whether a prefix needs all of its blocks."""
        return self.window_tokens is None and not self.is_state

    def first_needed_block(self, prefix_tokens: int) -> int:
        """The first block that a token at position ``prefix_tokens`` attends to, or goes on from."""
        if self.is_state:
            return max(0, prefix_tokens - 1) // self.block_size_tokens
        if self.window_tokens is None:
            return 0
        return max(0, prefix_tokens - self.window_tokens + 1) // self.block_size_tokens


def alignment_tokens(groups: Sequence[GroupSpec]) -> int:
    """Hits end on multiples of this: the least common multiple of the groups' block sizes."""
    return math.lcm(*(group.block_size_tokens for group in groups))


def base_block_tokens(groups: Sequence[GroupSpec]) -> int:
    """Hash chains have this granularity: the greatest common divisor of the groups' block sizes."""
    return math.gcd(*(group.block_size_tokens for group in groups))


def needed_blocks(group: GroupSpec, computed_tokens: int, prefix_tokens: int) -> range:
    """Blocks of ``group`` to bring up so that ``prefix_tokens`` can be used, the device having
    ``computed_tokens``.
    """
    first = max(computed_tokens // group.block_size_tokens, group.first_needed_block(prefix_tokens))
    return range(first, max(first, prefix_tokens // group.block_size_tokens))


def longest_prefix_tokens(
    groups: Sequence[GroupSpec],
    keys_of: Callable[[int], Sequence[BlockKey]],
    computed_tokens: int,
    limit_tokens: int,
    residents: Residents,
) -> int:
    """The longest usable prefix, in tokens from 0; ``computed_tokens`` when nothing beyond it is there.

    ``keys_of(i)`` are the keys of all full blocks of ``groups[i]``, from block 0 on.
    ``computed_tokens`` and the answer are multiples of ``alignment_tokens(groups)``; the answer is <=
    ``limit_tokens``.
    """
    align = alignment_tokens(groups)
    length = attention_reach_tokens(groups, keys_of, computed_tokens, limit_tokens, residents)
    partial = [(group, keys_of(position)) for position, group in enumerate(groups) if not group.needs_all]
    while length > computed_tokens:
        shorter = length
        for group, keys in partial:
            shorter = _longest_with_end(
                group, keys, computed_tokens, shorter, align=align, residents=residents
            )
        if shorter == length:
            return length
        length = shorter
    return computed_tokens


def attention_reach_tokens(
    groups: Sequence[GroupSpec],
    keys_of: Callable[[int], Sequence[BlockKey]],
    computed_tokens: int,
    limit_tokens: int,
    residents: Residents,
) -> int:
    """As ``longest_prefix_tokens``, of the groups alone that need all blocks of a prefix; the limit if there
    are none.
    """
    align = alignment_tokens(groups)
    length = limit_tokens // align * align
    for position, group in enumerate(groups):
        if group.needs_all and length > computed_tokens:
            size = group.block_size_tokens
            first, keys = computed_tokens // size, keys_of(position)
            # Asked by itself: most prompts that are new are new from their first block on.
            is_new = first >= len(keys) or not residents.contains(keys[first])
            run = 0 if is_new else residents.match_prefix(keys[first : length // size])
            length = (first + run) * size // align * align
    return length


def _longest_with_end(
    group: GroupSpec,
    keys: Sequence[BlockKey],
    computed_tokens: int,
    limit_tokens: int,
    *,
    align: int,
    residents: Residents,
) -> int:
    """The longest aligned length <= ``limit_tokens`` whose window, or state, is there. Walks down, each block
    asked once.
    """
    length = min(limit_tokens, len(keys) * group.block_size_tokens) // align * align
    while length > computed_tokens:
        blocks = needed_blocks(group, computed_tokens, length)
        found = residents.match_prefix(keys[blocks.start : blocks.stop][::-1])
        if found == len(blocks):
            return length
        # No length whose window holds the missing block will do: end at or before its start.
        missing = blocks.stop - 1 - found
        length = min(length - align, missing * group.block_size_tokens // align * align)
    return computed_tokens
