"""A store's own memory, of a bounded size, for trailers and for encoded blocks on their way."""

from __future__ import annotations

import mmap
import threading
from functools import partial
from typing import NamedTuple

from kvbm_core.clock import Clock
from kvbm_core.storage.late import LATE, ranges_of


class Lent(NamedTuple):
    """A part that is lent; ``memory`` begins at a page's start."""

    start: int
    memory: memoryview


class Scratch:
    """One mapping, lent in parts. The kernel gives it pages when they are first written. Any thread.

    A part that a request which was given up may still touch is not lent again until that has ended. So a
    store whose requests never end runs out of parts; it never takes more memory.
    """

    def __init__(self, num_bytes: int, clock: Clock) -> None:
        self.num_bytes = num_bytes
        self._clock = clock
        self._memory = memoryview(mmap.mmap(-1, num_bytes))
        self._changed = threading.Condition()
        self._free = [range(num_bytes)]  # in order, and none touches the next one

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
                self._changed.wait(left_s)
            return lent

    def give_back(self, lent: Lent) -> None:
        """The borrower does not use it any more; a late request may."""
        put_back = partial(self._put_back, range(lent.start, lent.start + lent.memory.nbytes))
        if not LATE.when_free(ranges_of(lent.memory), put_back):
            put_back()

    # ---------------------------------------------------------------- inside

    def _cut(self, size: int) -> Lent | None:
        """Under the lock."""
        for index, span in enumerate(self._free):
            if len(span) >= size:
                rest = range(span.start + size, span.stop)
                self._free[index : index + 1] = [rest] if rest else []
                return Lent(span.start, self._memory[span.start : rest.start])
        return None

    def _put_back(self, span: range) -> None:
        with self._changed:
            before = [other for other in self._free if other.stop < span.start]
            behind = [other for other in self._free if other.start > span.stop]
            touching = [other for other in self._free if other not in before and other not in behind]
            start = min([span.start, *(other.start for other in touching)])
            stop = max([span.stop, *(other.stop for other in touching)])
            self._free = [*before, range(start, stop), *behind]
            self._changed.notify_all()
