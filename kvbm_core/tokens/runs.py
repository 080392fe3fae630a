"""Runs: consecutive blocks of one request in one group, with their place in its chain."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from kvbm_core.types import BlockKey


class BlockRun(NamedTuple):
    """Blocks ``first`` to ``end`` - 1 of a chain. ``keys``: of the whole chain, from block 0 on. It is the
    request's own list, no copy, and may grow. ``block_tokens``: tokens in a block; by it blocks of several
    groups are put in order. ``is_state``: they are states: each is of use without those before it, and is
    stored and looked for alone. ``has_window``: whoever goes on needs the last ones alone.
    """

    keys: Sequence[BlockKey]
    first: int
    end: int
    block_tokens: int = 1
    is_state: bool = False
    has_window: bool = False

    @property
    def needs_head(self) -> bool:
        """Whether a block is of no use without those before it."""
        return not (self.is_state or self.has_window)


def run_of(keys: Sequence[BlockKey]) -> BlockRun:
    """A run of all blocks of a chain with these keys. Nothing comes before them, or nobody knows what."""
    return BlockRun(keys, 0, len(keys))


def blocks_of(runs: Sequence[BlockRun]) -> Sequence[BlockKey]:
    """The keys of the runs' blocks, in prefix order: a block that ends earlier comes first."""
    if len(runs) == 1:
        (run,) = runs
        is_whole = run.first == 0 and run.end == len(run.keys)
        return run.keys if is_whole else run.keys[run.first : run.end]
    ends = [
        ((block + 1) * run.block_tokens, run.keys[block])
        for run in runs
        for block in range(run.first, run.end)
    ]
    ends.sort(key=lambda end: end[0])
    return [key for _, key in ends]


def consecutive(blocks: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Divides ascending ``blocks`` into stretches without a gap: (first, last + 1) of each."""
    if not blocks:
        return
    first = last = blocks[0]
    for block in blocks[1:]:
        if block != last + 1:
            yield first, last + 1
            first = block
        last = block
    yield first, last + 1
