"""Peers in the leader's books: who is asked, who is left alone, and how much comes at once."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import pytest

from kvbm_core.errors import Outcome
from kvbm_core.peers.tier import FIRST_PAUSE_S, LONGEST_PAUSE_S, MAX_SOURCES, PeerTier, peer_tier
from kvbm_core.tiers.keyed import HOST_SHARE, KeyedOptions
from kvbm_core.tiers.lower import Seeker, Sought
from kvbm_core.tokens.runs import run_of
from kvbm_core.transfer.plan import OrderKind, TierOrder
from kvbm_core.types import BlockKey
from tests.effort import tries
from tests.unit.tier_bench import TierBench

KEYS = [BlockKey(number.to_bytes(32, "little")) for number in range(400)]
ONE, OTHER = "tcp://10.0.0.1:5000", "tcp://10.0.0.2:5000"


class Bench(TierBench[PeerTier]):
    def __init__(self, num_slots: int = 64, num_ranks: int = 1) -> None:
        super().__init__(
            lambda around: PeerTier(around, KeyedOptions(always_loads=True)), num_slots, num_ranks
        )

    def wanted(self, keys: Sequence[BlockKey], source: str = ONE) -> Sought:
        return self.tier.wanted([run_of(keys)], Seeker(source=source))

    def only(self) -> TierOrder:
        (order,) = self.take_sent()
        return order


def test_without_a_hint_nobody_is_asked() -> None:
    bench = Bench()
    assert bench.wanted(KEYS[:4], "") is Sought.NOWHERE
    assert bench.tier.wanted([run_of(KEYS[:4])]) is Sought.NOWHERE and not bench.sent
    bench.assert_idle()


def test_who_is_hinted_at_is_asked_and_what_it_has_comes() -> None:
    bench = Bench(num_ranks=2)
    bench.tier.expect(0, range(2))
    assert bench.wanted(KEYS[:4]) is Sought.COMING
    find = bench.only()
    assert (find.kind, find.source, find.tier) == (OrderKind.FIND, ONE, "peers")
    bench.answer(find, failed={3: Outcome.MISS})
    assert bench.wanted(KEYS[:4]) is Sought.COMING
    fetch = bench.only()
    assert (fetch.kind, fetch.source, fetch.keys) == (OrderKind.FETCH, ONE, tuple(KEYS[:3]))
    assert bench.tier.fetching_blocks == 3
    bench.answer(fetch)
    assert bench.host.match_prefix(KEYS[:4]) == 3
    assert bench.tier.brought(KEYS[:4]) == 3 and bench.tier.brought(KEYS[:4]) == 0
    assert bench.metrics.snapshot()["kvbm_peer_fetched_blocks_total"] == 3
    bench.assert_idle()


def test_nothing_is_stored_there() -> None:
    bench = Bench()
    bench.in_host(KEYS[:4])
    bench.wanted(KEYS[4:5])
    bench.take_sent()
    bench.offer(KEYS[:4])
    bench.hit(KEYS[:4])
    bench.tier.ended([run_of(KEYS[:4])])
    assert not bench.sent and bench.tier.storing_blocks == 0 and bench.tier.usage == (0, 0)


def test_what_one_does_not_have_another_is_asked_for() -> None:
    bench = Bench()
    bench.wanted(KEYS[:2])
    bench.answer(bench.only(), Outcome.MISS)
    assert bench.wanted(KEYS[:2]) is Sought.NOWHERE and not bench.sent
    assert bench.wanted(KEYS[:2], OTHER) is Sought.COMING
    assert bench.only().source == OTHER


@pytest.mark.parametrize("outcome", [Outcome.TIMED_OUT, Outcome.IO_ERROR])
def test_one_that_does_not_answer_is_left_alone_and_the_others_are_not(
    outcome: Outcome, caplog: pytest.LogCaptureFixture
) -> None:
    bench, pause_s = Bench(), FIRST_PAUSE_S
    while pause_s <= LONGEST_PAUSE_S:
        assert bench.wanted(KEYS[:2]) is Sought.COMING
        bench.answer(bench.only(), outcome)
        bench.clock.advance(pause_s - 0.1)
        assert bench.wanted(KEYS[:2]) is Sought.NOWHERE and not bench.sent
        other = f"tcp://10.0.1.{int(pause_s) % 250}:5000"
        assert bench.wanted(KEYS[:2], other) is Sought.COMING
        bench.answer(bench.only(), Outcome.MISS)
        bench.clock.advance(0.2)
        pause_s *= 2
    assert bench.wanted(KEYS[2:3]) is Sought.COMING
    bench.answer(bench.only(), Outcome.MISS)  # it lives
    assert bench.wanted(KEYS[3:4]) is Sought.COMING
    bench.answer(bench.only(), outcome)
    bench.clock.advance(FIRST_PAUSE_S + 0.1)
    assert bench.wanted(KEYS[4:5]) is Sought.COMING, "its pause has become short again"
    assert sum(ONE in record.getMessage() for record in caplog.records) >= 1


def test_busy_is_no_reason_to_leave_it_alone() -> None:
    bench = Bench()
    bench.wanted(KEYS[:2])
    bench.answer(bench.only())
    assert bench.wanted(KEYS[:2]) is Sought.COMING
    bench.answer(bench.only(), Outcome.BUSY)
    assert bench.wanted(KEYS[2:3]) is Sought.COMING and bench.only().kind is OrderKind.FIND


def test_all_peers_together_fill_no_more_of_the_host_than_one_store() -> None:
    bench, fetches = Bench(num_slots=8 * HOST_SHARE), list[TierOrder]()
    for number, source in enumerate((ONE, OTHER, "tcp://10.0.0.3:1")):
        keys = KEYS[number * 6 : number * 6 + 6]
        bench.wanted(keys, source)
        bench.answer(bench.only())
        bench.wanted(keys, source)
        fetches += bench.take_sent()
    assert [len(order.keys) for order in fetches] == [6, 2] and bench.tier.fetching_blocks == 8


def test_of_many_that_are_hinted_at_so_many_are_known() -> None:
    bench = Bench()
    for number in range(3 * MAX_SOURCES):
        source = f"tcp://10.1.0.{number}:5000"
        assert bench.wanted(KEYS[:1], source) is Sought.COMING
        bench.answer(bench.only(), Outcome.IO_ERROR)
    assert len(bench.tier._sources) == MAX_SOURCES
    bench = Bench()
    for number in range(MAX_SOURCES):
        bench.wanted(KEYS[:1], f"tcp://10.1.0.{number}:5000")
    assert bench.wanted(KEYS[:1], ONE) is Sought.NOWHERE  # all of them are being asked
    assert len(bench.take_sent()) == MAX_SOURCES


def test_after_a_reset_a_peer_is_asked_anew() -> None:
    bench = Bench()
    bench.wanted(KEYS[:1])
    bench.answer(bench.only(), Outcome.MISS)
    assert bench.wanted(KEYS[:1]) is Sought.NOWHERE and not bench.sent
    bench.tier.reset()
    assert bench.wanted(KEYS[:1]) is Sought.COMING and bench.only().kind is OrderKind.FIND


def test_a_tier_that_is_off_asks_nobody() -> None:
    bench = Bench()
    bench.tier.turn_off("its port is taken")
    assert bench.wanted(KEYS[:1]) is Sought.NOWHERE and not bench.sent
    assert callable(peer_tier())


def test_random_walks_leave_the_books_in_order(seed: int) -> None:
    """Several peers are hinted at for blocks in common; orders end in any order, in any way."""
    random = Random(seed)
    for _ in range(tries(20, nightly=100)):
        bench, open_orders = Bench(num_slots=random.choice((8, 40, 200)), num_ranks=2), list[TierOrder]()
        bench.tier.expect(0, range(2))
        for _ in range(60):
            action = random.random()
            if action < 0.5:
                first = random.randrange(60)
                source = f"tcp://10.0.0.{random.randrange(4)}:5000"
                bench.wanted(KEYS[first : first + random.randint(1, 30)], source)
                open_orders += bench.take_sent()
            elif action < 0.8 and open_orders:
                _end_one(bench, open_orders, random)
            elif action < 0.9:
                bench.clock.advance(random.choice((0.5, 20.0, 100.0)))
            elif action < 0.95:
                bench.host.forget(random.sample(KEYS[:90], 10))
            else:
                bench.host.reset()
                bench.tier.reset()
            bench.check()
            assert bench.tier.fetching_blocks <= bench.host.capacity_blocks // 2
        while open_orders:
            _end_one(bench, open_orders, random)
        bench.assert_idle()


def _end_one(bench: Bench, orders: list[TierOrder], random: Random) -> None:
    order = orders.pop(random.randrange(len(orders)))
    outcome = random.choice((Outcome.OK, Outcome.OK, Outcome.MISS, Outcome.TIMED_OUT, Outcome.BUSY))
    some = {i: Outcome.MISS for i in range(len(order.keys)) if random.random() < 0.2}
    bench.answer(order, outcome, failed=some if outcome is Outcome.OK else None)
