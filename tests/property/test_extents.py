"""Where extents begin and end, beside a naive twin."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvbm_core.storage.extents import (
    EXTENT_BYTES,
    MAX_EXTENT_BLOCKS,
    extent_at,
    extent_blocks,
    extent_number,
    extent_numbered,
    extents_within,
    smaller_extents,
    tail_extents,
)

powers = st.integers(0, 9).map(lambda n: 1 << n)


def _cuts(end: int, full_blocks: int) -> list[int]:
    """0, 1, 2, 4 ... and then the multiples of the full size."""
    cuts = [0, *(1 << n for n in range(full_blocks.bit_length()))]
    while cuts[-1] <= end:
        cuts.append(cuts[-1] + full_blocks)
    return cuts


@given(st.integers(0, 5000), powers)
def test_a_block_is_in_the_extent_between_two_cuts(position: int, full_blocks: int) -> None:
    cuts = _cuts(position, full_blocks)
    start = max(cut for cut in cuts if cut <= position)
    assert extent_at(position, full_blocks) == range(start, min(cut for cut in cuts if cut > position))


@given(st.integers(0, 3000), st.integers(0, 3000), powers)
def test_extents_of_a_span(first: int, end: int, full_blocks: int) -> None:
    spans = [extent_at(i, full_blocks) for i in range(first, end)]
    wanted = {(span.start, span.stop) for span in spans if span.stop <= end}
    found = [(span.start, span.stop) for span in extents_within(first, end, full_blocks)]
    assert sorted(wanted) == found


@given(st.integers(0, 3000), powers)
def test_a_chain_that_ended_is_covered_once(end: int, full_blocks: int) -> None:
    spans = [*extents_within(0, end, full_blocks), *tail_extents(end, full_blocks)]
    assert [block for span in spans for block in span] == list(range(end))
    assert all(len(span) & (len(span) - 1) == 0 and len(span) <= full_blocks for span in spans)


@given(st.integers(0, 3000), powers)
def test_a_tail_is_found_by_looking_for_the_largest_first(end: int, full_blocks: int) -> None:
    stored = {(span.start, span.stop) for span in tail_extents(end, full_blocks)}
    position, asked = (min(stored)[0] if stored else end), 0
    while position < end:
        candidates = [(s.start, s.stop) for s in smaller_extents(position, end + full_blocks, full_blocks)]
        asked += len(candidates)
        position = next(stop for start, stop in candidates if (start, stop) in stored)
    assert asked <= full_blocks.bit_length() ** 2


@given(st.integers(0, 3000), st.integers(0, 4000), powers)
def test_smaller_extents_hold_the_block_and_end_in_time(position: int, end: int, full_blocks: int) -> None:
    whole = extent_at(position, full_blocks)
    for span in smaller_extents(position, end, full_blocks):
        assert position in span and (span.start - whole.start) % len(span) == 0
        assert span.stop <= min(end, whole.stop)
        assert len(span) < len(whole)


@given(st.integers(0, 3000), powers)
def test_extents_are_numbered_from_the_first_on(position: int, full_blocks: int) -> None:
    whole = extent_at(position, full_blocks)
    number = len(list(extents_within(0, whole.start, full_blocks)))
    assert extent_number(position, full_blocks) == number
    assert extent_numbered(number, full_blocks) == whole


@given(st.integers(1, 1 << 31))
def test_a_full_extent_has_about_so_many_bytes(block_bytes: int) -> None:
    blocks = extent_blocks(block_bytes)
    assert blocks & (blocks - 1) == 0
    assert blocks == 1 or blocks * block_bytes <= EXTENT_BYTES
    assert blocks == MAX_EXTENT_BLOCKS or 2 * blocks * block_bytes > EXTENT_BYTES
