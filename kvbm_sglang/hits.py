"""How much of a prefix can be restored, where a model keeps more than one pool of pages. Pure.

SGLang's hit policies (HiCacheStorage.batch_exists_v2 of 0.5.10 to 0.5.23): of some pools every page of the
prefix is needed, of others (windows, states) only the last ones, and block groups are reported but decide
nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate


def leading(found: Sequence[bool]) -> int:
    """How many of the first are there without a gap."""
    return next((place for place, is_there in enumerate(found) if not is_there), len(found))


def lengths_with_all(found: Sequence[bool]) -> list[int]:
    """The prefix lengths, from 1 on, of which every page is there."""
    return list(range(1, leading(found) + 1))


def lengths_with_tail(found: Sequence[bool], tail_pages: int) -> list[int]:
    """The prefix lengths, from 1 on, of which the last ``tail_pages`` pages (or all, of a shorter one) are
    there.
    """
    tail_pages = max(1, tail_pages)
    missing = [0, *accumulate(not is_there for is_there in found)]
    lengths = range(1, len(found) + 1)
    return [length for length in lengths if missing[length] == missing[max(0, length - tail_pages)]]


def pages_of_groups(found: Sequence[bool], group_pages: int, block_pages: int) -> int:
    """Pages that the leading complete groups cover; ``found``: their keys, ``group_pages`` to a group."""
    return leading(found) // max(1, group_pages) * max(0, block_pages)
