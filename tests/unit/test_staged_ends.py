"""How loads end: waits, cancels and close; results that come from two threads at once; requests that are
late.
"""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace as changed

from kvbm_core.errors import Outcome
from kvbm_core.testing.executor_bench import HELD_JOB, LONG_S, plan
from kvbm_core.testing.store_contract import key_of
from kvbm_core.transfer.movers.base import OnBlocks, OnResult
from kvbm_core.transfer.plan import GroupMove, JobResult, OrderKind, TierOrder, TransferPlan, rejected
from kvbm_core.transfer.staged import OnDone, StagedExecutor
from kvbm_core.types import Direction
from tests.unit.disk_mover_bench import late_slots
from tests.unit.test_staged import (
    LOAD,
    SLOT_BYTES,
    Bench,
    held_reads,
    load_of,
    simple_load,
)

ROUNDS = 300


# ---------------------------------------------------------------- wait, cancel, close


def test_wait_and_drain_know_of_loads(tmp_path: Path, rng: random.Random) -> None:
    gate = threading.Event()
    with held_reads(tmp_path / "x.blocks", gate, only=12) as bench:
        bench.executor.submit(simple_load(bench, rng))
        assert not bench.executor.wait([LOAD], 0.0) and not bench.executor.wait(None, 0.0)
        assert bench.executor.wait([1, 999], 0.0)
        assert not bench.executor.cancel(999)
        with pytest.raises(ValueError, match="in flight"):
            bench.executor.submit(load_of(LOAD, [], [(9, 11)]))
        copy = plan(200, Direction.OFFLOAD, [9], [15])
        assert bench.finish(copy).outcome is Outcome.OK  # passes by
        assert LOAD not in bench.listener.ids()
        gate.set()
        assert bench.executor.wait(None, LONG_S) and bench.executor.wait([LOAD], 0.0)
        assert bench.listener.outcomes()[LOAD] is Outcome.OK


def test_wait_ends_after_the_listener_has_heard(tmp_path: Path, rng: random.Random) -> None:
    bench = Bench(tmp_path / "x.blocks")
    try:
        bench.executor.submit(simple_load(bench, rng, job_id=HELD_JOB))
        assert bench.listener.wait_for(HELD_JOB)
        assert not bench.executor.wait([HELD_JOB], 0.0) and not bench.executor.wait(None, 0.0)
        bench.listener.gate.set()
        assert bench.executor.wait(None, LONG_S)
    finally:
        bench.close()


def test_a_plan_without_reads_can_be_cancelled_while_it_waits(tmp_path: Path) -> None:
    bench = Bench(tmp_path / "x.blocks")
    try:
        bench.executor.submit(plan(HELD_JOB, Direction.OFFLOAD, [0], [0]))
        assert bench.listener.wait_for(HELD_JOB)
        bench.executor.submit(plan(7, Direction.OFFLOAD, [1], [1]))
        assert bench.executor.cancel(7) and not bench.executor.cancel(7)
        assert bench.listener.outcomes()[7] is Outcome.REJECTED
    finally:
        bench.close()


def test_close_ends_a_load_that_is_read_once_and_leaves_no_thread(tmp_path: Path, rng: random.Random) -> None:
    threads = set(threading.enumerate())
    gate = threading.Event()
    with held_reads(tmp_path / "x.blocks", gate, only=12) as bench:
        bench.executor.submit(simple_load(bench, rng))
        waiting = simple_load_again(LOAD + 1)
        bench.executor.submit(waiting)
        closer = threading.Thread(target=bench.close)
        closer.start()
        assert bench.listener.wait_for(waiting.job_id)
        gate.set()
        closer.join(LONG_S)
        assert not closer.is_alive()
        late = simple_load_again(LOAD + 2)
        bench.executor.submit(late)
        outcomes = bench.listener.outcomes()
        assert outcomes[waiting.job_id] is Outcome.REJECTED is outcomes[late.job_id]
        assert LOAD in outcomes
        ids = bench.listener.ids()
        assert all(ids.count(job_id) == 1 for job_id in (LOAD, LOAD + 1, LOAD + 2))
        assert bench.executor.wait(None, 0.0)
        bench.executor.close()
    assert set(threading.enumerate()) <= threads


def simple_load_again(job_id: int) -> TransferPlan:
    return load_of(job_id, [GroupMove(0, (1,), (1,))], [(1, 11)])


def test_a_read_without_its_tier_is_rejected_and_what_is_resident_is_copied(tmp_path: Path) -> None:
    bench = Bench(tmp_path / "x.blocks")
    try:
        key = load_of(LOAD, [], [(2, 11)]).reads[0].keys
        read = TierOrder(LOAD, "remote", OrderKind.FETCH, key, (2,))
        load = TransferPlan(LOAD, Direction.ONBOARD, (GroupMove(0, (1, 2), (1, 2)),), (read,))
        result = bench.finish(load)
        assert (result.outcome, result.failed) == (Outcome.REJECTED, ((2, Outcome.REJECTED),))
        assert "there is no remote here" in result.detail
        assert bench.on_device(0, 1) == bytes(bench.slot(1)[: len(bench.on_device(0, 1))])
    finally:
        bench.close()


# ---------------------------------------------------------------- two threads


class Tier:
    """A lower tier by hand: takes orders, and ends them when the test says so."""

    def __init__(self) -> None:
        self.orders: list[TierOrder] = []
        self.on_blocks: list[OnBlocks] = []
        self.on_result: list[OnResult] = []

    def submit(
        self,
        order: TierOrder,
        on_result: OnResult,
        *,
        deadline_s: float | None = None,
        on_blocks: OnBlocks | None = None,
    ) -> None:
        assert on_blocks is not None
        self.orders.append(order)
        self.on_blocks.append(on_blocks)
        self.on_result.append(on_result)

    def cancel(self, job_id: int) -> bool:
        return False

    def close(self) -> None:
        """Nothing to end."""

    def end(self, outcome: Outcome = Outcome.OK, *, is_late: bool = False, number: int = 0) -> None:
        self.on_result[number](JobResult(LOAD, outcome, 10, 1.5, 0.5, "read", is_late))


class ByHand:
    """The copier by hand too."""

    def __init__(self) -> None:
        self.copies: list[TransferPlan] = []
        self.on_done: list[OnDone] = []
        self.events: list[JobResult] = []
        self.marks = 0
        self.after: list[object] = []
        self.is_waiting = False
        self.breaks = False
        self.disk, self.remote = Tier(), Tier()
        movers = {"disk": self.disk, "remote": self.remote}
        self.executor = StagedExecutor(self.make_copier, movers, SLOT_BYTES, self.events.append)

    def make_copier(self, on_done: OnDone) -> Any:
        return self

    def mark(self) -> int:
        self.marks += 1
        return self.marks

    def submit(self, plan: TransferPlan, *, deadline_s: float | None, after: object, on_done: OnDone) -> None:
        if self.breaks:
            raise RuntimeError("the device is gone")
        self.copies.append(plan)
        self.after.append(after)
        self.on_done.append(on_done)

    def cancel(self, job_id: int) -> bool:
        """Of a copy that waits, if ``is_waiting``."""
        known = [copy.job_id for copy in self.copies]
        if not self.is_waiting or job_id not in known:  # it may be on its way here
            return False
        self.on_done[known.index(job_id)](rejected(job_id, "cancelled"))
        return True

    def wait(self, job_ids: Collection[int] | None, timeout_s: float) -> bool:
        return True

    def load(self) -> None:
        """A load of one block that is resident and one that is read."""
        self.executor.submit(load_of(LOAD, [GroupMove(0, (1, 2), (1, 2))], [(1, 1)]))

    def load_from_both(self) -> None:
        """One block is resident, one is read from the disk, and one from the remote tier."""
        plan = load_of(LOAD, [GroupMove(0, (1, 2, 3), (1, 2, 3))], [(1, 1)])
        remote = TierOrder(LOAD, "remote", OrderKind.FETCH, (key_of(2),), (2,))
        self.executor.submit(replace(plan, reads=(*plan.reads, remote)))

    def end_copy(self, index: int, outcome: Outcome = Outcome.OK) -> None:
        num_bytes = 10 if outcome is Outcome.OK else 0
        self.on_done[index](JobResult(self.copies[index].job_id, outcome, num_bytes, 0.0, 0.0, "copy"))

    def end_read(self, outcome: Outcome = Outcome.OK, *, is_late: bool = False) -> None:
        self.disk.end(outcome, is_late=is_late)

    def read(self, outcome: Outcome = Outcome.OK) -> None:
        """The block is there, or is not."""
        self.disk.on_blocks[0]([0], [outcome])


@pytest.fixture
def quick_switches() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.parametrize(
    ("copy", "read", "expected"),
    [
        (Outcome.OK, Outcome.OK, {Outcome.OK}),
        (Outcome.IO_ERROR, Outcome.OK, {Outcome.IO_ERROR}),
        (Outcome.OK, Outcome.MISS, {Outcome.MISS}),
        (Outcome.IO_ERROR, Outcome.MISS, {Outcome.IO_ERROR, Outcome.MISS}),
    ],
)
@pytest.mark.usefixtures("quick_switches")
def test_ends_from_two_threads_are_one_result(copy: Outcome, read: Outcome, expected: set[Outcome]) -> None:
    for _ in range(ROUNDS):
        hand = ByHand()
        hand.load()
        if read is Outcome.OK:
            hand.read()
            hand.end_copy(1)
        meet(partial(hand.end_copy, 0, copy), partial(hand.end_read, read))
        (result,) = hand.events
        assert result.job_id == LOAD and result.outcome in expected
        # By host slot: slot 2 is copied, slot 1 is read first.
        failed = {2: copy} if copy is not Outcome.OK else {}
        assert dict(result.failed) == (failed if read is Outcome.OK else {**failed, 1: read})
        assert result.num_bytes == 10 * [copy, read].count(Outcome.OK)
        assert hand.executor.wait([LOAD], 0.0) and hand.executor._loads == {}


def meet(*calls: Callable[[], None]) -> None:
    """Makes the calls in threads that start at the same time."""
    barrier = threading.Barrier(len(calls))

    def run(call: Callable[[], None]) -> None:
        barrier.wait(LONG_S)
        call()

    threads = [threading.Thread(target=run, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG_S)
        assert not thread.is_alive()


def test_a_failed_copy_costs_what_was_to_be_copied_alone() -> None:
    hand = ByHand()
    hand.load()
    hand.end_copy(0, Outcome.IO_ERROR)
    hand.read()
    assert len(hand.copies) == 2 and hand.events == []
    hand.end_copy(1)
    hand.end_read()
    (result,) = hand.events
    assert (result.outcome, result.detail, result.num_bytes) == (Outcome.IO_ERROR, "copy", 10)
    assert result.failed == ((2, Outcome.IO_ERROR),)


def test_a_copy_that_cannot_be_submitted_is_an_outcome() -> None:
    """By whatever thread: the load must end, and must not be OK without its bytes."""
    for is_resident in (True, False):
        hand = ByHand()
        hand.breaks = is_resident
        hand.load()
        hand.breaks = not is_resident
        hand.read()
        hand.end_read()
        hand.end_copy(0)
        (result,) = hand.events
        assert result.failed == ((2 if is_resident else 1, Outcome.IO_ERROR),)
        assert "the device is gone" in result.detail and hand.executor.wait([LOAD], 0.0)


def test_what_a_tier_says_at_the_end_counts_for_blocks_that_it_did_not_tell() -> None:
    for outcome, num_copies in ((Outcome.OK, 2), (Outcome.IO_ERROR, 1)):
        hand = ByHand()
        hand.load()
        hand.end_read(outcome)
        assert len(hand.copies) == num_copies
        for index in range(num_copies):
            hand.end_copy(index)
        (result,) = hand.events
        assert result.failures((1, 2)) == ({} if outcome is Outcome.OK else {1: outcome})


def test_a_load_from_two_tiers_waits_for_both() -> None:
    hand = ByHand()
    hand.load_from_both()
    hand.end_copy(0)
    hand.remote.on_blocks[0]([0], [Outcome.OK])
    hand.end_copy(1)
    hand.remote.end()
    assert hand.events == [] and not hand.executor.wait([LOAD], 0.0)
    hand.read(Outcome.MISS)
    hand.end_read(Outcome.MISS)
    (result,) = hand.events
    assert (result.outcome, result.failed, result.num_bytes) == (Outcome.MISS, ((1, Outcome.MISS),), 20)
    assert [(tier, num_bytes) for tier, num_bytes, *_ in result.fetched] == [("disk", 10), ("remote", 10)]


def test_a_load_from_two_tiers_is_late_until_both_are_done() -> None:
    hand = ByHand()
    hand.load_from_both()
    hand.end_copy(0)
    hand.end_read(Outcome.TIMED_OUT, is_late=True)
    hand.remote.end(Outcome.TIMED_OUT, is_late=True)
    (first,) = hand.events
    assert first.is_late and first.failed == ((1, Outcome.TIMED_OUT), (2, Outcome.TIMED_OUT))
    hand.remote.end(Outcome.TIMED_OUT)
    assert hand.events == [first]
    hand.end_read(Outcome.TIMED_OUT)
    assert hand.events == [first, changed(first, is_late=False)]


def test_two_orders_to_one_tier_are_an_outcome(tmp_path: Path) -> None:
    """Misuse, of which the load must not stay open for ever."""
    gate = threading.Event()
    with held_reads(tmp_path / "x.blocks", gate, only=12) as bench:
        first = load_of(LOAD, [GroupMove(0, (1, 2), (1, 2))], [(1, 12)])
        second = load_of(LOAD, [], [(2, 13)])
        bench.executor.submit(replace(first, reads=(*first.reads, *second.reads)))
        gate.set()
        assert bench.ended(LOAD).failures((1, 2))[2] is Outcome.REJECTED


@pytest.mark.parametrize("is_told_by_block", [True, False])
@pytest.mark.parametrize("is_wrong", [True, False])
def test_a_damaged_block_of_a_tier_is_no_other_kv_than_was_computed(
    is_told_by_block: bool, is_wrong: bool
) -> None:
    """It would be an alarm, and everything that is stored would be forgotten."""
    hand = ByHand()
    load = load_of(LOAD, [GroupMove(0, (1, 2), (1, 2))], [(1, 1)])
    hand.executor.submit(replace(load, direction=Direction.OFFLOAD, compares=True))
    if is_told_by_block:
        hand.read(Outcome.CORRUPT)
    hand.end_read(Outcome.CORRUPT)
    hand.end_copy(0, Outcome.CORRUPT if is_wrong else Outcome.OK)
    (result,) = hand.events
    found = {1: Outcome.MISS, 2: Outcome.CORRUPT} if is_wrong else {1: Outcome.MISS}
    assert result.failures((1, 2)) == found and result.outcome is Outcome.MISS


# ---------------------------------------------------------------- cancelled


def test_a_cancelled_load_begins_no_further_chunk_and_waits_for_those_that_copy() -> None:
    hand = ByHand()
    hand.load()
    assert not hand.executor.cancel(LOAD) and hand.events == []  # the resident part is being copied
    hand.read()
    assert len(hand.copies) == 1 and not hand.executor.wait([LOAD], 0.0)
    hand.end_copy(0)
    (result,) = hand.events
    assert (result.outcome, result.is_late, result.num_bytes) == (Outcome.REJECTED, True, 0)
    assert hand.executor.wait([LOAD], 0.0) and not hand.executor.cancel(LOAD)
    hand.end_read()
    assert hand.events == [result, changed(result, is_late=False)]  # only now are its slots free


def test_what_waits_for_the_device_is_taken_back() -> None:
    hand = ByHand()
    hand.load()
    hand.is_waiting = True
    assert hand.executor.cancel(LOAD)
    (result,) = hand.events
    assert result.outcome is Outcome.REJECTED and result.is_late
    hand.read()
    assert len(hand.copies) == 1
    hand.end_read(Outcome.TIMED_OUT, is_late=True)
    assert hand.events == [result]  # the kernel may still write
    hand.end_read(Outcome.TIMED_OUT)
    assert hand.events == [result, changed(result, is_late=False)]


def test_a_copy_that_was_on_its_way_to_the_device_at_a_cancel_is_taken_back() -> None:
    hand = ByHand()
    hand.load()
    hand.end_copy(0)
    hand.is_waiting = True
    submit, answers = hand.submit, list[bool]()

    def submit_late(plan: TransferPlan, **more: Any) -> None:
        answers.append(hand.executor.cancel(LOAD))
        submit(plan, **more)

    hand.submit = submit_late  # type: ignore[method-assign]
    hand.read()
    assert answers == [False] and len(hand.copies) == 2
    (result,) = hand.events
    assert result.outcome is Outcome.REJECTED and result.is_late
    hand.end_read()
    assert hand.events == [result, changed(result, is_late=False)]


def test_a_load_that_is_cancelled_after_its_reads_is_not_late() -> None:
    hand = ByHand()
    hand.load()
    hand.read()
    hand.end_read()
    hand.is_waiting = True
    assert hand.executor.cancel(LOAD)
    (result,) = hand.events
    assert (result.outcome, result.is_late, result.num_bytes) == (Outcome.REJECTED, False, 0)


@pytest.mark.usefixtures("quick_switches")
def test_a_cancel_meets_the_last_read_and_the_end_of_the_reads() -> None:
    """Whoever comes first: one result, no copy begins after the cancel, one release if it was late."""
    for _ in range(ROUNDS):
        hand = ByHand()
        hand.load()
        hand.end_copy(0)
        answers: list[bool] = []

        def read(hand: ByHand = hand) -> None:
            hand.read()
            hand.end_read()

        def cancel(hand: ByHand = hand, answers: list[bool] = answers) -> None:
            answers.append(hand.executor.cancel(LOAD))

        meet(read, cancel)
        if len(hand.copies) > 1:  # it had begun
            assert answers == [False] and hand.events == []
            hand.end_copy(1)
        result, *last = hand.events
        assert result.outcome is Outcome.REJECTED
        assert last == [changed(result, is_late=False)] * result.is_late
        assert hand.executor.wait([LOAD], 0.0) and hand.executor._loads == {}


def test_all_copies_of_a_load_start_after_the_mark_of_its_submission() -> None:
    """By whatever thread they are submitted."""
    hand = ByHand()
    hand.load()
    hand.executor.submit(load_of(LOAD + 1, [GroupMove(0, (3,), (3,))], [(3, 3)]))
    reader = threading.Thread(target=hand.read)
    reader.start()
    reader.join(LONG_S)
    hand.disk.on_blocks[1]([0], [Outcome.OK])
    assert hand.after == [1, 1, 2] and hand.marks == 2


# ---------------------------------------------------------------- late


def test_what_is_late_is_released_after_it_was_said_to_be_late() -> None:
    hand = ByHand()
    hand.load()
    hand.end_copy(0)
    hand.end_read(Outcome.TIMED_OUT, is_late=True)
    (result,) = hand.events
    assert result.outcome is Outcome.TIMED_OUT and result.is_late
    hand.end_read(Outcome.TIMED_OUT)
    assert hand.events == [result, changed(result, is_late=False)]


def test_a_late_read_that_ends_while_blocks_are_still_copied_makes_no_late_load() -> None:
    hand = ByHand()
    hand.load()
    hand.end_read(Outcome.TIMED_OUT, is_late=True)
    hand.end_read(Outcome.TIMED_OUT)
    assert hand.events == []
    hand.end_copy(0)
    (result,) = hand.events
    assert (result.outcome, result.is_late) == (Outcome.TIMED_OUT, False)


@pytest.mark.usefixtures("quick_switches")
def test_the_result_that_counts_is_the_last() -> None:
    for _ in range(ROUNDS):
        hand = ByHand()
        hand.load()
        hand.end_read(Outcome.TIMED_OUT, is_late=True)
        meet(partial(hand.end_copy, 0), partial(hand.end_read, Outcome.TIMED_OUT))
        assert [result.is_late for result in hand.events] in ([False], [True, False])
        assert {result.outcome for result in hand.events} == {Outcome.TIMED_OUT}
        assert hand.executor._loads == {}


def test_a_read_that_ends_while_its_load_is_told_to_be_late_is_told_after_it() -> None:
    hand = ByHand()
    hand.load()
    hand.end_copy(0)
    told: list[bool] = []

    def on_done(result: JobResult) -> None:
        if result.is_late:  # the disk's other thread, just now
            hand.end_read(Outcome.TIMED_OUT)
            assert not hand.executor.wait([LOAD], 0.0)
        told.append(result.is_late)

    hand.executor._on_done = on_done
    hand.end_read(Outcome.TIMED_OUT, is_late=True)
    assert told == [True, False] and hand.executor._loads == {}


def test_a_late_load_is_over_for_whoever_waits_also_while_its_end_is_told() -> None:
    """It has nothing to do with device memory any more."""
    hand = ByHand()
    hand.load()
    hand.end_copy(0)
    hand.end_read(Outcome.TIMED_OUT, is_late=True)
    over: list[bool] = []
    hand.executor._on_done = lambda result: over.append(hand.executor.wait([LOAD], 0.0))
    hand.end_read(Outcome.TIMED_OUT)
    assert over == [True]


def test_a_failing_listener_costs_no_second_result() -> None:
    hand = ByHand()
    hand.load()
    hand.end_copy(0)
    told: list[bool] = []

    def on_done(result: JobResult) -> None:
        told.append(result.is_late)
        raise RuntimeError("listener")

    hand.executor._on_done = on_done
    hand.end_read(Outcome.TIMED_OUT, is_late=True)
    hand.end_read(Outcome.TIMED_OUT)
    assert told == [True, False] and hand.executor._loads == {}


def test_a_late_load_holds_its_slots_until_the_disk_is_done(tmp_path: Path, rng: random.Random) -> None:
    """The same with a real file, whose disk answers only long after the deadline."""
    gate = threading.Event()
    with held_reads(tmp_path / "x.blocks", gate, only=12) as bench:
        bench.disk._io_deadline_s = 0.05
        load = simple_load(bench, rng)
        late = bench.finish(load)
        assert (late.outcome, late.is_late) == (Outcome.TIMED_OUT, True)
        assert dict(late.failed)[2] is Outcome.TIMED_OUT and late_slots(bench.host) == [2]
        assert bench.executor.wait(None, LONG_S)  # the device has nothing to do with it any more
        other = load_of(LOAD + 1, [GroupMove(0, (1,), (9,))], [(9, 13)])
        assert bench.finish(other).outcome is Outcome.OK and bench.listener.ids().count(LOAD) == 1
        gate.set()
        assert bench.listener.wait_for(LOAD, 2)
        assert [result for result in bench.listener.results if result.job_id == LOAD][1] == changed(
            late, is_late=False
        )
        assert late_slots(bench.host) == []
        assert bench.finish(simple_load_again(LOAD + 2)).outcome is Outcome.OK


def test_every_block_is_in_exactly_one_part_and_parts_have_numbers_of_their_own() -> None:
    hand = ByHand()
    moves = [GroupMove(0, (1, 2, 3), (1, 2, 3)), GroupMove(1, (4, 5), (4, 5))]
    hand.executor.submit(load_of(LOAD, moves, [(3, 9), (4, 8)]))
    hand.disk.on_blocks[0]([1], [Outcome.OK])
    hand.read()
    assert len({copy.job_id for copy in hand.copies}) == len(hand.copies) and all(
        c.job_id < 0 for c in hand.copies
    )
    assert not any(copy.reads for copy in hand.copies)
    pairs = [
        (move.group, block, slot)
        for copy in hand.copies
        for move in copy.moves
        for block, slot in zip(move.device_blocks, move.slots, strict=True)
    ]
    assert sorted(pairs) == [(0, 1, 1), (0, 2, 2), (0, 3, 3), (1, 4, 4), (1, 5, 5)]
