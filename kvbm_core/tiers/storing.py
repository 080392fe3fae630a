"""The way down to a lower tier: what the host has is offered, filtered, queued and stored by all ranks.

A block is offered when it has been committed to the host and when it is used there, and is stored if the
tier's filter says so. A tier that fails again and again is left alone for a while.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvbm_core.blocks.lease import Lease
from kvbm_core.errors import Outcome
from kvbm_core.observe.labels import DropReason
from kvbm_core.observe.log import TroubleLog
from kvbm_core.policy.admission import AdmissionPolicy, AdmitAll
from kvbm_core.tiers.breaker import Breaker
from kvbm_core.tiers.jobs import Job
from kvbm_core.tiers.lower import LowerTier, Surroundings
from kvbm_core.tokens.runs import BlockRun, blocks_of
from kvbm_core.transfer.plan import ExtentPart, OrderKind, TierOrder
from kvbm_core.types import BlockKey, Direction, Tier

STORE_BLOCKS = 64
"""Blocks in one order to the workers."""
# What came back is not what was stored, or nothing came back: it is of no use to anybody.
USELESS = frozenset({Outcome.MISS, Outcome.CORRUPT, Outcome.INCOMPATIBLE, Outcome.IO_ERROR})
FAILING = frozenset({Outcome.IO_ERROR, Outcome.TIMED_OUT})
WORDS = {
    Tier.DISK: "disk (DYN_KVBM_DISK_CACHE_DIR)",
    Tier.REMOTE: "shared store (KVBM_REMOTE_URL)",
}
"""What users know a tier by."""


@dataclass(frozen=True, slots=True)
class StoringOptions:
    """``max_storing_blocks``: on their way to the tier at once, and leased in the host meanwhile; as many as
    ``max_waiting_blocks`` wait their turn, not leased. What comes beyond that is dropped and counted.
    """

    max_storing_blocks: int = 1024
    max_waiting_blocks: int = 65_536


class StoringTier(LowerTier, ABC):
    """A LowerTier that is stored to by orders to all ranks, from leased host slots."""

    def __init__(
        self,
        name: str,
        tier: Tier,
        admission: AdmissionPolicy,
        around: Surroundings,
        options: StoringOptions,
    ) -> None:
        super().__init__(name, tier, around)
        self._admission = admission
        self._options = options
        self._breaker = Breaker(around.clock)
        self._trouble = TroubleLog(clock=around.clock)
        # Each with the block before it, without which it is of no use.
        self._waiting: OrderedDict[BlockKey, BlockKey | None] = OrderedDict()
        self._jobs: set[_StoreJob] = set()
        self.ordered_blocks = 0
        """Blocks in orders to store that some rank has not answered."""
        self.is_filtered = not isinstance(admission, AdmitAll)

    # ---------------------------------------------------------------- what each kind does otherwise

    @abstractmethod
    def _new_of(self, keys: Sequence[BlockKey]) -> Sequence[BlockKey]:
        """Those of ``keys`` that are neither here nor on their way."""

    @abstractmethod
    def _begin_store(
        self, befores: Mapping[BlockKey, BlockKey | None]
    ) -> tuple[Sequence[BlockKey], Sequence[int]]:
        """Those of the blocks that get a place, and the places; these are empty in a tier without slots.
        ``befores``: by each block the one that it needs before it.
        """

    @abstractmethod
    def _end_store(
        self,
        keys: Sequence[BlockKey],
        extents: Sequence[ExtentPart],
        outcomes: Sequence[Outcome],
        block_bytes: int,
    ) -> int:
        """How each of ``keys``, in ``extents``, ended, on all ranks together, which have written
        ``block_bytes`` for each. Answers how many are here now.
        """

    # ---------------------------------------------------------------- state

    @property
    def is_usable(self) -> bool:
        """See LowerTier; not while it is left alone."""
        return self.off_reason is None and not self._breaker.is_open

    @property
    def storing_blocks(self) -> int:
        """See LowerTier."""
        return self.ordered_blocks + self.waiting_blocks

    @property
    def waiting_blocks(self) -> int:
        """Blocks that wait until there is room on the way."""
        return len(self._waiting)

    def judge(self, outcome: Outcome, kind: OrderKind = OrderKind.FETCH) -> None:
        """See LowerTier."""
        if outcome is Outcome.OK:
            if self._breaker.succeeded(kind):
                self._trouble.worked("answer", "kvbm: the %s works again", self._words)
        elif outcome in FAILING and self._breaker.failed(kind):
            if self._is_news(outcome):
                line = "kvbm: the %s fails (%s): it is left alone for a while, and then tried again"
                self._trouble.failed("answer", outcome, line, self._words, outcome)
            self._around.metrics.dropped(DropReason.TRANSFER_FAILED, self.waiting_blocks)
            self._drop_waiting()

    def _is_news(self, outcome: Outcome) -> bool:
        """Whether nobody else has said that this is how it fails."""
        return True

    @property
    def _words(self) -> str:
        words, number = WORDS.get(self.tier, self.name), self.name.rpartition("-")[2]
        return f"{words}, number {number}," if number.isdigit() else words

    def mind(self) -> None:
        """See LowerTier."""
        host, ttl_s = self._around.host, self._around.lease_ttl_s
        now_s = self._around.clock.now_s()
        for job in self._jobs:
            if job.lease.expires_at_s - now_s < ttl_s / 2:
                job.lease = host.renew(job.lease, ttl_s) or job.lease

    def reset(self) -> None:
        """See LowerTier."""
        self._drop_waiting()

    def _drop_waiting(self) -> None:
        self._waiting.clear()

    # ---------------------------------------------------------------- the way down

    def hit(self, runs: Sequence[BlockRun]) -> None:
        """See LowerTier."""
        self._admission.hit(self._new_of(blocks_of(runs)))
        self.offer(runs)

    def offer(self, runs: Sequence[BlockRun]) -> None:
        """See LowerTier."""
        if not self.is_usable:
            return
        admitted = self._admission.admit(self._new_of(blocks_of(runs)))
        room = max(0, self._options.max_waiting_blocks - len(self._waiting))
        befores = _befores(runs) if admitted else {}
        self._waiting.update((key, befores.get(key)) for key in admitted[:room])
        self._around.metrics.dropped(DropReason.QUEUE_FULL, len(admitted) - room)
        self._send_waiting()

    def _send_waiting(self) -> None:
        """Sends as many orders as may be under way. Left out are what has left the host meanwhile and what
        lacks the block before it, here and on its way.
        """
        while self._waiting and self.is_usable:
            room = self._options.max_storing_blocks - self.ordered_blocks
            if room <= 0:
                return
            most = min(STORE_BLOCKS, room, len(self._waiting))
            befores = dict(self._waiting.popitem(last=False) for _ in range(most))
            batch: dict[BlockKey, BlockKey | None] = {}
            for key in self._around.host.resident_of(list(befores)):
                before = befores[key]
                if before is None or before in batch or not self._new_of([before]):
                    batch[key] = before
            if batch:
                self._store(batch)

    def _store(
        self, befores: Mapping[BlockKey, BlockKey | None], extents: tuple[ExtentPart, ...] = ()
    ) -> None:
        """Blocks that are in the host, see ``_begin_store``; in a tier that keeps extents, whole ones."""
        around = self._around
        placed, places = self._begin_store(befores)
        if not placed:
            return
        lease = around.host.lease(self.name, placed, around.lease_ttl_s)
        if lease is None:
            self._end_store(placed, extents, [Outcome.REJECTED] * len(placed), 0)
            return
        job_id = around.jobs.new_id()
        order = TierOrder(job_id, self.name, OrderKind.STORE, lease.keys, lease.slots, tuple(places), extents)
        job = _StoreJob(job_id, self._ranks(), around.jobs.now_s(), on_end=lambda: self._store_ended(job))
        job.on_late = lambda result: self.judge(result.verdict(order.slots), order.kind)
        job.order, job.lease = order, lease
        self._jobs.add(around.jobs.add(job))
        self.ordered_blocks += len(lease.keys)
        around.send(order)

    def _ranks(self) -> set[int]:
        """Those that have to answer an order."""
        return set(self._storing_ranks) or self._around.jobs.all_ranks()

    def _store_ended(self, job: _StoreJob) -> None:
        metrics, order = self._around.metrics, job.order
        self._jobs.discard(job)
        self.ordered_blocks -= len(order.keys)
        self._around.host.release(job.lease)
        failed = job.failures(order.slots)
        outcomes = [failed.get(slot, Outcome.OK) for slot in order.slots]
        num_ok = outcomes.count(Outcome.OK)
        self.judge(job.verdict(order.slots), order.kind)
        num_bytes = sum(result.num_bytes for result in job.results) if num_ok else 0
        if num_ok:
            seconds = max(result.seconds for result in job.results)
            metrics.tier_transfer(Tier.HOST, self.tier, num_bytes, seconds)
        num_kept = self._end_store(order.keys, order.extents, outcomes, num_bytes // max(1, num_ok))
        metrics.offloaded_blocks(num_kept, Tier.HOST, self.tier)
        metrics.dropped(DropReason.RESET, num_ok - num_kept)
        if num_ok < len(outcomes):
            metrics.failure(f"{Direction.OFFLOAD}_{job.outcome}")
            metrics.dropped(DropReason.TRANSFER_FAILED, len(outcomes) - num_ok)
        self._send_waiting()


def _befores(runs: Sequence[BlockRun]) -> dict[BlockKey, BlockKey]:
    """By blocks of ``runs`` those before them that they need."""
    befores: dict[BlockKey, BlockKey] = {}
    for run in runs:
        if run.needs_head:
            keys = run.keys[max(0, run.first - 1) : run.end]
            befores.update(zip(keys[1:], keys, strict=False))
    return befores


class _StoreJob(Job):
    """Host slots being stored; ``lease`` keeps them as they are."""

    __slots__ = ("lease", "order")
    order: TierOrder
    lease: Lease

    @property
    def num_blocks(self) -> int:
        return len(self.order.keys)
