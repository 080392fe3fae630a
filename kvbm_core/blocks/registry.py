"""Which block is in which slot of one tier."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, cast

import numpy as np

from kvbm_core.errors import IntegrityError
from kvbm_core.native import native
from kvbm_core.policy.recency import Slots
from kvbm_core.types import BlockKey

if TYPE_CHECKING:
    from kvbm_core.native._kvbm import Index

# Few at first, so that a miss costs little, then more.
FIRST_LOOKED_UP, LOOKED_UP_AT_ONCE = 8, 1024


class BlockRegistry:
    """Key to slot, and back. A key is resident (can be matched) or pending (its bytes are on their way).

    No object of ours stands behind a block: it is an entry of ``index``, which is the native module's where
    there is one. There a block takes 34 bytes by slot and 11 to 23 in the hash table, and its key is made
    anew when it is asked for; TypeError then for a key that is not bytes, ValueError for one of another
    length than a BlockKey's. One thread only. A call that raises has changed nothing.
    """

    def __init__(self, index: Index | PyIndex | None = None) -> None:
        self._index = new_index() if index is None else index
        self._capacity_slots = 0
        # The last answer of find: the same keys are asked for again when they are leased and touched.
        self._found: tuple[list[BlockKey], Slots] | None = None

    def grow(self, capacity_slots: int) -> None:
        """Slots below ``capacity_slots`` may be given from now on."""
        self._index.grow(capacity_slots)
        self._capacity_slots = max(self._capacity_slots, capacity_slots)

    def new_of(self, keys: Sequence[BlockKey]) -> tuple[BlockKey, ...]:
        """Those of ``keys`` that are not registered, each once."""
        return self._index.new_of(keys)

    def reserve(self, keys: Sequence[BlockKey], slots: Slots) -> None:
        """Registers ``keys[i]`` as pending in ``slots[i]``; ``keys`` are what ``new_of`` said.

        Raises ValueError if the lengths differ, if a key is registered or given twice, or if a slot is taken,
        given twice or not there.
        """
        self._index.reserve(keys, slots)

    def commit(self, keys: Sequence[BlockKey]) -> Slots:
        """Their bytes are there: pending ``keys`` become resident. Their slots; KeyError if one is not
        pending.
        """
        slots = np.empty(len(keys), np.int32)
        self._index.commit(keys, slots)
        self._found = None
        return slots

    def cancel(self, keys: Sequence[BlockKey]) -> Slots:
        """Forgets pending ``keys``; their slots in order. KeyError if one is not pending."""
        slots = np.empty(len(keys), np.int32)
        self._index.cancel(keys, slots)
        return slots

    def drop(self, slots: Slots) -> list[BlockKey]:
        """Forgets the resident blocks in ``slots``; their keys in order. KeyError if there is none in one of
        them, IndexError if there is no such slot.
        """
        keys = self._index.drop(slots)
        self._found = None
        return keys

    def find(self, keys: Sequence[BlockKey]) -> Slots:
        """Slots of the leading ``keys`` that are resident, up to the first that is not. Not to be written
        to.
        """
        if self._found is not None and self._found[0] == keys:  # cheap: the same objects in another list
            return self._found[1]
        slots = np.empty(len(keys), np.int32)
        slots = slots[: self._index.find(keys, slots)]
        if len(slots):  # a miss leaves what it has: letting go of thousands of keys would be all of its time
            self._found = (list(keys[: len(slots)]), slots)
        return slots

    def keys_in(self, slots: Slots) -> list[BlockKey | None]:
        """Keys of the resident blocks in ``slots``; None where there is none. IndexError if there is no such
        slot.
        """
        return self._index.keys_in(slots)

    def slots_of(self, keys: Sequence[BlockKey]) -> Slots:
        """Slots of those of ``keys`` that are resident."""
        slots = np.empty(len(keys), np.int32)
        return slots[: self._index.slots_of(keys, slots)]

    def resident_of(self, keys: Sequence[BlockKey]) -> list[BlockKey]:
        """Those of ``keys`` that are resident, in order."""
        return [key for key in self._index.keys_in(self.slots_of(keys)) if key is not None]

    def is_pending(self, key: BlockKey) -> bool:
        """Whether the block's bytes are on their way."""
        return self._index.is_pending(key)

    @property
    def pending_blocks(self) -> int:
        """How many blocks are on their way."""
        return self._index.pending_blocks()

    def __contains__(self, key: BlockKey) -> bool:
        return key in self._index

    def __len__(self) -> int:
        return len(self._index)

    def keys(self) -> Iterator[BlockKey]:
        """The resident keys, in no order."""
        every_slot = np.arange(self._capacity_slots, dtype=np.int32)
        return (key for key in self._index.keys_in(every_slot) if key is not None)

    def check_integrity(self) -> None:
        """Raises IntegrityError if key and slot do not point to each other. Cost grows with the slots."""
        fault = self._index.check()
        if fault is not None:
            raise IntegrityError(f"registry: {fault}")


def new_index() -> Index | PyIndex:
    """An empty one. Its seed is drawn: whoever knew it could write prompts whose blocks all want the same
    place in the table.
    """
    return PyIndex() if native is None else native.Index(secrets.randbits(64))


class PyIndex:
    """The native module's Index in Python: a block is one entry of a dict, and one place in a list of keys by
    slot.
    """

    def __init__(self) -> None:
        self._resident: dict[BlockKey, int] = {}
        self._pending: dict[BlockKey, int] = {}
        self._key_at: list[BlockKey | None] = []
        self._is_taken = np.zeros(0, np.bool_)

    def grow(self, capacity_slots: int) -> None:
        """See Index."""
        more = capacity_slots - len(self._key_at)
        if more > 0:
            self._key_at.extend([None] * more)
            self._is_taken = np.append(self._is_taken, np.zeros(more, np.bool_))

    def new_of(self, keys: Sequence[BlockKey]) -> tuple[BlockKey, ...]:
        """See Index."""
        once = dict.fromkeys(keys)
        resident, pending = self._resident, self._pending
        if resident.keys().isdisjoint(once) and pending.keys().isdisjoint(once):
            return tuple(once)
        return tuple(key for key in once if key not in resident and key not in pending)

    def reserve(self, keys: Sequence[BlockKey], slots: Slots) -> None:
        """See Index."""
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

    def commit(self, keys: Sequence[BlockKey], slots: Slots) -> None:
        """See Index."""
        slots[: len(keys)] = taken = self._take_pending(keys)
        self._resident.update(zip(keys, taken, strict=True))
        for key, slot in zip(keys, taken, strict=True):
            self._key_at[slot] = key

    def cancel(self, keys: Sequence[BlockKey], slots: Slots) -> None:
        """See Index."""
        slots[: len(keys)] = taken = self._take_pending(keys)
        self._is_taken[taken] = False

    def _take_pending(self, keys: Sequence[BlockKey]) -> list[int]:
        once = set(keys)
        if len(once) != len(keys) or not once <= self._pending.keys():
            raise KeyError("a key is not on its way, or given twice")
        return list(map(self._pending.pop, keys))

    def drop(self, slots: Slots) -> list[BlockKey]:
        """See Index."""
        numbers = slots.tolist()
        keys = [key for key in map(self._key_at.__getitem__, numbers) if key is not None]
        if len(keys) != len(numbers) or len(set(numbers)) != len(numbers):
            raise KeyError("a slot holds no resident block, or is given twice")
        resident, key_at = self._resident, self._key_at
        for key, slot in zip(keys, numbers, strict=True):
            del resident[key]
            key_at[slot] = None
        self._is_taken[slots] = False
        return keys

    def find(self, keys: Sequence[BlockKey], slots: Slots) -> int:
        """See Index."""
        get, end = self._resident.get, 0
        while end < len(keys):
            start, end = end, end + min(max(FIRST_LOOKED_UP, 8 * end), LOOKED_UP_AT_ONCE)
            found = list(map(get, keys[start:end]))
            gap = found.index(None) if None in found else len(found)
            slots[start : start + gap] = cast("list[int]", found[:gap])
            if gap < len(found):
                return start + gap
        return len(keys)

    def slots_of(self, keys: Sequence[BlockKey], slots: Slots) -> int:
        """See Index."""
        found = [slot for slot in map(self._resident.get, keys) if slot is not None]
        slots[: len(found)] = found
        return len(found)

    def keys_in(self, slots: Slots) -> list[BlockKey | None]:
        """See Index."""
        return [self._key_at[slot] for slot in slots.tolist()]

    def is_pending(self, key: BlockKey) -> bool:
        """See Index."""
        return key in self._pending

    def pending_blocks(self) -> int:
        """See Index."""
        return len(self._pending)

    def __contains__(self, key: BlockKey) -> bool:
        return key in self._resident

    def __len__(self) -> int:
        return len(self._resident)

    def check(self) -> str | None:
        """See Index. Cost grows with the blocks."""
        if not self._resident.keys().isdisjoint(self._pending):
            return "a key is both resident and pending"
        slots = {*self._resident.values(), *self._pending.values()}
        if len(slots) != len(self._resident) + len(self._pending):
            return "two keys share a slot"
        if slots != set(np.flatnonzero(self._is_taken).tolist()):
            return "other slots are taken than those of its blocks"
        if {key: slot for slot, key in enumerate(self._key_at) if key is not None} != self._resident:
            return "slot and key do not point to each other"
        return None
