"""A lower tier with numbered slots: the leader says which block goes where. The disk is one."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from kvbm_core.blocks.departures import Leave
from kvbm_core.blocks.lease import Lease
from kvbm_core.blocks.slot_tier import BlockTier, Reservation, protect_nothing
from kvbm_core.blocks.tenants import NOBODY
from kvbm_core.errors import IntegrityError, Outcome
from kvbm_core.policy.admission import AdmissionPolicy
from kvbm_core.policy.base import EvictionPolicy
from kvbm_core.policy.named import PolicyMaker, make_policy
from kvbm_core.storage.disk.recovery import Found, batches_of
from kvbm_core.tiers.lower import LowerTierMaker, Surroundings
from kvbm_core.tiers.storing import USELESS, StoringOptions, StoringTier
from kvbm_core.tiers.written import Chains, WrittenSlots
from kvbm_core.tokens.runs import BlockRun, blocks_of
from kvbm_core.transfer.plan import ANSWERS, ExtentPart, OrderKind, TierOrder
from kvbm_core.types import BlockKey, Tier

ERASE_BLOCKS = 4096
"""In one order: less than half a megabyte of it."""


def slotted_tier(
    name: str, tier: Tier, admission: AdmissionPolicy, make: PolicyMaker = make_policy
) -> LowerTierMaker:
    """Makes a SlottedTier; ``make`` its eviction policy."""
    return lambda around: SlottedTier(name, tier, admission, around, policy=make())


class SlottedTier(StoringTier):
    """A block is there once every rank has stored its shard in the same slot. It is held where it lies until
    it is fetched.
    """

    is_asked = False
    slots: BlockTier

    def __init__(
        self,
        name: str,
        tier: Tier,
        admission: AdmissionPolicy,
        around: Surroundings,
        options: StoringOptions | None = None,
        *,
        policy: EvictionPolicy | None = None,
    ) -> None:
        super().__init__(name, tier, admission, around, options or StoringOptions())
        self.slots = BlockTier(tier, policy or make_policy(), around.clock, around.listener, around.metrics)
        self.slots.on_cleared = self._erase
        self._written = WrittenSlots()
        self._expected_slots = 0
        self._storing: dict[BlockKey, Reservation] = {}
        self._found: dict[int, dict[int, dict[tuple[int, BlockKey], int]]] = {}
        self._is_forgotten = False

    # ---------------------------------------------------------------- what is there

    @property
    def news(self) -> object:
        """See LowerTier."""
        return self.off_reason, self._breaker.is_open, self.slots.num_changes

    @property
    def usage(self) -> tuple[int, int]:
        """See LowerTier."""
        return self.slots.resident_blocks, self.slots.capacity_blocks

    def match_prefix(self, keys: Sequence[BlockKey]) -> int:
        """See LowerTier."""
        return self.slots.match_prefix(keys) if self.is_usable else 0

    def contains(self, key: BlockKey) -> bool:
        """See LowerTier."""
        return self.is_usable and self.slots.contains(key)

    def resident_of(self, keys: Sequence[BlockKey]) -> list[BlockKey]:
        """See LowerTier."""
        return self.slots.resident_of(keys) if self.is_usable else []

    def hold(self, owner: str, keys: Sequence[BlockKey], ttl_s: float, tenant: int) -> Lease | None:
        """See LowerTier."""
        found = self.slots.resident_of(keys) if self.is_usable else []
        lease = self.slots.lease(owner, found, ttl_s) if found else None
        if lease is not None:
            self.slots.own(lease.slots, tenant)
        return lease

    def is_good(self, lease: Lease) -> bool:
        """See LowerTier."""
        return self.slots.is_live(lease) and self.slots.match_prefix(lease.keys) == len(lease.keys)

    def renew(self, lease: Lease, ttl_s: float) -> Lease:
        """See LowerTier."""
        return self.slots.renew(lease, ttl_s) or lease

    def release(self, lease: Lease) -> None:
        """See LowerTier."""
        self.slots.release(lease)

    # ---------------------------------------------------------------- what workers say of it

    def expect(self, num_places: int, ranks: Collection[int], block_bytes: int = 0) -> None:
        """See LowerTier."""
        super().expect(num_places, ranks, block_bytes)
        if num_places > self._expected_slots:
            self._expected_slots = num_places
            self.slots.expect(num_places)
            self._written.grow(num_places)

    def take_in(self, rank: int, end: int, found: Sequence[Found]) -> None:
        """See LowerTier. A block is there if every rank has it in the same slot."""
        kept = [] if self._is_forgotten else found
        if len(self._ranks()) == 1:
            self._restore(end, kept)
            return
        of_rank = self._found.setdefault(end, {})
        of_rank[rank] = {(record.slot, record.key): record.sequence for record in kept}
        if len(of_rank) < len(self._ranks()):
            return
        del self._found[end]
        first, *others = of_rank.values()
        common = [
            Found(slot, key, sequence)
            for (slot, key), sequence in first.items()
            if all((slot, key) in other for other in others)
        ]
        self._restore(end, common)

    def _restore(self, end: int, found: Sequence[Found]) -> None:
        self._written.begin([record.slot for record in found], [record.key for record in found])
        self.slots.restore(end, batches_of(found))

    @property
    def chains(self) -> Chains:
        """See LowerTier. Of blocks of an earlier process nobody knows what comes before them."""
        return self._written.chains(self.slots.used_slots)

    # ---------------------------------------------------------------- the way down

    def hit(self, runs: Sequence[BlockRun]) -> None:
        """See LowerTier. What is here counts as used, wherever it was loaded from."""
        self.slots.touch(blocks_of(runs))
        super().hit(runs)

    def _new_of(self, keys: Sequence[BlockKey]) -> Sequence[BlockKey]:
        return self.slots.new_of(keys) if self.slots.capacity_blocks else ()

    def _begin_store(
        self, befores: Mapping[BlockKey, BlockKey | None]
    ) -> tuple[Sequence[BlockKey], Sequence[int]]:
        new_keys = self.slots.new_of(list(befores))
        owners = self._around.host.owners(new_keys)
        whose = owners if len(owners) == len(new_keys) else NOBODY
        reservation = self.slots.reserve(new_keys, protect_nothing, tenants=whose)
        if len(reservation.keys) < len(new_keys):
            lacking = self.slots.new_of(new_keys)
            self.slots.note_left_out(lacking, reservation.over_quota, self._around.metrics)
        self._storing.update(dict.fromkeys(reservation.keys, reservation))
        before = [befores[key] for key in reservation.keys]
        self._written.begin(reservation.slots, reservation.keys, before)
        return reservation.keys, reservation.slots

    def _end_store(
        self,
        keys: Sequence[BlockKey],
        extents: Sequence[ExtentPart],
        outcomes: Sequence[Outcome],
        block_bytes: int,
    ) -> int:
        reservation = next(iter([self._storing.pop(key) for key in keys]))
        stored, lost = reservation.split(
            [key for key, outcome in zip(keys, outcomes, strict=True) if outcome is not Outcome.OK]
        )
        if lost.keys:
            self.slots.abort(lost)
            self.slots.departures.note(lost.keys, Leave.FAILED)
        self._written.wrote(stored.slots, block_bytes)
        return len(stored.keys) if self.slots.commit(stored) else 0

    # ---------------------------------------------------------------- the way up, and ends

    def fetched(self, outcomes: Sequence[tuple[BlockKey, Outcome]]) -> None:
        """See LowerTier. Useless ones are forgotten, a failing tier is left alone."""
        if outcomes:
            read = self.slots.slots_of([key for key, outcome in outcomes if outcome is Outcome.OK])
            self._around.metrics.read_again(self.tier, self._written.read(read))
            useless = [key for key, outcome in outcomes if outcome in USELESS]
            if useless:
                self.slots.forget(useless)
            troubles = [outcome for _, outcome in outcomes if outcome not in ANSWERS]
            self.judge(troubles[0] if len(troubles) == len(outcomes) else Outcome.OK)

    def turn_off(self, reason: str) -> None:
        """See LowerTier. What it has is forgotten: nobody can be told of it any more."""
        super().turn_off(reason)
        self._is_forgotten = True
        self.slots.reset()

    def reset(self) -> None:
        """See LowerTier; for good, also on the disks. What is on its way will not be committed."""
        super().reset()
        self.slots.reset()
        # What is still to come of what the ranks found at the start is of the time before.
        self._is_forgotten = True
        self._around.send(TierOrder(0, self.name, OrderKind.FORGET, ()))

    def _erase(self, keys: Sequence[BlockKey], places: Sequence[int]) -> None:
        """They were cleared: a restart is not to find them again."""
        for at in range(0, len(keys), ERASE_BLOCKS):
            part = slice(at, at + ERASE_BLOCKS)
            job_id = self._around.jobs.new_id()
            order = TierOrder(
                job_id, self.name, OrderKind.ERASE, tuple(keys[part]), places=tuple(places[part])
            )
            self._around.send(order)

    def check_integrity(self) -> None:
        """See LowerTier: what is reserved is what is being stored."""
        self.slots.check_integrity()
        if not self.slots.pending_blocks == len(self._storing) == self.ordered_blocks:
            raise IntegrityError(f"slots of the {self.name} are reserved for no order in flight")
