"""Which block is in which slot of one tier."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvbm_core.errors import IntegrityError
from kvbm_core.types import BlockKey, SlotId


class BlockRegistry:
    """Key to slot. A key is resident (can be matched) or pending (its bytes are on their way).

    One thread only. A call that raises has changed nothing.
    """

    def __init__(self) -> None:
        self._resident: dict[BlockKey, SlotId] = {}
        self._pending: dict[BlockKey, SlotId] = {}

    def reserve(self, keys: Sequence[BlockKey], slots: Sequence[SlotId]) -> None:
        """Registers ``keys[i]`` as pending in ``slots[i]``.

        Raises ValueError if the lengths differ, or a key is registered already or given twice.
        """
        new = dict(zip(keys, slots, strict=True))
        if len(new) != len(keys):
            raise ValueError("reserve: a key is given twice")
        if not (self._resident.keys().isdisjoint(new) and self._pending.keys().isdisjoint(new)):
            raise ValueError("reserve: a key is registered already")
        self._pending.update(new)

    def commit(self, keys: Sequence[BlockKey]) -> None:
        """Their bytes are there: pending ``keys`` become resident. Raises KeyError if one is not pending."""
        pending, resident = self._pending, self._resident
        _check_distinct(keys)
        for key in keys:
            if key not in pending:
                raise KeyError(key)
        for key in keys:
            resident[key] = pending.pop(key)

    def drop(self, keys: Sequence[BlockKey]) -> list[SlotId]:
        """Forgets ``keys``, resident or pending; returns their slots in order. KeyError if one is neither."""
        pending, resident = self._pending, self._resident
        _check_distinct(keys)
        for key in keys:
            if key not in resident and key not in pending:
                raise KeyError(key)
        return [resident.pop(key) if key in resident else pending.pop(key) for key in keys]

    def slot_of(self, key: BlockKey) -> SlotId | None:
        """The slot of a resident block, else None."""
        return self._resident.get(key)

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

    def match_prefix(self, keys: Sequence[BlockKey]) -> int:
        """How many of ``keys``, from the first on and without a gap, are resident."""
        resident = self._resident
        for index, key in enumerate(keys):
            if key not in resident:
                return index
        return len(keys)

    def keys(self) -> Iterator[BlockKey]:
        """The resident keys; not to be changed meanwhile."""
        return iter(self._resident)

    def check_integrity(self) -> None:
        """Raises IntegrityError if a key has two states or a slot two keys. Cost grows with the blocks."""
        if not self._resident.keys().isdisjoint(self._pending):
            raise IntegrityError("registry: a key is both resident and pending")
        slots = {*self._resident.values(), *self._pending.values()}
        if len(slots) != len(self._resident) + len(self._pending):
            raise IntegrityError("registry: two keys share a slot")


def _check_distinct(keys: Sequence[BlockKey]) -> None:
    if len(set(keys)) != len(keys):
        raise KeyError("a key is given twice")
