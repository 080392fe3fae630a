"""Small engines with a tier of a third kind below host and disk: right bytes, and nothing left at the end."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial
from random import Random

import pytest

from kvbm_core.errors import Outcome
from kvbm_core.testing.leader_bench import BenchDisk, LeaderBench
from kvbm_core.testing.leader_sim import SimShape, expect
from kvbm_core.testing.sim_disk import DiskLeaderSim, DiskSimWorker, SimDisk
from kvbm_core.testing.sim_store import SimBlock, SimStore, StoreSimWorker
from kvbm_core.testing.sim_worker import PAGE_BYTES, oracle
from kvbm_core.tiers.groups import GroupSpec
from kvbm_core.transfer.plan import TransferPlan
from tests.property.simulations import play
from tests.property.test_leader_sim_disk import GROUPS, has_states, run, sim_of
from tests.third_kind import SHELF, ShelfTier

SEEDS_EACH = 10


class ShelfSimWorker(StoreSimWorker):
    """A StoreSimWorker that reads from the shelf what loads need of it, before the disk is read."""

    def __init__(self, rank: int, shape: SimShape, random: Random, disk: SimDisk, shelf: SimStore) -> None:
        sizes = shape.num_device_blocks, shape.num_slots
        super().__init__(rank, *sizes, random, shape.failure_rate, disk, {SHELF: shelf})
        self._shelf = shelf.extents[rank]
        self._unread: dict[int, TransferPlan] = {}

    def submit(self, plan: TransferPlan) -> None:
        if any(order.tier == SHELF for order in plan.reads):
            self._unread[plan.job_id] = plan
        else:
            super().submit(plan)

    def fence(self, job_ids: Collection[int], *, times_out: bool) -> None:
        super().fence(job_ids, times_out=times_out)
        for job_id in sorted(self._unread.keys() & set(job_ids)):
            del self._unread[job_id]
            self._end(job_id, Outcome.REJECTED)

    @property
    def is_idle(self) -> bool:
        return super().is_idle and not self._unread

    def step(self) -> None:
        if self._unread and (super().is_idle or self._random.random() < 0.5):
            self._read(self._unread.pop(self._random.choice(sorted(self._unread))))
        else:
            super().step()

    def _read(self, plan: TransferPlan) -> None:
        (order,) = (one for one in plan.reads if one.tier == SHELF)
        others = tuple(one for one in plan.reads if one is not order)
        failed = dict[int, Outcome]()
        for key, slot in zip(order.keys, order.slots, strict=True):
            block = self._shelf.get((key, 1), {}).get(key)
            if block is None or block.is_damaged:
                is_gone = block is None or plan.compares  # as StagedExecutor: it is no wrong KV
                failed[slot] = Outcome.MISS if is_gone else Outcome.CORRUPT
            else:
                self.host[slot * PAGE_BYTES : (slot + 1) * PAGE_BYTES] = block.payload
        if self._fails():
            failed = dict.fromkeys(order.slots, Outcome.IO_ERROR)
        if failed:
            unread = {slot: Outcome.TIMED_OUT for one in others for slot in one.slots}
            self._end(plan.job_id, next(iter(failed.values())), tuple((failed | unread).items()))
        else:
            super().submit(replace(plan, reads=others))


class ShelfLeaderSim(DiskLeaderSim):
    """A DiskLeaderSim with a shelf below the disk, which other engines use too."""

    def __init__(self, shape: SimShape, random: Random, *, num_disk_slots: int, uses_filter: bool) -> None:
        self.shelf = SimStore(shape.world_size)
        self.shelf_loads = 0
        self._from_shelf: set[int] = set()
        super().__init__(shape, random, num_disk_slots=num_disk_slots, uses_filter=uses_filter)

    def _make_bench(self, disk: BenchDisk | None = None) -> LeaderBench:
        self._from_shelf = set()
        return super()._make_bench(BenchDisk(more=(partial(ShelfTier, SHELF),)))

    def _make_worker(self, rank: int, disk: SimDisk) -> DiskSimWorker:
        return ShelfSimWorker(rank, self.shape, self.random, disk, self.shelf)

    def _actions(self) -> list[tuple[Callable[[], None], float]]:
        return [*super()._actions(), (self._others_put, 1.0), (partial(self.shelf.lose, self.random), 1.0)]

    def _others_put(self) -> None:
        """Another engine puts a prompt there that this one has computed, or a part of it."""
        for request in self.requests[-1:]:
            for position, group in enumerate(self.shape.groups):
                for key in request.state.keys(position):
                    for rank, extents in enumerate(self.shelf.extents):
                        if self.random.random() < 0.9:
                            payload = oracle(rank, group.index, self._prefix_of[key][1])
                            extents[key, 1] = {key: SimBlock(payload)}

    def _look_at_plan(self, plan: TransferPlan) -> None:
        here = [order for order in plan.reads if order.tier == SHELF]
        for order in here:
            order.check(self.shape.num_slots)
            self._from_shelf.add(plan.job_id)
        super()._look_at_plan(replace(plan, reads=tuple(one for one in plan.reads if one not in here)))

    def _hear(self) -> None:
        super()._hear()
        for job_id in [job_id for job_id in self._from_shelf if not self.leader.is_pending(job_id)]:
            self._from_shelf.remove(job_id)
            self.shelf_loads += all(worker.outcome(job_id) is Outcome.OK for worker in self.workers)

    def check_bytes(self) -> None:
        super().check_bytes()
        for rank, extents in enumerate(self.shelf.extents):
            for (key, _), blocks in extents.items():
                group, prefix = self._prefix_of[key]
                is_right = blocks[key].is_damaged or blocks[key].payload == oracle(rank, group, prefix)
                expect(is_right, f"wrong bytes on the shelf of rank {rank} for {prefix}")

    def end(self) -> None:
        super().end()
        tier = self.leader.chain.named(SHELF)
        expect(isinstance(tier, ShelfTier) and not tier.num_held, "a block on the shelf is held for nobody")


@pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS.keys())
def test_bytes_stay_right_through_a_tier_of_a_third_kind(groups: tuple[GroupSpec, ...], seed: int) -> None:
    least = {"shelf_loads": 1 if has_states(groups) else SEEDS_EACH, "disk_loads": 1}
    play(
        seed,
        SEEDS_EACH,
        lambda random: run(sim_of(groups, random, ShelfLeaderSim)),
        lambda sim: {what: getattr(sim, what) for what in least},
        least,
    )
