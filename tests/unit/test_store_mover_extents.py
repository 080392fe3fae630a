"""The mover of a store that keeps extents, over a toy: what is asked in one call, which bytes come where."""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest

from kvbm_core.errors import Outcome
from kvbm_core.runtime.messages import Move, decode, encode
from kvbm_core.storage.base import Memory, parts_of
from kvbm_core.storage.extents import MAX_EXTENT_BLOCKS, Extent
from kvbm_core.storage.late import LATE, ranges_of
from kvbm_core.testing.executor_bench import LONG_S
from kvbm_core.testing.store_contract import content_of, key_of
from kvbm_core.testing.toy_store import CONTAINS, GET, PUT, ToyExtentStore, ToyFaults, ToyStore
from kvbm_core.transfer.movers import store as module
from kvbm_core.transfer.plan import NO_SLOT, ExtentPart, OrderKind, TierOrder
from tests.unit.test_store_mover import FETCH, FIND, NUM_SLOTS, SLOT_BYTES, STORE, Bench

FULL = ExtentPart(8)


def order(
    job_id: int,
    kind: OrderKind,
    numbers: Sequence[int],
    slots: Sequence[int],
    extents: Sequence[tuple[int, int]],
) -> TierOrder:
    """Blocks ``key_of(number)`` in these extents."""
    parts = tuple(ExtentPart(*extent) for extent in extents)
    return TierOrder(job_id, "remote", kind, tuple(map(key_of, numbers)), tuple(slots), extents=parts)


@contextmanager
def bench_of(faults: ToyFaults | None = None, store: ToyStore | None = None) -> Iterator[Bench]:
    made = Bench(store or ToyExtentStore(SLOT_BYTES, faults))
    try:
        yield made
    finally:
        made.close()


def put(bench: Bench, *extents: range) -> None:
    """Extents with the contents of their blocks, past the mover."""
    store = bench.store
    assert isinstance(store, ToyExtentStore)
    for numbers in extents:
        keys = tuple(map(key_of, numbers))
        payloads = [memoryview(content_of(key, SLOT_BYTES)) for key in keys]
        assert store.put_extents([Extent(len(keys), keys)], [payloads], deadline_s=LONG_S) == [Outcome.OK]


def has(bench: Bench, slot: int, number: int) -> bool:
    return bytes(bench.slot(slot)) == content_of(key_of(number), SLOT_BYTES)


def test_extents_go_down_and_come_back_whole_or_in_part() -> None:
    with bench_of() as bench:
        for slot in range(8):
            bench.slot(slot)[:] = content_of(key_of(slot), SLOT_BYTES)
        result = bench.run(order(1, STORE, range(6), range(6), [(4, 0), (2, 0)]))
        assert result.outcome is Outcome.OK and result.num_bytes == 6 * SLOT_BYTES
        found = bench.run(order(2, FIND, [3, 5, 5, 7], (), [(4, 3), (2, 1), (4, 3), (1, 0)]))
        assert dict(found.failed) == {2: Outcome.MISS, 3: Outcome.MISS}, "one size is not another"
        result = bench.run(order(3, FETCH, [1, 2, 3, 5], [11, 12, 13, 15], [(4, 1), (2, 1)]))
        assert result.outcome is Outcome.OK
        assert all(has(bench, 10 + number, number) for number in (1, 2, 3, 5))


def test_what_is_not_kept_of_an_extent_goes_nowhere() -> None:
    with bench_of() as bench:
        put(bench, range(8))
        before = bytes(bench.host.array)
        slots = [8, NO_SLOT, NO_SLOT, 11]
        result = bench.run(order(1, FETCH, [4, 5, 6, 7], slots, [(8, 4)]))
        assert result.outcome is Outcome.OK and result.num_bytes == 2 * SLOT_BYTES
        assert has(bench, 8, 4) and has(bench, 11, 7)
        after = bytearray(bench.host.array)
        for slot in (8, 11):
            at = slot * SLOT_BYTES
            after[at : at + SLOT_BYTES] = before[at : at + SLOT_BYTES]
        assert bytes(after) == before


def test_of_a_bad_extent_the_blocks_before_the_bad_one_come() -> None:
    with bench_of(ToyFaults(seed=3, spoils=1.0)) as bench:
        put(bench, range(8))
        result = bench.run(order(1, FETCH, range(8), range(8), [(8, 0)]))
        failed = dict(result.failed)
        assert failed and set(failed.values()) == {Outcome.CORRUPT}
        assert sorted(failed) == list(range(min(failed), 8))
        assert all(has(bench, slot, slot) for slot in range(min(failed)))


def test_calls_have_about_so_many_bytes_and_whole_extents(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CALL_BYTES", 8 * SLOT_BYTES)
    with bench_of() as bench:
        sizes = [(1, 0), (1, 0), (2, 0), (4, 0), (8, 0), (8, 0), (4, 0)]
        assert bench.run(order(1, STORE, range(28), range(28), sizes)).outcome is Outcome.OK
        assert [len(keys) for call, keys in bench.store.calls if call == PUT] == [4, 1, 1, 1]
        bench.run(order(2, FETCH, range(28), range(28), sizes))
        assert [len(keys) for call, keys in bench.store.calls if call == GET] == [4, 1, 1, 1]
        lasts = [0, 1, 3, 7, 15, 23, 27]
        assert not bench.run(order(3, FIND, lasts, (), [(n, n - 1) for n, _ in sizes])).failed
        assert [len(keys) for call, keys in bench.store.calls if call == CONTAINS] == [7]


def test_a_late_write_is_waited_for_but_for_what_is_not_kept() -> None:
    with bench_of(ToyFaults(is_late=1.0)) as bench:
        put(bench, range(4))
        bench.submit(order(1, FETCH, range(4), [4, NO_SLOT, 6, 7], [(4, 0)]))
        assert bench.listener.wait_for(1)
        (late,) = bench.results(1)
        assert late.is_late and set(dict(late.failed)) == {4, 6, 7}
        bench.store.land()
        assert set(dict(bench.last_result(1).failed)) == {4, 6, 7}
        assert has(bench, 4, 0) and has(bench, 7, 3), "the test is no test"


def test_memory_that_nobody_needs_is_kept_while_a_library_may_still_write_it() -> None:
    """A library in C knows an address and keeps no reference."""

    class InC(ToyExtentStore):
        token = 0
        written: weakref.ref[object] | None = None

        def get_extents(
            self, extents: Sequence[Extent], targets: Sequence[Sequence[Memory]], *, deadline_s: float
        ) -> list[list[Outcome]]:
            (needless, _), *_ = targets
            assert isinstance(needless, memoryview)
            self.written = weakref.ref(needless.obj)
            pieces = [piece for own in targets for target in own for piece in parts_of(target)]
            self.token = LATE.add(ranges_of(pieces), pieces)
            return [[Outcome.TIMED_OUT] * len(own) for own in targets]

    store = InC(SLOT_BYTES)
    with bench_of(store=store) as bench:
        bench.submit(order(1, FETCH, range(2), [NO_SLOT, 5], [(2, 0)]))
        assert bench.listener.wait_for(1) and bench.results(1)[0].is_late
        gc.collect()
        assert store.written is not None and store.written() is not None
        LATE.end(store.token)
        assert set(dict(bench.last_result(1).failed)) == {5}
        gc.collect()
        assert store.written() is None


@pytest.mark.parametrize(
    "wrong",
    [
        order(1, STORE, range(4), range(4), [(8, 4)]),
        order(1, STORE, range(4), range(4), [(8, 0)]),
        order(1, STORE, range(3), range(3), [(3, 0)]),
        order(1, STORE, [1, 2, 2, 3], range(4), [(2, 0), (2, 0)]),
        order(1, STORE, [1], [NO_SLOT], [(1, 0)]),
        order(1, FIND, [1, 2], (), [(2, 0)]),
        order(1, FETCH, [1, 2], [1, 1], [(2, 0)]),
        order(1, FETCH, [1, 2], [1, NUM_SLOTS], [(2, 0)]),
        order(1, FETCH, [1, 2], [1, -2], [(2, 0)]),
        order(1, FETCH, [1, 2], [1, 2], [(2, 0), (1, 1)]),
        order(1, FETCH, [1, 2], [1, 2], [(2, -1)]),
        order(1, FETCH, [1], [1], [(2 * MAX_EXTENT_BLOCKS, 2 * MAX_EXTENT_BLOCKS - 1)]),
        TierOrder(1, "remote", FETCH, (key_of(1),), (1,), (1,), (ExtentPart(1),)),
    ],
)
def test_an_order_that_cannot_be_is_rejected(wrong: TierOrder) -> None:
    with bench_of() as bench:
        result = bench.run(wrong)
        assert result.outcome is Outcome.REJECTED and result.detail and bench.store.calls == []


def test_a_store_without_extents_is_asked_for_none() -> None:
    with bench_of(store=ToyStore(SLOT_BYTES)) as bench:
        result = bench.run(order(1, FETCH, [1, 2], [1, 2], [(2, 0)]))
        assert result.outcome is Outcome.REJECTED and "keeps no extents" in result.detail


def test_an_answer_of_the_wrong_shape_fails_its_call(monkeypatch: pytest.MonkeyPatch) -> None:
    def mixed_up(
        extents: Sequence[Extent], targets: Sequence[Sequence[Memory]], *, deadline_s: float
    ) -> list[list[Outcome]]:
        return [[Outcome.OK], [Outcome.OK] * 3]

    with bench_of() as bench:
        monkeypatch.setattr(bench.store, "get_extents", mixed_up)
        result = bench.run(order(1, FETCH, range(4), range(4), [(2, 0), (2, 0)]))
        assert set(result.failures(range(4)).values()) == {Outcome.IO_ERROR}


def test_a_store_says_how_many_calls_it_takes() -> None:
    with bench_of() as bench:
        mover = module.StoreMover("other", ToyExtentStore(SLOT_BYTES), bench.host)
        try:
            assert len(mover._threads) == ToyExtentStore.concurrency != module.NUM_THREADS
        finally:
            mover.close()


def test_orders_with_extents_reach_the_workers(rng: random.Random) -> None:
    for _ in range(300):
        sizes = [1 << rng.randrange(10) for _ in range(rng.randint(1, 4))]
        parts = tuple(ExtentPart(size, rng.randrange(size)) for size in sizes)
        num_keys = sum(size - skipped for size, skipped in parts)
        slots = tuple(rng.choice([NO_SLOT, slot]) for slot in range(num_keys))
        sent = TierOrder(7, "remote", FETCH, tuple(map(key_of, range(num_keys))), slots, extents=parts)
        sent.check(num_keys)
        assert decode(encode(Move(sent))) == Move(sent)


def test_a_damaged_order_with_extents_is_refused_or_is_one(rng: random.Random) -> None:
    """Whatever comes over the wire: no message, an order that is refused, or one that means something."""
    num_decoded = 0
    for _ in range(3000):
        sent = order(7, rng.choice([STORE, FETCH, FIND]), range(6), range(6), [(4, 0), (2, 0)])
        frame = bytearray(encode(Move(sent)))
        for _ in range(rng.randint(1, 3)):
            frame[rng.randrange(len(frame))] = rng.randrange(256)
        message = decode(bytes(frame))
        if isinstance(message, Move):
            num_decoded += 1
            try:
                message.order.check(NUM_SLOTS)
            except ValueError:
                continue
            sizes = [num_blocks - skipped for num_blocks, skipped in message.order.extents]
            assert not sizes or sum(sizes) == len(message.order.keys)
    assert num_decoded > 100
