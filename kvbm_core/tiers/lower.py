"""A tier below the host, as the chain sees it; and the way down to it."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvbm_core.blocks.lease import Lease
from kvbm_core.blocks.slot_tier import BlockTier
from kvbm_core.clock import Clock
from kvbm_core.errors import Outcome
from kvbm_core.observe.labels import DropReason
from kvbm_core.observe.metrics import Metrics
from kvbm_core.storage.disk.recovery import Found
from kvbm_core.tiers.breaker import Breaker
from kvbm_core.tiers.groups import Residents
from kvbm_core.tiers.jobs import Job, JobTable
from kvbm_core.transfer.plan import OrderKind, TierOrder
from kvbm_core.types import BlockKey, Direction, Tier

STORE_BLOCKS = 64
"""Blocks in one order to the workers."""
# What came back is not what was stored, or nothing came back: it is of no use to anybody.
USELESS = frozenset({Outcome.MISS, Outcome.CORRUPT, Outcome.INCOMPATIBLE, Outcome.IO_ERROR})
FAILING = frozenset({Outcome.IO_ERROR, Outcome.TIMED_OUT})

log = logging.getLogger("kvbm")


class LowerTier(Residents, Protocol):
    """A tier below the host. On the leader's thread; never waits.

    Residents: what can be promised now. A tier by key promises nothing; what it has is brought into the host
    first (``wanted``).
    """

    name: str
    """One word, unique in a chain; orders and log lines carry it."""
    tier: Tier
    """What metrics count it as."""
    seeks: bool
    """Whether it promises nothing, and looks for what is ``wanted``."""

    @property
    def is_usable(self) -> bool:
        """Whether blocks can be stored and fetched now."""

    @property
    def storing_blocks(self) -> int:
        """Blocks on their way to the tier, or waiting for that."""

    @property
    def usage(self) -> tuple[int, int]:
        """Blocks in use, and in all."""

    def resident_of(self, keys: Sequence[BlockKey]) -> list[BlockKey]:
        """Those of ``keys`` that are there, in order."""

    def lease(self, owner: str, keys: Sequence[BlockKey], ttl_s: float) -> Lease | None:
        """Holds ``keys`` in their places; None, and nothing is held, unless all of them are there."""

    def renew(self, lease: Lease, ttl_s: float) -> Lease:
        """A new lease in place of ``lease``; the same one if that has ended."""

    def is_good(self, lease: Lease) -> bool:
        """Whether the lease has not ended, and none of its blocks was forgotten since."""

    def release(self, lease: Lease) -> None:
        """Ends a lease; one that has ended is left alone."""

    def expire_leases(self) -> int:
        """Ends the leases whose time is over; returns how many."""

    @property
    def live_leases(self) -> int:
        """Leases that have not ended."""

    def wanted(self, keys: Sequence[BlockKey]) -> bool:
        """``keys``, in order, are nowhere above: True if they are being looked for, or brought into the host,
        so that asking again soon is worth it.
        """

    def offer(self, keys: Sequence[BlockKey]) -> None:
        """``keys`` are new in the host: those that the tier lacks and admits are stored."""

    def hit(self, keys: Sequence[BlockKey]) -> None:
        """``keys`` were loaded: they may have become worth a place here."""

    def fetched(self, outcomes: Sequence[tuple[BlockKey, Outcome]]) -> None:
        """How a fetch of leased blocks ended: useless ones are forgotten, a failing tier is left alone."""

    def note_trouble(self, outcome: Outcome) -> None:
        """A fetch was given up, and is not over."""

    def take_in(self, rank: int, end: int, found: Sequence[Found]) -> None:
        """What ``rank`` found in its places below ``end``."""

    def expect(self, num_places: int, num_ranks: int) -> None:
        """So many places will be found, on so many ranks that store."""

    def turn_off(self, reason: str) -> None:
        """It cannot be used in this process; the engine serves without it."""

    def mind(self) -> None:
        """Time has passed: what is pinned for orders under way stays pinned."""

    def forget(self, keys: Sequence[BlockKey]) -> None:
        """Makes ``keys`` a miss."""

    def reset(self) -> None:
        """Forgets every block."""

    def check_integrity(self) -> None:
        """Raises IntegrityError unless the books agree."""


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a lower tier is put into. ``send`` reaches every worker that stores, and does not wait."""

    host: BlockTier
    jobs: JobTable
    send: Callable[[TierOrder], None]
    clock: Clock
    metrics: Metrics
    lease_ttl_s: float = 30.0


LowerTierMaker = Callable[[Surroundings], LowerTier]


@dataclass(frozen=True, slots=True)
class FeedOptions:
    """``max_storing_blocks``: on their way to the tier at once, and pinned in the host meanwhile; as many as
    ``max_waiting_blocks`` wait their turn, not pinned. What comes beyond that is dropped and counted.
    """

    max_storing_blocks: int = 1024
    max_waiting_blocks: int = 65_536


class Feed:
    """The way down from the host to one lower tier: what waits, what is under way, when to leave it alone.

    ``begin(keys)``: those of ``keys`` that get a place, as (keys, places), places empty in a tier by key.
    ``end(keys, outcomes)``: how each of these ended, on all ranks together.
    """

    def __init__(
        self,
        name: str,
        tier: Tier,
        around: Surroundings,
        options: FeedOptions,
        *,
        begin: Callable[[Sequence[BlockKey]], tuple[Sequence[BlockKey], Sequence[int]]],
        end: Callable[[Sequence[BlockKey], Sequence[Outcome]], int],
    ) -> None:
        self._name = name
        self._tier = tier
        self._around = around
        self._options = options
        self._begin, self._end = begin, end
        self._breaker = Breaker(around.clock)
        self._waiting: deque[BlockKey] = deque()
        self._jobs: set[_StoreJob] = set()
        self.num_ranks = 0  # of those that store; 0: all
        self.off_reason: str | None = None

    @property
    def is_usable(self) -> bool:
        """See LowerTier."""
        return self.off_reason is None and not self._breaker.is_open

    @property
    def waiting_blocks(self) -> int:
        """Blocks that wait for their turn."""
        return len(self._waiting)

    @property
    def storing_blocks(self) -> int:
        """Blocks in orders that some rank has not answered."""
        return sum(len(job.order.keys) for job in self._jobs)

    def put(self, keys: Sequence[BlockKey]) -> None:
        """Stores ``keys`` as soon as there is room on the way."""
        room = max(0, self._options.max_waiting_blocks - len(self._waiting))
        self._waiting.extend(keys[:room])
        self._around.metrics.dropped(DropReason.QUEUE_FULL, len(keys) - room)
        self.send_waiting()

    def send_waiting(self) -> None:
        """Sends as many orders as may be under way; what has left the host meanwhile is left out."""
        while self._waiting and self.is_usable:
            room = self._options.max_storing_blocks - self.storing_blocks
            if room <= 0:
                return
            batch = [self._waiting.popleft() for _ in range(min(STORE_BLOCKS, room, len(self._waiting)))]
            if resident := self._around.host.resident_of(list(dict.fromkeys(batch))):
                self._store(resident)

    def _store(self, keys: Sequence[BlockKey]) -> None:
        around = self._around
        placed, places = self._begin(keys)
        if not placed:
            return
        lease = around.host.lease(self._name, placed, around.lease_ttl_s)
        if lease is None:
            self._end(placed, [Outcome.REJECTED] * len(placed))
            return
        job_id = around.jobs.new_id()
        order = TierOrder(job_id, self._name, OrderKind.STORE, lease.keys, lease.slots, tuple(places))
        ranks = set(range(self.num_ranks)) if self.num_ranks else around.jobs.all_ranks()
        job = _StoreJob(job_id, ranks, around.jobs.now_s(), on_end=lambda: self._ended(job))
        job.on_late = lambda result: self.judge(result.outcome)
        job.order, job.lease = order, lease
        self._jobs.add(around.jobs.add(job))
        around.send(order)

    def _ended(self, job: _StoreJob) -> None:
        self._jobs.discard(job)
        metrics, order = self._around.metrics, job.order
        self._around.host.release(job.lease)
        failed = job.failures(order.slots)
        outcomes = [failed.get(slot, Outcome.OK) for slot in order.slots]
        num_ok = outcomes.count(Outcome.OK)
        self.judge(job.outcome)
        if num_ok:
            num_bytes = sum(result.num_bytes for result in job.results)
            seconds = max(result.seconds for result in job.results)
            metrics.tier_transfer(Tier.HOST, self._tier, num_bytes, seconds)
        num_kept = self._end(order.keys, outcomes)
        metrics.offloaded_blocks(num_kept, Tier.HOST, self._tier)
        metrics.dropped(DropReason.RESET, num_ok - num_kept)
        if num_ok < len(outcomes):
            metrics.failure(f"{Direction.OFFLOAD}_{job.outcome}")
            metrics.dropped(DropReason.TRANSFER_FAILED, len(outcomes) - num_ok)
        self.send_waiting()

    def judge(self, outcome: Outcome) -> None:
        """How something that the tier was asked for ended: a failing one is left alone for a while."""
        if outcome is Outcome.OK:
            self._breaker.succeeded()
        elif outcome in FAILING and self._breaker.failed():
            log.warning("kvbm: the %s fails (%s); it is left alone for a while", self._name, outcome)
            self._around.metrics.dropped(DropReason.TRANSFER_FAILED, len(self._waiting))
            self._waiting.clear()

    def turn_off(self, reason: str) -> None:
        """See LowerTier."""
        if self.off_reason is None:
            log.error("kvbm: the %s tier is off, the engine serves without it: %s", self._name, reason)
        self.off_reason = reason

    def mind(self) -> None:
        """A host slot is not reused while a worker may still read it."""
        host, ttl_s = self._around.host, self._around.lease_ttl_s
        now_s = self._around.clock.now_s()
        for job in self._jobs:
            if job.lease.expires_at_s - now_s < ttl_s / 2:
                job.lease = host.renew(job.lease, ttl_s) or job.lease

    def clear(self) -> None:
        """What waits is not stored."""
        self._waiting.clear()


class _StoreJob(Job):
    """Host slots being stored; ``lease`` keeps them as they are."""

    __slots__ = ("lease", "order")
    order: TierOrder
    lease: Lease

    @property
    def num_blocks(self) -> int:
        return len(self.order.keys)
