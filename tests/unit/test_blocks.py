"""Slots, registry, leases and admission, one by one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from kvbm_core.blocks.lease import Lease, LeaseBook
from kvbm_core.blocks.pool import SlotPool
from kvbm_core.blocks.registry import LOOKED_UP_AT_ONCE, BlockRegistry, PyIndex, new_index
from kvbm_core.clock import ManualClock
from kvbm_core.errors import IntegrityError
from kvbm_core.native import native
from kvbm_core.policy.admission import AdmitAll
from kvbm_core.policy.recency import Slots, as_slots
from kvbm_core.testing.policy_contract import sample_keys
from kvbm_core.types import BlockKey, SequenceHash, block_key

A, B, C, D = sample_keys(0, 4)


def slots(*numbers: int) -> Slots:
    """Plain numbers as slots."""
    return as_slots(numbers)


# ---------------------------------------------------------------- pool


def take(pool: SlotPool, count: int) -> list[int] | None:
    taken = pool.allocate(count)
    return None if taken is None else taken.tolist()


def test_slots_of_one_call_ascend_and_those_given_back_last_come_first() -> None:
    pool = SlotPool(8)
    assert take(pool, 3) == [0, 1, 2]
    assert take(pool, 3) == [3, 4, 5]
    pool.release(slots(5, 1, 2))
    assert take(pool, 2) == [1, 2]
    assert take(pool, 3) == [5, 6, 7]
    pool.release(slots(6, 0, 3))
    pool.release(slots(4))
    assert take(pool, 1) == [4]
    assert take(pool, 3) == [0, 3, 6]
    pool.check_integrity()


def test_allocate_gives_all_or_nothing() -> None:
    pool = SlotPool(4)
    assert take(pool, 5) is None
    assert pool.free_slots == 4
    assert take(pool, 0) == []
    assert take(pool, 4) == [0, 1, 2, 3]
    assert take(pool, 1) is None
    assert take(pool, 0) == []
    with pytest.raises(ValueError, match="negative"):
        pool.allocate(-1)


def test_a_pool_grows_and_never_shrinks() -> None:
    pool = SlotPool()
    assert (pool.capacity_slots, pool.free_slots, take(pool, 1)) == (0, 0, None)
    pool.grow(2)
    assert take(pool, 2) == [0, 1]
    pool.grow(4)
    assert (pool.capacity_slots, pool.free_slots) == (4, 2)
    pool.release(slots(1))
    assert take(pool, 3) == [1, 2, 3]
    with pytest.raises(ValueError, match="shrink"):
        pool.grow(3)
    pool.check_integrity()


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        (slots(0, 3), "free already"),
        (slots(0, 0), "twice"),
        (slots(0, 9), "outside"),
        (slots(0, -1), "outside"),
    ],
)
def test_a_bad_release_changes_nothing(bad: Slots, why: str) -> None:
    pool = SlotPool(4)
    pool.allocate(3)
    with pytest.raises(ValueError, match=why):
        pool.release(bad)
    pool.check_integrity()
    assert pool.free_slots == 1
    pool.release(slots(0))
    with pytest.raises(ValueError, match="free already"):
        pool.release(slots(0))
    assert pool.free_slots == 2


def test_the_pool_check_sees_a_lost_slot() -> None:
    pool = SlotPool(4)
    pool.allocate(2)
    pool._used[1] = False
    with pytest.raises(IntegrityError):
        pool.check_integrity()


# ---------------------------------------------------------------- registry


needs_native = pytest.mark.skipif(
    native is None,
    reason="NOT RUN: the registry in C (no C compiler when kvbm was installed, or KVBM_NATIVE=0)",
)


@pytest.fixture(params=[PyIndex, pytest.param(new_index, marks=needs_native)])
def registry(request: pytest.FixtureRequest) -> BlockRegistry:
    """One of ten slots."""
    made = BlockRegistry(request.param())
    made.grow(10)
    return made


def found(registry: BlockRegistry, keys: Sequence[BlockKey]) -> list[int]:
    return registry.find(keys).tolist()


def test_the_registry_in_c_is_used_where_there_is_one() -> None:
    assert isinstance(BlockRegistry()._index, PyIndex) is (native is None)


def test_a_block_can_be_found_from_commit_on(registry: BlockRegistry) -> None:
    registry.reserve([A, B], slots(7, 3))
    assert (A in registry, registry.is_pending(A), found(registry, [A])) == (False, True, [])
    assert (found(registry, [A, B]), len(registry), registry.pending_blocks) == ([], 0, 2)
    assert registry.commit([A]).tolist() == [7]
    assert (A in registry, registry.is_pending(A), found(registry, [A])) == (True, False, [7])
    assert (found(registry, [A, B]), len(registry), registry.pending_blocks) == ([7], 1, 1)
    assert list(registry.keys()) == [A]
    registry.check_integrity()


def test_cancel_takes_what_is_on_its_way_and_drop_what_is_there(registry: BlockRegistry) -> None:
    registry.reserve([A, B, C], slots(5, 6, 7))
    registry.commit([B, C])
    assert registry.cancel([A]).tolist() == [5]
    assert registry.drop(slots(7, 6)) == [C, B]
    assert (len(registry), registry.pending_blocks) == (0, 0)
    registry.reserve([B], slots(6))
    registry.check_integrity()


def test_find_stops_at_the_first_gap(registry: BlockRegistry) -> None:
    registry.reserve([A, B, D], slots(0, 1, 2))
    registry.commit([A, B, D])
    assert found(registry, [A, B, C, D]) == [0, 1]
    assert found(registry, [C, A]) == []
    assert found(registry, [A, B, D]) == [0, 1, 2]
    assert found(registry, []) == []
    assert registry.slots_of([C, D, A]).tolist() == [2, 0]


def test_find_never_remembers_what_has_changed(registry: BlockRegistry) -> None:
    registry.reserve([A, B, C], slots(0, 1, 2))
    assert found(registry, [A, B]) == []
    registry.commit([A])
    assert found(registry, [A, B]) == [0]
    registry.commit([B])
    assert found(registry, [A, B]) == found(registry, [A, B]) == [0, 1]
    registry.drop(slots(1))
    assert found(registry, [A, B]) == [0] and found(registry, [B]) == []
    registry.reserve([B], slots(1))
    registry.commit([C])
    assert found(registry, [A, B, C]) == [0]


def test_only_what_is_neither_there_nor_on_its_way_is_new(registry: BlockRegistry) -> None:
    registry.reserve([A, B], slots(0, 1))
    registry.commit([A])
    assert registry.new_of([A, C, B, D, C]) == (C, D)
    assert registry.new_of([D, C, D]) == (D, C)


def test_find_sees_beyond_what_it_looks_up_at_once(registry: BlockRegistry) -> None:
    keys = sample_keys(0, 3 * LOOKED_UP_AT_ONCE)
    registry.grow(len(keys))
    registry.reserve(keys, slots(*range(len(keys))))
    registry.commit(keys)
    assert found(registry, keys) == list(range(len(keys)))
    gap = 2 * LOOKED_UP_AT_ONCE + 5
    registry.drop(slots(gap))
    assert found(registry, keys) == list(range(gap))


@pytest.mark.parametrize(
    ("error", "call"),
    [
        (ValueError, lambda registry: registry.reserve([C, B], slots(8, 9))),
        (ValueError, lambda registry: registry.reserve([C, C], slots(8, 9))),
        (ValueError, lambda registry: registry.reserve([C, A], slots(8, 9))),
        (ValueError, lambda registry: registry.reserve([C, D], slots(8))),
        (ValueError, lambda registry: registry.reserve([C, D], slots(8, 0))),
        (ValueError, lambda registry: registry.reserve([C, D], slots(8, 1))),
        (ValueError, lambda registry: registry.reserve([C, D], slots(8, 8))),
        (ValueError, lambda registry: registry.reserve([C, D], slots(8, 10))),
        (ValueError, lambda registry: registry.reserve([C, D], slots(8, -1))),
        (KeyError, lambda registry: registry.commit([B, A])),
        (KeyError, lambda registry: registry.commit([B, C])),
        (KeyError, lambda registry: registry.commit([B, B])),
        (KeyError, lambda registry: registry.cancel([B, A])),
        (KeyError, lambda registry: registry.cancel([B, B])),
        (KeyError, lambda registry: registry.drop(slots(0, 1))),
        (KeyError, lambda registry: registry.drop(slots(0, 0))),
        (IndexError, lambda registry: registry.drop(slots(0, 10))),
        (IndexError, lambda registry: registry.keys_in(slots(0, 10))),
    ],
)
def test_misuse_of_the_registry_changes_nothing(
    registry: BlockRegistry, error: type[Exception], call: Callable[[BlockRegistry], object]
) -> None:
    registry.reserve([A, B], slots(0, 1))
    registry.commit([A])
    with pytest.raises(error):
        call(registry)
    assert [key in registry for key in (A, B, C, D)] == [True, False, False, False]
    assert [registry.is_pending(key) for key in (A, B, C, D)] == [False, True, False, False]
    assert found(registry, [A]) == [0]
    registry.check_integrity()
    registry.reserve([C, D], slots(8, 9))


def test_blocks_of_other_groups_are_other_blocks(registry: BlockRegistry) -> None:
    keys = [block_key(SequenceHash(A), group) for group in (0, 1, 255)]
    registry.reserve(keys, slots(3, 4, 5))
    registry.commit(keys[::2])
    assert [key in registry for key in keys] == [True, False, True]
    assert registry.keys_in(slots(3, 4, 5, 6)) == [keys[0], None, keys[2], None]
    assert registry.drop(slots(5, 3)) == [keys[2], keys[0]]
    registry.check_integrity()


def test_the_registry_check_sees_a_slot_with_two_blocks() -> None:
    registry = BlockRegistry(index := PyIndex())
    registry.grow(10)
    registry.reserve([A, B], slots(1, 2))
    index._pending[B] = 1
    with pytest.raises(IntegrityError, match="share a slot"):
        registry.check_integrity()


def test_the_registry_check_sees_a_slot_that_is_not_marked_as_taken() -> None:
    registry = BlockRegistry(index := PyIndex())
    registry.grow(10)
    registry.reserve([A, B], slots(1, 2))
    index._is_taken[1] = False
    with pytest.raises(IntegrityError, match="taken"):
        registry.check_integrity()


def test_the_registry_check_sees_a_slot_that_does_not_know_its_block() -> None:
    registry = BlockRegistry(index := PyIndex())
    registry.grow(10)
    registry.reserve([A], slots(1))
    registry.commit([A])
    index._key_at[1] = None
    with pytest.raises(IntegrityError, match="point to each other"):
        registry.check_integrity()


# ---------------------------------------------------------------- leases


def test_a_lease_ends_once_by_release() -> None:
    book = LeaseBook(ManualClock())
    lease = book.grant("request-1", [A, B], (0, 1), ttl_s=5.0)
    assert (lease.owner, lease.keys, lease.slots, lease.expires_at_s) == ("request-1", (A, B), (0, 1), 5.0)
    assert book.is_live(lease)
    assert book.release(lease)
    assert not book.release(lease)
    assert (book.is_live(lease), book.live_leases) == (False, 0)


def test_a_lease_ends_once_by_expiry() -> None:
    clock = ManualClock(100.0)
    book = LeaseBook(clock)
    late = book.grant("late", [A], (0,), ttl_s=20.0)
    soon = book.grant("soon", [A], (0,), ttl_s=10.0)
    released = book.grant("released", [A], (0,), ttl_s=5.0)
    book.release(released)
    clock.advance(9.9)
    assert book.expire() == []
    clock.advance(0.2)
    assert book.is_live(soon), "its pins hold until expire is called"
    assert book.expire() == [soon]
    assert not book.release(soon)
    assert book.expire() == []
    clock.advance(100.0)
    assert book.expire() == [late]
    assert book.live_leases == 0
    book.check_integrity()


def test_a_lease_past_its_time_can_still_be_released() -> None:
    clock = ManualClock()
    book = LeaseBook(clock)
    lease = book.grant("r", [A], (0,), ttl_s=1.0)
    clock.advance(2.0)
    assert book.release(lease)
    assert book.expire() == []


def test_the_lease_of_another_book_is_not_live() -> None:
    book, other = LeaseBook(ManualClock()), LeaseBook(ManualClock())
    mine, theirs = (each.grant("r", [A], (0,), ttl_s=1.0) for each in (book, other))
    assert mine == theirs
    assert not book.is_live(theirs)
    assert not book.release(theirs)
    assert book.is_live(mine)


def test_a_lease_is_for_a_time_and_for_as_many_slots_as_keys() -> None:
    book = LeaseBook(ManualClock())
    for ttl_s in (0.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match="lasts"):
            book.grant("r", [A], (0,), ttl_s)
    with pytest.raises(ValueError, match="slots"):
        book.grant("r", [A, B], (0,), 1.0)
    assert book.live_leases == 0


def test_released_leases_do_not_pile_up() -> None:
    book = LeaseBook(ManualClock())
    kept = [book.grant("kept", [A], (0,), ttl_s=1e6) for _ in range(10)]
    for _ in range(10_000):
        book.release(book.grant("short", [A], (0,), ttl_s=1e6))
    assert len(book._by_expiry) < 200
    assert all(book.is_live(lease) for lease in kept)
    book.check_integrity()


def test_the_lease_check_sees_one_that_never_expires() -> None:
    book = LeaseBook(ManualClock())
    book._live[9] = Lease(9, "r", (A,), (0,), 1.0)
    with pytest.raises(IntegrityError, match="never expire"):
        book.check_integrity()


# ---------------------------------------------------------------- admission


def test_admit_all_takes_everything() -> None:
    assert AdmitAll().admit((A, B)) == [A, B]
