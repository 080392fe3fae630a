"""What becomes of that which this process has written to a lower tier: is it read again, and can it be?"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from kvbm_core.policy.recency import Slots
from kvbm_core.types import BlockKey

NameT = TypeVar("NameT", bound=Hashable)

MAX_UNREAD = 1_000_000
"""Names that are remembered where there are no slots; the oldest ones go."""
TAG_BYTES = 8
_NOTHING = bytes(TAG_BYTES)
_ROW = np.dtype([("tag", np.uint64), ("before", np.uint64), ("unread_bytes", np.int64)])


class Unread(Generic[NameT]):
    """Bytes by name that were written and not read since. One thread at a time."""

    def __init__(self, max_names: int = MAX_UNREAD) -> None:
        self._max_names = max_names
        self._bytes: dict[NameT, int] = {}

    def wrote(self, bytes_of: Iterable[tuple[NameT, int]]) -> None:
        """These names were written, with so many bytes each."""
        self._bytes.update(bytes_of)
        while len(self._bytes) > self._max_names:
            del self._bytes[next(iter(self._bytes))]

    def read(self, names: Iterable[NameT]) -> int:
        """These were read: how many bytes were so for the first time."""
        return sum([self._bytes.pop(name, 0) for name in names])


class Chains(NamedTuple):
    """Of the blocks of a tier, in any order: what each is called, and which one it needs before it."""

    tags: npt.NDArray[np.uint64]
    befores: npt.NDArray[np.uint64]

    @property
    def num_headless(self) -> int:
        """Blocks behind one that is not there."""
        num_blocks = len(self.tags)
        if not num_blocks:
            return 0
        needs_none, missing = num_blocks, num_blocks + 1
        order = np.argsort(self.tags)
        ranked = self.tags[order]
        at = np.minimum(np.searchsorted(ranked, self.befores), num_blocks - 1)
        found = np.where(ranked[at] == self.befores, order[at], missing)
        up = np.append(np.where(self.befores == 0, needs_none, found), [needs_none, missing])
        for _ in range(num_blocks.bit_length()):  # each time twice as far up
            up = up[up]
        return int(np.count_nonzero(up[:num_blocks] == missing))


class WrittenSlots:
    """By slot, which block is there, which one it needs before it, and how much of it was not read. One
    thread at a time.
    """

    def __init__(self) -> None:
        self._rows = np.zeros(0, _ROW)

    def grow(self, num_slots: int) -> None:
        """Slots below ``num_slots`` may be written from now on."""
        more = num_slots - len(self._rows)
        if more > 0:
            self._rows = np.concatenate([self._rows, np.zeros(more, _ROW)])

    def begin(
        self,
        slots: Sequence[int],
        keys: Sequence[BlockKey],
        befores: Sequence[BlockKey | None] | None = None,
    ) -> None:
        """``keys`` are in ``slots``, or on their way there. ``befores``: the blocks that they need; without
        it nobody knows.
        """
        self.grow(max(slots, default=-1) + 1)
        rows, at = self._rows, list(slots)
        rows["tag"][at] = _tags(keys)
        rows["before"][at] = 0 if befores is None else _tags(befores)
        rows["unread_bytes"][at] = 0

    def wrote(self, slots: Sequence[int], block_bytes: int) -> None:
        """They are there now."""
        self._rows["unread_bytes"][list(slots)] = block_bytes

    def read(self, slots: Slots) -> int:
        """These were read: how many bytes were so for the first time."""
        unread_bytes = self._rows["unread_bytes"]
        num_bytes = int(unread_bytes[slots].sum())
        unread_bytes[slots] = 0
        return num_bytes

    def chains(self, used: Slots) -> Chains:
        """Of the blocks in the slots ``used``; a copy."""
        rows = self._rows
        return Chains(rows["tag"][used], rows["before"][used])


def _tags(keys: Sequence[BlockKey | None]) -> npt.NDArray[np.uint64]:
    """The last bytes of each key, as the first ones do not tell groups apart; 0 for none."""
    return np.frombuffer(b"".join([key[-TAG_BYTES:] if key else _NOTHING for key in keys]), np.uint64)
