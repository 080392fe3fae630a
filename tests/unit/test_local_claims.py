"""Promises and claims of LocalTiers: what is claimed is held, and what has expired is not trusted."""

from __future__ import annotations

from kvbm_core.clock import ManualClock
from kvbm_core.policy.lru import LruPolicy
from kvbm_core.runtime.local_claims import Claim, ClaimBook
from kvbm_core.tiers.tier import BlockTier, protect_nothing
from kvbm_core.types import BlockKey, Tier

TTL_S = 10.0


def key(number: int) -> BlockKey:
    return BlockKey(bytes([number]) * 33)


KEYS = [key(number) for number in range(1, 4)]


class Bench:
    """A host tier of ``num_slots`` slots that holds KEYS, and a book over it."""

    def __init__(self, num_slots: int = 3) -> None:
        self.clock = ManualClock()
        self.host = BlockTier(Tier.HOST, LruPolicy(), self.clock)
        self.host.grow(num_slots)
        self.store(KEYS)
        self.book = ClaimBook(self.host, None, self.clock, TTL_S)

    def store(self, keys: list[BlockKey]) -> tuple[int, ...]:
        """As many of ``keys`` as find room; where they are."""
        reservation = self.host.reserve(keys, protect_nothing)
        self.host.commit(reservation)
        return reservation.slots

    def forget_leases(self) -> None:
        """The tier has ended what is over; the book has not been told."""
        self.clock.advance(TTL_S + 1)
        self.host.expire_leases()
        assert self.host.live_leases == 0 and self.book.num_promises == 1

    def assert_held(self, claim: Claim | None) -> None:
        """Each block is in its slot, and nothing takes it away."""
        assert claim is not None and set(claim.slot_of) == set(claim.keys)
        assert self.host.live_leases == 1 and self.store([key(n) for n in range(50, 60)]) == ()
        assert self.host.match_prefix(claim.keys) == len(claim.keys)
        self.host.check_integrity()


def test_an_expired_promise_is_not_a_claim_its_blocks_are_held_anew() -> None:
    bench = Bench()
    assert bench.book.promise("r", KEYS) == 3
    bench.forget_leases()
    claim = bench.book.claim("r", KEYS)
    bench.assert_held(claim)


def test_an_expired_promise_names_no_slot_that_is_somebody_elses_by_now() -> None:
    bench = Bench()
    assert bench.book.promise("r", KEYS) == 3
    bench.forget_leases()
    others = [key(number) for number in range(20, 23)]
    assert len(bench.store(others)) == 3  # in the very slots
    assert bench.book.claim("r", KEYS) is None
    assert bench.book.num_promises == 0 and bench.host.live_leases == 0


def test_a_promise_of_blocks_that_were_forgotten_since_is_not_trusted() -> None:
    bench = Bench()
    assert bench.book.promise("r", KEYS) == 3
    bench.host.forget(KEYS[1:2])  # a load of it failed
    assert bench.book.claim("r", KEYS) is None
    assert bench.host.live_leases == 0 and bench.host.resident_blocks == 2


def test_a_promise_in_time_is_the_claim_and_outlives_its_time() -> None:
    bench = Bench()
    assert bench.book.promise("r", KEYS) == 3
    bench.clock.advance(TTL_S - 1)
    bench.book.mind_leases([])
    claim = bench.book.claim("r", KEYS)
    assert claim is not None
    for _ in range(10):
        bench.clock.advance(TTL_S / 2)
        bench.book.mind_leases([claim])
    bench.assert_held(claim)
    bench.book.release(claim)
    assert bench.host.live_leases == 0


def test_a_promise_ends_when_its_time_is_over_and_not_before() -> None:
    bench = Bench()
    assert bench.book.promise("r", KEYS) == 3
    bench.clock.advance(TTL_S - 0.5)
    bench.book.mind_leases([])
    assert bench.book.num_promises == 1 and bench.host.live_leases == 1
    bench.clock.advance(0.5)
    bench.book.mind_leases([])
    assert bench.book.num_promises == 0 == bench.host.live_leases
    assert len(bench.store([key(number) for number in range(20, 23)])) == 3
