"""A tier by key: what is wanted is looked for and brought into the host, and no answer costs a request
anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from kvbm_core.errors import IntegrityError, Outcome
from kvbm_core.policy.admission import AdmitAll
from kvbm_core.policy.frequency import FrequencyFilter
from kvbm_core.tiers.breaker import FAILURES_IN_A_ROW, FIRST_PAUSE_S, LONGEST_PAUSE_S
from kvbm_core.tiers.keyed import HOST_SHARE, KeyedOptions, KeyedTier
from kvbm_core.tiers.lower import Sought
from kvbm_core.tiers.storing import StoringOptions
from kvbm_core.tokens.runs import run_of
from kvbm_core.transfer.plan import OrderKind, TierOrder
from kvbm_core.types import BlockKey, Tier
from tests.unit.tier_bench import TierBench

KEYS = [BlockKey(number.to_bytes(32, "little")) for number in range(400)]
OPTIONS = KeyedOptions()


class Bench(TierBench[KeyedTier]):
    """``options``: as KeyedOptions."""

    def __init__(self, num_slots: int = 64, num_ranks: int = 1, **options: Any) -> None:
        super().__init__(
            lambda around: KeyedTier("store", Tier.REMOTE, AdmitAll(), around, KeyedOptions(**options)),
            num_slots,
            num_ranks,
        )

    def wanted(self, keys: Sequence[BlockKey]) -> bool:
        """As a request that has just come."""
        return self.tier.wanted([run_of(keys)]) is Sought.COMING

    def only(self, kind: OrderKind) -> TierOrder:
        """The one order since the last look, which is of this kind."""
        (order,) = self.take_sent()
        assert order.kind is kind and order.tier == "store" and order.places == ()
        return order

    def find(self, keys: Sequence[BlockKey], **answer: Any) -> TierOrder:
        """They are wanted and looked for; ``answer``: to that."""
        assert self.wanted(keys)
        order = self.only(OrderKind.FIND)
        assert not order.slots
        self.answer(order, **answer)
        return order

    def fetch(self, keys: Sequence[BlockKey]) -> TierOrder:
        """They are known, and are being brought up now."""
        assert self.wanted(keys)
        orders = self.take_sent()
        assert orders[0].kind is OrderKind.FETCH, orders
        self.finds = orders[1:]
        return orders[0]

    def here(self, keys: Sequence[BlockKey]) -> list[bool]:
        return [self.host.contains(key) for key in keys]


# ---------------------------------------------------------------- the way up


def test_it_promises_nothing() -> None:
    bench = Bench()
    bench.find(KEYS[:3])
    assert bench.tier.is_usable and bench.tier.usage == (0, 0)
    assert not bench.wanted([])


def test_what_is_there_comes_into_the_host() -> None:
    bench = Bench()
    order = bench.find(KEYS[:4])
    assert order.keys == tuple(KEYS[:4]) and bench.here(KEYS[:4]) == [False] * 4
    fetch = bench.fetch(KEYS[:4])
    assert fetch.keys == tuple(KEYS[:4]) and len(set(fetch.slots)) == 4
    assert bench.tier.fetching_blocks == 4 == bench.host.pending_blocks
    assert bench.wanted(KEYS[:4]) and not bench.sent  # on its way: neither looked for nor fetched again
    assert bench.here(KEYS[:4]) == [False] * 4  # nothing is there before it has come
    bench.answer(fetch)
    assert bench.here(KEYS[:4]) == [True] * 4
    lease = bench.host.lease("r", KEYS[:4], 1.0)
    assert lease is not None and lease.slots == fetch.slots
    bench.host.release(lease)
    values = bench.metrics.snapshot()
    assert values["kvbm_onboard_blocks_o2d"] == 4
    assert values['kvbm_tier_transfer_bytes_total{from="remote",to="host"}'] == 100
    bench.assert_idle()


def test_what_is_not_there_is_not_waited_for_and_not_looked_for_again_for_a_while() -> None:
    bench = Bench()
    bench.find(KEYS[:4], outcome=Outcome.MISS)
    for _ in range(3):
        assert not bench.wanted(KEYS[:4])
    assert not bench.sent
    bench.clock.advance(OPTIONS.absent_s)
    assert bench.find(KEYS[:4]).keys == tuple(KEYS[:4])
    bench.assert_idle()


def test_a_hole_ends_the_prefix() -> None:
    bench = Bench()
    bench.find(KEYS[:6], failed={2: Outcome.MISS})
    fetch = bench.fetch(KEYS[:6])
    assert fetch.keys == tuple(KEYS[:2])
    bench.answer(fetch)
    assert not bench.wanted(KEYS[2:6]) and not bench.sent
    assert bench.wanted(KEYS[3:6]) and bench.only(OrderKind.FETCH).keys == tuple(KEYS[3:6])


def test_a_find_looks_further_the_more_was_found() -> None:
    bench = Bench(400, first_find_blocks=8, most_find_blocks=64)
    sizes, wanted = [], KEYS[:300]
    while wanted and bench.wanted(wanted):
        for order in bench.take_sent():
            if order.kind is OrderKind.FIND:
                sizes.append(len(order.keys))
            bench.answer(order)
        wanted = [key for key in KEYS[:300] if not bench.host.contains(key)]
    assert sizes[:4] == [8, 16, 32, 64] and max(sizes) == 64 and sum(sizes) == 300
    bench.assert_idle()


def test_nothing_is_looked_for_twice() -> None:
    """Two requests with one prefix: what the first has asked for the second waits for."""
    bench = Bench()
    assert bench.wanted(KEYS[:4])
    order = bench.only(OrderKind.FIND)
    assert bench.wanted(KEYS[:12]) and not bench.sent
    bench.answer(order)
    assert bench.wanted(KEYS[:12])
    fetch, find = bench.take_sent() if bench.sent[0].kind is OrderKind.FETCH else bench.take_sent()[::-1]
    assert fetch.keys == tuple(KEYS[:4]) and find.keys == tuple(KEYS[4:12])


@pytest.mark.parametrize("outcome", [Outcome.IO_ERROR, Outcome.TIMED_OUT, Outcome.BUSY, Outcome.REJECTED])
def test_what_could_not_be_answered_is_asked_for_again_soon(outcome: Outcome) -> None:
    bench = Bench()
    bench.find(KEYS[:2], outcome=outcome)
    assert not bench.wanted(KEYS[:2]) and not bench.sent
    bench.clock.advance(OPTIONS.trouble_s)
    bench.find(KEYS[:2])
    bench.answer(bench.fetch(KEYS[:2]))
    assert bench.here(KEYS[:2]) == [True] * 2


def test_an_answer_is_believed_for_a_while() -> None:
    bench = Bench()
    bench.find(KEYS[:2])
    bench.clock.advance(OPTIONS.present_s)
    bench.find(KEYS[:2])  # looked for anew, not fetched
    assert bench.fetch(KEYS[:2]).keys == tuple(KEYS[:2])


def test_only_so_many_answers_are_remembered_and_the_newest_are_kept() -> None:
    bench = Bench(max_known=4, first_find_blocks=3)
    for start in (0, 3, 0, 6):  # 0..2 are answered anew
        bench.clock.advance(OPTIONS.absent_s)
        bench.find(KEYS[start : start + 3], outcome=Outcome.MISS)
    assert (
        len(bench.tier._known) == 4
        and (KEYS[2], 1) in bench.tier._known
        and (KEYS[3], 1) not in bench.tier._known
    )


@pytest.mark.parametrize(
    ("outcome", "until_asked_again_s"),
    [
        (Outcome.MISS, OPTIONS.absent_s),
        (Outcome.CORRUPT, OPTIONS.absent_s),
        (Outcome.INCOMPATIBLE, OPTIONS.absent_s),
        (Outcome.IO_ERROR, OPTIONS.trouble_s),
        (Outcome.TIMED_OUT, OPTIONS.trouble_s),
    ],
)
def test_of_a_fetch_that_failed_in_part_the_rest_stays(outcome: Outcome, until_asked_again_s: float) -> None:
    bench = Bench()
    bench.find(KEYS[:4])
    bench.answer(bench.fetch(KEYS[:4]), failed={1: outcome})
    assert bench.here(KEYS[:4]) == [True, False, True, True] and bench.host.pending_blocks == 0
    assert not bench.wanted(KEYS[1:2]) and not bench.sent
    bench.clock.advance(until_asked_again_s - 0.1)
    assert not bench.wanted(KEYS[1:2])
    bench.clock.advance(0.1)
    bench.find(KEYS[1:2])
    values = bench.metrics.snapshot()
    assert values["kvbm_onboard_blocks_o2d"] == 3
    bench.assert_idle()


def test_a_fetch_that_failed_leaves_nothing() -> None:
    bench = Bench()
    bench.find(KEYS[:4])
    bench.answer(bench.fetch(KEYS[:4]), Outcome.IO_ERROR)
    assert bench.here(KEYS[:4]) == [False] * 4 and bench.metrics.snapshot()["kvbm_onboard_blocks_o2d"] == 0
    bench.assert_idle()


def test_a_late_fetch_keeps_its_slots_until_nobody_writes_them() -> None:
    bench = Bench(num_slots=4)
    bench.find(KEYS[:1])
    fetch = bench.fetch(KEYS[:1])
    bench.answer(fetch, Outcome.TIMED_OUT, is_late=True)
    assert bench.host.pending_blocks == 1 and bench.tier.fetching_blocks == 1
    bench.in_host(KEYS[10:14])  # all that is free
    assert bench.host.resident_blocks == 3 and bench.host.pending_blocks == 1
    bench.answer(fetch, Outcome.TIMED_OUT)
    assert bench.host.pending_blocks == 0 and not bench.here(KEYS[:1])[0]
    bench.assert_idle()


def test_what_was_brought_counts_for_who_loads_it_first() -> None:
    bench = Bench()
    bench.find(KEYS[:4])
    bench.answer(bench.fetch(KEYS[:4]), failed={})
    bench.in_host(KEYS[10:12])
    assert bench.tier.brought([*KEYS[:2], *KEYS[10:12]]) == 2
    assert bench.tier.brought(KEYS[:4]) == 2 and not bench.tier.brought(KEYS[:4])
    bench.assert_idle()


def test_what_is_late_is_not_waited_for() -> None:
    bench = Bench()
    bench.find(KEYS[:4])
    fetch = bench.fetch(KEYS[:2])
    assert bench.wanted(KEYS[:4]), "the rest is fetched beside it"
    other = bench.only(OrderKind.FETCH)
    bench.answer(fetch, Outcome.TIMED_OUT, is_late=True)
    assert not bench.wanted(KEYS[:4]) and not bench.sent
    for order in (fetch, other):
        bench.answer(order)
    bench.assert_idle()


@pytest.mark.parametrize("is_late", [True, False])
def test_a_store_that_knows_its_blocks_and_gives_none_is_left_alone(is_late: bool) -> None:
    """A shared directory may answer a look-up from memory, and hang with each read."""
    bench = Bench(first_find_blocks=1)
    for i in range(FAILURES_IN_A_ROW):
        assert bench.tier.is_usable
        bench.find(KEYS[i : i + 1])
        bench.answer(bench.fetch(KEYS[i : i + 1]), Outcome.TIMED_OUT, is_late=is_late)
    assert not bench.tier.is_usable


@pytest.mark.parametrize("kind", [OrderKind.FIND, OrderKind.FETCH])
def test_a_store_that_takes_everything_and_gives_nothing_is_left_alone(kind: OrderKind) -> None:
    bench = Bench(first_find_blocks=1)
    bench.in_host(KEYS[100:120])

    def store(number: int) -> None:
        bench.offer(KEYS[100 + number : 101 + number])
        bench.answer(bench.only(OrderKind.STORE))

    def read(number: int) -> None:
        if kind is OrderKind.FIND:
            bench.find(KEYS[number : number + 1], outcome=Outcome.TIMED_OUT)
        else:
            bench.find(KEYS[number : number + 1])
            bench.answer(bench.fetch(KEYS[number : number + 1]), Outcome.TIMED_OUT)

    for i in range(FAILURES_IN_A_ROW):
        assert bench.tier.is_usable
        read(i)
        if i < FAILURES_IN_A_ROW - 1:
            store(i)
    assert not bench.tier.is_usable
    bench.clock.advance(FIRST_PAUSE_S)
    store(10)  # a trial that proves nothing: one more read fails, and the next pause is longer
    read(10)
    bench.clock.advance(2 * FIRST_PAUSE_S - 1.0)
    assert not bench.tier.is_usable


def test_a_fetch_that_works_ends_the_count_of_failures() -> None:
    bench = Bench(first_find_blocks=1)
    for i in range(2 * FAILURES_IN_A_ROW):
        bench.find(KEYS[i : i + 1])
        bench.answer(bench.fetch(KEYS[i : i + 1]), Outcome.OK if i % 2 else Outcome.TIMED_OUT)
    assert bench.tier.is_usable


def test_a_block_is_there_if_every_rank_has_it() -> None:
    bench = Bench(num_ranks=2)
    assert bench.wanted(KEYS[:4])
    order = bench.only(OrderKind.FIND)
    bench.answer(order, failed={3: Outcome.MISS}, ranks=[0])
    assert bench.wanted(KEYS[:4]) and not bench.sent
    bench.answer(order, failed={2: Outcome.MISS}, ranks=[1])
    fetch = bench.fetch(KEYS[:4])
    assert fetch.keys == tuple(KEYS[:2])
    bench.answer(fetch, ranks=[0])
    assert bench.here(KEYS[:2]) == [False, False]
    bench.answer(fetch, failed={0: Outcome.MISS}, ranks=[1])
    assert bench.here(KEYS[:2]) == [False, True]
    bench.assert_idle()


def test_trouble_on_one_rank_is_no_answer_though_another_has_one() -> None:
    """It must not be taken for a MISS, for long, nor for a store that works."""
    bench = Bench(num_ranks=2, first_find_blocks=1)
    for i in range(FAILURES_IN_A_ROW):
        assert bench.tier.is_usable and bench.wanted(KEYS[i : i + 1])
        order = bench.only(OrderKind.FIND)
        bench.answer(order, Outcome.MISS, ranks=[0])
        bench.answer(order, Outcome.TIMED_OUT, ranks=[1])
    assert not bench.tier.is_usable


def test_only_ranks_that_store_are_waited_for() -> None:
    bench = Bench(num_ranks=3)
    bench.tier.expect(0, [0])
    bench.find(KEYS[:2], ranks=[0])
    bench.answer(bench.fetch(KEYS[:2]), ranks=[0])
    assert bench.here(KEYS[:2]) == [True, True]
    bench.assert_idle()


# ---------------------------------------------------------------- bounds


def test_only_a_part_of_the_host_is_fetched_into_at_once() -> None:
    bench = Bench(num_slots=HOST_SHARE * 4, first_find_blocks=20)
    bench.find(KEYS[:20])
    fetch = bench.fetch(KEYS[:20])
    assert len(fetch.keys) == 4
    assert bench.wanted(KEYS[:20]) and not bench.sent
    assert not bench.wanted(KEYS[10:20]) and not bench.sent, "there is no room: nobody waits for it"
    bench.answer(fetch)
    assert bench.fetch(KEYS[4:20]).keys == tuple(KEYS[4:8])


def test_no_more_than_the_option_says_is_fetched_at_once() -> None:
    bench = Bench(num_slots=400, max_fetching_blocks=3)
    bench.find(KEYS[:8])
    assert len(bench.fetch(KEYS[:8]).keys) == 3


def test_nothing_is_fetched_into_a_host_that_has_no_room() -> None:
    bench = Bench(num_slots=4)
    bench.in_host(KEYS[100:104])
    lease = bench.host.lease("r", KEYS[100:104], 1.0)
    assert lease is not None
    bench.find(KEYS[:4])
    assert not bench.wanted(KEYS[:4]) and not bench.sent
    bench.host.release(lease)
    assert bench.fetch(KEYS[:4]).keys == tuple(KEYS[:1])
    assert bench.host.evicted_blocks_total == 1


def test_what_another_tier_brings_up_is_not_fetched_too() -> None:
    bench = Bench()
    bench.find(KEYS[:4])
    elsewhere = bench.host.reserve(KEYS[:2], frozenset)
    assert bench.fetch(KEYS[:4]).keys == tuple(KEYS[2:4])
    bench.host.commit(elsewhere)
    bench.check()


# ---------------------------------------------------------------- the way down


def test_new_blocks_are_stored_once() -> None:
    bench = Bench()
    bench.in_host(KEYS[:3])
    bench.offer(KEYS[:3])
    order = bench.only(OrderKind.STORE)
    assert order.keys == tuple(KEYS[:3]) and bench.tier.storing_blocks == 3
    bench.offer(KEYS[:3])  # on their way
    bench.hit(KEYS[:3])
    assert not bench.sent
    bench.answer(order, failed={1: Outcome.NO_SPACE})
    bench.hit(KEYS[:3])
    again = bench.only(OrderKind.STORE)
    assert again.keys == (KEYS[1],)
    bench.answer(again)
    bench.hit(KEYS[:3])
    assert not bench.sent
    assert bench.metrics.snapshot()["kvbm_offload_blocks_d2o"] == 3
    bench.assert_idle()


def test_what_was_found_or_fetched_there_is_not_stored_again() -> None:
    bench = Bench()
    bench.find(KEYS[:4], failed={3: Outcome.MISS})
    bench.in_host([KEYS[0], KEYS[3]])
    bench.answer(bench.fetch(KEYS[1:3]))
    bench.offer(KEYS[:4])
    order = bench.only(OrderKind.STORE)
    assert order.keys == (KEYS[3],)
    bench.answer(order)
    bench.host.forget(KEYS[:4])
    assert bench.fetch(KEYS[:4]).keys == tuple(KEYS[:4])  # what was stored is known to be there


def hits(bench: Bench, keys: Sequence[BlockKey], every_s: float, times: int) -> list[TierOrder]:
    """What hits at such intervals lead to; the store has everything."""
    orders = list[TierOrder]()
    for _ in range(times):
        bench.clock.advance(every_s)
        bench.hit(keys)
        for order in bench.take_sent():
            orders.append(order)
            bench.answer(order)
    return orders


@pytest.mark.parametrize("is_found", [False, True])
def test_what_is_hit_for_hours_in_the_host_is_stored_once_and_one_block_of_it_looked_for(
    is_found: bool,
) -> None:
    bench = Bench()
    if is_found:
        bench.find(KEYS[:8])
        bench.answer(bench.fetch(KEYS[:8]))
    else:
        bench.in_host(KEYS[:8])
        bench.offer(KEYS[:8])
        bench.answer(bench.only(OrderKind.STORE))
    every_s = OPTIONS.present_s + 1.0
    orders = hits(bench, KEYS[:8], every_s, 50)
    assert [(order.kind, order.keys) for order in orders] == [(OrderKind.FIND, (KEYS[7],))] * 50
    assert not hits(bench, KEYS[:8], OPTIONS.present_s / 2, 1)
    orders = hits(bench, KEYS[:8], OPTIONS.kept_s, 1)
    assert [order.kind for order in orders] == [OrderKind.STORE], "what a store has removed stays away"
    bench.assert_idle()


def test_what_a_store_has_lost_while_the_host_had_it_is_stored_anew() -> None:
    bench = Bench()
    bench.in_host(KEYS[:8])
    bench.offer(KEYS[:6])
    bench.answer(bench.only(OrderKind.STORE))
    bench.clock.advance(OPTIONS.present_s)
    bench.offer(KEYS[6:8])
    bench.answer(bench.only(OrderKind.STORE))
    bench.clock.advance(1.0)
    bench.hit(KEYS[:6])
    order = bench.only(OrderKind.FIND)
    bench.hit(KEYS[:6])  # while it is being looked for
    assert not bench.sent
    bench.answer(order, failed={0: Outcome.MISS})
    bench.hit(KEYS[:8])
    order = bench.only(OrderKind.STORE)
    assert order.keys == tuple(KEYS[:6]), "what was seen there just now is there"
    bench.answer(order)
    bench.assert_idle()


def test_a_look_up_without_an_answer_does_not_make_it_be_stored_again() -> None:
    bench = Bench()
    bench.in_host(KEYS[:4])
    bench.offer(KEYS[:4])
    bench.answer(bench.only(OrderKind.STORE))
    bench.clock.advance(OPTIONS.present_s)
    bench.hit(KEYS[:4])
    bench.answer(bench.only(OrderKind.FIND), Outcome.TIMED_OUT)
    bench.hit(KEYS[:4])
    assert not bench.sent
    bench.clock.advance(OPTIONS.trouble_s)
    bench.hit(KEYS[:4])
    assert bench.only(OrderKind.FIND).keys == (KEYS[3],)


def test_a_slot_that_is_being_stored_is_not_given_away() -> None:
    bench = Bench(num_slots=2)
    bench.in_host(KEYS[:2])
    bench.offer(KEYS[:2])
    order = bench.only(OrderKind.STORE)
    for _ in range(5):
        bench.clock.advance(20.0)
        bench.tier.mind()
        bench.host.expire_leases()
    assert bench.host.reserve(KEYS[5:6], frozenset).keys == ()
    bench.answer(order)
    assert bench.host.live_leases == 0


def test_the_filter_of_a_store_is_its_own() -> None:
    bench = TierBench(
        lambda around: KeyedTier("store", Tier.REMOTE, FrequencyFilter(around.clock), around, KeyedOptions())
    )
    bench.in_host(KEYS[:2])
    bench.offer(KEYS[:2])
    assert not bench.sent
    bench.hit(KEYS[:1])
    assert [order.keys for order in bench.sent] == [(KEYS[0],)]


def test_what_waits_for_the_store_is_bounded() -> None:
    bench = Bench(storing=StoringOptions(max_storing_blocks=4, max_waiting_blocks=10))
    bench.in_host(KEYS[:20])
    bench.offer(KEYS[:20])
    assert bench.tier.storing_blocks == 10 and len(bench.only(OrderKind.STORE).keys) == 4
    assert bench.metrics.snapshot()['kvbm_dropped_blocks_total{reason="queue_full"}'] == 10


# ---------------------------------------------------------------- trouble and ends


def test_a_store_that_fails_is_left_alone_for_a_while() -> None:
    bench = Bench(first_find_blocks=1)
    bench.in_host(KEYS[100:102])
    for i in range(FAILURES_IN_A_ROW):
        bench.find(KEYS[i : i + 1], outcome=Outcome.IO_ERROR)
    assert not bench.tier.is_usable
    assert not bench.wanted(KEYS[5:6])
    bench.offer(KEYS[100:102])
    assert not bench.sent
    bench.clock.advance(FIRST_PAUSE_S)
    bench.find(KEYS[5:6])
    bench.offer(KEYS[100:102])
    assert bench.take_sent()[0].kind is OrderKind.STORE and bench.tier.is_usable


@pytest.mark.parametrize(("outcome", "num_lines"), [(Outcome.TIMED_OUT, 2), (Outcome.IO_ERROR, 0)])
def test_what_a_store_cannot_say_itself_is_said_once_however_long_it_lasts(
    outcome: Outcome, num_lines: int, caplog: pytest.LogCaptureFixture
) -> None:
    bench = Bench(first_find_blocks=1)
    for i in range(FAILURES_IN_A_ROW + 20):
        bench.clock.advance(LONGEST_PAUSE_S)
        bench.find(KEYS[i : i + 1], outcome=outcome)
    bench.clock.advance(LONGEST_PAUSE_S)
    for key in KEYS[50:52]:
        bench.find([key])
    store = "kvbm: the shared store (KVBM_REMOTE_URL)"
    lines = [
        f"{store} fails (timed_out): it is left alone for a while, and then tried again",
        f"{store} works again",
    ]
    assert caplog.messages == lines[:num_lines]


@pytest.mark.parametrize("outcome", [Outcome.MISS, Outcome.CORRUPT, Outcome.REJECTED, Outcome.BUSY])
def test_a_store_that_answers_does_not_fail(outcome: Outcome) -> None:
    bench = Bench(first_find_blocks=1)
    for i in range(FAILURES_IN_A_ROW + 2):
        bench.find(KEYS[i : i + 1], outcome=outcome)
    assert bench.tier.is_usable


def test_one_that_is_off_is_not_asked() -> None:
    bench = Bench()
    bench.find(KEYS[:2])
    bench.tier.turn_off("no such folder")
    assert not bench.wanted(KEYS[:2]) and not bench.tier.is_usable
    bench.in_host(KEYS[4:5])
    bench.offer(KEYS[4:5])
    assert not bench.sent


def test_a_reset_while_fetching_keeps_nothing_of_it_and_the_store_keeps_all() -> None:
    bench = Bench()
    bench.find(KEYS[:4])
    fetch = bench.fetch(KEYS[:4])
    bench.in_host(KEYS[10:12])
    bench.offer(KEYS[10:12])
    store = bench.only(OrderKind.STORE)
    bench.host.reset()
    bench.tier.reset()
    assert not bench.sent  # nobody is told to forget: others use the store too
    bench.answer(fetch)
    bench.answer(store)
    assert bench.here(KEYS[:4]) == [False] * 4 and bench.host.resident_blocks == 0
    values = bench.metrics.snapshot()
    assert values["kvbm_onboard_blocks_o2d"] == 0
    assert values['kvbm_dropped_blocks_total{reason="reset"}'] == 4
    bench.answer(bench.fetch(KEYS[:4]))
    assert bench.here(KEYS[:4]) == [True] * 4
    bench.assert_idle()


def test_a_reset_while_looking_for_blocks_and_what_waits_is_not_stored() -> None:
    bench = Bench(storing=StoringOptions(max_storing_blocks=1))
    bench.in_host(KEYS[10:12])
    bench.offer(KEYS[10:12])
    store = bench.only(OrderKind.STORE)
    assert bench.wanted(KEYS[:4])
    find = bench.only(OrderKind.FIND)
    bench.tier.reset()
    bench.answer(find)
    bench.answer(store)
    assert not bench.sent and bench.tier.storing_blocks == 0
    bench.assert_idle()


def test_integrity_notices_what_is_fetched_or_stored_by_no_order() -> None:
    bench = Bench()
    bench.tier._storing.add((KEYS[0], 1))
    with pytest.raises(IntegrityError):
        bench.tier.check_integrity()
    bench = Bench()
    bench.find(KEYS[:2])
    bench.fetch(KEYS[:2])
    bench.tier.check_integrity()
    del bench.tier._fetching[KEYS[0]]
    with pytest.raises(IntegrityError):
        bench.tier.check_integrity()
