"""One tier's bookkeeping: which block is in which slot, what may be evicted, what is pinned.

No bytes here. A block exists in the tier from ``commit`` on, never before; between ``reserve`` and ``commit``
(or ``abort``) its slot is neither matchable nor reusable. One thread only: the leader's.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from collections.abc import Set as AbstractSet
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvbm_core.blocks.lease import Lease, LeaseBook
from kvbm_core.blocks.pool import SlotPool
from kvbm_core.blocks.registry import BlockRegistry
from kvbm_core.clock import Clock
from kvbm_core.errors import IntegrityError
from kvbm_core.policy.base import EvictionPolicy
from kvbm_core.policy.recency import Slots, as_slots
from kvbm_core.types import BlockKey, Tier

Protected = Callable[[Sequence[BlockKey]], AbstractSet[BlockKey]]
"""What has to stay where it is when room is made for these keys."""


def protect_nothing(new_keys: Sequence[BlockKey]) -> AbstractSet[BlockKey]:
    """Everything may be evicted for them."""
    return frozenset()


class Reservation(NamedTuple):
    """Slots being written: ``keys[i]`` goes to ``slots[i]``. Ended exactly once, by commit or abort."""

    keys: tuple[BlockKey, ...]
    slots: tuple[int, ...]
    generation: int

    def split(self, lost: Collection[BlockKey]) -> tuple[Reservation, Reservation]:
        """In place of it, two that are ended each by itself: without the keys of ``lost``, and with these."""
        if not lost:
            return self, Reservation((), (), self.generation)
        lost = frozenset(lost)
        parts = []
        for is_lost in (False, True):
            pairs = [p for p in zip(self.keys, self.slots, strict=True) if (p[0] in lost) == is_lost]
            keys, slots = tuple(key for key, _ in pairs), tuple(slot for _, slot in pairs)
            parts.append(Reservation(keys, slots, self.generation))
        return parts[0], parts[1]


class BlockTier:
    """Pool + registry + policy + leases of one tier.

    ``on_evict`` is told the keys that left the tier (evicted, forgotten or reset), after they left.
    """

    def __init__(
        self,
        tier: Tier,
        policy: EvictionPolicy,
        clock: Clock,
        on_evict: Callable[[Sequence[BlockKey]], None] | None = None,
    ) -> None:
        self.tier = tier
        self._policy = policy
        self._pool = SlotPool()
        self._registry = BlockRegistry()
        self._leases = LeaseBook(clock)
        self._on_evict = on_evict or (lambda keys: None)
        # Keys that must leave as soon as their last pin goes: forgotten or reset while being read.
        self._doomed: set[BlockKey] = set()
        self._generation = 0
        self.evicted_blocks_total = 0

    @property
    def capacity_blocks(self) -> int:
        """Slots of the tier that are ready for use."""
        return self._pool.capacity_slots

    @property
    def resident_blocks(self) -> int:
        """Blocks that can be matched."""
        return len(self._registry) - len(self._doomed)

    @property
    def pending_blocks(self) -> int:
        """Blocks whose bytes are on their way."""
        return self._registry.pending_blocks

    @property
    def live_leases(self) -> int:
        """Leases granted and neither released nor expired."""
        return self._leases.live_leases

    def grow(self, capacity_blocks: int) -> None:
        """Makes ``capacity_blocks`` slots usable in all; a smaller number changes nothing."""
        if capacity_blocks > self._pool.capacity_slots:
            self._pool.grow(capacity_blocks)
            self._registry.grow(capacity_blocks)
            self._policy.grow(capacity_blocks)

    def expect(self, capacity_blocks: int) -> None:
        """There will be so many slots: the books are made large enough at once, not each time they grow."""
        self._pool.expect(capacity_blocks)
        self._registry.grow(capacity_blocks)
        self._policy.grow(capacity_blocks)

    def restore(self, capacity_blocks: int, batches: Sequence[Sequence[tuple[BlockKey, int]]]) -> int:
        """As ``grow``, with (block, slot) that the new slots hold already; returns how many were taken in.

        ``batches``: the least recent first, each head first. A key that is here already stays where it is.
        ValueError if a slot is none of the new ones.
        """
        taken: dict[BlockKey, int] = {}
        for batch in batches:
            taken.update(batch)  # of two with one key the more recent
        new_keys = self._registry.new_of(list(taken))
        slots = as_slots([taken[key] for key in new_keys])
        self._pool.grow(max(capacity_blocks, self._pool.capacity_slots), slots)
        self._registry.grow(self._pool.capacity_slots)
        self._policy.grow(self._pool.capacity_slots)
        self._registry.reserve(new_keys, slots)
        self._registry.commit(new_keys)
        if len(new_keys) == sum(map(len, batches)):
            ordered = [slot for batch in reversed(batches) for _, slot in batch]
        else:
            new = {key: taken[key] for key in new_keys}
            ordered = [slot for batch in reversed(batches) for key, slot in batch if new.get(key) == slot]
        self._policy.insert(as_slots(ordered))  # of one call the tail is the least recent
        return len(new_keys)

    def contains(self, key: BlockKey) -> bool:
        """Whether the block can be matched now."""
        return key in self._registry and key not in self._doomed

    def resident_of(self, keys: Sequence[BlockKey]) -> list[BlockKey]:
        """Those of ``keys`` that can be matched now, in order."""
        resident = self._registry.resident_of(keys)
        return [key for key in resident if key not in self._doomed] if self._doomed else resident

    def absent_of(self, keys: Sequence[BlockKey]) -> list[BlockKey]:
        """The others, in order."""
        here = frozenset(self.resident_of(keys))
        return [key for key in keys if key not in here]

    def keys(self) -> list[BlockKey]:
        """The blocks that can be matched, in no order. Cost grows with their number."""
        return list(filter(self.contains, self._registry.keys()))

    def new_of(self, keys: Sequence[BlockKey]) -> tuple[BlockKey, ...]:
        """Those of ``keys`` that are neither in a slot nor on their way to one, each once."""
        return self._registry.new_of(keys)

    def evictable_of(self, keys: Sequence[BlockKey]) -> list[BlockKey]:
        """Those of ``keys`` that are in a slot and that nobody holds."""
        return self._free_of(self._registry.resident_of(keys))

    def match_prefix(self, keys: Sequence[BlockKey]) -> int:
        """How many leading ``keys`` can be matched. Changes nothing (a probe is not a use)."""
        count = len(self._registry.find(keys))
        if self._doomed:
            return next((index for index in range(count) if keys[index] in self._doomed), count)
        return count

    def lease(self, owner: str, keys: Sequence[BlockKey], ttl_s: float) -> Lease | None:
        """Pins ``keys`` for ``ttl_s`` seconds; None, and nothing pinned, unless all of them are there."""
        slots = self._registry.find(keys)
        if len(slots) < len(keys) or (self._doomed and not self._doomed.isdisjoint(keys)):
            return None
        self._policy.pin(slots)
        return self._leases.grant(owner, keys, slots.tolist(), ttl_s)

    def renew(self, lease: Lease, ttl_s: float) -> Lease | None:
        """A new lease on the same slots in place of ``lease``; None if that had ended.

        Holds for blocks forgotten meanwhile too: who reads them must not see their slots written.
        """
        if not self._leases.is_live(lease):
            return None
        self._policy.pin(as_slots(lease.slots))
        renewed = self._leases.grant(lease.owner, lease.keys, lease.slots, ttl_s)
        self.release(lease)
        return renewed

    def is_live(self, lease: Lease) -> bool:
        """Whether the lease has neither been released nor expired."""
        return self._leases.is_live(lease)

    def release(self, lease: Lease) -> None:
        """Ends a lease; one that has expired or was released before is left alone."""
        if self._leases.release(lease):
            self._unpin(lease)

    def expire_leases(self) -> int:
        """Ends the leases whose time is over; returns how many."""
        if not self._leases.live_leases:
            return 0
        expired = self._leases.expire()
        for lease in expired:
            self._unpin(lease)
        return len(expired)

    def touch(self, keys: Sequence[BlockKey]) -> None:
        """Makes ``keys`` (prefixes, each head first) recently used; a head is evicted after its tail."""
        slots = self._registry.find(keys)
        self._policy.touch(slots if len(slots) == len(keys) else self._registry.slots_of(keys))

    def reserve(
        self, keys: Sequence[BlockKey], protected: Protected, *, all_or_none: bool = False
    ) -> Reservation:
        """Slots for those of ``keys`` that are neither there nor on their way, as many as can be had.

        Blocks are taken from the head of ``keys`` on; what does not fit is left out (compare the lengths).
        ``protected`` is asked only if something has to be evicted; the keys that it answers stay.
        ``all_or_none``: if not each of ``keys`` gets a slot, none does, and nothing is evicted.
        """
        new_keys = self._registry.new_of(keys)
        missing = len(new_keys) - self._pool.free_slots
        if all_or_none and len(new_keys) < len(keys):
            new_keys = ()
        elif missing > 0:
            self._make_room(missing, protected(new_keys), partly=not all_or_none)
            new_keys = new_keys[
                : 0 if all_or_none and self._pool.free_slots < len(new_keys) else self._pool.free_slots
            ]
        slots = self._pool.allocate(len(new_keys))
        if slots is None:
            raise IntegrityError("the pool refused slots that it had just counted as free")
        self._registry.reserve(new_keys, slots)
        return Reservation(new_keys, tuple(slots.tolist()), self._generation)

    def commit(self, reservation: Reservation) -> bool:
        """The bytes are there: the blocks become matchable. False if a reset came in between (they are
        dropped).
        """
        if reservation.generation != self._generation:
            self.abort(reservation)
            return False
        self._policy.insert(self._registry.commit(reservation.keys))
        return True

    def abort(self, reservation: Reservation) -> None:
        """The bytes did not arrive: nothing stays registered, the slots are free again."""
        self._pool.release(self._registry.cancel(reservation.keys))

    def forget(self, keys: Sequence[BlockKey]) -> None:
        """Makes resident ``keys`` a miss from now on (a load of them failed); unknown ones are ignored."""
        present = self.resident_of(list(dict.fromkeys(keys)))
        free = self._free_of(present)
        self._doomed.update(present)
        self._drop(free)

    def reset(self) -> int:
        """Forgets every block; what is being read leaves when its lease ends, what is being written never
        arrives.

        Returns how many blocks were forgotten.
        """
        self._generation += 1
        resident = self.keys()
        self.forget(resident)
        return len(resident)

    def check_integrity(self) -> None:
        """Raises IntegrityError unless pool, registry, policy and leases agree."""
        self._pool.check_integrity()
        self._registry.check_integrity()
        self._policy.check_integrity()
        self._leases.check_integrity()
        used = self._pool.capacity_slots - self._pool.free_slots
        if used != len(self._registry) + self._registry.pending_blocks:
            raise IntegrityError(
                f"{self.tier.name}: {used} slots in use, {len(self._registry)} blocks registered"
            )
        keys = list(self._registry.keys())
        pinned = set(keys) - set(self._free_of(keys))
        if self._policy.evictable_blocks + len(pinned) != len(self._registry):
            raise IntegrityError(f"{self.tier.name}: the policy knows other blocks than the registry")
        if not self._doomed <= pinned:
            raise IntegrityError(f"{self.tier.name}: a doomed block is not pinned and never leaves")
        if pinned and not self._leases.live_leases:
            raise IntegrityError(
                f"{self.tier.name}: {len(pinned)} blocks are pinned and nobody holds a lease"
            )

    def _make_room(self, count_blocks: int, protected: AbstractSet[BlockKey], *, partly: bool) -> None:
        def spare(slots: Slots) -> npt.NDArray[np.bool_]:
            return np.fromiter(
                map(protected.__contains__, self._registry.keys_in(slots)), np.bool_, len(slots)
            )

        victims = self._policy.evict(count_blocks, spare if protected else None)
        if victims is None and partly:
            num_spared = len(self._free_of(self._registry.resident_of(list(protected))))
            possible = min(count_blocks, self._policy.evictable_blocks - num_spared)
            victims = self._policy.evict(possible, spare) if possible > 0 else None
        if victims is not None and len(victims):
            self.evicted_blocks_total += len(victims)
            self._leave(victims)

    def _unpin(self, lease: Lease) -> None:
        self._policy.unpin(as_slots(lease.slots))
        if self._doomed:
            self._drop(self._free_of([key for key in lease.keys if key in self._doomed]))

    def _free_of(self, keys: Sequence[BlockKey]) -> list[BlockKey]:
        slots = self._registry.slots_of(keys).tolist()
        return [key for key, slot in zip(keys, slots, strict=True) if not self._policy.is_pinned(slot)]

    def _drop(self, keys: Sequence[BlockKey]) -> None:
        if keys:
            slots = self._registry.slots_of(keys)
            self._policy.remove(slots)
            self._leave(slots)
            self._doomed.difference_update(keys)

    def _leave(self, slots: Slots) -> None:
        keys = self._registry.drop(slots)
        self._pool.release(slots)
        self._on_evict(keys)
