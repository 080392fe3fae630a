"""What the owner's leader holds for others: where it lies, for as long as it is copied, and never for longer
than it said.
"""

from __future__ import annotations

import threading

import pytest

from kvbm_core.blocks.slot_tier import BlockTier, protect_nothing
from kvbm_core.clock import ManualClock
from kvbm_core.observe.metrics import Metrics
from kvbm_core.peers.copies import Copies
from kvbm_core.peers.lending import LONGEST_S, MAX_LOANS, Lender
from kvbm_core.policy.admission import AdmitAll
from kvbm_core.policy.lru import LruPolicy
from kvbm_core.tiers.chain import TierChain
from kvbm_core.tiers.jobs import JobTable
from kvbm_core.tiers.slotted import SlottedTier, slotted_tier
from kvbm_core.transfer.plan import NO_SLOT
from kvbm_core.types import BlockKey, Tier

KEYS = [BlockKey(number.to_bytes(32, "little")) for number in range(400)]


class Bench:
    """A host of four blocks over a disk of eight."""

    def __init__(self) -> None:
        self.clock, self.metrics = ManualClock(), Metrics()
        self.host = BlockTier(Tier.HOST, LruPolicy(), self.clock)
        self.host.grow(4)
        maker = slotted_tier("disk", Tier.DISK, AdmitAll())
        self.chain = TierChain(
            self.host,
            (maker,),
            JobTable(1, self.clock),
            send=lambda order: None,
            clock=self.clock,
            metrics=self.metrics,
        )
        (disk,) = self.chain.lower
        assert isinstance(disk, SlottedTier)
        self.disk = disk
        self.disk.slots.grow(8)
        self.lender = Lender(self.chain, threading.RLock(), self.clock, self.metrics)

    def put(self, tier: BlockTier, *keys: BlockKey) -> tuple[int, ...]:
        reservation = tier.reserve(keys, protect_nothing)
        tier.commit(reservation)
        return reservation.slots

    def leases(self) -> int:
        return self.chain.live_leases


def test_blocks_are_held_where_they_lie_and_the_host_goes_first() -> None:
    bench = Bench()
    slots = bench.put(bench.host, *KEYS[:2])
    places = bench.put(bench.disk.slots, *KEYS[1:4])
    loan = bench.lender.lend(0, 1, KEYS[:5], 1.0)
    assert loan.slots == (*slots, NO_SLOT, NO_SLOT, NO_SLOT) and loan.tier == "disk"
    assert loan.places == (NO_SLOT, NO_SLOT, *places[1:], NO_SLOT) and not loan.is_refused
    assert bench.leases() == 2
    bench.put(bench.host, *KEYS[10:14])  # all that is not held may go
    assert bench.host.match_prefix(KEYS[:2]) == 2
    assert bench.lender.take_back(0, 1) and bench.leases() == 0
    assert not bench.lender.take_back(0, 1)
    assert bench.metrics.snapshot()["kvbm_peer_lent_blocks_total"] == 4


def test_a_question_holds_nothing() -> None:
    bench = Bench()
    bench.put(bench.host, KEYS[0])
    bench.put(bench.disk.slots, KEYS[1])
    loan = bench.lender.find(KEYS[:3])
    assert [slot != NO_SLOT for slot in loan.slots] == [True, False, False]
    assert [place != NO_SLOT for place in loan.places] == [False, True, False]
    assert bench.leases() == 0 == bench.lender.num_loans


def test_nothing_is_lent_of_a_disk_that_is_left_alone() -> None:
    bench = Bench()
    bench.put(bench.disk.slots, KEYS[0])
    bench.disk.turn_off("broken")
    assert bench.lender.lend(0, 1, KEYS[:1], 1.0).places == (NO_SLOT,)


def test_what_is_not_given_back_is_held_no_longer_than_was_said() -> None:
    bench = Bench()
    bench.put(bench.host, *KEYS[:4])
    for number, ttl_s in enumerate((1.0, 1e9)):
        bench.lender.lend(0, number, KEYS[:4], ttl_s)
        bench.clock.advance(min(ttl_s, LONGEST_S) - 0.1)
        bench.lender.expire()
        assert bench.lender.num_loans == 1
        bench.clock.advance(0.2)
        bench.lender.expire()
        assert bench.lender.num_loans == 0 == bench.leases()
        assert not bench.lender.take_back(0, number), "what was copied may be of another block"


def test_nothing_is_lent_while_the_books_are_of_a_rank_that_is_gone() -> None:
    bench, is_current = Bench(), [True]
    lender = Lender(bench.chain, threading.RLock(), bench.clock, bench.metrics, lambda: is_current[0])
    bench.put(bench.host, *KEYS[:2])
    assert not lender.lend(0, 1, KEYS[:1], 1.0).is_refused
    is_current[0] = False
    assert lender.lend(0, 2, KEYS[:1], 1.0).is_refused
    assert not lender.take_back(0, 1) and bench.leases() == 0


@pytest.mark.parametrize("how", ["forget", "reset"])
def test_what_was_forgotten_meanwhile_was_not_held(how: str) -> None:
    bench = Bench()
    bench.put(bench.host, *KEYS[:2])
    bench.lender.lend(0, 1, KEYS[:2], 1.0)
    if how == "forget":
        bench.host.forget(KEYS[1:2])
    else:
        bench.host.reset()
    assert not bench.lender.take_back(0, 1) and bench.leases() == 0
    assert bench.metrics.snapshot()["kvbm_peer_lent_blocks_total"] == 0


def test_leases_that_the_chain_has_ended_were_not_held() -> None:
    bench = Bench()
    bench.put(bench.host, KEYS[0])
    bench.lender.lend(0, 1, KEYS[:1], 1.0)
    bench.clock.advance(2.0)
    assert bench.chain.mind([]) == 1
    assert not bench.lender.take_back(0, 1)


def test_so_many_loans_at_once_and_one_of_a_number() -> None:
    bench = Bench()
    bench.put(bench.host, KEYS[0])
    for number in range(MAX_LOANS):
        assert not bench.lender.lend(number % 4, number, KEYS[:1], 1.0).is_refused
    assert bench.lender.lend(0, MAX_LOANS, KEYS[:1], 1.0).is_refused
    assert bench.lender.take_back(1, 1)
    assert bench.lender.lend(0, 0, KEYS[:1], 1.0).is_refused  # its number is in use
    assert bench.lender.lend(0, 5000, KEYS[:1], 0.0).is_refused
    assert not bench.lender.lend(0, MAX_LOANS, KEYS[:1], 1.0).is_refused
    bench.clock.advance(2.0)
    bench.lender.expire()
    assert bench.leases() == 0


@pytest.mark.shows("KVBM_PEER_EXPORT_GB")
def test_copies_are_bounded_for_all_and_for_each() -> None:
    copies = Copies(100, 1600)  # 16 of them, 4 for each
    assert [copies.take(b"a", 3), copies.take(b"a", 3), copies.take(b"a", 1)] == [3, 1, 0]
    assert [copies.take(asker, 100) for asker in (b"b", b"c", b"d", b"e")] == [4, 4, 4, 0]
    assert copies.taken_blocks == 16

    class Sent:
        done = False

    tracker, memory = Sent(), copies.memory()
    copies.sent(b"a", memory, tracker)
    copies.unused(b"a", 3)
    assert copies.taken_blocks == 13 and copies.take(b"e", 4) == 3 and not copies.take(b"e", 1)
    tracker.done = True
    assert copies.take(b"e", 4) == 1 and copies.taken_blocks == 16
    assert copies.memory() is memory, "memory is used again"
    for asker in (b"b", b"c", b"d", b"e"):
        copies.unused(asker, 4)
    assert copies.taken_blocks == 0
    assert Copies(100, 1).take(b"a", 2) == 1, "a block at least"
