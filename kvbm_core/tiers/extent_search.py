"""Which extents of a chain to look for next in a shared store, given its answers so far.

The search keeps no state; it begins anew with each answer.

1. The first extent is looked for alone: a prompt of which nothing is stored costs one request.
2. If it is there, those at 2, 4, 8 ... and the last one are looked for at once.
3. Then the gap between the last that is there and the first that is not, at sixteen places at once.

Extents before one that is there are believed to be there too. Where the full extents end, smaller ones are
looked for; there are none before block 1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from typing import NamedTuple

from kvbm_core.storage.extents import extent_at, extent_number, extent_numbered, smaller_extents

PARTS = 16


class Belief(Enum):
    """What is known of an extent."""

    UNKNOWN = "unknown"
    ASKED = "asked"
    PRESENT = "present"
    ABSENT = "absent"


class Step(NamedTuple):
    """``there``: the extents to fetch, from the front on: known or believed to be there. ``ask``: extents to
    look for now. ``is_open``: answers are missing, so there may be more extents.
    """

    there: Sequence[range] = ()
    ask: Sequence[range] = ()
    is_open: bool = False


class ExtentSearch:
    """A search for blocks ``origin`` to ``end`` - 1 of a chain. ``origin``: the first block that was missing
    when the search began. ``belief``: tells what is known of an extent.
    """

    def __init__(self, origin: int, end: int, full_blocks: int, belief: Callable[[range], Belief]) -> None:
        self._origin, self._end = origin, end
        self._full_blocks = full_blocks
        self._belief = belief
        self._start_number = extent_number(origin, full_blocks)
        self._num_whole = extent_number(end, full_blocks) - self._start_number

    def step(self, first: int, most_blocks: int) -> Step:
        """The next step if ``first`` is the first block that is missing now. ``there`` has no extents that
        begin ``most_blocks`` or more behind it.
        """
        found, ask, is_open = self._search_whole()
        there = list[range]()
        for number in range(extent_number(first, self._full_blocks) - self._start_number, found):
            extent = self._whole(number)
            if extent.start >= first + most_blocks:
                return Step(there, ask, is_open)
            if self._belief(extent) is Belief.ABSENT:  # it was believed to be there, and could not be read
                found, ask, is_open = number, [], False
                break
            there.append(extent)
        if is_open:
            return Step(there, ask, is_open)
        smaller, ask, is_open = self._search_smaller(self._whole(found - 1).stop if found else self._origin)
        return Step([*there, *(e for e in smaller if e.stop > first)], ask, is_open)

    def _whole(self, number: int) -> range:
        """The full extent with this number; that of ``origin`` has number 0."""
        return extent_numbered(self._start_number + number, self._full_blocks)

    def _search_whole(self) -> tuple[int, list[range], bool]:
        """How many whole extents are there, which to ask for, and whether answers are missing."""
        num_all = self._num_whole
        if not num_all:
            return 0, [], False
        first = self._look([0])
        if first.last < 0:
            return 0, first.ask, first.is_open
        jumps = [1 << i for i in range(1, num_all.bit_length()) if 1 << i < num_all - 1]
        last, absent = 0, num_all
        numbers = [*jumps, num_all - 1] if num_all > 1 else []
        while numbers:
            look = self._look(numbers)
            last, absent = max(last, look.last), min(absent, look.absent)
            if look.is_open:
                return last + 1, look.ask, True
            part = -(-(absent - last) // PARTS)
            numbers = list(range(last + part, absent, part))
        return last + 1, [], False

    def _look(self, numbers: Sequence[int]) -> _Look:
        last, ask, is_open = -1, list[range](), False
        for number in numbers:
            extent = self._whole(number)
            belief = self._belief(extent)
            if belief is Belief.ABSENT:
                return _Look(last, number, ask, is_open)
            if belief is Belief.PRESENT:
                last = number
            else:
                is_open = True
                if belief is Belief.UNKNOWN:
                    ask.append(extent)
        return _Look(last, self._num_whole, ask, is_open)

    def _search_smaller(self, position: int) -> tuple[list[range], list[range], bool]:
        """The same for smaller extents from ``position`` on, of a chain that has ended within its extent."""
        there, smallest = list[range](), len(extent_at(position, self._full_blocks))
        while position < self._end:
            sizes = [e for e in smaller_extents(position, self._end, self._full_blocks) if len(e) < smallest]
            beliefs = [self._belief(extent) for extent in sizes]
            ask = [e for e, belief in zip(sizes, beliefs, strict=True) if belief is Belief.UNKNOWN]
            if ask or Belief.ASKED in beliefs:
                return there, ask, True
            largest = next((e for e, b in zip(sizes, beliefs, strict=True) if b is Belief.PRESENT), None)
            if largest is None:
                break
            there.append(largest)
            position, smallest = largest.stop, len(largest)
        return there, [], False


class _Look(NamedTuple):
    """``last``: the last number that is there, -1 for none. ``absent``: the first that is not. ``ask``,
    ``is_open``: as in Step.
    """

    last: int
    absent: int
    ask: list[range]
    is_open: bool
