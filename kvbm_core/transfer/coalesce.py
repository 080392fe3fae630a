"""Neighbouring blocks that can be copied in one go."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Run:
    """Source blocks ``src, src+1, ..`` to ``dst, dst+step, ..``: ``count`` pairs; ``step`` is 1 or -1."""

    src: int
    dst: int
    count: int
    step: int = 1


def runs(src_ids: Sequence[int], dst_ids: Sequence[int]) -> list[tuple[int, int, int]]:
    """Maximal ``(src_start, dst_start, count)`` where both advance by 1, sorted by source."""
    return [(run.src, run.dst, run.count) for run in _merge(src_ids, dst_ids, steps=(1,))]


def runs_both_ways(src_ids: Sequence[int], dst_ids: Sequence[int]) -> list[Run]:
    """Like ``runs``, and the target may also descend: engines hand out freed blocks in reverse order."""
    return _merge(src_ids, dst_ids, steps=(1, -1))


def _merge(src_ids: Sequence[int], dst_ids: Sequence[int], steps: tuple[int, ...]) -> list[Run]:
    merged: list[Run] = []
    start_src = start_dst = last_src = last_dst = count = step = 0
    for src, dst in sorted(zip(src_ids, dst_ids, strict=True)):
        advance = dst - last_dst
        if count and src == last_src + 1 and (advance == step or (count == 1 and advance in steps)):
            step = advance
            count += 1
        else:
            if count:
                merged.append(Run(start_src, start_dst, count, step or 1))
            start_src, start_dst, count, step = src, dst, 1, 0
        last_src, last_dst = src, dst
    if count:
        merged.append(Run(start_src, start_dst, count, step or 1))
    return merged
