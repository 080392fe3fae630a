"""BlockTier: one commit point, exact pins, and resets that nothing survives."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kvbm_core.blocks.slot_tier import BlockTier
from kvbm_core.clock import ManualClock
from kvbm_core.errors import IntegrityError
from kvbm_core.policy.lru import LruPolicy
from kvbm_core.policy.recency import as_slots
from kvbm_core.testing.heard import Heard
from kvbm_core.testing.policy_contract import sample_keys
from kvbm_core.types import BlockKey, Tier

KEYS = sample_keys(0, 10)


class Bench:
    """A tier of ``capacity`` slots and what it said."""

    def __init__(self, capacity: int = 4) -> None:
        self.clock = ManualClock()
        self.heard = Heard()
        self.policy = LruPolicy()
        self.tier = BlockTier(Tier.HOST, self.policy, self.clock, self.heard)
        self.tier.grow(capacity)

    def store(self, *keys: BlockKey) -> None:
        reservation = self.tier.reserve(keys, frozenset)
        assert reservation.keys == keys
        assert self.tier.commit(reservation)

    def has(self) -> list[BlockKey]:
        self.tier.check_integrity()
        assert self.heard.here[Tier.HOST] == set(self.tier.keys())
        return [key for key in KEYS if self.tier.contains(key)]

    @property
    def gone(self) -> list[BlockKey]:
        return self.heard.gone


def test_a_block_is_there_from_commit_on_and_not_before() -> None:
    bench = Bench()
    reservation = bench.tier.reserve(KEYS[:2], frozenset)
    assert bench.has() == [] and bench.tier.pending_blocks == 2
    assert bench.tier.lease("x", KEYS[:1], 1.0) is None
    assert bench.tier.match_prefix(KEYS[:2]) == 0
    assert bench.tier.commit(reservation)
    assert bench.has() == KEYS[:2] and bench.tier.pending_blocks == 0 and bench.tier.resident_blocks == 2


def test_what_is_aborted_was_never_there_and_its_slots_are_free() -> None:
    bench = Bench(2)
    bench.tier.abort(bench.tier.reserve(KEYS[:2], frozenset))
    assert bench.has() == []
    bench.store(*KEYS[2:4])
    assert bench.gone == []


def test_reserving_leaves_out_what_is_there_or_on_its_way_or_given_twice() -> None:
    bench = Bench(8)
    bench.store(KEYS[0])
    on_its_way = bench.tier.reserve([KEYS[1]], frozenset)
    second = bench.tier.reserve([KEYS[0], KEYS[1], KEYS[2], KEYS[2]], frozenset)
    assert second.keys == (KEYS[2],)
    assert len(bench.tier.new_of([KEYS[0], KEYS[1], KEYS[2], KEYS[3], KEYS[3]])) == 1
    assert len({*on_its_way.slots, *second.slots}) == 2


def test_what_does_not_fit_is_cut_off_at_the_tail() -> None:
    bench = Bench(3)
    reservation = bench.tier.reserve(KEYS[:5], frozenset)
    assert reservation.keys == tuple(KEYS[:3])
    assert len(bench.tier.new_of(KEYS[:5])) == 2
    assert bench.tier.reserve(KEYS[5:6], frozenset).keys == ()


def test_the_least_recent_block_makes_room_and_the_tail_goes_before_the_head() -> None:
    bench = Bench(4)
    bench.store(*KEYS[:4])
    bench.store(KEYS[4])
    assert bench.gone == [KEYS[3]]
    bench.tier.touch(KEYS[:3])
    bench.store(KEYS[5])
    assert bench.gone == [KEYS[3], KEYS[4]]
    assert bench.tier.evicted_blocks_total == 2


def test_pinned_and_protected_blocks_stay_and_the_rest_is_still_used() -> None:
    bench = Bench(4)
    bench.store(*KEYS[:4])
    lease = bench.tier.lease("reader", [KEYS[3]], 10.0)
    assert lease is not None
    reservation = bench.tier.reserve(KEYS[5:9], lambda _: {KEYS[0], KEYS[3], KEYS[9]})
    assert reservation.keys == tuple(KEYS[5:7])
    assert sorted(bench.gone) == sorted([KEYS[1], KEYS[2]])
    assert bench.has() == [KEYS[0], KEYS[3]]


def test_protection_is_asked_for_only_when_something_must_go() -> None:
    bench = Bench(4)

    def ask(new_keys: Sequence[BlockKey]) -> frozenset[BlockKey]:
        raise AssertionError("nothing has to be evicted")

    assert bench.tier.reserve(KEYS[:4], ask).keys == tuple(KEYS[:4])


def test_a_lease_is_all_or_nothing() -> None:
    bench = Bench()
    bench.store(*KEYS[:2])
    assert bench.tier.lease("x", KEYS[:3], 1.0) is None
    assert bench.tier.live_leases == 0 and not bench.policy.is_pinned(0)


def test_an_expired_lease_pins_nothing_and_its_release_is_no_second_unpin() -> None:
    bench = Bench()
    bench.store(*KEYS[:2])
    short = bench.tier.lease("a", KEYS[:2], 1.0)
    long = bench.tier.lease("b", KEYS[:1], 5.0)
    assert short is not None and long is not None
    bench.clock.advance(1.0)
    assert bench.tier.expire_leases() == 1
    bench.tier.release(short)
    bench.tier.check_integrity()
    assert bench.policy.is_pinned(short.slots[0]) and not bench.policy.is_pinned(short.slots[1])
    assert bench.tier.renew(short, 1.0) is None


def test_a_renewed_lease_keeps_its_slots_pinned_without_a_gap() -> None:
    bench = Bench(1)
    bench.store(KEYS[0])
    lease = bench.tier.lease("a", KEYS[:1], 2.0)
    assert lease is not None
    bench.clock.advance(1.0)
    renewed = bench.tier.renew(lease, 2.0)
    assert renewed is not None and renewed.slots == lease.slots and bench.tier.live_leases == 1
    bench.clock.advance(1.0)
    assert bench.tier.expire_leases() == 0
    assert bench.tier.reserve(KEYS[1:2], frozenset).keys == ()


@pytest.mark.parametrize("how", ["reset", "forget"])
def test_a_block_forgotten_while_it_is_read_keeps_its_slot_until_the_reader_ends(how: str) -> None:
    """Also over a renewal: a slot given away under a reader would hand it another block's bytes."""
    bench = Bench(1)
    bench.store(KEYS[0])
    lease = bench.tier.lease("reader", KEYS[:1], 2.0)
    assert lease is not None
    if how == "reset":
        assert bench.tier.reset() == 1
    else:
        bench.tier.forget([KEYS[0], KEYS[7]])
    assert bench.has() == [] and bench.tier.resident_blocks == 0
    assert bench.tier.match_prefix(KEYS[:1]) == 0 and bench.tier.lease("late", KEYS[:1], 1.0) is None
    lease = bench.tier.renew(lease, 2.0)
    assert lease is not None
    assert bench.tier.reserve(KEYS[1:2], frozenset).keys == () and bench.gone == [KEYS[0]]
    bench.tier.release(lease)
    bench.tier.check_integrity()
    assert bench.gone == [KEYS[0]]  # it was told when it could be matched no more, and once
    assert bench.tier.reserve(KEYS[1:2], frozenset).slots == (0,)


def test_a_cleared_prompt_is_told_of_when_its_slots_are_free_and_what_comes_later_does_not_stay() -> None:
    bench, told = Bench(), list[tuple[BlockKey, int]]()
    bench.tier.on_cleared = lambda keys, slots: told.extend(zip(keys, slots, strict=True))
    bench.store(*KEYS[:3])
    on_its_way = bench.tier.reserve(KEYS[3:4], frozenset)
    lease = bench.tier.lease("reader", KEYS[:1], 2.0)
    assert lease is not None
    assert bench.tier.forget_prompt([KEYS[0], KEYS[1], KEYS[3]]) == 2
    assert bench.has() == [KEYS[2]] and [key for key, _ in told] == [KEYS[1]]
    bench.tier.release(lease)
    assert [key for key, _ in told] == [KEYS[1], KEYS[0]]
    assert bench.tier.commit(on_its_way) and bench.has() == [KEYS[2]]
    assert told[2] == (KEYS[3], on_its_way.slots[0])
    bench.store(*KEYS[:2])  # as if nothing had been
    bench.tier.forget([KEYS[0]])
    bench.tier.reset()
    assert len(told) == 3


def test_match_prefix_stops_at_a_doomed_block() -> None:
    bench = Bench()
    bench.store(*KEYS[:3])
    assert bench.tier.lease("x", [KEYS[1]], 1.0) is not None
    bench.tier.forget([KEYS[1]])
    assert bench.tier.match_prefix(KEYS[:3]) == 1


def test_what_was_being_written_at_a_reset_never_arrives() -> None:
    bench = Bench()
    bench.store(KEYS[0])
    before = bench.tier.reserve(KEYS[1:3], frozenset)
    assert bench.tier.reset() == 1 and bench.gone == [KEYS[0]]
    assert not bench.tier.commit(before)
    assert bench.has() == [] and bench.tier.pending_blocks == 0
    bench.store(*KEYS[1:3])
    assert bench.has() == KEYS[1:3]


def test_a_tier_grows_and_never_shrinks() -> None:
    bench = Bench(2)
    bench.tier.grow(1)
    assert bench.tier.capacity_blocks == 2
    bench.tier.grow(6)
    bench.store(*KEYS[:6])
    assert bench.gone == []


def test_integrity_notices_a_block_that_the_policy_lost() -> None:
    bench = Bench()
    bench.store(*KEYS[:2])
    bench.policy.remove(as_slots([0]))
    with pytest.raises(IntegrityError):
        bench.tier.check_integrity()


def test_integrity_notices_a_pin_without_a_lease() -> None:
    bench = Bench()
    bench.store(*KEYS[:2])
    bench.policy.pin(as_slots([0]))
    with pytest.raises(IntegrityError, match="nobody holds a lease"):
        bench.tier.check_integrity()
