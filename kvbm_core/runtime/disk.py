"""The leader's part of the disk tier: which blocks are there, and which of the host's go there."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvbm_core.blocks.lease import Lease
from kvbm_core.clock import Clock
from kvbm_core.errors import IntegrityError, Outcome
from kvbm_core.observe.labels import DropReason
from kvbm_core.observe.metrics import Metrics
from kvbm_core.policy.admission import Admission, AdmissionPolicy, AdmissionState
from kvbm_core.policy.lru import LruPolicy
from kvbm_core.runtime.breaker import Breaker
from kvbm_core.runtime.messages import ForgetDisk, JobAck, Message, Store
from kvbm_core.storage.disk.recovery import Found, batches_of
from kvbm_core.tiers.tier import BlockTier, Reservation, protect_nothing
from kvbm_core.types import BlockKey, Direction, Tier

OWNER = "disk"
STORE_BLOCKS = 64
"""Blocks in one order to the workers."""
# What came back is not what was stored, or nothing came back: the record is of no use to anybody.
_USELESS = frozenset({Outcome.MISS, Outcome.CORRUPT, Outcome.INCOMPATIBLE, Outcome.IO_ERROR})
_FAILING = frozenset({Outcome.IO_ERROR, Outcome.TIMED_OUT})

log = logging.getLogger("kvbm")


@dataclass
class _StoreJob:
    """Host slots being written: ``lease`` keeps them as they are, ``reservation`` the places on the disk."""

    lease: Lease
    reservation: Reservation
    waiting_ranks: set[int]
    started_at_s: float
    late_ranks: set[int] = field(default_factory=set)
    acks: list[JobAck] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class DiskOptions:
    """``max_storing_blocks``: on their way to the disk at once, and pinned in the host tier meanwhile; as
    many as ``max_waiting_blocks`` wait their turn, not pinned. What comes beyond that is dropped and counted.
    """

    lease_ttl_s: float = 30.0
    max_storing_blocks: int = 1024
    max_waiting_blocks: int = 65_536


class DiskTier:
    """Part of the Leader, on its thread. ``send`` reaches every worker and does not wait.

    A block is on disk once every rank has acknowledged its record; it is offered when it has been committed
    to the host tier and when it is used there, and goes if ``admission`` says so.
    """

    def __init__(  # noqa: PLR0917 - the parts of a tier, put together in one place
        self,
        host: BlockTier,
        admission: AdmissionPolicy,
        send: Callable[[Message], None],
        new_job_id: Callable[[], int],
        world_size: int,
        clock: Clock,
        metrics: Metrics,
        options: DiskOptions,
    ) -> None:
        self.tier = BlockTier(Tier.DISK, LruPolicy(), clock)
        self.off_reason: str | None = None
        self.block_bytes = 0  # over all ranks; known when they are
        self._host = host
        self._admission = admission
        self._send = send
        self._new_job_id = new_job_id
        self.num_ranks = world_size  # of those that store; known when they are
        self._metrics = metrics
        self._options = options
        self._clock = clock
        self._breaker = Breaker(clock)
        self._jobs: dict[int, _StoreJob] = {}
        self._waiting: deque[BlockKey] = deque()
        self._found: dict[int, dict[int, dict[tuple[int, BlockKey], int]]] = {}
        self._expected_slots = 0
        self._evicted_seen = 0
        self._is_forgotten = False

    # ---------------------------------------------------------------- what is there

    @property
    def is_usable(self) -> bool:
        """Whether blocks can be stored and read now."""
        return self.off_reason is None and not self._breaker.is_open

    @property
    def storing_blocks(self) -> int:
        """Blocks on their way to the disk, or waiting for that."""
        return self.tier.pending_blocks + len(self._waiting)

    def match_prefix(self, keys: Sequence[BlockKey]) -> int:
        """See Residents; nothing while the disk is off."""
        return self.tier.match_prefix(keys) if self.is_usable else 0

    def contains(self, key: BlockKey) -> bool:
        """See Residents; nothing while the disk is off."""
        return self.is_usable and self.tier.contains(key)

    def expect(self, num_slots: int) -> None:
        """So many slots will be found in all."""
        if num_slots > self._expected_slots:
            self._expected_slots = num_slots
            self.tier.expect(num_slots)

    def take_in(self, rank: int, end: int, found: Sequence[Found]) -> None:
        """What ``rank`` found in its slots up to ``end``. A block is there if every rank has it in the same
        slot.
        """
        kept = [] if self._is_forgotten else found
        if self.num_ranks == 1:
            self.tier.restore(end, batches_of(kept))
            return
        of_rank = self._found.setdefault(end, {})
        of_rank[rank] = {(record.slot, record.key): record.sequence for record in kept}
        if len(of_rank) < self.num_ranks:
            return
        del self._found[end]
        first, *others = of_rank.values()
        common = [
            Found(slot, key, sequence)
            for (slot, key), sequence in first.items()
            if all((slot, key) in other for other in others)
        ]
        self.tier.restore(end, batches_of(common))

    def turn_off(self, reason: str) -> None:
        """It cannot be used in this process; the engine serves without it."""
        if self.off_reason is None:
            log.error("kvbm: the disk tier is off, the engine serves without it: %s", reason)
        self.off_reason = reason

    # ---------------------------------------------------------------- the way down

    def hit(self, keys: Sequence[BlockKey]) -> None:
        """``keys`` were brought up from here or from the host: they may have become worth a place on the
        disk.
        """
        self._admission.hit(keys)
        self.offer(keys)

    def offer(self, keys: Sequence[BlockKey]) -> None:
        """Stores those of ``keys`` that are in the host tier, are not on the disk yet and are admitted."""
        if not self.is_usable or not self.tier.capacity_blocks:
            return
        state = AdmissionState(
            self.tier.capacity_blocks,
            self.tier.capacity_blocks - self.tier.resident_blocks - self.tier.pending_blocks,
            self.tier.pending_blocks,
        )
        decide = self._admission.decide
        chosen = [
            key for key in self.tier.new_of(keys) if decide(key, self.block_bytes, state) is Admission.ADMIT
        ]
        room = max(0, self._options.max_waiting_blocks - len(self._waiting))
        self._waiting.extend(chosen[:room])
        self._metrics.dropped(DropReason.QUEUE_FULL, len(chosen) - room)
        self._store_waiting()

    def _store_waiting(self) -> None:
        """Sends as many orders as may be under way; what has left the host meanwhile is left out."""
        while self._waiting and self.is_usable:
            room = self._options.max_storing_blocks - self.tier.pending_blocks
            if room <= 0:
                return
            batch = [self._waiting.popleft() for _ in range(min(STORE_BLOCKS, room, len(self._waiting)))]
            batch = [key for key in self.tier.new_of(batch) if self._host.contains(key)]
            if batch:
                self._store(batch)

    def _store(self, keys: Sequence[BlockKey]) -> None:
        reservation = self.tier.reserve(keys, protect_nothing)
        evicted = self.tier.evicted_blocks_total - self._evicted_seen
        self._evicted_seen += evicted
        self._metrics.evicted(Tier.DISK, evicted)
        if len(reservation.keys) < len(keys):
            self._metrics.dropped(DropReason.NO_SPACE, len(keys) - len(reservation.keys))
        lease = (
            self._host.lease(OWNER, reservation.keys, self._options.lease_ttl_s) if reservation.keys else None
        )
        if lease is None:
            self.tier.abort(reservation)
            return
        job_id = self._new_job_id()
        self._jobs[job_id] = _StoreJob(lease, reservation, set(range(self.num_ranks)), self._clock.now_s())
        self._send(
            Store(job_id, [bytes(key) for key in lease.keys], list(lease.slots), list(reservation.slots))
        )

    def owns(self, job_id: int) -> bool:
        """Whether this is one of our orders."""
        return job_id in self._jobs

    def orders(self) -> list[tuple[int, _StoreJob]]:
        """Those that some rank has not answered yet."""
        return list(self._jobs.items())

    def note_late(self, rank: int, job_id: int) -> None:
        """One rank has given an order up, and answers it once nothing touches its slots any more."""
        if job_id in self._jobs:
            self._jobs[job_id].late_ranks.add(rank)

    def acknowledge(self, rank: int, ack: JobAck) -> bool:
        """One rank's answer to an order. True if its blocks are on the disk from now on."""
        job = self._jobs[ack.job_id]
        if rank not in job.waiting_ranks:
            return False
        job.waiting_ranks.discard(rank)
        job.acks.append(ack)
        if job.waiting_ranks:
            return False
        del self._jobs[ack.job_id]
        self._host.release(job.lease)
        outcome = next((ack.outcome for ack in job.acks if ack.outcome is not Outcome.OK), Outcome.OK)
        self.judge(outcome)
        if outcome is Outcome.OK:
            num_bytes, seconds = sum(ack.num_bytes for ack in job.acks), max(ack.seconds for ack in job.acks)
            self._metrics.tier_transfer(Tier.HOST, Tier.DISK, num_bytes, seconds)
        is_committed = outcome is Outcome.OK and self.tier.commit(job.reservation)
        if is_committed:
            self._metrics.offloaded_blocks(len(job.reservation.keys), Tier.HOST, Tier.DISK)
        elif outcome is Outcome.OK:
            self._metrics.dropped(DropReason.RESET, len(job.reservation.keys))
        else:
            self.tier.abort(job.reservation)
            self._metrics.failure(f"{Direction.OFFLOAD}_{outcome}")
            self._metrics.dropped(DropReason.TRANSFER_FAILED, len(job.reservation.keys))
        self._store_waiting()
        return is_committed

    # ---------------------------------------------------------------- the way up, and ends

    def judge(self, outcome: Outcome, keys: Sequence[BlockKey] = ()) -> None:
        """How a store, or a load of ``keys``, ended: useless records are forgotten, a failing disk is left
        alone.
        """
        if outcome in _USELESS:
            self.tier.forget(keys)
        if outcome is Outcome.OK:
            self._breaker.succeeded()
        elif outcome in _FAILING and self._breaker.failed():
            log.warning("kvbm: the disk fails (%s); it is left alone for a while", outcome)
            self._metrics.dropped(DropReason.TRANSFER_FAILED, len(self._waiting))
            self._waiting.clear()

    def renew_leases(self, now_s: float) -> None:
        """A host slot is not reused while a worker may still read it."""
        for job in self._jobs.values():
            if job.lease.expires_at_s - now_s < self._options.lease_ttl_s / 2:
                job.lease = self._host.renew(job.lease, self._options.lease_ttl_s) or job.lease

    def reset(self) -> None:
        """Forgets every block, here and, for good, on the disks; what is on its way will not be committed."""
        self._waiting.clear()
        self.tier.reset()
        # What is still to come of what the ranks found at the start is of the time before.
        self._is_forgotten = True
        self._send(ForgetDisk())

    def check_integrity(self) -> None:
        """Raises IntegrityError unless what is reserved is what is being written."""
        self.tier.check_integrity()
        if self.tier.pending_blocks != sum(len(job.reservation.keys) for job in self._jobs.values()):
            raise IntegrityError("disk slots are reserved for no order in flight")
