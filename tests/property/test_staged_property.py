"""StagedExecutor against a naive twin: several tiers, blocks that fail one by one, late reads, cancels."""

from __future__ import annotations

import random
from collections.abc import Collection
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace as changed

from kvbm_core.errors import Outcome
from kvbm_core.transfer import staged
from kvbm_core.transfer.movers.base import OnBlocks, OnResult
from kvbm_core.transfer.plan import GroupMove, JobResult, OrderKind, TierOrder, TransferPlan, rejected
from kvbm_core.transfer.staged import OnDone, StagedExecutor
from kvbm_core.types import BlockKey, Direction
from tests.effort import tries

TIERS = ("disk", "remote", "peer")
FAILURES = (Outcome.MISS, Outcome.CORRUPT, Outcome.IO_ERROR)
GARBAGE = -1


@dataclass
class Order:
    """An order that a tier has taken. ``told``: blocks whose end was told. ``results`` of it so far."""

    order: TierOrder
    on_result: OnResult
    on_blocks: OnBlocks
    told: dict[int, Outcome] = field(default_factory=dict)
    has_begun: bool = False
    results: list[JobResult] = field(default_factory=list)

    def end(self, result: JobResult) -> None:
        self.results.append(result)
        self.on_result(result)

    @property
    def is_over(self) -> bool:
        return bool(self.results) and not self.results[-1].is_late


class TierByHand:
    """A mover whose orders go on when the test says so."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.orders: list[Order] = []

    def submit(
        self,
        order: TierOrder,
        on_result: OnResult,
        *,
        deadline_s: float | None = None,
        on_blocks: OnBlocks | None = None,
    ) -> None:
        assert on_blocks is not None
        self.orders.append(Order(order, on_result, on_blocks))

    def cancel(self, job_id: int) -> bool:
        for order in self.orders:
            if order.order.job_id == job_id and not order.has_begun and not order.results:
                order.end(rejected(job_id, "cancelled"))
                return True
        return False

    def close(self) -> None:
        """Nothing to end."""

    def tell(self, order: Order, ended: dict[int, Outcome]) -> None:
        order.has_begun = True
        order.told |= ended
        for number, outcome in ended.items():
            slot = order.order.slots[number]
            self._world.host[slot] = self._world.content[slot] if outcome is Outcome.OK else GARBAGE
        order.on_blocks(list(ended), list(ended.values()))


class CopierByHand:
    """A copier whose plans wait, copy and end when the test says so."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.waiting: dict[int, tuple[TransferPlan, OnDone]] = {}
        self.running: dict[int, tuple[TransferPlan, OnDone]] = {}

    def mark(self) -> None:
        """No streams."""

    def submit(self, plan: TransferPlan, *, deadline_s: float | None, after: object, on_done: OnDone) -> None:
        load = self._world.load_of(plan.moves[0].device_blocks[0])
        if plan.job_id >= 0 or plan.reads or load.is_cancelled:
            self._world.failures.append(ValueError(f"{plan} was to be copied"))
        self.waiting[plan.job_id] = (plan, on_done)

    def cancel(self, job_id: int) -> bool:
        if job_id not in self.waiting:
            return False
        _, on_done = self.waiting.pop(job_id)
        on_done(rejected(job_id, "cancelled"))
        return True

    def wait(self, job_ids: Collection[int] | None, timeout_s: float) -> bool:
        return True

    def begin(self, job_id: int) -> None:
        plan, _ = self.running[job_id] = self.waiting.pop(job_id)
        for move in plan.moves:
            for block, slot in zip(move.device_blocks, move.slots, strict=True):
                self._world.copies(block, slot)

    def end(self, job_id: int, outcome: Outcome) -> None:
        plan, on_done = self.running.pop(job_id)
        num_blocks = plan.num_blocks if outcome is Outcome.OK else 0
        for move in plan.moves:
            for block, slot in zip(move.device_blocks, move.slots, strict=True):
                self._world.device[block] = self._world.host[slot] if outcome is Outcome.OK else GARBAGE
                if outcome is not Outcome.OK:
                    self._world.failed_copies.add(block)
        on_done(JobResult(job_id, outcome, num_blocks, 0.0, 0.0, "copy"))


@dataclass
class Load:
    """What the test knows of one load. ``blocks``: device block to slot."""

    plan: TransferPlan
    orders: list[Order]
    blocks: dict[int, int]
    is_cancelled: bool = False
    told: list[JobResult] = field(default_factory=list)

    @property
    def plan_slots(self) -> set[int]:
        """All that are read or copied."""
        return {*self.blocks.values(), *(slot for order in self.orders for slot in order.order.slots)}


class World:
    """The executor, and the twin: what it has to have done by now."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.host: dict[int, int] = {}
        self.content: dict[int, int] = {}
        self.device: dict[int, int] = {}
        self.failed_copies: set[int] = set()
        self.loads: dict[int, Load] = {}
        self.copied: set[int] = set()
        self.failures: list[Exception] = []
        self._numbers = count(1)
        self.tiers = {name: TierByHand(self) for name in TIERS}
        self.copier = CopierByHand(self)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(staged, "CHUNK_BYTES", rng.randrange(1, 4))
            self.executor = StagedExecutor(lambda on_done: self.as_copier(), self.tiers, 1, self.on_done)

    def as_copier(self) -> Any:
        return self.copier

    # ---------------------------------------------------------------- what is told to the twin

    def load_of(self, block: int) -> Load:
        return next(load for load in self.loads.values() if block in load.blocks)

    def copies(self, block: int, slot: int) -> None:
        """A copy begins: once, of a block whose bytes are there, of a load that nobody has cancelled."""
        load = self.load_of(block)
        assert not load.is_cancelled and not load.told and block not in self.copied
        assert self.host[slot] == self.content[slot], "it was read before its bytes had come"
        self.copied.add(block)

    def on_done(self, result: JobResult) -> None:
        try:
            self.judge(result)
        except Exception as error:  # the executor goes on whatever its listener does
            self.failures.append(error)

    def judge(self, result: JobResult) -> None:
        load = self.loads[result.job_id]
        assert not self.executor.wait([result.job_id], 0.0) or load.told, "nobody may go on before it is told"
        load.told.append(result)
        if len(load.told) > 1:
            assert load.told[0].is_late and result == changed(load.told[0], is_late=False)
            assert all(order.is_over for order in load.orders)
            return
        assert result.is_late is not all(order.is_over for order in load.orders)
        if load.is_cancelled:
            assert (result.outcome, result.num_bytes) == (Outcome.REJECTED, 0)
            return
        failed = self.failed_slots(load)
        assert set(result.failures(list(load.plan_slots))) == failed, (result, failed)
        assert (result.outcome is Outcome.OK) is not bool(failed)
        for block, slot in load.blocks.items():
            if slot not in failed:
                assert self.device[block] == self.content[slot], "wrong bytes"
        assert result.num_bytes == len(self.copied & load.blocks.keys() - self.failed_copies)

    def failed_slots(self, load: Load) -> set[int]:
        """Of a load whose reads have their results: not read, or not copied."""
        failed = {load.blocks[block] for block in self.failed_copies & load.blocks.keys()}
        for order in load.orders:
            slots = order.order.slots
            failed |= {slots[number] for number, outcome in order.told.items() if outcome is not Outcome.OK}
            failed |= set(order.results[0].failures(slots))
        return failed

    # ---------------------------------------------------------------- steps

    def submit(self) -> None:
        rng, job_id = self.rng, next(self._numbers)
        orders = []
        slots: list[int] = []
        for name in rng.sample(TIERS, rng.randrange(1, len(TIERS) + 1)):
            own = [next(self._numbers) for _ in range(rng.randrange(0, 6))]
            keys = tuple(BlockKey(b"%032d" % slot) for slot in own)
            orders.append(TierOrder(job_id, name, OrderKind.FETCH, keys, tuple(own)))
            slots += own
        resident = [next(self._numbers) for _ in range(rng.randrange(0, 3))]
        self.content |= {slot: slot for slot in slots + resident}
        self.host |= dict.fromkeys(slots, GARBAGE) | {slot: slot for slot in resident}
        sources = [slot for slot in slots + resident if rng.random() < 0.9]  # some are for the host alone
        sources += [slot for slot in sources if rng.random() < 0.1]  # and some go to two places
        rng.shuffle(sources)
        blocks = {next(self._numbers): slot for slot in sources}
        cut = rng.randrange(len(blocks) + 1)
        pairs = list(blocks.items())
        moves = [
            GroupMove(group, tuple(block for block, _ in part), tuple(slot for _, slot in part))
            for group, part in ((0, pairs[:cut]), (1, pairs[cut:]))
            if part
        ]
        plan = TransferPlan(job_id, Direction.ONBOARD, tuple(moves), tuple(orders))
        load = self.loads[job_id] = Load(plan, [], blocks)
        self.executor.submit(plan)
        load.orders = [
            order for tier in self.tiers.values() for order in tier.orders if order.order.job_id == job_id
        ]

    def go_on(self) -> bool:
        """One step of a tier or of the copier; False if there is none."""
        steps: list[tuple[Any, Any]] = [(self.read, order) for order in self.open_orders()]
        steps += [(self.begin, number) for number in self.copier.waiting]
        steps += [(self.end, number) for number in self.copier.running]
        if not steps:
            return False
        step, what = self.rng.choice(steps)
        step(what)
        return True

    def open_orders(self) -> list[Order]:
        return [order for tier in self.tiers.values() for order in tier.orders if not order.is_over]

    def begin(self, job_id: int) -> None:
        self.copier.begin(job_id)

    def end(self, job_id: int) -> None:
        self.copier.end(job_id, self.rng.choice((Outcome.OK, Outcome.OK, Outcome.OK, *FAILURES)))

    def read(self, order: Order) -> None:
        """More blocks have ended, or the order has, for now or for good."""
        rng, tier, slots = self.rng, self.tiers[order.order.tier], order.order.slots
        untold = [number for number in range(len(slots)) if number not in order.told]
        if order.results:  # it was late
            order.end(changed(order.results[0], is_late=False))
        elif untold and rng.random() < 0.8:
            ended = rng.sample(untold, rng.randrange(1, len(untold) + 1))
            outcomes = [Outcome.OK if rng.random() < 0.8 else rng.choice(FAILURES) for _ in ended]
            tier.tell(order, dict(zip(ended, outcomes, strict=True)))
        elif rng.random() < 0.1:  # of all, in a word
            order.end(JobResult(order.order.job_id, Outcome.IO_ERROR, 0, 0.0, 0.0, "all"))
        else:
            failed = {number: told for number, told in order.told.items() if told is not Outcome.OK}
            for number in untold:
                outcome = rng.choice((Outcome.OK, Outcome.TIMED_OUT))
                if outcome is Outcome.OK:
                    self.host[slots[number]] = self.content[slots[number]]
                else:
                    failed[number] = outcome
            outcome = next(iter(failed.values()), Outcome.OK)
            is_late = bool(failed) and rng.random() < 0.4
            pairs = tuple((slots[number], how) for number, how in failed.items())
            order.end(
                JobResult(order.order.job_id, outcome, 0, 0.0, 0.0, str(outcome), is_late, failed=pairs)
            )

    def cancel(self) -> None:
        job_id = self.rng.choice(list(self.loads))
        load = self.loads[job_id]
        if not load.told:
            load.is_cancelled = True
        is_copying = any(load.blocks.keys() & plan.moves[0].device_blocks for plan, _ in self.running())
        was_told = bool(load.told)
        assert self.executor.cancel(job_id) is (not was_told and not is_copying)

    def running(self) -> list[tuple[TransferPlan, OnDone]]:
        return list(self.copier.running.values())

    def check(self) -> None:
        """Each load is told as soon as it is over, and not before; and again when its reads are."""
        if self.failures:
            raise self.failures[0]
        copying = {
            block
            for plan, _ in (*self.copier.waiting.values(), *self.running())
            for move in plan.moves
            for block in move.device_blocks
        }
        for job_id, load in self.loads.items():
            is_read = load.is_cancelled or all(order.results for order in load.orders)
            is_told = is_read and copying.isdisjoint(load.blocks)
            assert bool(load.told) is is_told
            assert self.executor.wait([job_id], 0.0) is is_told
            is_over = is_told and all(order.is_over for order in load.orders)
            assert [result.is_late for result in load.told] in (
                ([False], [True, False]) if is_over else ([True],) if is_told else ([],)
            )
        assert self.executor.wait(None, 0.0) is all(load.told for load in self.loads.values())


@settings(max_examples=tries(75, nightly=300))
@given(st.integers(0, 2**32))
def test_any_history_of_loads_is_the_twins(seed: int) -> None:
    world = World(random.Random(seed))
    for _ in range(60):
        chance = world.rng.random()
        if not world.loads or chance < 0.1:
            world.submit()
        elif chance < 0.15:
            world.cancel()
        else:
            world.go_on()
        world.check()
    while world.go_on():
        world.check()
    assert all(load.told for load in world.loads.values()) and world.executor._loads == {}
