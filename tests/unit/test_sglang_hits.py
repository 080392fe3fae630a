"""How much of a prefix can be restored: against the rules of SGLang's documentation, written out naively."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvbm_sglang.hits import leading, lengths_with_all, lengths_with_tail, pages_of_groups

FOUND = st.lists(st.booleans(), max_size=24)


@given(FOUND)
def test_every_page_of_the_prefix(found: list[bool]) -> None:
    assert lengths_with_all(found) == [n for n in range(1, len(found) + 1) if all(found[:n])]
    assert leading(found) == max([0, *lengths_with_all(found)])


@given(FOUND, st.integers(0, 30))
def test_the_last_pages_of_the_prefix(found: list[bool], tail: int) -> None:
    def is_restorable(length: int) -> bool:
        return all(found[place] for place in range(length) if place >= length - max(1, tail))

    assert lengths_with_tail(found, tail) == [n for n in range(1, len(found) + 1) if is_restorable(n)]


@given(FOUND, st.integers(1, 5), st.integers(1, 9))
def test_whole_groups(found: list[bool], group_pages: int, block_pages: int) -> None:
    groups = [found[start : start + group_pages] for start in range(0, len(found), group_pages)]
    whole = 0
    for group in groups:
        if len(group) < group_pages or not all(group):
            break
        whole += 1
    assert pages_of_groups(found, group_pages, block_pages) == whole * block_pages
