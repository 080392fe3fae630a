"""The mover of any BlockStore, over a toy: outcomes per key, time, calls that hang, late writes, ends."""

from __future__ import annotations

import gc
import logging
import random
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvbm_core.clock import ManualClock
from kvbm_core.errors import ConfigError, Outcome
from kvbm_core.storage.base import Memory
from kvbm_core.storage.host_slab import HostSlab
from kvbm_core.storage.late import LATE, Span
from kvbm_core.storage.stores import StoreOptions, StoreSpec, open_store
from kvbm_core.testing import toy_store
from kvbm_core.testing.executor_bench import LONG_S, Listener, is_mapped
from kvbm_core.testing.store_contract import content_of, key_of
from kvbm_core.testing.toy_store import CLOSE, CONTAINS, GET, PUT, ToyBlocks, ToyFaults, ToyStore
from kvbm_core.transfer.movers import store as module
from kvbm_core.transfer.movers.base import OnBlocks
from kvbm_core.transfer.movers.store import BATCH_BLOCKS, FIND_BLOCKS, GRACE_S, StoreMover
from kvbm_core.transfer.plan import JobResult, OrderKind, TierOrder
from kvbm_core.types import BlockKey
from tests.unit.disk_mover_bench import late_slots

NUM_SLOTS = 32
SLOT_BYTES = 4096
DEADLINE_S = 5.0
STORE, FETCH, FIND = OrderKind.STORE, OrderKind.FETCH, OrderKind.FIND
FORGET = TierOrder(0, "remote", OrderKind.FORGET, ())
CALL_OF = {STORE: PUT, FETCH: GET, FIND: CONTAINS}


def order(job_id: int, kind: OrderKind, numbers: Sequence[int], slots: Sequence[int] = ()) -> TierOrder:
    """Blocks ``key_of(number)``."""
    return TierOrder(job_id, "remote", kind, tuple(map(key_of, numbers)), tuple(slots))


class Bench:
    """A StoreMover between a slab and a toy, by a clock that the test moves."""

    def __init__(self, store: ToyStore, num_threads: int = 1) -> None:
        self.store = store
        self.clock = ManualClock()
        self.host = HostSlab(NUM_SLOTS, SLOT_BYTES)
        assert self.host.wait_ready(LONG_S)
        self.listener = Listener()
        self.mover = StoreMover(
            "remote",
            store,
            self.host,
            io_deadline_s=DEADLINE_S,
            num_threads=num_threads,
            clock=self.clock,
        )

    def submit(
        self, submitted: TierOrder, *, deadline_s: float | None = None, on_blocks: OnBlocks | None = None
    ) -> None:
        self.mover.submit(submitted, self.listener, deadline_s=deadline_s, on_blocks=on_blocks)

    def results(self, job_id: int) -> list[JobResult]:
        return [result for result in self.listener.results if result.job_id == job_id]

    def result(self, job_id: int) -> JobResult:
        """Exactly one so far."""
        assert self.listener.wait_for(job_id)
        (result,) = self.results(job_id)
        return result

    def last_result(self, job_id: int) -> JobResult:
        """The second of a late order."""
        assert self.listener.wait_for(job_id, 2)
        first, second = self.results(job_id)
        assert first.is_late and not second.is_late
        return second

    def run(self, submitted: TierOrder, *, on_blocks: OnBlocks | None = None) -> JobResult:
        self.submit(submitted, on_blocks=on_blocks)
        return self.result(submitted.job_id)

    def advance(self, seconds: float) -> None:
        """Time passes, and the mover notices."""
        self.clock.advance(seconds)
        with self.mover._changed:
            self.mover._changed.notify_all()

    def slot(self, slot: int) -> memoryview:
        return self.host.array[slot * SLOT_BYTES : (slot + 1) * SLOT_BYTES].data

    def put(self, *numbers: int) -> None:
        """Blocks with their ``content_of``, past the mover."""
        keys = [key_of(number) for number in numbers]
        payloads = [memoryview(content_of(key, SLOT_BYTES)) for key in keys]
        assert set(self.store.put_many(keys, payloads, deadline_s=LONG_S)) <= {Outcome.OK}

    def hang(self, kind: OrderKind, job_id: int, numbers: Sequence[int], slots: Sequence[int] = ()) -> None:
        """Submits an order whose call hangs."""
        self.store.hold(CALL_OF[kind])
        self.submit(order(job_id, kind, numbers, slots))
        assert self.store.wait_hanging(1, LONG_S)

    def close(self) -> None:
        self.listener.gate.set()
        self.store.land()
        self.store.let_go()
        self.mover.close()
        self.host.close()


@contextmanager
def bench_of(num_threads: int = 1, faults: ToyFaults | None = None) -> Iterator[Bench]:
    made = Bench(ToyStore(SLOT_BYTES, faults), num_threads)
    try:
        yield made
    finally:
        made.close()


@pytest.fixture(name="bench")
def bench_fixture() -> Iterator[Bench]:
    with bench_of() as made:
        yield made


# ---------------------------------------------------------------- what works


def test_bytes_come_back_exactly_in_calls_of_a_few_blocks() -> None:
    with bench_of(num_threads=3) as bench:
        numbers, slots, targets = range(20), range(20), range(31, 11, -1)
        for number in numbers:
            bench.slot(number)[:] = content_of(key_of(number), SLOT_BYTES)
        stored = bench.run(order(1, STORE, numbers, slots))
        assert (stored.outcome, stored.num_bytes, stored.failed) == (Outcome.OK, 20 * SLOT_BYTES, ())
        bench.host.array[:] = 0
        fetched = bench.run(order(2, FETCH, numbers, targets))
        assert (fetched.outcome, fetched.num_bytes, fetched.detail) == (Outcome.OK, 20 * SLOT_BYTES, "")
        for number, slot in zip(numbers, targets, strict=True):
            assert bytes(bench.slot(slot)) == content_of(key_of(number), SLOT_BYTES)
        sizes = [len(keys) for name, keys in bench.store.calls if name == GET]
        assert sorted(sizes) == [4, BATCH_BLOCKS, BATCH_BLOCKS]


def test_a_find_says_which_blocks_are_there_by_their_places_in_the_order(bench: Bench) -> None:
    bench.put(1, 3)
    result = bench.run(order(1, FIND, [1, 2, 3, 4]))
    assert result.outcome is Outcome.MISS and dict(result.failed) == {1: Outcome.MISS, 3: Outcome.MISS}
    assert result.num_bytes == 0 and bench.run(order(2, FIND, [3, 1])).failed == ()
    assert bench.run(order(3, FIND, range(FIND_BLOCKS + 5))).outcome is Outcome.MISS
    assert [len(keys) for _, keys in bench.store.calls[-2:]] == [FIND_BLOCKS, 5]


def test_an_order_of_nothing_is_answered(bench: Bench) -> None:
    assert [bench.run(order(n, kind, [])).outcome for n, kind in enumerate(CALL_OF)] == [Outcome.OK] * 3


def test_one_lost_block_costs_no_other(bench: Bench) -> None:
    bench.put(*[number for number in range(12) if number not in (3, 9)])
    told: list[tuple[int, Outcome]] = []

    def on_blocks(numbers: Sequence[int], outcomes: Sequence[Outcome]) -> None:
        assert bench.listener.ids() == []
        told.extend(zip(numbers, outcomes, strict=True))

    slots = range(20, 32)
    result = bench.run(order(1, FETCH, range(12), slots), on_blocks=on_blocks)
    assert result.failures(slots) == {23: Outcome.MISS, 29: Outcome.MISS}
    assert (result.num_bytes, result.is_late) == (10 * SLOT_BYTES, False)
    assert "2 of 12 blocks: miss" in result.detail
    assert sorted(told) == [(n, Outcome.MISS if n in (3, 9) else Outcome.OK) for n in range(12)]
    assert bytes(bench.slot(24)) == content_of(key_of(4), SLOT_BYTES)


def test_what_a_request_waits_for_goes_first(bench: Bench) -> None:
    bench.put(1, 2, 3)
    bench.hang(STORE, 1, [9], [0])
    for job_id, kind, slots in ((2, STORE, [1]), (3, FIND, []), (4, FETCH, [2])):
        bench.submit(order(job_id, kind, [job_id], slots))
    bench.store.let_go()
    for job_id in (1, 2, 3, 4):
        bench.result(job_id)
    assert bench.listener.ids() == [1, 4, 3, 2]


def test_an_order_to_forget_is_not_for_a_store_that_others_use(bench: Bench) -> None:
    bench.put(1)
    bench.submit(FORGET)
    assert bench.run(order(1, FIND, [1])).outcome is Outcome.OK and bench.listener.ids() == [1]


# ---------------------------------------------------------------- what does not


@pytest.mark.parametrize(
    "wrong",
    [
        order(1, FETCH, [1, 2], [0]),
        order(1, FETCH, [1], [NUM_SLOTS]),
        order(1, STORE, [1], [-1]),
        order(1, FETCH, [1, 2], [3, 3]),
        order(1, STORE, [1, 1], [2, 3]),
        order(1, FIND, [1], [1]),
        TierOrder(1, "remote", FETCH, (key_of(1),), (1,), (1,)),
    ],
    ids=["lengths", "slot", "slot<0", "slot twice", "key twice", "find with slots", "places"],
)
def test_an_order_that_cannot_be_is_rejected(bench: Bench, wrong: TierOrder) -> None:
    result = bench.run(wrong)
    assert result.outcome is Outcome.REJECTED and result.detail and bench.store.calls == []


def test_a_store_that_raises_or_miscounts_fails_its_call_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with bench_of(faults=ToyFaults(raises=1.0)) as bench:
        result = bench.run(order(1, FETCH, [1, 2], [1, 2]))
        assert result.failures([1, 2]) == {1: Outcome.IO_ERROR, 2: Outcome.IO_ERROR}
        assert "a store failed: OSError" in caplog.text

    def too_few(keys: Sequence[BlockKey], targets: Sequence[Memory], *, deadline_s: float) -> list[Outcome]:
        return [Outcome.OK]

    with bench_of() as bench:
        bench.put(1)
        with monkeypatch.context() as patch:
            patch.setattr(bench.store, "get_many", too_few)
            assert bench.run(order(1, FETCH, [1, 2], [1, 2])).outcome is Outcome.IO_ERROR
        assert bench.run(order(2, FETCH, [1], [1])).outcome is Outcome.OK


def test_failing_listeners_harm_nobody(bench: Bench) -> None:
    def fail(*args: object) -> None:
        raise RuntimeError("listener")

    bench.put(1)
    bench.mover.submit(order(1, FETCH, [1], [1]), fail, on_blocks=fail)
    assert bench.run(order(2, FETCH, [1], [2]), on_blocks=fail).outcome is Outcome.OK


def test_what_waits_is_bounded(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_WAITING_CALLS", 3)
    bench.hang(FETCH, 1, [1], [1])
    bench.submit(order(2, FETCH, range(2 * BATCH_BLOCKS), range(2 * BATCH_BLOCKS)))
    assert (
        bench.run(order(3, FETCH, range(2 * BATCH_BLOCKS), range(2 * BATCH_BLOCKS))).outcome is Outcome.BUSY
    )
    bench.submit(order(4, FETCH, [5], [20]))
    bench.submit(order(5, STORE, [6], [21]))  # each kind by itself
    assert bench.listener.ids() == [3]
    bench.store.let_go()
    assert {bench.result(job_id).outcome for job_id in (1, 2, 4)} == {Outcome.MISS}
    assert bench.result(5).outcome is Outcome.OK


# ---------------------------------------------------------------- time


def test_what_waits_too_long_is_not_begun(bench: Bench) -> None:
    bench.hang(FETCH, 1, [1], [1])
    bench.submit(order(2, FETCH, [2], [2]), deadline_s=1.0)
    bench.submit(order(3, STORE, [3], [3]), deadline_s=3.0)
    bench.advance(2.0)
    late = bench.result(2)
    assert (late.outcome, late.is_late, late.num_bytes) == (Outcome.TIMED_OUT, False, 0)
    assert bench.listener.ids() == [2]
    bench.store.let_go()
    assert bench.result(3).outcome is Outcome.OK
    assert [keys for _, keys in bench.store.calls] == [(key_of(1),), (key_of(3),)]


def test_a_thread_that_comes_back_begins_nothing_that_has_waited_too_long(bench: Bench) -> None:
    """Also if it is quicker than whoever looks at the clock."""
    bench.hang(FETCH, 1, [1], [1])
    bench.submit(order(2, FETCH, [2], [2]), deadline_s=1.0)
    bench.clock.advance(2.0)
    bench.store.let_go()
    assert bench.result(2).outcome is Outcome.TIMED_OUT and len(bench.store.calls) == 1


@pytest.mark.parametrize("kind", [FETCH, STORE])
def test_a_call_that_hangs_is_given_up_and_its_slots_are_held_until_it_returns(
    bench: Bench, kind: OrderKind
) -> None:
    bench.put(1)
    bench.hang(kind, 1, [1], [4])
    bench.advance(DEADLINE_S)
    bench.submit(order(2, FIND, [1]), deadline_s=1.0)
    assert bench.listener.ids() == []  # the store has some grace
    bench.advance(GRACE_S + 0.1)
    first = bench.result(1)
    assert (first.outcome, first.is_late) == (Outcome.TIMED_OUT, True)
    assert first.failures([4]) == {4: Outcome.TIMED_OUT} and first.seconds > DEADLINE_S
    assert late_slots(bench.host) == [4]
    assert bench.result(2).outcome is Outcome.TIMED_OUT  # the only thread is missing
    bench.store.let_go()
    assert bench.last_result(1).outcome is Outcome.TIMED_OUT  # whatever it said in the end
    assert late_slots(bench.host) == []
    assert bench.run(order(3, FETCH, [1], [5])).outcome is Outcome.OK  # and is back


def test_a_look_up_that_hangs_is_late_for_no_memory(bench: Bench) -> None:
    bench.hang(FIND, 1, [1])
    bench.advance(DEADLINE_S + GRACE_S + 0.1)
    result = bench.result(1)
    assert (result.outcome, result.is_late) == (Outcome.TIMED_OUT, False)
    bench.store.let_go()
    assert bench.run(order(2, FIND, [1])).outcome is Outcome.MISS
    assert len(bench.results(1)) == 1


def test_what_hangs_costs_one_thread_and_its_own_blocks() -> None:
    with bench_of(num_threads=2) as bench:
        bench.put(*range(BATCH_BLOCKS + 1))
        bench.hang(FETCH, 1, range(BATCH_BLOCKS), range(BATCH_BLOCKS))
        bench.store.hold_no_more()
        assert bench.run(order(2, FETCH, [1], [20])).outcome is Outcome.OK
        bench.advance(DEADLINE_S + GRACE_S + 0.1)
        assert bench.result(1).is_late
        assert bench.run(order(3, FETCH, [2], [21])).outcome is Outcome.OK
        bench.store.let_go()
        assert bench.last_result(1).outcome is Outcome.TIMED_OUT


def test_a_part_that_hangs_costs_no_other_part(monkeypatch: pytest.MonkeyPatch) -> None:
    with bench_of(num_threads=2) as bench:
        bench.put(*range(2 * BATCH_BLOCKS))
        slots = range(2 * BATCH_BLOCKS)
        bench.hang(FETCH, 1, slots, slots)
        assert bench.store.wait_hanging(2, LONG_S)
        with bench.mover._changed:  # one of them comes back in time
            stuck = next(call for call in bench.mover._running if call.numbers.start == 0)
            for call in bench.mover._running - {stuck}:
                call.given_up_at_s = LONG_S
        given_up, add = threading.Event(), LATE.add

        def notice(spans: Iterable[Span], keep: object) -> int:
            given_up.set()
            return add(spans, keep)

        monkeypatch.setattr(LATE, "add", notice)
        bench.advance(DEADLINE_S + GRACE_S + 0.1)
        assert given_up.wait(LONG_S) and bench.listener.ids() == []
        bench.store.let_go()
        assert bench.listener.wait_for(1)
        last = bench.results(1)[0]
        if last.is_late:  # the other part was over first
            last = bench.last_result(1)
        assert last.failures(slots) == dict.fromkeys(range(BATCH_BLOCKS), Outcome.TIMED_OUT)
        assert late_slots(bench.host) == []
        assert bytes(bench.slot(BATCH_BLOCKS)) == content_of(key_of(BATCH_BLOCKS), SLOT_BYTES)


def test_a_store_that_writes_late_keeps_the_slots_until_it_has() -> None:
    with bench_of(faults=ToyFaults(is_late=1.0)) as bench:
        bench.put(1, 2)
        first = bench.run(order(1, FETCH, [1, 7, 2], [3, 4, 5]))
        assert first.is_late and first.failures([3, 4, 5]) == {
            3: Outcome.TIMED_OUT,
            4: Outcome.MISS,
            5: Outcome.TIMED_OUT,
        }
        assert late_slots(bench.host) == [3, 5]
        assert not any(bench.slot(3))
        bench.store.land()
        assert bench.last_result(1).failed == first.failed
        assert bytes(bench.slot(3)) == content_of(key_of(1), SLOT_BYTES)
        assert late_slots(bench.host) == []


def test_a_call_that_comes_back_and_still_writes_late_keeps_its_slots() -> None:
    """Given up, returned at last, and the store says that it may still write."""
    with bench_of(faults=ToyFaults(is_late=1.0)) as bench:
        bench.put(1)
        bench.hang(FETCH, 1, [1], [3])
        bench.advance(DEADLINE_S + GRACE_S + 0.1)
        assert bench.result(1).is_late
        bench.store.let_go()
        assert bench.run(order(2, FIND, [1])).outcome is Outcome.OK  # by the thread that has come back
        assert len(bench.results(1)) == 1 and late_slots(bench.host) == [3]
        bench.store.land()
        assert bench.last_result(1).outcome is Outcome.TIMED_OUT and late_slots(bench.host) == []


# ---------------------------------------------------------------- cancel


def test_cancel_takes_back_a_fetch_that_has_not_begun(bench: Bench) -> None:
    told: list[int] = []
    bench.hang(FETCH, 1, [1], [1])
    many = range(2 * BATCH_BLOCKS)
    bench.submit(order(2, FETCH, many, many), on_blocks=lambda numbers, outcomes: told.extend(numbers))
    bench.submit(order(3, STORE, [3], [30]))
    assert bench.mover.cancel(2) and not bench.mover.cancel(2)
    assert not bench.mover.cancel(1) and not bench.mover.cancel(3) and not bench.mover.cancel(4)
    result = bench.result(2)
    assert (result.outcome, result.is_late, result.num_bytes) == (Outcome.REJECTED, False, 0)
    bench.store.let_go()
    assert bench.result(1).outcome is Outcome.MISS and bench.result(3).outcome is Outcome.OK
    assert told == [] and len(bench.results(2)) == 1
    assert [name for name, _ in bench.store.calls] == [GET, PUT]


def test_a_fetch_of_which_a_part_has_begun_goes_on(bench: Bench) -> None:
    many = range(2 * BATCH_BLOCKS)
    bench.put(*many)
    bench.hang(FETCH, 1, many, many)
    assert not bench.mover.cancel(1)
    bench.store.let_go()
    assert bench.result(1).outcome is Outcome.OK


# ---------------------------------------------------------------- close


def test_close_rejects_what_waits_ends_what_runs_and_leaves_nothing() -> None:
    threads = set(threading.enumerate())
    bench = Bench(ToyStore(SLOT_BYTES), num_threads=2)
    bench.put(*range(4))
    bench.hang(FETCH, 1, [1], [1])
    bench.submit(order(2, FETCH, [2], [2]))
    assert bench.store.wait_hanging(2, LONG_S)
    bench.submit(order(3, FETCH, [3], [3]))
    closer = threading.Thread(target=bench.mover.close)
    closer.start()
    assert bench.result(3).outcome is Outcome.REJECTED
    bench.store.let_go()
    closer.join(LONG_S)
    assert not closer.is_alive()
    assert bench.result(1).outcome is bench.result(2).outcome is Outcome.OK
    assert bench.run(order(4, FETCH, [1], [1])).outcome is Outcome.REJECTED
    assert bench.store.contains_many([key_of(1)], deadline_s=1.0) == [Outcome.REJECTED]  # closed too
    bench.close()
    assert set(threading.enumerate()) <= threads


@pytest.mark.parametrize("hangs", [(GET,), (GET, CLOSE)], ids=["call", "call and close"])
def test_close_of_a_store_that_hangs_takes_bounded_time_and_keeps_its_memory(
    monkeypatch: pytest.MonkeyPatch, hangs: tuple[str, ...]
) -> None:
    monkeypatch.setattr(module, "CLOSE_TIMEOUT_S", 0.1)
    threads = set(threading.enumerate())
    bench = Bench(ToyStore(SLOT_BYTES), num_threads=3)
    address = bench.host.address
    bench.put(1)
    bench.store.hold(*hangs)
    for job_id in (1, 2, 3):
        bench.submit(order(job_id, FETCH, [1], [job_id]))
    assert bench.store.wait_hanging(3, LONG_S)
    gets = [(name, keys) for name, keys in bench.store.calls if name == GET]
    bench.mover.close()  # what hangs is let go later
    bench.mover.close()
    bench.host.close()
    for job_id in (1, 2, 3):
        first = bench.results(job_id)[0]
        assert (first.outcome, first.is_late) == (Outcome.TIMED_OUT, True)
    assert len(gets) == 3
    if hangs != (GET,):
        gc.collect()
        assert late_slots(bench.host) == [1, 2, 3] and is_mapped(address)
        bench.store.let_go()
    for job_id in (1, 2, 3):
        assert bench.last_result(job_id).outcome is Outcome.TIMED_OUT
    for thread in set(threading.enumerate()) - threads:
        thread.join(LONG_S)
    gc.collect()
    assert not is_mapped(address)


def test_close_keeps_the_memory_that_a_store_may_still_write() -> None:
    bench = Bench(ToyStore(SLOT_BYTES, ToyFaults(is_late=1.0)))
    address = bench.host.address
    bench.put(1)
    assert bench.run(order(1, FETCH, [1], [3])).is_late
    bench.mover.close()
    bench.host.close()
    gc.collect()
    assert is_mapped(address) and late_slots(bench.host) == [3] and len(bench.results(1)) == 1
    bench.store.land()  # harms nobody
    assert bench.last_result(1).outcome is Outcome.TIMED_OUT
    gc.collect()
    assert not is_mapped(address)


def test_close_hears_of_a_store_that_has_written_by_then() -> None:
    bench = Bench(ToyStore(SLOT_BYTES, ToyFaults(is_late=1.0)))
    bench.put(1)
    assert bench.run(order(1, FETCH, [1], [3])).is_late
    bench.store.land()
    bench.mover.close()
    assert bench.last_result(1).outcome is Outcome.TIMED_OUT and late_slots(bench.host) == []
    bench.close()


# ---------------------------------------------------------------- anything at once


class History:
    """Orders of any kind; a slot is used again after its order's last result."""

    def __init__(self, bench: Bench, rng: random.Random) -> None:
        self.bench, self._rng = bench, rng
        self.free, self.lock = list(range(NUM_SLOTS)), threading.Condition()
        self.told: dict[int, list[JobResult]] = {}
        self.wrong: list[str] = []

    def run(self, job_id: int) -> None:
        """Submits an order, as soon as there are slots for it."""
        rng, bench = self._rng, self.bench
        kind = rng.choice([STORE, FETCH, FETCH, FIND])
        numbers = rng.sample(range(60), rng.randrange(1, 14))
        slots = self._take(0 if kind is FIND else len(numbers))
        for slot, number in zip(slots, numbers, strict=False):
            content = content_of(key_of(number), SLOT_BYTES)
            bench.slot(slot)[:] = content if kind is STORE else bytes(SLOT_BYTES)
        blocks: dict[int, Outcome] = {}
        submitted, told = order(job_id, kind, numbers, slots), self.told.setdefault(job_id, [])

        def on_blocks(numbers: Sequence[int], outcomes: Sequence[Outcome]) -> None:
            for number, outcome in zip(numbers, outcomes, strict=True):
                if number in blocks or told:
                    self.wrong.append(f"{job_id}: block {number} is told twice, or after its order")
                blocks[number] = outcome

        def on_result(result: JobResult) -> None:
            self._judge(submitted, result, blocks)
            with self.lock:
                told.append(result)
                if not result.is_late:
                    self.free.extend(slots)
                self.lock.notify_all()

        bench.mover.submit(submitted, on_result, on_blocks=on_blocks)
        if rng.random() < 0.1:
            bench.mover.cancel(job_id)

    def _take(self, count: int) -> list[int]:
        with self.lock:
            while len(self.free) < count:
                self.bench.store.land()
                self.lock.wait(0.01)
            return [self.free.pop() for _ in range(count)]

    def _judge(self, submitted: TierOrder, result: JobResult, blocks: dict[int, Outcome]) -> None:
        places = submitted.slots or range(len(submitted.keys))
        failed = result.failures(places)
        for number, (key, place) in enumerate(zip(submitted.keys, places, strict=True)):
            if blocks and failed.get(place, Outcome.OK) is not blocks.get(number):
                self.wrong.append(f"{result}: block {number} was told as {blocks.get(number)}")
            is_there = submitted.kind is FETCH and place not in failed
            if is_there and bytes(self.bench.slot(place)) != content_of(key, SLOT_BYTES):
                self.wrong.append(f"{result}: wrong bytes in slot {place}")


def test_any_history_tells_each_order_once_and_never_a_wrong_byte(rng: random.Random) -> None:
    """A store with every fault, under some threads."""
    rates = {"fails": 0.05, "loses": 0.05, "spoils": 0.05, "is_late": 0.02, "raises": 0.02}
    faults = ToyFaults(rng.randrange(2**32), 0.05, **rates)
    store = ToyStore(SLOT_BYTES, faults, ToyBlocks(40 * SLOT_BYTES))
    history = History(Bench(store, num_threads=4), rng)
    try:
        for job_id in range(1, 301):
            history.run(job_id)
        with history.lock:
            assert history.lock.wait_for(lambda: all(history.told.values()), LONG_S)
        store.land()
        with history.lock:
            assert history.lock.wait_for(lambda: len(history.free) == NUM_SLOTS, LONG_S)
    finally:
        history.bench.close()
    lates = [[result.is_late for result in results] for results in history.told.values()]
    assert history.wrong == [] and all(late in ([False], [True, False]) for late in lates)
    assert late_slots(history.bench.host) == []


# ---------------------------------------------------------------- by URL


@pytest.fixture(name="toys")
def toys_fixture() -> Iterator[None]:
    toy_store.register()
    yield
    toy_store.forget_all()


def spec(url: str, meaning: str = "layout", shard: str = "0of1") -> StoreSpec:
    return StoreSpec(url, SLOT_BYTES, meaning, shard)


@pytest.mark.usefixtures("toys")
def test_toys_of_one_name_have_their_blocks_in_common_and_those_of_other_meaning_do_not() -> None:
    payload = memoryview(content_of(key_of(1), SLOT_BYTES))

    def has(opened: StoreSpec) -> Outcome:
        return open_store(opened).contains_many([key_of(1)], deadline_s=LONG_S)[0]

    assert open_store(spec("toy://a")).put_many([key_of(1)], [payload], deadline_s=LONG_S) == [Outcome.OK]
    assert has(spec("toy://a?seed=3&latency_ms=0.01")) is Outcome.OK
    others: list[Callable[[], StoreSpec]] = [
        lambda: spec("toy://b"),
        lambda: spec("toy://a", meaning="other"),
        lambda: spec("toy://a", shard="1of2"),
    ]
    assert [has(other()) for other in others] == [Outcome.MISS] * 3


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (StoreOptions(500_000_000_000), "500 GB for each model, blocks of this user are read"),
        (StoreOptions(None, "group"), "no limit of size for each model, blocks of this group are read"),
    ],
)
def test_a_shared_directory_is_told_once_with_its_size_and_trust(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, options: StoreOptions, told: str
) -> None:
    with caplog.at_level(logging.INFO, "kvbm"):
        for meaning in ("one pool", "another"):
            opened = StoreSpec(f"file://{tmp_path}", SLOT_BYTES, meaning, "0of1", "model", options)
            open_store(opened).close()
    assert caplog.messages == [f"kvbm: shared directory: {tmp_path}, {told}"]


@pytest.mark.usefixtures("toys")
@pytest.mark.parametrize("url", ["toy://a?explodes=1", "toy://a?loses=often", "cellar://a", "toy"])
def test_a_url_that_means_nothing_is_refused_in_one_line(url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        open_store(spec(url))
    assert "KVBM_REMOTE_URL" in str(caught.value) and "\n" not in str(caught.value)
