"""Small engines whose disks are read straight into device memory, by turns with the way through the host."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from random import Random

from kvbm_core.errors import Outcome
from kvbm_core.testing.leader_sim import SimShape, expect
from kvbm_core.testing.sim_disk import DiskLeaderSim, DiskSimWorker, SimDisk
from kvbm_core.testing.sim_worker import FAILURES, HALF_BYTES, PAGE_BYTES
from kvbm_core.transfer.plan import FIRST_DIRECT_SLOT, TierOrder, TransferPlan

_ANY_SLOT = 1 << 62


@dataclass
class _Straight:
    """A load of which ``reads`` goes straight; ``life``: of the disk when it came. ``staged``: what was read,
    by slot; None: nothing yet. ``is_half_copied``: half of each page is on the device.
    """

    plan: TransferPlan
    reads: TierOrder
    life: int
    staged: dict[int, bytes] | None = None
    failed: dict[int, Outcome] = field(default_factory=dict)
    is_half_copied: bool = False


class DirectSimWorker(DiskSimWorker):
    """A DiskSimWorker that also reads straight into the device's memory."""

    def __init__(  # noqa: PLR0917 - as DiskSimWorker
        self,
        rank: int,
        num_device_blocks: int,
        num_slots: int,
        random: Random,
        failure_rate: float,
        disk: SimDisk,
    ) -> None:
        super().__init__(rank, num_device_blocks, num_slots, random, failure_rate, disk)
        self._straight: dict[int, _Straight] = {}

    def submit(self, plan: TransferPlan) -> None:
        """See SimWorker."""
        if any(order.is_direct for order in plan.reads):
            (reads,) = plan.reads
            self._straight[plan.job_id] = _Straight(plan, reads, self.disk.life)
        else:
            super().submit(plan)

    def fence(self, job_ids: Collection[int], *, times_out: bool) -> None:
        """See SimWorker; what is not being copied is over at once, whatever the disk does."""
        super().fence(job_ids, times_out=times_out)
        for job_id in sorted(self._straight.keys() & set(job_ids)):
            if self._straight[job_id].is_half_copied:
                self._copy_half(self._straight[job_id])
            else:
                del self._straight[job_id]
                self._end(job_id, Outcome.REJECTED)

    @property
    def is_idle(self) -> bool:
        """See SimWorker."""
        return super().is_idle and not self._straight

    def step(self) -> None:
        """See SimWorker."""
        if self._straight and (super().is_idle or self._random.random() < 0.5):
            self._go_on_straight()
        else:
            super().step()

    def _go_on_straight(self) -> None:
        load = self._straight[self._random.choice(sorted(self._straight))]
        if load.staged is not None:
            self._copy_half(load)
        elif self._random.random() < self._failure_rate / 2:
            del self._straight[load.plan.job_id]
            self._end(load.plan.job_id, self._random.choice([*FAILURES, Outcome.REJECTED]))
        else:
            self._read(load)

    def _read(self, load: _Straight) -> None:
        wanted = {slot for move in load.plan.moves for slot in move.slots}
        load.staged = {}
        for key, slot, place in zip(load.reads.keys, load.reads.slots, load.reads.places, strict=True):
            expect(slot == FIRST_DIRECT_SLOT + place, "a slot that is not that of its place")
            record = self.disk.records[place]
            if slot not in wanted:
                continue
            if self.disk.life != load.life:
                load.failed[slot] = Outcome.MISS
                continue
            if record is None or record.key != key or record.life != self.disk.life:
                raise AssertionError("the leader asked for a block that is not in this slot of the disk")
            if self._random.random() < self._failure_rate / 8:
                record.payload, record.is_damaged = bytes(PAGE_BYTES), True
            if record.is_damaged:
                load.failed[slot] = Outcome.CORRUPT
            load.staged[slot] = record.payload

    def _copy_half(self, load: _Straight) -> None:
        """What could be read, and what is in the host."""
        first = HALF_BYTES if load.is_half_copied else 0
        for move in load.plan.moves:
            for block, slot in zip(move.device_blocks, move.slots, strict=True):
                if slot not in load.failed:
                    page = (load.staged or {}).get(slot)
                    page = self.in_slot(slot) if page is None else page
                    here = block * PAGE_BYTES + first
                    self.device[here : here + HALF_BYTES] = page[first : first + HALF_BYTES]
        if not load.is_half_copied:
            load.is_half_copied = True
            return
        del self._straight[load.plan.job_id]
        outcome = next(iter(load.failed.values()), Outcome.OK)
        self._end(load.plan.job_id, outcome, tuple(load.failed.items()))


class DirectLeaderSim(DiskLeaderSim):
    """A DiskLeaderSim whose ranks can, or now and then cannot, read straight into their devices' memory."""

    def __init__(self, shape: SimShape, random: Random, *, num_disk_slots: int, uses_filter: bool) -> None:
        self._going_straight: dict[int, int] = {}
        self.straight_loads = self.straight_blocks = 0
        super().__init__(shape, random, num_disk_slots=num_disk_slots, uses_filter=uses_filter)

    def _make_worker(self, rank: int, disk: SimDisk) -> DiskSimWorker:
        shape = self.shape
        return DirectSimWorker(
            rank, shape.num_device_blocks, shape.num_slots, self.random, shape.failure_rate, disk
        )

    def _actions(self) -> list[tuple[Callable[[], None], float]]:
        return [*super()._actions(), (self._turn, 0.5)]

    def _turn(self) -> None:
        self.leader.chain.direct("disk", self.random.random() < 0.8)

    def restart(self) -> None:
        """See DiskLeaderSim."""
        super().restart()
        self._going_straight.clear()
        self._turn()

    def _look_at_plan(self, plan: TransferPlan) -> None:
        if not any(order.is_direct for order in plan.reads):
            super()._look_at_plan(plan)
            return
        (order,) = plan.reads
        order.check_direct(self._num_disk_slots)
        plan.check(self.shape.num_device_blocks, _ANY_SLOT)
        expect(order.job_id == plan.job_id, "a load and its reads are two jobs")
        self._going_straight[plan.job_id] = len(order.keys)

    def _hear(self) -> None:
        super()._hear()
        for job_id in [job_id for job_id in self._going_straight if not self.leader.is_pending(job_id)]:
            num_blocks = self._going_straight.pop(job_id)
            if all(worker.outcome(job_id) is Outcome.OK for worker in self.workers):
                self.straight_loads += 1
                self.straight_blocks += num_blocks
