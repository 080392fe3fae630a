"""The interface of eviction policies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from kvbm_core.policy.recency import Slots
from kvbm_core.tokens.runs import BlockRun

Spare = Callable[[Slots], npt.NDArray[np.bool_]]


@runtime_checkable
class EvictionPolicy(Protocol):
    """Chooses which of a tier's blocks goes when room is needed. Knows slot numbers only; see TakesRuns.

    Slots are given as arrays (int32), head first, in prefix order: of the slots of one call the tail is
    evicted before the head, as a tail without its head is of no use. A sequence that arrives in several calls
    is touched as a whole after each, and then the tail goes first, however often each slot was used before.
    One load is a pin, an unpin and one touch or more: who counts uses counts what ``tell`` says, or one of
    these. Steps must not grow with the slots: a queue is an OrderedDict, as a dict from which the first were
    deleted is slow to find its next. The arrays are not to be changed. One thread only. A call that raises
    has changed nothing. ``kvbm_core.testing.policy_contract`` is the test that every policy must pass.
    """

    def grow(self, capacity_slots: int) -> None:
        """Slots below ``capacity_slots`` may be given from now on; a smaller number changes nothing."""

    def insert(self, slots: Slots) -> None:
        """Adds ``slots``, unpinned and most recent. Raises ValueError if one is there or given twice."""

    def touch(self, slots: Slots) -> None:
        """``slots`` have been used again. Unknown ones are ignored, and pinned ones but that they are demoted
        no more.
        """

    def demote(self, slots: Slots) -> None:
        """``slots`` go before all that are not demoted, until they are touched; of those that are demoted the
        first ones first, of one call the tail; one that is demoted already stays where it is. Unknown ones
        are ignored; pinned ones are demoted with their last unpin, the tail of that first.
        """

    def pin(self, slots: Slots) -> None:
        """Keeps ``slots`` until as many unpins; counted, once per mention. KeyError if one is unknown."""

    def unpin(self, slots: Slots) -> None:
        """Takes back one pin per mention; the last one makes the slot most recent, unless it
        is demoted.

        Raises KeyError if a slot has fewer pins than that.
        """

    def remove(self, slots: Slots) -> None:
        """Takes ``slots`` out. Raises KeyError if one is unknown or given twice, ValueError if one is
        pinned.
        """

    def evict(self, count_blocks: int, spare: Spare | None = None) -> Slots | None:
        """Takes out and returns exactly ``count_blocks`` slots, not pinned and not spared, next to go first.

        ``spare(slots)`` says which of some candidates stay for now; it is asked about no more than are
        needed.

        None, and nothing has changed, if there are not so many. Raises ValueError for a negative count.
        """

    def is_pinned(self, slot: int) -> bool:
        """Whether ``slot`` is here and pinned."""

    @property
    def evictable_blocks(self) -> int:
        """How many slots are not pinned."""

    def check_integrity(self) -> None:
        """Raises IntegrityError if the policy's own books disagree. Cost grows with their size."""


@runtime_checkable
class TakesRuns(Protocol):
    """An EvictionPolicy that wants to know of which prompt blocks are, and where in it they lie."""

    def tell(self, run: BlockRun, slots: Slots) -> None:
        """The blocks of ``run`` were stored or loaded just now: ``slots[i]`` has its block ``first + i``;
        NOT_HERE: it is not in this tier. Blocks that came to a disk are told of when they are loaded.
        """


NOT_HERE = -1
