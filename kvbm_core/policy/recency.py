"""An order of use over slot numbers, in arrays: the queue under LRU and its relatives.

A log of slots, oldest first, in chunks of fixed size. A slot that is used again is appended again; its old
entry is dead, because ``_where`` no longer points to it. A chunk without live entries is taken out at once,
and chunks with few are merged with their neighbours a few at a time, so that no step grows with the number of
slots.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from kvbm_core.errors import IntegrityError

Slots = npt.NDArray[np.int32]

CHUNK_BITS = 10
MERGES_PER_CHUNK = 4
FEW = 16
_NOWHERE = -1


class RecencyLog:
    """Slots 0 .. capacity-1, each at most once, oldest use first. One thread only.

    ``chunk_bits``: a chunk of the log has 2 ** chunk_bits places.
    """

    def __init__(self, chunk_bits: int = CHUNK_BITS) -> None:
        self._chunk_bits = chunk_bits
        self._chunk = 1 << chunk_bits
        self._where = np.full(0, _NOWHERE, np.int64)
        self._entries = np.zeros(0, np.int32)
        self._live: list[int] = []
        # Chunk ids, oldest first, as a ring of neighbours; the tail is filled up to _fill.
        self._next: list[int] = []
        self._before: list[int] = []
        self._free: list[int] = []
        self._tail = self._cursor = self._take_chunk()
        self._next[self._tail] = self._before[self._tail] = self._tail
        self._fill = 0
        self._num_chunks = 1
        self._len = 0

    def __len__(self) -> int:
        return self._len

    @property
    def log_entries(self) -> int:
        """Places of the log in use, dead entries included."""
        return self._num_chunks * self._chunk

    def grow(self, capacity_slots: int) -> None:
        """Slots below ``capacity_slots`` may be given from now on."""
        more = capacity_slots - len(self._where)
        if more > 0:
            self._where = np.concatenate([self._where, np.full(more, _NOWHERE, np.int64)])

    def holds(self, slots: Slots) -> npt.NDArray[np.bool_]:
        """Which of ``slots`` are here."""
        held: npt.NDArray[np.bool_] = self._where[slots] >= 0
        return held

    def append(self, slots: Slots) -> None:
        """Adds ``slots``, different from each other and not here; the last is the most recent."""
        start = 0
        while start < len(slots):
            if self._fill == self._chunk:
                self._new_tail()
            part = slots[start : start + self._chunk - self._fill]
            first = self._tail * self._chunk + self._fill
            self._entries[first : first + len(part)] = part
            self._where[part] = _span(first, len(part))
            self._live[self._tail] += len(part)
            self._fill += len(part)
            start += len(part)
        self._len += len(slots)

    def remove(self, slots: Slots) -> None:
        """Takes out ``slots``, different from each other and all here."""
        places = self._where[slots]
        self._where[slots] = _NOWHERE
        self._len -= len(slots)
        chunks = places >> self._chunk_bits
        if len(slots) <= FEW:
            for chunk, count in Counter(chunks.tolist()).items():
                self._lose(chunk, count)
        else:
            changes = np.flatnonzero(chunks[1:] != chunks[:-1])
            if len(changes) > len(chunks) // FEW:  # the oldest of all are together as they are
                chunks.sort()
                changes = np.flatnonzero(chunks[1:] != chunks[:-1])
            ends = [*(changes + 1).tolist(), len(chunks)]
            for start, end in pairwise([0, *ends]):
                self._lose(int(chunks[start]), end - start)

    def oldest(self) -> Iterator[Slots]:
        """The slots in order, some at a time. The log must not be changed until the iterator is given up."""
        chunk = self._next[self._tail]
        while True:
            if self._live[chunk]:
                yield self._entries[self._alive(chunk)]
            if chunk == self._tail:
                return
            chunk = self._next[chunk]

    def check_integrity(self) -> None:
        """Raises IntegrityError if the books disagree. Cost grows with the slots."""
        slots = np.concatenate([*self.oldest(), np.zeros(0, np.int32)])
        here = np.flatnonzero(self._where >= 0)
        if len(slots) != self._len or len(here) != self._len or not np.array_equal(np.sort(slots), here):
            raise IntegrityError("recency: a slot is lost, or there twice")
        if sum(self._live) != self._len:
            raise IntegrityError("recency: the live entries are not counted right")

    def _alive(self, chunk: int) -> npt.NDArray[np.int64]:
        """Places of the chunk's live entries."""
        first = chunk * self._chunk
        places = _span(first, self._fill if chunk == self._tail else self._chunk)
        alive: npt.NDArray[np.int64] = places[self._where[self._entries[places]] == places]
        return alive

    def _take_chunk(self) -> int:
        if not self._free:
            first, more = len(self._live), max(1, len(self._live) // 2)
            self._entries = np.concatenate([self._entries, np.zeros(more * self._chunk, np.int32)])
            for numbers in (self._live, self._next, self._before):
                numbers.extend([0] * more)
            self._free = list(range(first + more - 1, first - 1, -1))
        return self._free.pop()

    def _new_tail(self) -> None:
        for _ in range(MERGES_PER_CHUNK):
            self._merge_at_cursor()
        chunk, head, old_tail = self._take_chunk(), self._next[self._tail], self._tail
        self._live[chunk] = 0
        self._next[old_tail], self._before[chunk] = chunk, old_tail
        self._next[chunk], self._before[head] = head, chunk
        self._tail, self._fill = chunk, 0
        self._num_chunks += 1
        self._lose(old_tail, 0)

    def _lose(self, chunk: int, count: int) -> None:
        self._live[chunk] -= count
        if not self._live[chunk] and chunk != self._tail:
            self._unlink(chunk)

    def _unlink(self, chunk: int) -> None:
        before, after = self._before[chunk], self._next[chunk]
        self._next[before], self._before[after] = after, before
        if self._cursor == chunk:
            self._cursor = after
        self._free.append(chunk)
        self._num_chunks -= 1

    def _merge_at_cursor(self) -> None:
        """Moves the live entries of two neighbours into the first if they fit; else goes on to the second."""
        first = self._cursor
        second = self._next[first]
        if self._tail in (first, second) or self._live[first] + self._live[second] > self._chunk:
            self._cursor = second
            return
        slots = np.concatenate([self._entries[self._alive(first)], self._entries[self._alive(second)]])
        start = first * self._chunk
        self._entries[start : start + len(slots)] = slots
        # What lies behind are old entries of this chunk: those of slots that are still here must not look
        # alive.
        self._where[slots] = _span(start, len(slots))
        self._live[first] = len(slots)
        self._live[second] = 0
        self._unlink(second)


def _span(first: int, count: int) -> npt.NDArray[np.int64]:
    return np.arange(first, first + count, dtype=np.int64)


def are_distinct(slots: Slots) -> bool:
    """Whether no slot is given twice."""
    if len(slots) <= 4 * FEW:
        return len(set(slots.tolist())) == len(slots)
    later, earlier = slots[1:], slots[:-1]
    if (later > earlier).all() or (later < earlier).all():  # as those of one prompt mostly are
        return True
    ordered = np.sort(slots)
    return not (ordered[1:] == ordered[:-1]).any()


def as_slots(numbers: Sequence[int]) -> Slots:
    """Slot numbers as an array."""
    return np.frombuffer(array("i", numbers), np.int32)
