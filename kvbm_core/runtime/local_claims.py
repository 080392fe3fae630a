"""What LocalTiers holds for loads to come: blocks pinned where they are, and slots for those still to be
read.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count

from kvbm_core.blocks.lease import Lease
from kvbm_core.clock import Clock
from kvbm_core.runtime.disk import DiskTier
from kvbm_core.tiers.stack import TierStack
from kvbm_core.tiers.tier import BlockTier, Reservation, protect_nothing
from kvbm_core.transfer.plan import DiskPlan, GroupMove, TransferPlan
from kvbm_core.types import BlockKey, Direction, SequenceHash, block_key


@dataclass(eq=False)
class Claim:
    """``keys`` held to be loaded, each with its slot of the host tier.

    ``reads``: those that are on the disk alone. ``reservation``: slots in which they stay. ``private``: slots
    for those that somebody else is bringing up at the moment; they are free again after the load.
    """

    owner: str
    keys: tuple[BlockKey, ...]
    expires_at_s: float
    slot_of: dict[BlockKey, int] = field(default_factory=dict)
    lease: Lease | None = None
    disk_lease: Lease | None = None
    reads: tuple[BlockKey, ...] = ()
    reservation: Reservation | None = None
    private: Reservation | None = None

    def plan(self, job_id: int, device_blocks: Sequence[int]) -> TransferPlan:
        """Loads ``keys[i]`` into ``device_blocks[i]``."""
        slots = tuple(self.slot_of[key] for key in self.keys)
        reads = None
        if self.disk_lease is not None and self.reads:
            at = dict(zip(self.disk_lease.keys, self.disk_lease.slots, strict=True))
            into = tuple(self.slot_of[key] for key in self.reads)
            reads = DiskPlan(
                job_id, Direction.ONBOARD, self.reads, into, tuple(at[key] for key in self.reads)
            )
        return TransferPlan(job_id, Direction.ONBOARD, (GroupMove(0, tuple(device_blocks), slots),), reads)


class ClaimBook:
    """Part of LocalTiers, under its lock. Promises end by themselves, claims do not."""

    def __init__(self, host: BlockTier, disk: DiskTier | None, clock: Clock, ttl_s: float) -> None:
        self._host = host
        self._disk = disk
        self._clock = clock
        self._ttl_s = ttl_s
        self._stack = TierStack([host] if disk is None else [host, disk])
        self._promises: dict[str, Claim] = {}
        self._names = count()

    @property
    def num_promises(self) -> int:
        """Promises that have not ended."""
        return len(self._promises)

    def contains(self, key: BlockKey) -> bool:
        """Whether the block is in one of the tiers."""
        return self._stack.contains(key)

    def promise(self, owner: str, keys: Sequence[BlockKey]) -> int:
        """How many leading ``keys`` are held for ``owner`` from now on, until ``claim`` or ``ttl_s``
        later.
        """
        self.let_go(owner)
        promise = self._hold(owner, tuple(keys[: self._stack.match_prefix(keys)]))
        if promise is None:
            return 0
        self._promises[owner] = promise
        return len(promise.keys)

    def claim(self, owner: str, keys: Sequence[BlockKey]) -> Claim | None:
        """All of ``keys``, promised or not, held until ``release``; None if that cannot be."""
        wanted = tuple(keys)
        claim = self._promises.pop(owner, None)
        if claim is not None and claim.keys == wanted and self.is_good(claim):
            return claim
        if claim is not None:
            self.release(claim)
        claim = self._hold(owner, wanted)
        if claim is not None and claim.keys != wanted:
            self.release(claim)
            return None
        return claim

    def let_go(self, owner: str) -> None:
        """Ends a promise."""
        promise = self._promises.pop(owner, None)
        if promise is not None:
            self.release(promise)

    def let_all_go(self) -> None:
        """Ends all promises."""
        for owner in list(self._promises):
            self.let_go(owner)

    def is_good(self, claim: Claim) -> bool:
        """No lease has ended, and no block was forgotten since: such a one is not to be trusted any more."""
        return all(
            tier.is_live(lease) and all(map(tier.contains, lease.keys))
            for lease, tier in self._leases_of(claim)
        )

    def release(self, claim: Claim) -> None:
        """Gives back all that is held; slots that were to be read into are free again."""
        for lease, tier in self._leases_of(claim):
            tier.release(lease)
        for reservation in (claim.reservation, claim.private):
            if reservation is not None:
                self._host.abort(reservation)
        claim.lease = claim.disk_lease = claim.reservation = claim.private = None

    def mind_leases(self, claims: Iterable[Claim]) -> None:
        """Ends promises whose time is over; what was claimed, and what moves, stays held."""
        now_s = self._clock.now_s()
        for owner in [owner for owner, promise in self._promises.items() if promise.expires_at_s <= now_s]:
            self.let_go(owner)
        for claim in claims:
            if claim.expires_at_s < now_s + self._ttl_s / 2:
                claim.expires_at_s = now_s + self._ttl_s
                claim.lease = self._renewed(claim.lease, self._host)
                if self._disk is not None:
                    claim.disk_lease = self._renewed(claim.disk_lease, self._disk.tier)
        if self._disk is not None:
            self._disk.renew_leases(now_s)
            self._disk.tier.expire_leases()
        self._host.expire_leases()

    def _renewed(self, lease: Lease | None, tier: BlockTier) -> Lease | None:
        return lease and (tier.renew(lease, self._ttl_s) or lease)  # one that has ended tells so: see is_good

    def _hold(self, owner: str, keys: tuple[BlockKey, ...]) -> Claim | None:
        """The longest prefix of ``keys`` that can be held; None if there is none."""
        while keys:
            claim = self._try_to_hold(owner, keys)
            num_missing = sum(key not in claim.slot_of for key in keys)
            if not num_missing:
                return claim
            self.release(claim)
            # A block less at the end needs no slot, or has one that can be taken.
            keys = keys[:-num_missing]
        return None

    def _try_to_hold(self, owner: str, keys: tuple[BlockKey, ...]) -> Claim:
        claim = Claim(owner, keys, self._clock.now_s() + self._ttl_s)
        here = [key for key in keys if self._host.contains(key)]
        # Before slots are made free for the rest.
        claim.lease = self._host.lease(owner, here, self._ttl_s) if here else None
        if claim.lease is not None:
            claim.slot_of.update(zip(claim.lease.keys, claim.lease.slots, strict=True))
        if self._disk is not None and len(here) < len(keys):
            below = [key for key in keys if not self._host.contains(key)]
            below = below[: self._disk.match_prefix(below)]
            claim.disk_lease = self._disk.tier.lease(owner, below, self._ttl_s) if below else None
        if claim.disk_lease is not None:
            self._reserve_for(claim, claim.disk_lease.keys)
        return claim

    def _reserve_for(self, claim: Claim, reads: tuple[BlockKey, ...]) -> None:
        new = self._host.new_of(reads)
        claim.reservation = self._host.reserve(new, protect_nothing)
        claim.slot_of.update(zip(claim.reservation.keys, claim.reservation.slots, strict=True))
        # Others are being brought up for somebody else, who may give it up, or fail: they are read twice.
        is_new = set(new)
        own_name = {self._private_name(key): key for key in reads if key not in is_new}
        claim.private = self._host.reserve(list(own_name), protect_nothing)
        for name, slot in zip(claim.private.keys, claim.private.slots, strict=True):
            claim.slot_of[own_name[name]] = slot
        claim.reads = tuple(key for key in reads if key in claim.slot_of)

    def _private_name(self, key: BlockKey) -> BlockKey:
        text = b"private" + next(self._names).to_bytes(8, "big") + key
        return block_key(SequenceHash(hashlib.sha256(text).digest()), 0)

    def _leases_of(self, claim: Claim) -> list[tuple[Lease, BlockTier]]:
        leases = [] if claim.lease is None else [(claim.lease, self._host)]
        if self._disk is not None and claim.disk_lease is not None:
            leases.append((claim.disk_lease, self._disk.tier))
        return leases
