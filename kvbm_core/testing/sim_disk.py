"""The disk's part of the simulation: disks that outlive their workers, workers that use them, and restarts.

Stores and reads take two steps. Records carry a digest of what their host slot held at the start, and the
bytes that it held at the end: a host slot that was given to somebody else meanwhile yields a record that does
not verify, and the simulation fails unless it has damaged that record itself. Reads may be late: the engine
is told TIMED_OUT, and the worker goes on writing into the host slots and acknowledges to the leader only when
that is over. Of a load that failed in part the rest is right.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from hashlib import blake2b
from random import Random

import msgspec

from kvbm_core.errors import Outcome
from kvbm_core.policy.admission import AdmitAll
from kvbm_core.policy.frequency import FrequencyFilter
from kvbm_core.runtime.handshake import SlotsFound
from kvbm_core.storage.disk.recovery import Found
from kvbm_core.testing.leader_bench import BenchDisk, LeaderBench
from kvbm_core.testing.leader_sim import LeaderSim, SimShape, expect
from kvbm_core.testing.sim_worker import FAILURES, HALF_BYTES, PAGE_BYTES, SimWorker, oracle
from kvbm_core.transfer.plan import JobResult, OrderKind, TierOrder, TransferPlan
from kvbm_core.types import BlockKey

EARLY_PROMPTS = 5
LATE_RATE = 0.15


def _digest(payload: bytes) -> bytes:
    return blake2b(payload, digest_size=8).digest()


@dataclass
class SimRecord:
    """``is_damaged``: on purpose, or not written to its end; it must be taken for useless, and nothing is
    wrong.
    """

    key: BlockKey
    life: int
    sequence: int
    payload: bytes
    digest: bytes
    is_damaged: bool


class SimDisk:
    """The disk of one rank. What a worker that was killed had not ended stays as it was."""

    def __init__(self, num_slots: int, first_sequence: int) -> None:
        self.records: list[SimRecord | None] = [None] * num_slots
        self.life = 0
        self.sequence = first_sequence

    def found(self, slots: range) -> list[Found]:
        """What a look at the headers of ``slots`` shows."""
        records = ((slot, self.records[slot]) for slot in slots)
        return [
            Found(slot, record.key, record.sequence)
            for slot, record in records
            if record is not None and record.life == self.life
        ]


@dataclass
class _Load:
    """A plan with reads; ``life``: of the disk when it came."""

    plan: TransferPlan
    reads: TierOrder
    life: int
    is_half_read: bool = False
    is_late: bool = False


class DiskSimWorker(SimWorker):
    """A SimWorker with a disk: one order of the leader's at a time, in order; loads in any order."""

    def __init__(  # noqa: PLR0917 - as SimWorker, and its disk
        self,
        rank: int,
        num_device_blocks: int,
        num_slots: int,
        random: Random,
        failure_rate: float,
        disk: SimDisk,
    ) -> None:
        super().__init__(rank, num_device_blocks, num_slots, random, failure_rate)
        self.disk = disk
        self.late_reads = 0
        self._orders: deque[TierOrder] = deque()
        self._is_half_stored = False
        self._loads: dict[int, _Load] = {}

    def hear(self, order: TierOrder) -> None:
        """Takes an order of the leader's."""
        self._orders.append(order)

    def submit(self, plan: TransferPlan) -> None:
        """See SimWorker; what has to be read goes to the device when all of it has come."""
        if not plan.reads:
            super().submit(plan)
        else:
            (reads,) = plan.reads
            self._loads[plan.job_id] = _Load(plan, reads, self.disk.life)

    def fence(self, job_ids: Collection[int], *, times_out: bool) -> None:
        """See SimWorker; what is read for a comparison that is cancelled is read to its end."""
        super().fence(job_ids, times_out=times_out)
        for job_id in sorted(self._loads.keys() & set(job_ids)):
            if not self._loads[job_id].is_late:
                self._loads[job_id].is_late = True
                self._outcomes[job_id] = Outcome.REJECTED

    @property
    def is_idle(self) -> bool:
        """See SimWorker."""
        return super().is_idle and not self._orders and not self._loads

    def step(self) -> None:
        """See SimWorker."""
        steps: list[Callable[[], None]] = [] if super().is_idle else [super().step]
        if self._orders:
            steps.append(self._go_on_with_order)
        if self._loads:
            steps.append(self._go_on_with_load)
        if steps:
            self._random.choice(steps)()

    # ---------------------------------------------------------------- host to disk

    def _go_on_with_order(self) -> None:
        order = self._orders[0]
        if order.kind is OrderKind.FORGET:
            self._orders.popleft()
            self.disk.life += 1
        elif order.kind is OrderKind.ERASE:
            self._orders.popleft()
            for place in order.places:
                self.disk.records[place] = None
        elif self._is_half_stored:
            self._orders.popleft()
            self._is_half_stored = False
            self._end_store(order)
        elif self._fails():
            self._orders.popleft()
            for disk_slot in order.places:
                if self._random.random() < 0.5:
                    self.disk.records[disk_slot] = (
                        None  # what was there is gone, and no new record has come of it
                    )
            self._end(order.job_id, self._random.choice([*FAILURES, Outcome.REJECTED]))
        else:
            self._is_half_stored = True
            self._begin_store(order)

    def _fails(self) -> bool:
        return self._random.random() < self._failure_rate

    def _begin_store(self, order: TierOrder) -> None:
        self.disk.sequence += self._random.randint(1, 3)
        for key, slot, disk_slot in zip(order.keys, order.slots, order.places, strict=True):
            payload = self.in_slot(slot)
            half = payload[:HALF_BYTES].ljust(PAGE_BYTES, b"\0")
            self.disk.records[disk_slot] = SimRecord(
                BlockKey(key), self.disk.life, self.disk.sequence, half, _digest(payload), is_damaged=True
            )

    def _end_store(self, order: TierOrder) -> None:
        for slot, disk_slot in zip(order.slots, order.places, strict=True):
            record = self.disk.records[disk_slot]
            expect(record is not None, "a record vanished while it was written")
            if record is not None:
                record.payload, record.is_damaged = self.in_slot(slot), False
                expect(
                    _digest(record.payload) == record.digest,
                    f"slot {slot} was reused while it was being stored",
                )
        self._end(order.job_id, self._random.choice(FAILURES) if self._fails() else Outcome.OK)

    # ---------------------------------------------------------------- disk to host to device

    def _go_on_with_load(self) -> None:
        job_id = self._random.choice(sorted(self._loads))
        load = self._loads[job_id]
        if load.is_half_read:
            del self._loads[job_id]
            self._end_reads(load)
        elif self._failure_rate and not load.is_late and self._random.random() < LATE_RATE:
            # The engine knows at once, the leader when nothing is written any more.
            load.is_late = True
            self._outcomes[job_id] = Outcome.TIMED_OUT
            self.late_reads += 1
        elif load.is_late or not self._fails():
            self._begin_reads(load)
        else:
            self._fail(load)

    def _fail(self, load: _Load) -> None:
        job_id = load.plan.job_id
        trouble = self._random.choice([Outcome.IO_ERROR, Outcome.TIMED_OUT, Outcome.CORRUPT])
        if trouble is Outcome.CORRUPT:
            record = self.disk.records[self._random.choice(load.reads.places)]
            if record is not None:
                record.payload, record.is_damaged = bytes(PAGE_BYTES), True
            self._begin_reads(load)
        else:
            self._read_half(load, 0)
            del self._loads[job_id]
            self._end(job_id, trouble)

    def _begin_reads(self, load: _Load) -> None:
        self._read_half(load, 0)
        load.is_half_read = True

    def _read_half(self, load: _Load, offset_bytes: int) -> None:
        for slot, disk_slot in zip(load.reads.slots, load.reads.places, strict=True):
            record = self.disk.records[disk_slot]
            if record is not None:
                first = slot * PAGE_BYTES + offset_bytes
                self.host[first : first + HALF_BYTES] = record.payload[
                    offset_bytes : offset_bytes + HALF_BYTES
                ]

    def _end_reads(self, load: _Load) -> None:
        self._read_half(load, HALF_BYTES)
        problems = [self._problem_of(load, i) for i in range(len(load.reads.keys))]
        trouble = next((problem for problem in problems if problem is not None), None)
        failed = {
            slot: problem
            for slot, problem in zip(load.reads.slots, problems, strict=True)
            if problem is not None
        }
        if load.is_late:
            kept = [slot for slot in load.reads.slots if self._random.random() < 0.5]
            failed = {slot: Outcome.TIMED_OUT for slot in load.reads.slots if slot not in kept} | failed
            result = JobResult(load.plan.job_id, self._outcomes[load.plan.job_id], 0, 0.0, 0.0)
            self.acks.append(msgspec.structs.replace(result, failed=tuple(failed.items())))
        elif trouble is not None:
            if load.plan.compares:  # as StagedExecutor: a damaged record is no wrong KV
                changed = {slot: Outcome.MISS for slot, bad in failed.items() if bad is Outcome.CORRUPT}
                failed, trouble = failed | changed, Outcome.MISS if trouble is Outcome.CORRUPT else trouble
            self._end(load.plan.job_id, trouble, tuple(failed.items()) if self._random.random() < 0.7 else ())
        else:
            super().submit(replace(load.plan, reads=()))

    def _problem_of(self, load: _Load, number: int) -> Outcome | None:
        """What is wrong with one block that was read. AssertionError if that is nobody's fault but the
        leader's.
        """
        record = self.disk.records[load.reads.places[number]]
        if self.disk.life != load.life:
            return Outcome.MISS
        key = load.reads.keys[number]
        expect(record is not None, "the leader asked for a record that is not there")
        if record is None or record.key != key or record.life != self.disk.life:
            raise AssertionError("the leader asked for a block that is not in this slot of the disk")
        if record.is_damaged:
            return Outcome.CORRUPT
        read = self.in_slot(load.reads.slots[number])
        expect(_digest(read) == record.digest, "a host slot was given away while it was being read into")
        return None


# ---------------------------------------------------------------- the engine


class DiskLeaderSim(LeaderSim):
    """A LeaderSim with disks of ``num_disk_slots``. Now and then all of it but the disks is killed and starts
    anew.

    ``uses_filter``: the frequency filter stands before the disk; else everything goes there.
    """

    def __init__(self, shape: SimShape, random: Random, *, num_disk_slots: int, uses_filter: bool) -> None:
        self._num_disk_slots = num_disk_slots
        self._uses_filter = uses_filter
        self._disks = [SimDisk(num_disk_slots, random.randrange(1000)) for _ in range(shape.world_size)]
        self._disk_workers: list[DiskSimWorker] = []
        # What the leader has not been told yet of what is on the disks, by rank; on its way since the start.
        self._untold: list[deque[SlotsFound]] = []
        # Loads that read from the disk: the plan, and the number of resets before it.
        self._reading: dict[int, tuple[TierOrder, int]] = {}
        self._resets = 0
        self._early_prompts: list[list[int]] = []
        self._restored: set[BlockKey] = set()
        self.disk_loads = self.promoted_blocks = self.restart_hits = self._late_reads = 0
        super().__init__(shape, random)

    @property
    def late_reads(self) -> int:
        """Reads that went on after the engine had been told of their end."""
        return self._late_reads + sum(worker.late_reads for worker in self._disk_workers)

    def _make_bench(self, disk: BenchDisk | None = None) -> LeaderBench:
        self._disk_workers = []
        make_admission = FrequencyFilter if self._uses_filter else lambda clock: AdmitAll()
        more = () if disk is None else disk.more
        return super()._make_bench(BenchDisk(0, make_admission, self._tell_workers, more=more))

    def _make_workers(self) -> list[DiskSimWorker]:
        self._disk_workers = [self._make_worker(rank, disk) for rank, disk in enumerate(self._disks)]
        half, end = self._num_disk_slots // 2, self._num_disk_slots
        self._untold = [
            deque(
                SlotsFound("disk", rank, part.stop, disk.found(part))
                for part in (range(half), range(half, end))
            )
            for rank, disk in enumerate(self._disks)
        ]
        return self._disk_workers

    def _make_worker(self, rank: int, disk: SimDisk) -> DiskSimWorker:
        shape = self.shape
        return DiskSimWorker(
            rank, shape.num_device_blocks, shape.num_slots, self.random, shape.failure_rate, disk
        )

    def _tell_workers(self, order: TierOrder) -> None:
        for worker in self._disk_workers:
            worker.hear(order)

    def _actions(self) -> list[tuple[Callable[[], None], float]]:
        more = [
            (self._schedule, 5.0),
            (self._work, 10.0),
            (self._hear, 10.0),
            (self._tell_found, 1.0),
            (self.restart, 0.1),
        ]
        return [*super()._actions(), *more]

    def _arrive(self) -> None:
        # Prompts of long ago come back, of which the host has nothing any more.
        self._early_prompts += self._prompts[len(self._early_prompts) : EARLY_PROMPTS]
        if self._early_prompts and self.random.random() < 0.7:
            self._prompts = [self.random.choice(self._early_prompts)]
        super()._arrive()

    # ---------------------------------------------------------------- restarts

    def restart(self) -> None:
        """Engine, leader and workers are killed; new ones find what is on the disks, bit by bit."""
        self.requests, self.kept = [], []
        self.free_blocks = list(range(1, self.shape.num_device_blocks))
        self._last_job = self._last_job_before_reset = 0
        self._open_jobs, self._open_audits, self._audits = set(), [], set()
        self._late_reads = self.late_reads
        self._reading.clear()
        self._restored.clear()
        self.bench = self._make_bench()
        self.leader = self.bench.leader
        self.workers = self._make_workers()

    def tell_all_found(self) -> None:
        """The leader hears of all that is on the disks."""
        while any(self._untold):
            self._tell_found()

    def _tell_found(self) -> None:
        untold = self.random.choice(self._untold)
        if untold:
            before = set(self.bench.disk.slots.keys())
            self.bench.handshake.found.append(untold.popleft())
            self.leader.poll()
            self._restored.update(set(self.bench.disk.slots.keys()) - before)

    # ---------------------------------------------------------------- what must be so

    def _look_at_plan(self, plan: TransferPlan) -> None:
        super()._look_at_plan(plan)
        for order in plan.reads:
            order.check(self.shape.num_slots, self._num_disk_slots)
            expect(order.job_id == plan.job_id, "a load and its reads are two jobs")
            self._reading[plan.job_id] = (order, self._resets)

    def _hear(self) -> None:
        super()._hear()
        for job_id in [job_id for job_id in self._reading if not self.leader.is_pending(job_id)]:
            reads, resets_before = self._reading.pop(job_id)
            if any(worker.outcome(job_id) is not Outcome.OK for worker in self.workers):
                continue
            self.disk_loads += 1
            self.restart_hits += not self._restored.isdisjoint(reads.keys)
            if resets_before == self._resets:
                expect(
                    all(map(self.bench.tier.contains, reads.keys)),
                    "what came up from the disk is not in the host",
                )
                self.promoted_blocks += len(reads.keys)

    def _reset(self) -> None:
        super()._reset()
        self._resets += 1
        self._restored.clear()
        expect(self.bench.disk.slots.resident_blocks == 0, "a block on the disk survived the reset")

    def _was_cleared(self) -> None:
        self._resets += 1

    def _was_reset(self, tier: str) -> None:
        super()._was_reset(tier)
        self._resets += 1
        if tier != "host":
            self._restored.clear()
            self._after_orders.append((self.bench.disk.slots.resident_blocks, False))

    def _time_passes(self) -> None:
        super()._time_passes()
        if self.random.random() < 0.3:  # a disk that was left alone is tried again
            self.bench.clock.advance(30.0)
            self.leader.poll()

    def check_bytes(self) -> None:
        """See LeaderSim; and each block that could be matched on the disk is there, on every rank."""
        super().check_bytes()
        tier = self.bench.disk.slots
        for key, (group, prefix) in self._prefix_of.items():
            lease = tier.lease("check", [key], 1.0)
            if lease is None:
                continue
            for worker in self._disk_workers:
                record = worker.disk.records[lease.slots[0]]
                if record is None or record.key != key or record.life != worker.disk.life:
                    raise AssertionError(f"the record of {prefix} is not on the disk of rank {worker.rank}")
                is_right = record.payload == oracle(worker.rank, group, prefix)
                expect(
                    is_right or record.is_damaged,
                    f"wrong bytes on the disk of rank {worker.rank} for {prefix}",
                )
            tier.release(lease)
