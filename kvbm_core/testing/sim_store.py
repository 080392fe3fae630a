"""Stores by key in the simulation: shared with other engines, they outlive every leader and worker.

What is in a store, in single blocks or in extents, is right bytes or damaged on purpose. A store and a fetch
take two steps each, many at a time, in any order; a fetch may be late: its rank says so, goes on writing into
the host slots, and answers when that is over. A host slot that somebody else was given meanwhile is noticed
in its bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from hashlib import blake2b
from random import Random
from typing import ClassVar

from kvbm_core.errors import Outcome
from kvbm_core.policy.admission import AdmitAll
from kvbm_core.storage.extents import EXTENT_BYTES, extents_within, tail_extents
from kvbm_core.testing.leader_bench import BenchDisk, LeaderBench
from kvbm_core.testing.leader_sim import SimShape, expect
from kvbm_core.testing.sim_disk import DiskLeaderSim, DiskSimWorker, SimDisk
from kvbm_core.testing.sim_worker import FAILURES, HALF_BYTES, PAGE_BYTES, oracle
from kvbm_core.tiers.groups import GroupSpec
from kvbm_core.tiers.keyed import KeyedOptions, KeyedTier, keyed_tier
from kvbm_core.tiers.lower import Name
from kvbm_core.transfer.plan import NO_SLOT, ExtentPart, JobResult, OrderKind, TierOrder
from kvbm_core.types import BlockKey, Tier, group_of

NAMES = ("near", "far")
LATE_RATE = 0.15
TROUBLES = (*FAILURES, Outcome.REJECTED)


@dataclass
class SimBlock:
    """``is_damaged``: on purpose; it must be taken for CORRUPT, and nothing is wrong."""

    payload: bytes
    is_damaged: bool = False


Extents = MutableMapping[Name, dict[BlockKey, SimBlock]]
"""By name, each with its blocks in order; a block that is stored alone is an extent of one."""


class SimStore:
    """What one store has, by rank. Whole extents only: a worker that is killed leaves nothing behind."""

    def __init__(self, num_ranks: int) -> None:
        self.extents: list[Extents] = [{} for _ in range(num_ranks)]

    def lose(self, random: Random) -> None:
        """Others need the room, on all ranks or on one; or a bit changes."""
        for extents in self.extents:
            if extents and random.random() < 0.6:
                name = random.choice(sorted(extents))
                if random.random() < 0.3:
                    key = random.choice(sorted(extents[name]))
                    extents[name][key] = SimBlock(bytes(PAGE_BYTES), is_damaged=True)
                else:
                    del extents[name]


def parts_of(order: TierOrder) -> Iterator[tuple[Name, range]]:
    """The extents of an order: their names, and which of its keys are theirs."""
    start = 0
    for num_blocks, skipped in order.extents or [ExtentPart(1)] * len(order.keys):
        end = start + num_blocks - skipped
        yield (order.keys[end - 1], num_blocks), range(start, end)
        start = end


@dataclass
class _Running:
    """``written``: by a fetch, what its first halves are. ``digests``: by a store, of what it reads."""

    order: TierOrder
    written: dict[int, bytes] = field(default_factory=dict)
    digests: dict[int, bytes] = field(default_factory=dict)
    is_late: bool = False


class StoreSimWorker(DiskSimWorker):
    """A DiskSimWorker that also has ``stores``, by name."""

    def __init__(  # noqa: PLR0917 - as DiskSimWorker, and its stores
        self,
        rank: int,
        num_device_blocks: int,
        num_slots: int,
        random: Random,
        failure_rate: float,
        disk: SimDisk,
        stores: Mapping[str, SimStore],
    ) -> None:
        super().__init__(rank, num_device_blocks, num_slots, random, failure_rate, disk)
        self._stores = {name: store.extents[rank] for name, store in stores.items()}
        self._waiting_orders: dict[int, TierOrder] = {}
        self._running_orders: dict[int, _Running] = {}
        self.late_fetches = 0

    def hear(self, order: TierOrder) -> None:
        """See DiskSimWorker."""
        if order.tier not in self._stores:
            super().hear(order)
            return
        order.check(len(self.host) // PAGE_BYTES)
        expect(order.kind is not OrderKind.FORGET, "a store that others use was told to forget")
        self._waiting_orders[order.job_id] = order

    @property
    def is_idle(self) -> bool:
        """See SimWorker."""
        return super().is_idle and not self._waiting_orders and not self._running_orders

    def step(self) -> None:
        """See SimWorker."""
        has_orders = bool(self._waiting_orders or self._running_orders)
        if has_orders and (super().is_idle or self._random.random() < 0.5):
            self._go_on_with_store()
        else:
            super().step()

    def _go_on_with_store(self) -> None:
        job_id = self._random.choice(sorted([*self._waiting_orders, *self._running_orders]))
        order = self._waiting_orders.pop(job_id, None)
        if order is None:
            self._finish_order(job_id)
        elif self._fails():
            self._say(order, dict.fromkeys(self._places_of(order), self._random.choice(TROUBLES)))
        elif order.kind is OrderKind.FIND:
            extents = self._stores[order.tier]
            names = [name for name, _ in parts_of(order)]
            self._say(order, {i: Outcome.MISS for i, name in enumerate(names) if name not in extents})
        else:
            self._begin_order(order)

    def _places_of(self, order: TierOrder) -> tuple[int, ...]:
        return tuple(slot for slot in order.slots if slot != NO_SLOT) or tuple(range(len(order.keys)))

    def _begin_order(self, order: TierOrder) -> None:
        running = self._running_orders[order.job_id] = _Running(order)
        for _, slot, block in self._blocks_of(order):
            if order.kind is OrderKind.STORE:
                running.digests[slot] = blake2b(self.in_slot(slot), digest_size=8).digest()
            elif block is not None:
                running.written[slot] = block.payload[:HALF_BYTES]
                self.host[slot * PAGE_BYTES : slot * PAGE_BYTES + HALF_BYTES] = running.written[slot]

    def _blocks_of(self, order: TierOrder) -> Iterator[tuple[BlockKey, int, SimBlock | None]]:
        """The keys of an order that have host slots, with what the store has of each in its extent."""
        for name, numbers in parts_of(order):
            extent = self._stores[order.tier].get(name, {})
            for i in numbers:
                if order.slots[i] != NO_SLOT:
                    yield order.keys[i], order.slots[i], extent.get(order.keys[i])

    def _finish_order(self, job_id: int) -> None:
        running = self._running_orders[job_id]
        order = running.order
        if order.kind is OrderKind.FETCH and self._is_made_late(running):
            return
        del self._running_orders[job_id]
        end = self._end_fetch if order.kind is OrderKind.FETCH else self._end_put
        failed = end(running)
        if running.is_late:
            failed = dict.fromkeys(self._places_of(order), Outcome.TIMED_OUT) | failed
        elif self._fails():
            chosen = [slot for slot in self._places_of(order) if self._random.random() < 0.5]
            failed = dict.fromkeys(chosen, self._random.choice(TROUBLES)) | failed
        self._say(order, failed)

    def _is_made_late(self, running: _Running) -> bool:
        """Whether the leader hears TIMED_OUT now, or has not heard it yet: messages of a rank keep order."""
        job_id = running.order.job_id
        if running.is_late:
            return any(said.job_id == job_id for said in self.acks)
        if not self._failure_rate or self._random.random() >= LATE_RATE:
            return False
        running.is_late = True
        self.late_fetches += 1
        self.acks.append(JobResult(job_id, Outcome.TIMED_OUT, 0, 0.0, 0.0, is_late=True))
        return True

    def _end_put(self, running: _Running) -> dict[int, Outcome]:
        order = running.order
        for slot in order.slots:
            is_same = blake2b(self.in_slot(slot), digest_size=8).digest() == running.digests[slot]
            expect(is_same, f"slot {slot} was reused while it was being stored by key")
        for name, numbers in parts_of(order):
            payloads = {order.keys[i]: SimBlock(self.in_slot(order.slots[i])) for i in numbers}
            self._stores[order.tier][name] = payloads
        return {}

    def _end_fetch(self, running: _Running) -> dict[int, Outcome]:
        failed = dict[int, Outcome]()
        for _, slot, block in self._blocks_of(running.order):
            at, first_half = slot * PAGE_BYTES, running.written.get(slot)
            if first_half is not None:
                is_ours = self.host[at : at + HALF_BYTES] == first_half
                expect(is_ours, f"slot {slot} was given away while it was being fetched into")
            if block is None or first_half is None:  # it came or went meanwhile
                failed[slot] = Outcome.MISS
            elif block.is_damaged or block.payload[:HALF_BYTES] != first_half:
                failed[slot] = Outcome.CORRUPT
            else:
                self.host[at + HALF_BYTES : at + PAGE_BYTES] = block.payload[HALF_BYTES:]
        return failed

    def _say(self, order: TierOrder, failed: Mapping[int, Outcome]) -> None:
        outcome = next(iter(failed.values()), Outcome.OK)
        is_whole = len(failed) == len(self._places_of(order)) and len(set(failed.values())) == 1
        bad = () if is_whole and self._random.random() < 0.5 else tuple(failed.items())
        self.acks.append(JobResult(order.job_id, outcome, 1, 0.0, 0.0, failed=bad))


class StoreLeaderSim(DiskLeaderSim):
    """A DiskLeaderSim with two stores by key below the disk, which other engines use too."""

    make_store: ClassVar[type[SimStore]] = SimStore

    def __init__(self, shape: SimShape, random: Random, *, num_disk_slots: int, uses_filter: bool) -> None:
        self.stores = {name: self.make_store(shape.world_size) for name in NAMES}
        self._store_workers: list[StoreSimWorker] = []
        self._late_fetches = 0
        self._moved = {"fetched": 0.0, "stored": 0.0}
        self._max_fetching_blocks = random.choice([2, 1024])
        self._full_blocks = random.choice([1, 2, 4])
        self._keeps_extents = self._full_blocks > 1 or random.random() < 0.5
        self._chains: list[tuple[GroupSpec, list[BlockKey]]] = []
        super().__init__(shape, random, num_disk_slots=num_disk_slots, uses_filter=uses_filter)

    @property
    def late_fetches(self) -> int:
        """Fetches that went on after their rank had given them up."""
        return self._late_fetches + sum(worker.late_fetches for worker in self._store_workers)

    def moved(self, what: str) -> float:
        """Blocks ``fetched`` from stores into the host, or ``stored`` in them."""
        series = {"fetched": "kvbm_onboard_blocks_o2d", "stored": "kvbm_offload_blocks_d2o"}
        return self._moved[what] + self.bench.metric(series[what])

    def _make_bench(self, disk: BenchDisk | None = None) -> LeaderBench:
        options = KeyedOptions(
            max_fetching_blocks=self._max_fetching_blocks,
            max_known=50,
            extent_bytes=EXTENT_BYTES if self._keeps_extents else 0,
        )
        makers = tuple(keyed_tier(name, Tier.REMOTE, AdmitAll(), options) for name in NAMES)
        block_bytes = self.shape.world_size * (EXTENT_BYTES // self._full_blocks)
        return super()._make_bench(BenchDisk(more=makers, block_bytes=block_bytes))

    def _make_worker(self, rank: int, disk: SimDisk) -> DiskSimWorker:
        shape = self.shape
        if not rank:
            self._store_workers = []
        worker = StoreSimWorker(
            rank,
            shape.num_device_blocks,
            shape.num_slots,
            self.random,
            shape.failure_rate,
            disk,
            self.stores,
        )
        self._store_workers.append(worker)
        return worker

    def _actions(self) -> list[tuple[Callable[[], None], float]]:
        return [*super()._actions(), (self._others_put, 1.0), (self._others_lose, 1.0)]

    def _arrive(self) -> None:
        before = len(self.requests)
        super()._arrive()
        for request in self.requests[before:]:
            for position, group in enumerate(self.shape.groups):
                self._chains.append((group, list(request.state.keys(position))))
        self._chains = self._chains[-20:]

    def _others_put(self) -> None:
        """Another engine stores some prompt, or the end of it that is not in the window, on all ranks or on
        one.
        """
        if not self._chains:
            return
        group, keys = self.random.choice(self._chains)
        store, end = self.stores[self.random.choice(NAMES)], self.random.randint(0, len(keys))
        spans = [*extents_within(0, end, self._full_blocks), *tail_extents(end, self._full_blocks)]
        if group.is_state:
            spans = [range(block, block + 1) for block in range(end) if self.random.random() < 0.5]
        for span in spans[self.random.choice([0, 0, max(0, len(spans) - 3)]) :]:
            for rank, extents in enumerate(store.extents):
                if self.random.random() < 0.9:
                    extents[keys[span.stop - 1], len(span)] = {
                        key: SimBlock(oracle(rank, group.index, self._prefix_of[key][1]))
                        for key in keys[span.start : span.stop]
                    }

    def _others_lose(self) -> None:
        self.stores[self.random.choice(NAMES)].lose(self.random)

    def restart(self) -> None:
        """See DiskLeaderSim; the stores stay."""
        self._late_fetches = self.late_fetches
        self._moved = {what: self.moved(what) for what in self._moved}
        self._store_workers = []
        super().restart()

    def check_bytes(self) -> None:
        """See LeaderSim; and no store has wrong bytes."""
        super().check_bytes()
        for name, store in self.stores.items():
            for rank, extents in enumerate(store.extents):
                states = {group.index for group in self.shape.groups if group.is_state}
                long = [name for name in extents if name[1] > 1 and group_of(name[0]) in states]
                expect(not long, "a state is in an extent of several blocks")
                for key, block in (pair for blocks in extents.values() for pair in blocks.items()):
                    group, prefix = self._prefix_of[key]
                    is_right = block.is_damaged or block.payload == oracle(rank, group, prefix)
                    expect(is_right, f"wrong bytes in the {name} store of rank {rank} for {prefix}")

    def end(self) -> None:
        """See LeaderSim."""
        super().end()
        for name in NAMES:
            tier = self.leader.chain.named(name)
            expect(isinstance(tier, KeyedTier) and not tier.fetching_blocks, "a fetch has no end")
            expect(isinstance(tier, KeyedTier) and not tier._finding, "a find has no end")
