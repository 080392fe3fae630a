"""Host and disk of one process, by key: for engines whose ranks each look after their own blocks and have no
leader.

Blocks go straight between the engine's device memory and the host tier, and on from there to the disk, by the
parts that a leader and its worker are made of.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import NamedTuple

from kvbm_core.clock import Clock, SystemClock
from kvbm_core.errors import IntegrityError, Outcome
from kvbm_core.observe.labels import DropReason
from kvbm_core.observe.metrics import Metrics
from kvbm_core.policy.lru import LruPolicy
from kvbm_core.runtime.disk import DiskTier
from kvbm_core.runtime.jobs import count_transfer
from kvbm_core.runtime.local_bytes import LocalBytes, LocalOptions
from kvbm_core.runtime.local_claims import Claim, ClaimBook
from kvbm_core.runtime.messages import Acks, DiskFound, DiskRefused, Message, Store
from kvbm_core.storage.disk.recovery import Found
from kvbm_core.tiers.tier import BlockTier, Reservation
from kvbm_core.transfer.executor import DeviceMemory
from kvbm_core.transfer.plan import GroupMove, JobResult, TransferPlan
from kvbm_core.types import BlockKey, Direction, Tier

log = logging.getLogger("kvbm")

OnEnd = Callable[[Outcome], None]
"""Told of the end of a transfer, once, from any thread. Must be short."""


class _Ready(NamedTuple):
    slots: int


class _Released(NamedTuple):
    job_id: int


@dataclass
class _Job:
    """A load has a claim, a store a reservation. ``is_lasting``: its keys mean the same in another process.
    ``is_spoiled``: its device blocks were used otherwise meanwhile.
    """

    keys: tuple[BlockKey, ...]
    on_end: OnEnd
    claim: Claim | None = None
    reservation: Reservation | None = None
    is_lasting: bool = True
    is_spoiled: bool = False
    is_cancelled: bool = False


class LocalTiers:
    """Safe to call from any thread; nothing waits for I/O but the constructor, ``wait_stored`` and ``close``.

    A block is there once its transfer has ended well, not before; a failed one leaves nothing registered.
    What a load stumbled over is forgotten, so that it fails once. Constructor: see LocalBytes.
    """

    def __init__(
        self,
        memory: DeviceMemory,
        options: LocalOptions,
        metrics: Metrics | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.block_bytes = memory.views[0].block_bytes
        self._metrics = metrics = metrics or Metrics()
        clock = clock or SystemClock()
        self._ids = count(1)
        self._changed = threading.Condition()
        self._lock = self._changed  # one lock, by what it is used for
        self._turn = threading.Lock()
        self._inbox: deque[JobResult | Message | _Ready | _Released] = deque()
        self._orders: deque[Message] = deque()
        self._host = BlockTier(Tier.HOST, LruPolicy(), clock)
        self._disk: DiskTier | None = None
        if options.disk is not None:
            disk, new_id = options.disk, self._ids.__next__
            self._disk = DiskTier(
                self._host, disk.admission, self._orders.append, new_id, 1, clock, metrics, disk.tier
            )
            self._disk.block_bytes = self.block_bytes
            self._disk.expect(disk.share.num_slots)
        self._book = ClaimBook(self._host, self._disk, clock, options.lease_ttl_s)
        self._claims: set[Claim] = set()
        self._jobs: dict[int, _Job] = {}
        self._late: dict[int, Claim] = {}
        self._evicted_seen = 0
        self._bytes = LocalBytes(
            memory,
            options,
            on_ready=lambda slots: self._hear(_Ready(slots)),
            on_result=self._hear,
            on_news=self._hear,
            on_released=lambda job_id: self._hear(_Released(job_id)),
        )

    # ---------------------------------------------------------------- the way up

    def contains(self, key: BlockKey) -> bool:
        """Whether the block is in the host or the disk tier."""
        with self._lock:
            return self._book.contains(key)

    def match(self, owner: str, keys: Sequence[BlockKey]) -> int:
        """How many leading ``keys`` can be loaded. They are held for ``owner`` until ``claim``, or
        ``lease_ttl_s``.

        Asked again it answers anew, and holds that instead.
        """
        with self._lock:
            moving = [job.claim for job in self._jobs.values() if job.claim is not None]
            self._book.mind_leases((*self._claims, *self._late.values(), *moving))
            found = self._book.promise(owner, keys)
            self._count_evicted()
        return found

    def claim(self, owner: str, keys: Sequence[BlockKey]) -> Claim | None:
        """Holds ``keys``, of those matched or others, until ``load`` or ``drop``; None if not all can be."""
        with self._lock:
            claim = self._book.claim(owner, keys)
            self._count_evicted()
            if claim is not None:
                self._claims.add(claim)
            return claim

    def drop(self, claim: Claim) -> None:
        """A claim that will not be loaded."""
        with self._lock:
            self._claims.remove(claim)
            self._book.release(claim)

    def load(
        self, claim: Claim, device_blocks: Sequence[int], on_end: OnEnd, *, is_lasting: bool = True
    ) -> None:
        """Fills ``device_blocks[i]`` with block i of ``claim``. OK: all are filled; else they hold garbage.

        After its end nothing writes to them any more. What came from the disk stays in the host tier. What
        is not ``is_lasting`` is not offered to the disk, see ``store``.
        """
        job_id, plan = next(self._ids), None
        with self._lock:
            self._claims.remove(claim)
            if self._book.is_good(claim):
                plan = claim.plan(job_id, device_blocks)
                self._jobs[job_id] = _Job(claim.keys, on_end, claim=claim, is_lasting=is_lasting)
            else:
                self._book.release(claim)
        if plan is not None:
            self._submit(plan)
        else:
            self._metrics.failure(f"{Direction.ONBOARD}_{Outcome.MISS}")
            on_end(Outcome.MISS)

    def cancel(self, claim: Claim) -> None:
        """Ends a load: at once if nothing of it is being copied, else soon. Nothing if it is over.

        Blocks of it that come from the disk wait for the disk no more; what was kept stays.
        """
        with self._lock:
            found = {job_id: job for job_id, job in self._jobs.items() if job.claim is claim}
            for job in found.values():
                job.is_cancelled = True
        for job_id in found:
            self._bytes.cancel(job_id)

    # ---------------------------------------------------------------- the way down

    def store(
        self,
        keys: Sequence[BlockKey],
        device_blocks: Sequence[int],
        on_end: OnEnd,
        *,
        is_lasting: bool = True,
    ) -> None:
        """Keeps ``device_blocks[i]`` as ``keys[i]``, but for those that are there already or on their way.

        OK: all of them are there now. NO_SPACE: some are not, but those from the head on that had room are.
        Keys that are not ``is_lasting`` mean nothing in another process: their blocks stay in host memory.
        """
        block_of = dict(zip(keys, device_blocks, strict=True))
        job_id = next(self._ids)
        with self._lock:
            num_new = len(self._host.new_of(keys))
            reservation = self._host.reserve(keys, lambda new: frozenset(keys))
            self._count_evicted()
            self._metrics.dropped(DropReason.NO_SPACE, num_new - len(reservation.keys))
            outcome = Outcome.OK
            if reservation.keys:
                self._jobs[job_id] = _Job(tuple(keys), on_end, reservation=reservation, is_lasting=is_lasting)
            else:
                self._host.touch(keys)
                outcome = self._kept(keys)
        if reservation.keys:
            move = GroupMove(0, tuple(block_of[key] for key in reservation.keys), reservation.slots)
            self._submit(TransferPlan(job_id, Direction.OFFLOAD, (move,)))
        else:
            on_end(outcome)

    def disown(self) -> None:
        """Device blocks that stores still read are used otherwise from now on: nothing of these stores will
        be kept.
        """
        with self._lock:
            for job in self._jobs.values():
                job.is_spoiled = True

    # ---------------------------------------------------------------- state and end

    @property
    def ready_slots(self) -> int:
        """Slots of the host tier that can be used."""
        return self._host.capacity_blocks

    @property
    def resident_blocks(self) -> tuple[int, int]:
        """Blocks in the host tier and on the disk."""
        with self._lock:
            return self._host.resident_blocks, 0 if self._disk is None else self._disk.tier.resident_blocks

    def wait_ready(self, slots: int, disk_slots: int, timeout_s: float) -> bool:
        """Waits until so many slots of host and disk can be used; False if time ran out."""

        def is_ready() -> bool:
            on_disk = 0 if self._disk is None else self._disk.tier.capacity_blocks
            return self._host.capacity_blocks >= slots and on_disk >= disk_slots

        with self._changed:
            return self._changed.wait_for(is_ready, timeout_s)

    def wait_stored(self, timeout_s: float) -> bool:
        """Waits until nothing is on its way to the disk; False if time ran out."""
        with self._changed:
            return self._changed.wait_for(
                lambda: self._disk is None or not self._disk.storing_blocks, timeout_s
            )

    def close(self) -> None:
        """Ends what is under way, threads, memory and files; idempotent. What is in the host tier is gone."""
        with self._lock:
            self._book.let_all_go()
        self._bytes.close()

    def check_integrity(self) -> None:
        """Raises IntegrityError unless the books agree."""
        with self._lock:
            self._host.check_integrity()
            if self._disk is not None:
                self._disk.check_integrity()
            if self._host.pending_blocks and not (
                self._jobs or self._claims or self._late or self._book.num_promises
            ):
                raise IntegrityError("host slots are reserved for nobody")

    # ---------------------------------------------------------------- what executors say

    def _submit(self, plan: TransferPlan) -> None:
        try:
            self._bytes.submit(plan)
        except Exception as error:  # whatever happens to a job is its outcome
            log.exception("kvbm: %s %d could not be submitted", plan.direction, plan.job_id)
            self._hear(JobResult(plan.job_id, Outcome.IO_ERROR, 0, 0.0, 0.0, str(error)))

    def _hear(self, news: JobResult | Message | _Ready | _Released) -> None:
        self._inbox.append(news)
        self._take_turn()

    def _take_turn(self) -> None:
        """Takes in what was heard and sends what follows from it; one thread at a time, the others leave it
        theirs.
        """
        while self._inbox or self._orders:
            if not self._turn.acquire(blocking=False):
                return  # whoever has the turn looks again after it
            try:
                self._take_in()
            finally:
                self._turn.release()

    def _take_in(self) -> None:
        ended: list[tuple[OnEnd, Outcome]] = []
        with self._changed:
            while self._inbox:
                self._take(self._inbox.popleft(), ended)
            self._metrics.tier_usage(Tier.HOST, self._host.resident_blocks, self._host.capacity_blocks)
            if self._disk is not None:
                tier = self._disk.tier
                self._metrics.tier_usage(Tier.DISK, tier.resident_blocks, tier.capacity_blocks)
            self._changed.notify_all()
        for on_end, outcome in ended:
            try:
                on_end(outcome)
            except Exception:  # the next one is to hear of its end all the same
                log.exception("kvbm: the end of a transfer could not be told")
        while self._orders:
            order = self._orders.popleft()
            if isinstance(order, Store):
                self._bytes.store(order)

    def _take(
        self, news: JobResult | Message | _Ready | _Released, ended: list[tuple[OnEnd, Outcome]]
    ) -> None:
        if isinstance(news, JobResult):
            job = self._jobs.pop(news.job_id)
            end = self._end_load if job.claim is not None else self._end_store
            ended.append((job.on_end, end(job, news)))
        elif isinstance(news, _Ready):
            self._host.grow(news.slots)
        elif isinstance(news, _Released):
            claim = self._late.pop(news.job_id, None)
            if claim is not None:
                self._book.release(claim)
        elif self._disk is not None:
            self._take_disk_news(self._disk, news)

    def _take_disk_news(self, disk: DiskTier, news: Message) -> None:
        if isinstance(news, Acks):
            for ack in news.acks:
                if (
                    ack.is_late
                ):  # nothing is freed before the second answer, but nobody is sent there for a while
                    disk.judge(ack.outcome)
                elif disk.owns(ack.job_id):
                    disk.acknowledge(news.rank, ack)
        elif isinstance(news, DiskFound):
            found = zip(news.slots, news.keys, news.sequences, strict=True)
            disk.take_in(
                news.rank, news.end, [Found(slot, BlockKey(key), sequence) for slot, key, sequence in found]
            )
        elif isinstance(news, DiskRefused):
            disk.turn_off(news.reason)

    # ---------------------------------------------------------------- ends; under the lock

    def _end_load(self, job: _Job, result: JobResult) -> Outcome:
        claim = job.claim
        if claim is None:
            return result.outcome
        is_loaded = result.outcome is Outcome.OK
        is_unwanted = job.is_cancelled and result.outcome is Outcome.REJECTED
        self._count(Direction.ONBOARD, result)
        if is_loaded:
            if claim.reservation is not None:
                self._host.commit(claim.reservation)
                claim.reservation = None
            self._metrics.onboarded_blocks(len(claim.keys) - len(claim.reads), Tier.HOST, Tier.DEVICE)
            self._metrics.onboarded_blocks(len(claim.reads), Tier.DISK, Tier.DEVICE)
        elif not is_unwanted:
            self._host.forget(claim.keys)
        if self._disk is not None:
            if claim.reads:
                self._disk.judge(result.outcome)
            if is_loaded and job.is_lasting:
                self._disk.hit(claim.keys)
            elif not is_loaded and not is_unwanted:
                self._disk.tier.forget(claim.reads)
        if result.is_late:
            self._late[result.job_id] = claim
        else:
            self._book.release(claim)
        self._host.touch(job.keys)
        return result.outcome

    def _end_store(self, job: _Job, result: JobResult) -> Outcome:
        reservation = job.reservation
        if reservation is None:
            return result.outcome
        self._count(Direction.OFFLOAD, result)
        outcome = Outcome.REJECTED if job.is_spoiled else result.outcome
        if outcome is not Outcome.OK:
            self._host.abort(reservation)
            self._metrics.dropped(DropReason.TRANSFER_FAILED, len(reservation.keys))
            return outcome
        self._host.commit(reservation)
        self._metrics.offloaded_blocks(len(reservation.keys))
        self._host.touch(job.keys)
        if self._disk is not None and job.is_lasting:
            self._disk.offer(reservation.keys)
        return self._kept(job.keys)

    def _kept(self, keys: Sequence[BlockKey]) -> Outcome:
        return Outcome.OK if all(map(self._book.contains, keys)) else Outcome.NO_SPACE

    def _count(self, direction: Direction, result: JobResult) -> None:
        if result.outcome is Outcome.OK:
            count_transfer(self._metrics, direction, [result])
        else:
            self._metrics.failure(f"{direction}_{result.outcome}")
            log.warning("kvbm: %s %d: %s %s", direction, result.job_id, result.outcome, result.detail)

    def _count_evicted(self) -> None:
        self._metrics.evicted(Tier.HOST, self._host.evicted_blocks_total - self._evicted_seen)
        self._evicted_seen = self._host.evicted_blocks_total
