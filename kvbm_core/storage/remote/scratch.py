"""A store's own memory, of a bounded size, for trailers and for encoded blocks on their way."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable
from typing import NamedTuple

from kvbm_core.clock import Clock
from kvbm_core.storage.base import Memory
from kvbm_core.storage.call_pool import ranges_of

LOOK_S = 0.05
"""So often a waiting call checks whether a late request has ended."""
_KEPT: list[mmap.mmap] = []
"""Memory of closed stores that requests which never ended may still touch."""


class Lent(NamedTuple):
    """A part that is lent; ``memory`` begins at a page's start."""

    start: int
    memory: memoryview


class Scratch:
    """One mapping, lent in parts. The kernel gives it pages when they are first written. Any thread.

    ``is_late``: whether a request that was given up may still touch this memory. Such a part is not lent
    again until the request has ended. So a store whose requests never end runs out of parts; it never takes
    more memory.
    """

    def __init__(self, num_bytes: int, is_late: Callable[[Memory], bool], clock: Clock) -> None:
        self.num_bytes = num_bytes
        self._is_late = is_late
        self._clock = clock
        self._mmap = mmap.mmap(-1, num_bytes)
        self._memory = memoryview(self._mmap)
        self._changed = threading.Condition()
        self._free = [range(num_bytes)]  # in order, and none touches the next one
        self._late: list[Lent] = []

    @property
    def place(self) -> tuple[int, int]:
        """Its address and size in bytes."""
        ((start, stop),) = ranges_of(self._memory)
        return start, stop - start

    def take(self, num_bytes: int, deadline_s: float) -> Lent | None:
        """A part of ``num_bytes``; waits for one at most ``deadline_s`` seconds, then None."""
        size = -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        ends_at_s = self._clock.now_s() + deadline_s
        with self._changed:
            while (lent := self._cut(size)) is None:
                left_s = ends_at_s - self._clock.now_s()
                if left_s <= 0 or size > self.num_bytes:
                    return None
                self._changed.wait(min(left_s, LOOK_S) if self._late else left_s)
            return lent

    def give_back(self, lent: Lent) -> None:
        """The borrower does not use it any more; a late request may."""
        with self._changed:
            if self._is_late(lent.memory):
                self._late.append(lent)
            else:
                self._put_back(range(lent.start, lent.start + lent.memory.nbytes))
            self._changed.notify_all()

    def close(self) -> None:
        """Memory that may still be touched is kept for good."""
        with self._changed:
            self._look_at_late()
            if self._late:
                _KEPT.append(self._mmap)

    # ---------------------------------------------------------------- inside, under the lock

    def _cut(self, size: int) -> Lent | None:
        for looks in (False, True):
            if looks and not self._look_at_late():
                return None
            for index, span in enumerate(self._free):
                if len(span) >= size:
                    rest = range(span.start + size, span.stop)
                    self._free[index : index + 1] = [rest] if rest else []
                    return Lent(span.start, self._memory[span.start : rest.start])
        return None

    def _look_at_late(self) -> bool:
        """Whether some of it is free now."""
        late, self._late = self._late, []
        for lent in late:
            if self._is_late(lent.memory):
                self._late.append(lent)
            else:
                self._put_back(range(lent.start, lent.start + lent.memory.nbytes))
        return len(self._late) < len(late)

    def _put_back(self, span: range) -> None:
        before = [other for other in self._free if other.stop < span.start]
        behind = [other for other in self._free if other.start > span.stop]
        touching = [other for other in self._free if other not in before and other not in behind]
        start = min([span.start, *(other.start for other in touching)])
        stop = max([span.stop, *(other.stop for other in touching)])
        self._free = [*before, range(start, stop), *behind]
