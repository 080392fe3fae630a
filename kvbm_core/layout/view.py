"""A block as a list of byte ranges, and how two such lists meet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from kvbm_core.errors import LayoutError

MAX_CHECKED_RANGES = 32_000_000
"""A view too irregular to prove free of overlap with this many byte ranges is refused."""


@dataclass(frozen=True, slots=True)
class Segment:
    """One contiguous piece of every block: block b has it at ``offset_bytes + b * block_stride_bytes``."""

    storage: int
    offset_bytes: int
    block_stride_bytes: int
    nbytes: int

    def end_bytes(self, num_blocks: int) -> int:
        """One past the last byte that any of ``num_blocks`` blocks uses."""
        return self.offset_bytes + (num_blocks - 1) * self.block_stride_bytes + self.nbytes


@dataclass(frozen=True)
class BlockView:
    """The bytes of blocks ``0 .. num_blocks-1``: the segments one after the other are the block's content."""

    num_blocks: int
    segments: tuple[Segment, ...]

    @property
    def block_bytes(self) -> int:
        """Content of one block, gaps between the segments not counted."""
        return sum(segment.nbytes for segment in self.segments)

    def regions(self, block: int) -> list[tuple[int, int, int]]:
        """``(storage, offset_bytes, nbytes)`` of each piece of ``block``, in content order."""
        if not 0 <= block < self.num_blocks:
            raise IndexError(f"block {block} is not in 0..{self.num_blocks - 1}")
        return [(s.storage, s.offset_bytes + block * s.block_stride_bytes, s.nbytes) for s in self.segments]

    def coalesced(self) -> BlockView:
        """The same bytes in the same order, with segments that touch in every block made one."""
        merged: list[Segment] = []
        for segment in self.segments:
            last = merged[-1] if merged else None
            if (
                last is not None
                and last.storage == segment.storage
                and last.block_stride_bytes == segment.block_stride_bytes
                and last.offset_bytes + last.nbytes == segment.offset_bytes
            ):
                nbytes = last.nbytes + segment.nbytes
                merged[-1] = Segment(last.storage, last.offset_bytes, last.block_stride_bytes, nbytes)
            else:
                merged.append(segment)
        return BlockView(self.num_blocks, tuple(merged))

    def check(self, storage_bytes: Sequence[int]) -> None:
        """Proves that every byte is inside its storage and belongs to one block only; else LayoutError."""
        if self.num_blocks < 1 or not self.segments:
            raise LayoutError(f"a view of {self.num_blocks} blocks and {len(self.segments)} segments")
        of_storage: dict[int, list[Segment]] = {}
        for segment in self.coalesced().segments:
            self._check_bounds(segment, storage_bytes)
            of_storage.setdefault(segment.storage, []).append(segment)
        for segments in of_storage.values():
            for cluster in _clusters(segments, self.num_blocks):
                if not _is_comb(cluster, self.num_blocks):
                    _check_ranges(cluster, self.num_blocks)

    def _check_bounds(self, segment: Segment, storage_bytes: Sequence[int]) -> None:
        if not 0 <= segment.storage < len(storage_bytes):
            raise LayoutError(f"{segment} is in none of the {len(storage_bytes)} storages")
        if segment.nbytes < 1 or segment.offset_bytes < 0 or segment.block_stride_bytes < 0:
            raise LayoutError(f"{segment} has a size, offset or stride out of range")
        if segment.end_bytes(self.num_blocks) > storage_bytes[segment.storage]:
            raise LayoutError(
                f"{segment} of {self.num_blocks} blocks ends at byte {segment.end_bytes(self.num_blocks)}"
                f" of a storage of {storage_bytes[segment.storage]}"
            )


def _clusters(segments: list[Segment], num_blocks: int) -> list[list[Segment]]:
    """Segments grouped so that pieces of different groups cannot touch; each group sorted by offset."""
    clusters: list[list[Segment]] = []
    end = -1
    for segment in sorted(segments, key=lambda s: s.offset_bytes):
        if not clusters or segment.offset_bytes >= end:
            clusters.append([])
        clusters[-1].append(segment)
        end = max(end, segment.end_bytes(num_blocks))
    return clusters


def _is_comb(cluster: list[Segment], num_blocks: int) -> bool:
    """True if all pieces of a block lie, apart from each other, in one window of the common block stride."""
    stride = cluster[0].block_stride_bytes
    if any(s.block_stride_bytes != stride for s in cluster):
        return False
    if any(a.offset_bytes + a.nbytes > b.offset_bytes for a, b in pairwise(cluster)):
        return False
    window = cluster[-1].offset_bytes + cluster[-1].nbytes - cluster[0].offset_bytes
    return num_blocks == 1 or window <= stride


def _check_ranges(cluster: list[Segment], num_blocks: int) -> None:
    """Lists and sorts all byte ranges of the group; LayoutError where two of them overlap."""
    if len(cluster) * num_blocks > MAX_CHECKED_RANGES:
        raise LayoutError(f"{len(cluster)} interleaved segments of {num_blocks} blocks are too many to check")
    blocks = np.arange(num_blocks, dtype=np.int64)
    starts = np.concatenate([s.offset_bytes + blocks * s.block_stride_bytes for s in cluster])
    sizes = np.repeat(np.array([s.nbytes for s in cluster], dtype=np.int64), num_blocks)
    order = np.argsort(starts, kind="stable")
    starts, ends = starts[order], (starts + sizes)[order]
    clash = np.flatnonzero(ends[:-1] > starts[1:])
    if clash.size:
        raise LayoutError(
            f"blocks overlap at byte {int(starts[clash[0] + 1])} of storage {cluster[0].storage}"
            f" (block strides {sorted({s.block_stride_bytes for s in cluster})})"
        )


def pair_segments(src: BlockView, dst: BlockView) -> tuple[tuple[Segment, Segment], ...]:
    """Both views cut at their common boundaries: equal pieces of content, in content order.

    The block counts may differ. Raises LayoutError if the blocks differ in size.
    """
    if src.block_bytes != dst.block_bytes:
        raise LayoutError(f"blocks of {src.block_bytes} and of {dst.block_bytes} bytes cannot be paired")
    pairs: list[tuple[Segment, Segment]] = []
    left, right = list(reversed(src.coalesced().segments)), list(reversed(dst.coalesced().segments))
    while left and right:
        a, b = left.pop(), right.pop()
        nbytes = min(a.nbytes, b.nbytes)
        pairs.append((_head(a, nbytes), _head(b, nbytes)))
        if a.nbytes > nbytes:
            left.append(_tail(a, nbytes))
        if b.nbytes > nbytes:
            right.append(_tail(b, nbytes))
    return tuple(pairs)


def evenly_spaced(rows: Sequence[tuple[Segment, ...]]) -> tuple[int, tuple[int, ...]]:
    """How many of the first rows are alike but for their offsets, which advance by even steps in each column,
    and these steps, in bytes (0 for a single row).
    """
    count, steps = 1, (0,) * len(rows[0])
    for before, row in pairwise(rows):
        own = tuple(b.offset_bytes - a.offset_bytes for a, b in zip(before, row, strict=True))
        moved = tuple(replace(a, offset_bytes=b.offset_bytes) for a, b in zip(before, row, strict=True))
        if moved != row or (count > 1 and own != steps):
            break
        count, steps = count + 1, own
    return count, steps


def _head(segment: Segment, nbytes: int) -> Segment:
    return Segment(segment.storage, segment.offset_bytes, segment.block_stride_bytes, nbytes)


def _tail(segment: Segment, skip_bytes: int) -> Segment:
    offset_bytes = segment.offset_bytes + skip_bytes
    return Segment(segment.storage, offset_bytes, segment.block_stride_bytes, segment.nbytes - skip_bytes)
