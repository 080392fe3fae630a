"""PyBlockRegistry's twin in C."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence

import numpy as np

from kvbm_core.errors import IntegrityError
from kvbm_core.native import native
from kvbm_core.policy.recency import Slots
from kvbm_core.types import BlockKey


class NativeBlockRegistry:
    """As PyBlockRegistry, which says what the methods promise; RuntimeError where there is no native module.

    A block takes 34 bytes by slot and 11 to 23 in the hash table; its key is made anew when it is asked for.
    TypeError for a key that is not bytes, ValueError for one of another length than a BlockKey's. ``seed`` is
    drawn unless a test wants one: whoever knew it could write prompts whose blocks all want the same place in
    the table.
    """

    def __init__(self, seed: int | None = None) -> None:
        if native is None:
            raise RuntimeError("kvbm was built without its native module, or KVBM_NATIVE=0 is set")
        self._index = native.Index(secrets.randbits(64) if seed is None else seed)
        self._capacity_slots = 0
        self._found: tuple[list[BlockKey], Slots] | None = None

    def grow(self, capacity_slots: int) -> None:
        """Slots below ``capacity_slots`` may be given from now on."""
        self._index.grow(capacity_slots)
        self._capacity_slots = max(self._capacity_slots, capacity_slots)

    def new_of(self, keys: Sequence[BlockKey]) -> tuple[BlockKey, ...]:
        """Those of ``keys`` that are not registered, each once."""
        return self._index.new_of(keys)

    def reserve(self, keys: Sequence[BlockKey], slots: Slots) -> None:
        """Registers ``keys[i]`` as pending in ``slots[i]``; ``keys`` are what ``new_of`` said."""
        self._index.reserve(keys, slots)

    def commit(self, keys: Sequence[BlockKey]) -> Slots:
        """Their bytes are there: pending ``keys`` become resident. Their slots."""
        slots = np.empty(len(keys), np.int32)
        self._index.commit(keys, slots)
        self._found = None
        return slots

    def cancel(self, keys: Sequence[BlockKey]) -> Slots:
        """Forgets pending ``keys``; their slots in order."""
        slots = np.empty(len(keys), np.int32)
        self._index.cancel(keys, slots)
        return slots

    def drop(self, slots: Slots) -> list[BlockKey]:
        """Forgets the resident blocks in ``slots``; their keys in order."""
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
        """Keys of the resident blocks in ``slots``; None where there is none."""
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
