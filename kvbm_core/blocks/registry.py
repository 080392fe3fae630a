"""Which block is in which slot of one tier."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import cast

import numpy as np

from kvbm_core.blocks.native_registry import NativeBlockRegistry
from kvbm_core.errors import IntegrityError
from kvbm_core.native import native
from kvbm_core.policy.recency import Slots, as_slots
from kvbm_core.types import BlockKey

# Few at first, so that a miss costs little, then more.
FIRST_LOOKED_UP, LOOKED_UP_AT_ONCE = 8, 1024


class PyBlockRegistry:
    """Key to slot, and back. A key is resident (can be matched) or pending (its bytes are on their way).

    No object of ours stands behind a block: one entry of a dict, and one place in a list of keys by slot.
    One thread only. A call that raises has changed nothing.
    """

    def __init__(self) -> None:
        self._resident: dict[BlockKey, int] = {}
        self._pending: dict[BlockKey, int] = {}
        self._key_at: list[BlockKey | None] = []
        self._is_taken = np.zeros(0, np.bool_)
        # The last answer of find: the same keys are asked for again when they are leased and touched.
        self._found: tuple[list[BlockKey], Slots] | None = None

    def grow(self, capacity_slots: int) -> None:
        """Slots below ``capacity_slots`` may be given from now on."""
        more = capacity_slots - len(self._key_at)
        if more > 0:
            self._key_at.extend([None] * more)
            self._is_taken = np.append(self._is_taken, np.zeros(more, np.bool_))

    def new_of(self, keys: Sequence[BlockKey]) -> tuple[BlockKey, ...]:
        """Those of ``keys`` that are not registered, each once."""
        once = dict.fromkeys(keys)
        resident, pending = self._resident, self._pending
        if resident.keys().isdisjoint(once) and pending.keys().isdisjoint(once):
            return tuple(once)
        return tuple(key for key in once if key not in resident and key not in pending)

    def reserve(self, keys: Sequence[BlockKey], slots: Slots) -> None:
        """Registers ``keys[i]`` as pending in ``slots[i]``; ``keys`` are what ``new_of`` said.

        Raises ValueError if the lengths differ, if a key is registered or given twice, or if a slot is taken,
        given twice or not there.
        """
        numbers = slots.tolist()
        new = dict(zip(keys, numbers, strict=True))
        if len(new) != len(keys) or len(self.new_of(keys)) != len(keys):
            raise ValueError("reserve: a key is registered already, or given twice")
        is_there = not numbers or (min(numbers) >= 0 and max(numbers) < len(self._is_taken))
        if not is_there or len(set(numbers)) != len(numbers) or self._is_taken[slots].any():
            raise ValueError("reserve: a slot is taken, given twice or not there")
        self._is_taken[slots] = True
        if self._pending:
            self._pending.update(new)
        else:  # no other job is under way: nothing to copy
            self._pending = new

    def commit(self, keys: Sequence[BlockKey]) -> Slots:
        """Their bytes are there: pending ``keys`` become resident. Their slots; KeyError if one is not
        pending.
        """
        slots = self._take_pending(keys)
        self._resident.update(zip(keys, slots, strict=True))
        for key, slot in zip(keys, slots, strict=True):
            self._key_at[slot] = key
        self._found = None
        return as_slots(slots)

    def cancel(self, keys: Sequence[BlockKey]) -> Slots:
        """Forgets pending ``keys``; their slots in order. KeyError if one is not pending."""
        slots = as_slots(self._take_pending(keys))
        self._is_taken[slots] = False
        return slots

    def _take_pending(self, keys: Sequence[BlockKey]) -> list[int]:
        once = set(keys)
        if len(once) != len(keys) or not once <= self._pending.keys():
            raise KeyError("a key is not on its way, or given twice")
        return list(map(self._pending.pop, keys))

    def drop(self, slots: Slots) -> list[BlockKey]:
        """Forgets the resident blocks in ``slots``; their keys in order. KeyError if there is none in one of
        them, IndexError if there is no such slot.
        """
        numbers = slots.tolist()
        keys = [key for key in map(self._key_at.__getitem__, numbers) if key is not None]
        if len(keys) != len(numbers) or len(set(numbers)) != len(numbers):
            raise KeyError("a slot holds no resident block, or is given twice")
        resident, key_at = self._resident, self._key_at
        for key, slot in zip(keys, numbers, strict=True):
            del resident[key]
            key_at[slot] = None
        self._is_taken[slots] = False
        self._found = None
        return keys

    def find(self, keys: Sequence[BlockKey]) -> Slots:
        """Slots of the leading ``keys`` that are resident, up to the first that is not. Not to be written
        to.
        """
        if self._found is not None and self._found[0] == keys:  # cheap: the same objects in another list
            return self._found[1]
        get = self._resident.get
        found: list[int] = []
        end = 0
        while end < len(keys):
            start, end = end, end + min(max(FIRST_LOOKED_UP, 8 * end), LOOKED_UP_AT_ONCE)
            slots = list(map(get, keys[start:end]))
            gap = slots.index(None) if None in slots else len(slots)
            found += cast("list[int]", slots[:gap])
            if gap < len(slots):
                break
        self._found = (list(keys[: len(found)]), as_slots(found))
        return self._found[1]

    def keys_in(self, slots: Slots) -> list[BlockKey | None]:
        """Keys of the resident blocks in ``slots``; None where there is none. IndexError if there is no such
        slot.
        """
        return [self._key_at[slot] for slot in slots.tolist()]

    def slots_of(self, keys: Sequence[BlockKey]) -> Slots:
        """Slots of those of ``keys`` that are resident."""
        return as_slots([slot for slot in map(self._resident.get, keys) if slot is not None])

    def resident_of(self, keys: Sequence[BlockKey]) -> list[BlockKey]:
        """Those of ``keys`` that are resident, in order."""
        return [key for key in keys if key in self._resident]

    def is_pending(self, key: BlockKey) -> bool:
        """Whether the block's bytes are on their way."""
        return key in self._pending

    @property
    def pending_blocks(self) -> int:
        """How many blocks are on their way."""
        return len(self._pending)

    def __contains__(self, key: BlockKey) -> bool:
        return key in self._resident

    def __len__(self) -> int:
        return len(self._resident)

    def keys(self) -> Iterator[BlockKey]:
        """The resident keys, in no order; not to be changed meanwhile."""
        return iter(self._resident)

    def check_integrity(self) -> None:
        """Raises IntegrityError if a key has two states or a slot two keys. Cost grows with the blocks."""
        if not self._resident.keys().isdisjoint(self._pending):
            raise IntegrityError("registry: a key is both resident and pending")
        slots = {*self._resident.values(), *self._pending.values()}
        if len(slots) != len(self._resident) + len(self._pending):
            raise IntegrityError("registry: two keys share a slot")
        if slots != set(np.flatnonzero(self._is_taken).tolist()):
            raise IntegrityError("registry: other slots are taken than those of its blocks")
        if {key: slot for slot, key in enumerate(self._key_at) if key is not None} != self._resident:
            raise IntegrityError("registry: slot and key do not point to each other")


AnyBlockRegistry = PyBlockRegistry | NativeBlockRegistry
BlockRegistry: type[AnyBlockRegistry] = PyBlockRegistry if native is None else NativeBlockRegistry
