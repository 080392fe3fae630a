"""One tier's bookkeeping: which block is in which slot, what may be evicted, what is pinned.

No bytes here. A block exists in the tier from ``commit`` on, never before; between ``reserve`` and ``commit``
(or ``abort``) its slot is neither matchable nor reusable. One thread only: the leader's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from collections.abc import Set as AbstractSet
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvbm_core.blocks.departures import Departures, Leave
from kvbm_core.blocks.lease import Lease, LeaseBook
from kvbm_core.blocks.pool import SlotPool
from kvbm_core.blocks.registry import BlockRegistry
from kvbm_core.blocks.tenants import NOBODY, Quota, TenantBooks, Tenants, tenants_of
from kvbm_core.clock import Clock
from kvbm_core.errors import IntegrityError
from kvbm_core.observe.labels import DropReason, EvictReason
from kvbm_core.observe.metrics import Metrics
from kvbm_core.policy.base import NOT_HERE, EvictionPolicy, TakesRuns
from kvbm_core.policy.recency import Slots, as_slots
from kvbm_core.tokens.runs import BlockRun
from kvbm_core.types import BlockKey, Tier, group_of

Protected = Callable[[Sequence[BlockKey]], AbstractSet[BlockKey]]
"""What has to stay where it is when room is made for these keys."""


def protect_nothing(new_keys: Sequence[BlockKey]) -> AbstractSet[BlockKey]:
    """Everything may be evicted for them."""
    return frozenset()


class Reservation(NamedTuple):
    """Slots being written: ``keys[i]`` goes to ``slots[i]``. Ended exactly once, by commit or abort.
    ``over_quota``: what was left out, in order, as the quota of who has it was full; not what found no slot.
    """

    keys: tuple[BlockKey, ...]
    slots: tuple[int, ...]
    generation: int
    over_quota: tuple[BlockKey, ...] = ()

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


class Residency:
    """Hears which blocks can be matched in which tier, on the thread that changes it. Here: does nothing.

    The keys are not changed afterward. A tier that several stores share the work of may say a thing twice.
    """

    def stored(self, tier: Tier, keys: Sequence[BlockKey]) -> None:
        """They can be matched from now on."""

    def removed(self, tier: Tier, keys: Sequence[BlockKey]) -> None:
        """They cannot any more: evicted, or forgotten. Who holds a lease may still read them."""

    def cleared(self, tier: Tier, keys: Sequence[BlockKey]) -> None:
        """None can; ``keys`` could until now."""


_REASONS = {
    Leave.EVICTED: EvictReason.ROOM,
    Leave.QUOTA: EvictReason.QUOTA,
    Leave.FAILED: EvictReason.FORGOTTEN,
    Leave.RESET: EvictReason.RESET,
}


class BlockTier:
    """Pool + registry + policy + leases of one tier. ``listener`` hears what can be matched, ``metrics`` what
    leaves, why, and how long after its last use. ``departures``: what was here, or should have come.
    """

    def __init__(
        self,
        tier: Tier,
        policy: EvictionPolicy,
        clock: Clock,
        listener: Residency | None = None,
        metrics: Metrics | None = None,
    ) -> None:
        self.tier = tier
        self._policy = policy
        self.takes_runs = isinstance(policy, TakesRuns)
        self._clock = clock
        self._metrics = metrics
        # When each slot's block was used last, in seconds since the first moment, which 32 bits can hold.
        self._began_at_s = clock.now_s()
        self._used_at_s = np.zeros(0, np.float32)
        self.departures = Departures(clock)
        self._pool = SlotPool()
        self._registry = BlockRegistry()
        self._leases = LeaseBook(clock)
        self.listener = listener
        # Keys that must leave as soon as their last pin goes: forgotten or reset while being read.
        self._doomed: set[BlockKey] = set()
        # How many operators' pins want a block here to stay. What can be matched has one pin for all of them.
        self._kept: Counter[BlockKey] = Counter()
        self.kept_blocks = 0
        """Of these, how many can be matched."""
        # Slots, and keys, of blocks on their way that are to be forgotten on arrival.
        self._void: set[int] = set()
        self._void_keys: set[BlockKey] = set()
        self.on_cleared: Callable[[Sequence[BlockKey], Sequence[int]], None] | None = None
        """Hears what has left its slot because somebody wants it to be forgotten, but for a reset of all."""
        self._clearing: set[BlockKey] = set()  # of these it will be told
        self._tenants = TenantBooks()
        self._generation = 0
        self.evicted_blocks_total = 0
        self.num_changes = 0
        """Grows with all that may change what can be matched, or held."""
        self.state_groups: frozenset[int] = frozenset()
        """Groups whose blocks are states; set before the first block comes."""
        self._num_states = 0

    @property
    def capacity_blocks(self) -> int:
        """Slots of the tier that are ready for use."""
        return self._pool.capacity_slots

    @property
    def resident_blocks(self) -> int:
        """Blocks that can be matched."""
        return len(self._registry) - len(self._doomed)

    @property
    def resident_states(self) -> int:
        """Of these, how many are states."""
        return self._num_states - (self._states_among(self._doomed) if self._doomed else 0)

    def _states_among(self, keys: Iterable[BlockKey]) -> int:
        return sum(group_of(key) in self.state_groups for key in keys)

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
            self._grow_books(capacity_blocks)

    def expect(self, capacity_blocks: int) -> None:
        """There will be so many slots: the books are made large enough at once, not each time they grow."""
        self._pool.expect(capacity_blocks)
        self._grow_books(capacity_blocks)

    def _grow_books(self, capacity_blocks: int) -> None:
        self.num_changes += 1
        self._registry.grow(capacity_blocks)
        self._policy.grow(capacity_blocks)
        self._tenants.grow(capacity_blocks)
        more = capacity_blocks - len(self._used_at_s)
        if more > 0:
            self._used_at_s = np.concatenate([self._used_at_s, np.zeros(more, np.float32)])

    def _note_use(self, slots: Slots) -> None:
        if len(slots):
            self._used_at_s[slots] = self._clock.now_s() - self._began_at_s

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
        self._grow_books(self._pool.capacity_slots)
        self._note_use(slots)
        self._tenants.note(slots, NOBODY)
        self._registry.reserve(new_keys, slots)
        self._registry.commit(new_keys)
        if len(new_keys) == sum(map(len, batches)):
            ordered = [slot for batch in reversed(batches) for _, slot in batch]
        else:
            new = {key: taken[key] for key in new_keys}
            ordered = [slot for batch in reversed(batches) for key, slot in batch if new.get(key) == slot]
        self._policy.insert(as_slots(ordered))  # of one call the tail is the least recent
        self._num_states += self._states_among(new_keys) if self.state_groups else 0
        if self._kept:
            self._hold_kept(new_keys)
        if self.listener is not None and new_keys:
            self.listener.stored(self.tier, new_keys)
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
        if len(slots) < len(keys):
            slots = self._registry.slots_of(keys)
        self._policy.touch(slots)
        self._note_use(slots)
        if self._tenants.has_quotas:
            self._tenants.used(slots)

    def tell(self, runs: Iterable[BlockRun]) -> None:
        """The blocks of ``runs`` were stored or loaded just now; for a policy that wants to know."""
        policy = self._policy
        if not isinstance(policy, TakesRuns):
            return
        for run in runs:
            keys = run.keys[run.first : run.end]
            here = self.resident_of(keys)
            slot_of = dict(zip(here, self._registry.slots_of(here).tolist(), strict=True))
            policy.tell(run, as_slots([slot_of.get(key, NOT_HERE) for key in keys]))

    def demote(self, keys: Sequence[BlockKey]) -> None:
        """``keys`` go before all others, until they are used again."""
        slots = self._registry.slots_of(keys)
        if len(slots):
            self._policy.demote(slots)
            if self._tenants.has_quotas:
                self._tenants.demoted(slots)

    def reserve(
        self,
        keys: Sequence[BlockKey],
        protected: Protected,
        *,
        all_or_none: bool = False,
        tenants: Tenants = NOBODY,
    ) -> Reservation:
        """Slots for those of ``keys`` that are neither there nor on their way, as many as can be had.

        Blocks are taken from the head of ``keys`` on; what does not fit is left out (compare the lengths).
        ``protected`` is asked only if something has to be evicted; the keys that it answers stay.
        ``all_or_none``: if not each of ``keys`` gets a slot, none does, and nothing is evicted. ``tenants``:
        whose they are; who has a quota makes room in it by blocks of its own.
        """
        new_keys, over_quota = self._registry.new_of(keys), tuple[BlockKey, ...]()
        if self._tenants.has_quotas and new_keys:
            of, wanted = tenants_of(tenants, keys, new_keys), new_keys
            new_keys = self._within_quotas(wanted, of, protected, all_or_none=all_or_none)
            if len(new_keys) < len(wanted):
                within = frozenset(new_keys)
                over_quota = tuple(key for key in wanted if key not in within)
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
        self._tenants.note(slots, tenants_of(tenants, keys, new_keys))
        if self._tenants.has_quotas:
            self._tenants.reserved(slots)
        return Reservation(new_keys, tuple(slots.tolist()), self._generation, over_quota)

    def commit(self, reservation: Reservation) -> bool:
        """The bytes are there: the blocks become matchable. False if a reset came in between (they are
        dropped).
        """
        if reservation.generation != self._generation:
            self.abort(reservation)
            return False
        self.num_changes += 1
        slots = self._registry.commit(reservation.keys)
        self._policy.insert(slots)
        self._note_use(slots)
        if self._tenants.has_quotas:
            self._tenants.committed(slots)
        if self.state_groups:
            self._num_states += self._states_among(reservation.keys)
        if self._kept:
            self._hold_kept(reservation.keys)
        if self.listener is not None and reservation.keys:
            self.listener.stored(self.tier, reservation.keys)
        if self._void or self._void_keys:
            self.forget(self._take_void(reservation.keys, slots), Leave.RESET)
        return True

    def abort(self, reservation: Reservation) -> None:
        """The bytes did not arrive: nothing stays registered, the slots are free again."""
        self.num_changes += 1
        slots = self._registry.cancel(reservation.keys)
        if self._tenants.has_quotas:
            self._tenants.aborted(slots)
        if self._void or self._void_keys:
            self._take_void(reservation.keys, slots)
        self._pool.release(slots)

    def forget(self, keys: Sequence[BlockKey], why: Leave = Leave.FAILED) -> None:
        """Makes resident ``keys`` a miss from now on (a load of them failed, or RESET: somebody says so);
        unknown ones are ignored.
        """
        present = self.resident_of(list(dict.fromkeys(keys)))
        if why is Leave.RESET and self.on_cleared is not None:
            self._clearing.update(present)
        self._forget(present, why)
        if self.listener is not None and present:
            self.listener.removed(self.tier, present)

    def reset(self) -> int:
        """Forgets every block; what is being read leaves when its lease ends, what is being written never
        arrives.

        Returns how many blocks were forgotten.
        """
        self._generation += 1
        resident = self.keys()
        self._forget(resident, Leave.RESET)
        if self.listener is not None:
            self.listener.cleared(self.tier, resident)
        return len(resident)

    # ---------------------------------------------------------------- what operators want

    def keep(self, keys: Collection[BlockKey]) -> None:
        """What of ``keys`` can be matched, now or later, is not evicted, until as many ``unkeep``."""
        new_keys = [key for key in dict.fromkeys(keys) if key not in self._kept]
        self._kept.update(keys)
        slots = self._registry.slots_of(self.resident_of(new_keys))
        self._policy.pin(slots)
        self.kept_blocks += len(slots)

    def unkeep(self, keys: Collection[BlockKey]) -> None:
        """Takes one ``keep`` of these keys back. KeyError if there is none."""
        if any(self._kept[key] < 1 for key in keys):
            raise KeyError("unkeep: a key is not kept")
        self._kept.subtract(keys)
        loose = [key for key in dict.fromkeys(keys) if not self._kept[key]]
        for key in loose:
            del self._kept[key]
        slots = self._registry.slots_of(self.resident_of(loose))
        self._unpin_slots(slots)
        self.kept_blocks -= len(slots)

    def _hold_kept(self, keys: Sequence[BlockKey]) -> None:
        slots = self._registry.slots_of([key for key in keys if key in self._kept])
        self._policy.pin(slots)
        self.kept_blocks += len(slots)

    def own(self, slots: Sequence[int], tenant: int) -> None:
        """Blocks in these slots, of which it was not known whose they are, are this tenant's."""
        self._tenants.found(as_slots(slots), tenant)

    def slots_of(self, keys: Sequence[BlockKey]) -> Slots:
        """Where those of ``keys`` are that are there."""
        return self._registry.slots_of(keys)

    @property
    def used_slots(self) -> Slots:
        """Slots of blocks that are there or on their way. Cost grows with the slots."""
        slots = np.arange(self._pool.capacity_slots, dtype=np.int32)
        return slots[self._pool.are_used(slots)]

    def owners(self, keys: Sequence[BlockKey]) -> list[int]:
        """Whose these blocks are, which are all there."""
        return self._tenants.numbers(self._registry.slots_of(keys))

    def forget_of(self, tenants: Collection[int]) -> int:
        """Forgets all blocks of these tenants, what is on its way too; how many could be matched."""
        resident, pending = self._in_use(tenants)
        keys = [key for key in self._registry.keys_in(resident) if key is not None]
        keys = self.resident_of(keys)
        self._void.update(pending.tolist())
        self.forget(keys, Leave.RESET)
        return len(keys)

    def forget_prompt(self, keys: Sequence[BlockKey]) -> int:
        """Forgets these blocks, what is on its way too; how many could be matched."""
        num_here = len(self.resident_of(keys))
        self._void_keys.update(filter(self._registry.is_pending, keys))
        self.forget(keys, Leave.RESET)
        return num_here

    def note_left_out(
        self, lacking: Sequence[BlockKey], over_quota: Sequence[BlockKey], metrics: Metrics
    ) -> None:
        """``lacking`` were to be stored here, and got no slot; ``over_quota``: those whose quota was full."""
        full = frozenset(over_quota)
        for why, reason, left_out in (
            (Leave.OVER_QUOTA, DropReason.QUOTA, [key for key in lacking if key in full]),
            (Leave.NO_SPACE, DropReason.NO_SPACE, [key for key in lacking if key not in full]),
        ):
            self.departures.note(left_out, why)
            metrics.dropped(reason, len(left_out))

    def _take_void(self, keys: Sequence[BlockKey], slots: Slots) -> list[BlockKey]:
        """Those of ``keys``, which were on their way to ``slots``, that nobody is to find."""
        numbers = slots.tolist()
        pairs = zip(keys, numbers, strict=True)
        void = [key for key, slot in pairs if slot in self._void or key in self._void_keys]
        self._void.difference_update(numbers)
        self._void_keys.difference_update(void)
        return void

    def set_quota(self, tenants: Collection[int], limit_blocks: int | None) -> None:
        """All of them together have ``limit_blocks`` at most; what they have too much goes as far as nobody
        holds it. None: as many as there is room for.
        """
        self.num_changes += 1
        quota = None if limit_blocks is None else Quota(limit_blocks)
        self._tenants.set_quota(tenants, quota, *self._in_use(tenants))
        if quota is not None:
            self._evict(self._surplus(quota, quota.used_blocks - quota.limit_blocks, frozenset()))

    def join_quota(self, tenant: int, other: int) -> None:
        """``tenant``, which has no blocks yet, shares the quota of ``other``."""
        quota = self._tenants.quota_of(other)
        if quota is not None:
            self._tenants.share(tenant, quota)

    def leave_quotas(self, tenants: Iterable[int]) -> None:
        """They have no quota any more."""
        self.num_changes += 1
        self._tenants.leave(tenants)

    def owners_in_use(self) -> set[int]:
        """Whose blocks are here, or on their way. Cost grows with the slots."""
        return set(self._tenants.numbers(self.used_slots))

    def used_by(self, tenant: int) -> int:
        """Blocks that count toward its quota; 0 if it has none."""
        quota = self._tenants.quota_of(tenant)
        return 0 if quota is None else quota.used_blocks

    def is_quota_full(self, tenant: int) -> bool:
        """Whether it has a quota, and as many blocks as that allows."""
        quota = self._tenants.quota_of(tenant)
        return quota is not None and quota.used_blocks >= quota.limit_blocks

    def _in_use(self, tenants: Collection[int]) -> tuple[Slots, Slots]:
        """Their slots with blocks in them, the least recently used first, and with blocks on their way. Cost
        grows with the slots.
        """
        slots = self._tenants.slots_of(tenants)
        slots = slots[slots < self._pool.capacity_slots]
        has_block = np.fromiter(
            (key is not None for key in self._registry.keys_in(slots)), np.bool_, len(slots)
        )
        resident, others = slots[has_block], slots[~has_block]
        # Of what came together the tail goes before the head, which has the lower slot, as a rule.
        oldest_first = np.lexsort((-resident, self._used_at_s[resident]))
        return resident[oldest_first], others[self._pool.are_used(others)]

    def _within_quotas(
        self, keys: tuple[BlockKey, ...], tenants: Tenants, protected: Protected, *, all_or_none: bool
    ) -> tuple[BlockKey, ...]:
        """Those of ``keys`` that the quotas of their tenants leave room for, or make room for."""
        of = [tenants] * len(keys) if isinstance(tenants, int) else tenants
        quotas = [self._tenants.quota_of(tenant) for tenant in of]
        wanted = Counter(quota for quota in quotas if quota is not None)
        victims: list[int] = []
        room: dict[Quota, int] = {}
        stay = protected(keys) if wanted else frozenset()
        for quota, count in wanted.items():
            surplus = self._surplus(quota, quota.used_blocks + count - quota.limit_blocks, stay)
            victims += surplus
            room[quota] = quota.limit_blocks - quota.used_blocks + len(surplus)
        if all_or_none and any(room[quota] < count for quota, count in wanted.items()):
            return ()
        self._evict(victims)
        chosen = []
        for key, limited in zip(keys, quotas, strict=True):
            if limited is None or room[limited] > 0:
                chosen.append(key)
            if limited is not None:
                room[limited] -= 1
        return tuple(chosen)

    def _surplus(self, quota: Quota, count: int, protected: AbstractSet[BlockKey]) -> list[int]:
        """Slots of the ``count`` blocks of a quota that go next, or of as many as can go."""
        found: list[int] = []
        for slot in quota.slots if count > 0 else ():
            if self._policy.is_pinned(slot):
                continue
            if protected and self._registry.keys_in(as_slots([slot]))[0] in protected:
                continue
            found.append(slot)
            if len(found) == count:
                break
        return found

    def _evict(self, slots: Sequence[int]) -> None:
        if slots:
            victims = as_slots(slots)
            self._policy.remove(victims)
            self._evicted(victims, Leave.QUOTA)

    def _evicted(self, victims: Slots, why: Leave = Leave.EVICTED) -> None:
        self.evicted_blocks_total += len(victims)
        idle_s = self._idle_s(victims)
        if self._metrics is not None:  # a quota's ages say nothing about the size of the tier
            ages_s = idle_s if why is Leave.EVICTED else None
            self._metrics.evicted(self.tier, len(victims), _REASONS[why], ages_s)
        gone = self._leave(victims)
        self.departures.note(gone, why, idle_s)
        if self.listener is not None:
            self.listener.removed(self.tier, gone)

    # ---------------------------------------------------------------- inside

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
        if self._num_states != self._states_among(keys):
            raise IntegrityError(f"{self.tier.name}: {self._num_states} states counted, others there")
        if not self._doomed <= pinned:
            raise IntegrityError(f"{self.tier.name}: a doomed block is not pinned and never leaves")
        kept = {key for key in keys if key in self._kept and key not in self._doomed}
        if not kept <= pinned:
            raise IntegrityError(f"{self.tier.name}: a block that is to be kept could be evicted")
        if len(kept) != self.kept_blocks:
            raise IntegrityError(f"{self.tier.name}: {len(kept)} kept blocks, {self.kept_blocks} counted")
        if pinned - kept and not self._leases.live_leases:
            raise IntegrityError(
                f"{self.tier.name}: {len(pinned)} blocks are pinned and nobody holds a lease"
            )
        self._check_quotas()

    def _check_quotas(self) -> None:
        for tenants, counted in self._tenants.quotas():
            resident, pending = self._in_use(tenants)
            if set(resident.tolist()) != counted.slots.keys() or len(pending) != counted.num_pending:
                raise IntegrityError(f"{self.tier.name}: the blocks of a quota are not counted right")

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
            self._evicted(victims)

    def _idle_s(self, slots: Slots) -> npt.NDArray[np.float32]:
        return self._clock.now_s() - self._began_at_s - self._used_at_s[slots]

    def _forget(self, present: Sequence[BlockKey], why: Leave) -> None:
        self.num_changes += 1
        if self._metrics is not None:
            self._metrics.evicted(self.tier, len(present), _REASONS[why])
        self.departures.note(present, why, self._idle_s(self._registry.slots_of(present)))
        if self._kept:  # from here on nobody wants it to stay; it is held again when it is stored again
            slots = self._registry.slots_of([key for key in present if key in self._kept])
            self._unpin_slots(slots)
            self.kept_blocks -= len(slots)
        free = self._free_of(present)
        self._doomed.update(present)
        self._drop(free)

    def _unpin(self, lease: Lease) -> None:
        self._unpin_slots(as_slots(lease.slots))
        if self._doomed:
            self._drop(self._free_of([key for key in lease.keys if key in self._doomed]))

    def _unpin_slots(self, slots: Slots) -> None:
        self.num_changes += 1
        self._policy.unpin(slots)
        self._note_use(slots)
        if self._tenants.has_quotas:
            self._tenants.used(slots)

    def _free_of(self, keys: Sequence[BlockKey]) -> list[BlockKey]:
        slots = self._registry.slots_of(keys).tolist()
        return [key for key, slot in zip(keys, slots, strict=True) if not self._policy.is_pinned(slot)]

    def _drop(self, keys: Sequence[BlockKey]) -> None:
        if keys:
            slots = self._registry.slots_of(keys)
            self._policy.remove(slots)
            self._leave(slots)
            self._doomed.difference_update(keys)
            if self._clearing:
                self._tell_cleared(keys, slots)

    def _tell_cleared(self, keys: Sequence[BlockKey], slots: Slots) -> None:
        told = {k: s for k, s in zip(keys, slots.tolist(), strict=True) if k in self._clearing}
        self._clearing.difference_update(told)
        if told and self.on_cleared is not None:
            self.on_cleared(list(told), list(told.values()))

    def _leave(self, slots: Slots) -> list[BlockKey]:
        self.num_changes += 1
        keys = self._registry.drop(slots)
        if self.state_groups:
            self._num_states -= self._states_among(keys)
        if self._tenants.has_quotas:
            self._tenants.left(slots)
        self._pool.release(slots)
        return keys
