"""Small engines below whose host and disk is a tier of a third kind, or are stores from an installed package
(that of docs/extending.md): records on real clients of it, which other engines write, lose and damage too.
Right bytes through everything, and nothing left at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping, ValuesView
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from random import Random
from typing import ClassVar, cast

import pytest

from kvbm_core.errors import Outcome
from kvbm_core.storage.extents import Extent
from kvbm_core.storage.remote.engine import GetItem, PutItem
from kvbm_core.storage.remote.record_store import RecordStore
from kvbm_core.storage.stores import StoreOptions, StoreSpec, open_engine, open_store
from kvbm_core.testing.leader_bench import BenchDisk, LeaderBench
from kvbm_core.testing.leader_sim import SimShape, expect
from kvbm_core.testing.sim_disk import DiskLeaderSim, DiskSimWorker, SimDisk
from kvbm_core.testing.sim_store import SimBlock, SimStore, StoreLeaderSim, StoreSimWorker
from kvbm_core.testing.sim_worker import PAGE_BYTES, oracle
from kvbm_core.testing.store_contract import LONG_S
from kvbm_core.tiers.groups import GroupSpec
from kvbm_core.tiers.lower import Name
from kvbm_core.transfer.plan import TransferPlan
from kvbm_core.types import BlockKey
from tests.outside import sqlite_store
from tests.property.simulations import play
from tests.property.test_leader_sim_disk import GROUPS, has_states, run, sim_of
from tests.third_kind import SHELF, ShelfTier

SHELF_SEEDS, INSTALLED_SEEDS = 10, 4
ROOM_BYTES = 1 << 16
"""More than a record has here."""
every_group = pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS.keys())


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


class Records(MutableMapping[Name, dict[BlockKey, SimBlock]]):
    """What one rank has in the store, as the simulation reads and writes it."""

    def __init__(self, url: str, shard: str) -> None:
        self.store = cast(RecordStore, open_store(StoreSpec(url, PAGE_BYTES, "meaning", shard)))
        self._keys: dict[Name, tuple[BlockKey, ...]] = {}  # of all that was ever put there

    def __setitem__(self, name: Name, blocks: dict[BlockKey, SimBlock]) -> None:
        extent = Extent(name[1], tuple(blocks))
        payloads = [memoryview(block.payload) for block in blocks.values()]
        assert self.store.put_extents([extent], [payloads], deadline_s=LONG_S) == [Outcome.OK]
        self._keys[name] = extent.keys

    def __getitem__(self, name: Name) -> dict[BlockKey, SimBlock]:
        keys = self._keys[name]
        targets = [memoryview(bytearray(PAGE_BYTES)) for _ in keys]
        (outcomes,) = self.store.get_extents([Extent(name[1], keys)], [targets], deadline_s=LONG_S)
        assert set(outcomes) <= {Outcome.OK, Outcome.MISS, Outcome.CORRUPT}
        if Outcome.MISS in outcomes:
            raise KeyError(name)
        found = zip(keys, targets, outcomes, strict=True)
        return {key: SimBlock(bytes(target), end is Outcome.CORRUPT) for key, target, end in found}

    def __delitem__(self, name: Name) -> None:
        extent = Extent(name[1], self._keys.pop(name))
        assert self.store.remove_extents([extent], deadline_s=LONG_S) == [Outcome.OK]

    def __contains__(self, name: object) -> bool:
        key, num_blocks = cast(Name, name)
        return self.store.contains_extents([Extent(num_blocks, (key,))], deadline_s=LONG_S) == [Outcome.OK]

    def __iter__(self) -> Iterator[Name]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)

    def values(self) -> ValuesView[dict[BlockKey, SimBlock]]:
        """Of those that are there still."""
        return {name: found for name in self if (found := self.get(name))}.values()


class InstalledStore(SimStore):
    """A SimStore in the package's store."""

    folder: ClassVar[Path]
    opened: ClassVar[list[RecordStore]]
    _numbers = count()

    def __init__(self, num_ranks: int) -> None:
        super().__init__(0)
        self._url = f"sqlite://{self.folder}/{next(self._numbers)}.db"
        for rank in range(num_ranks):
            records = Records(self._url, f"{rank}of{num_ranks}")
            self.extents.append(records)
            self.opened.append(records.store)

    def lose(self, random: Random) -> None:
        """By another client of the store: a bit of an object changes, or it goes."""
        other = open_engine(self._url, StoreOptions())
        for name in sorted(info.name for info in other.scan("", deadline_s=LONG_S)):
            if random.random() < 0.1:
                if random.random() < 0.3:
                    room = memoryview(bytearray(ROOM_BYTES))
                    (got,) = other.get([GetItem(name, [room])], deadline_s=LONG_S)
                    room[random.randrange(got.num_bytes)] ^= 1
                    done = other.put([PutItem(name, [room[: got.num_bytes]])], deadline_s=LONG_S)
                else:
                    done = other.remove([name], deadline_s=LONG_S)
                assert done == [Outcome.OK]
        other.close()


class InstalledLeaderSim(StoreLeaderSim):
    """A StoreLeaderSim whose stores are the package's."""

    make_store = InstalledStore


@pytest.fixture(autouse=True)
def _package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    opened: list[RecordStore] = []
    monkeypatch.setattr(InstalledStore, "folder", tmp_path, raising=False)
    monkeypatch.setattr(InstalledStore, "opened", opened, raising=False)
    with sqlite_store(tmp_path / "site"):
        yield
        for store in opened:
            store.close()


@every_group
def test_bytes_stay_right_through_a_tier_of_a_third_kind(groups: tuple[GroupSpec, ...], seed: int) -> None:
    least = {"shelf_loads": 1 if has_states(groups) else SHELF_SEEDS, "disk_loads": 1}

    def seen(sim: ShelfLeaderSim) -> Mapping[str, float]:
        return {what: getattr(sim, what) for what in least}

    play(seed, SHELF_SEEDS, lambda random: run(sim_of(groups, random, ShelfLeaderSim)), seen, least)


@every_group
def test_bytes_stay_right_through_a_store_of_somebody_else(groups: tuple[GroupSpec, ...], seed: int) -> None:
    least = {"fetched": 1 if has_states(groups) else INSTALLED_SEEDS, "stored": INSTALLED_SEEDS}

    def seen(sim: StoreLeaderSim) -> Mapping[str, float]:
        return {what: sim.moved(what) for what in least}

    play(seed, INSTALLED_SEEDS, lambda random: run(sim_of(groups, random, InstalledLeaderSim)), seen, least)
