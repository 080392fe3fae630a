"""The leader over stores by key: a request waits a little for what comes, and never for what may not come."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest

from kvbm_core.control.messages import Order, Verb
from kvbm_core.errors import Outcome
from kvbm_core.policy.admission import AdmitAll
from kvbm_core.runtime import onboard as onboard_module
from kvbm_core.runtime.handshake import RankReplaced
from kvbm_core.runtime.leader_options import LeaderOptions
from kvbm_core.testing.leader_bench import ONE_GROUP, BenchDisk, LeaderBench
from kvbm_core.tiers import chain as chain_module
from kvbm_core.tiers.chain import ERRAND_S, MOST_ERRANDS
from kvbm_core.tiers.groups import GroupSpec
from kvbm_core.tiers.keyed import KeyedOptions, KeyedTier, keyed_tier
from kvbm_core.tiers.lower import Seeker, Sought
from kvbm_core.tokens.runs import BlockRun
from kvbm_core.transfer.plan import JobResult, OrderKind, TierOrder
from kvbm_core.types import BlockKey, Tier
from tests.unit.disk_bench import OTHER, PROMPT, TABLE, leave_host, loading, stored

WAIT_S = 1.0
WINDOWED = (GroupSpec(0, 4), GroupSpec(1, 4, window_tokens=6))


class Bench(LeaderBench):
    """``has``: the keys of each store by its name, in the order of the search; the same on every rank."""

    def __init__(
        self,
        num_slots: int = 64,
        *,
        names: Iterable[str] = ("near",),
        wait_s: float = WAIT_S,
        num_disk: int = 16,
        groups: tuple[GroupSpec, ...] = ONE_GROUP,
        world_size: int = 1,
    ) -> None:
        self.has: dict[str, set[BlockKey]] = {name: set() for name in names}
        makers = tuple(
            keyed_tier(name, Tier.REMOTE, AdmitAll(), KeyedOptions(first_find_blocks=16)) for name in self.has
        )
        options = LeaderOptions(5.0, fetch_wait_s=wait_s)
        disk = BenchDisk(num_disk, more=makers)
        super().__init__(num_slots, groups=groups, world_size=world_size, options=options, disk=disk)

    def store_of(self, name: str = "near") -> KeyedTier:
        tier = self.leader.chain.named(name)
        assert isinstance(tier, KeyedTier)
        return tier

    def reply(self, *, ranks: Iterable[int] | None = None) -> list[TierOrder]:
        """Disk and stores do what was ordered; returns that."""
        orders = self.take_sent()
        for order in orders:
            self.leader.check_integrity()
            for rank in range(self.world_size) if ranks is None else ranks:
                self.leader.acknowledge(rank, [self._result(order)])
        return orders

    def _result(self, order: TierOrder) -> JobResult:
        has = self.has.get(order.tier)
        failed: list[tuple[int, Outcome]] = []
        if has is not None and order.kind is OrderKind.STORE:
            has.update(order.keys)
        elif has is not None:
            places = order.slots or range(len(order.keys))
            failed = [
                (place, Outcome.MISS) for place, key in zip(places, order.keys, strict=True) if key not in has
            ]
        outcome = failed[0][1] if failed else Outcome.OK
        return JobResult(order.job_id, outcome, 100, 0.5, 0.25, failed=tuple(failed))


def in_store(bench: Bench, blocks: Iterable[int], name: str = "near") -> None:
    """Somebody else has put these blocks of PROMPT there."""
    keys = bench.keys(PROMPT)
    bench.has[name].update(keys[block] for block in blocks)


def test_a_request_waits_for_what_comes_and_gets_it_from_the_host() -> None:
    bench = Bench()
    in_store(bench, range(5))
    state = bench.open()
    assert bench.match(state, PROMPT) is None
    assert [order.kind for order in bench.reply()] == [OrderKind.FIND]
    assert bench.match(state, PROMPT) is None
    (fetch,) = bench.reply()
    assert fetch.kind is OrderKind.FETCH and fetch.keys == tuple(bench.keys(PROMPT)[:4])
    assert bench.match(state, PROMPT) == 16 and not bench.sent
    plan = bench.leader.onboard(state, 16, TABLE)
    assert plan is not None and plan.reads == ()
    bench.answer(plan)
    bench.leader.finish(state)
    assert bench.metric("kvbm_onboard_blocks_o2d") == 4 and bench.metric("kvbm_onboard_blocks_h2d") == 4
    bench.reply()
    bench.assert_idle()


def kinds_of(bench: Bench) -> list[OrderKind]:
    """What stores are told until they have nothing more to do; nobody asks."""
    kinds = list[OrderKind]()
    while orders := bench.reply():
        kinds += (order.kind for order in orders)
    return kinds


def once(bench: Bench, tokens: list[int] = PROMPT) -> int | None:
    """What a request is told that asks once, and goes."""
    state = bench.open()
    matched = bench.match(state, tokens)
    bench.leader.finish(state)
    return matched


def test_who_asks_once_has_it_brought_up_for_the_next_one() -> None:
    bench = Bench(wait_s=0.0)
    in_store(bench, range(5))
    assert once(bench) == 0
    assert kinds_of(bench) == [OrderKind.FIND, OrderKind.FETCH]
    assert once(bench) == 16
    assert kinds_of(bench) == []
    bench.assert_idle()


def test_of_a_long_prompt_all_is_brought_up_for_who_asks_once() -> None:
    bench, prompt = Bench(num_slots=400, wait_s=0.0), list(range(1000, 1000 + 4 * 200))
    bench.has["near"].update(bench.keys(prompt))
    assert once(bench, prompt) == 0
    assert kinds_of(bench).count(OrderKind.FETCH) > 4
    assert once(bench, prompt) == 4 * 199
    bench.assert_idle()


def test_who_asks_again_has_nothing_brought_up_that_it_does_not_ask_for() -> None:
    bench = Bench()
    in_store(bench, range(5))
    state = bench.open()
    assert bench.match(state, PROMPT) is None
    assert kinds_of(bench) == [OrderKind.FIND]
    bench.leader.finish(state)
    bench.assert_idle()


def test_who_asks_once_for_what_is_nowhere_costs_one_look_up_of_each_store() -> None:
    bench = Bench(wait_s=0.0, names=("near", "far"))
    assert once(bench) == 0
    assert kinds_of(bench) == [OrderKind.FIND, OrderKind.FIND]
    bench.assert_idle()


def test_at_one_piece_of_news_a_bounded_number_of_blocks_is_looked_through(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    num_blocks, most = 10, 25
    monkeypatch.setattr(chain_module, "ERRAND_BLOCKS", most)
    bench = Bench(num_slots=1000, wait_s=0.0)
    chain, looked = bench.leader.chain, list[int]()
    seek, go_on = chain.sought, bench.store_of().on_news

    def sought(runs: Sequence[BlockRun], seeker: Seeker | None = None) -> Sought:
        found = seek(runs, seeker)
        if found is Sought.COMING:
            looked[-1] += sum(run.end - run.first for run in runs)
        return found

    def news() -> None:
        looked.append(0)
        go_on()

    prompts = [[1000 * p + i for i in range(4 * num_blocks + 1)] for p in range(1, MOST_ERRANDS + 1)]
    for prompt in prompts:
        bench.has["near"].update(bench.keys(prompt))
        assert once(bench, prompt) == 0
    monkeypatch.setattr(chain, "sought", sought)
    monkeypatch.setattr(bench.store_of(), "on_news", news)
    kinds_of(bench)
    monkeypatch.undo()
    assert num_blocks <= max(looked) < most + num_blocks
    assert [once(bench, prompt) for prompt in prompts] == [4 * num_blocks] * MOST_ERRANDS
    bench.assert_idle()


def test_while_an_operator_has_it_drained_nothing_more_is_brought_up() -> None:
    bench = Bench(wait_s=0.0)
    in_store(bench, range(5))
    assert once(bench) == 0
    end = bench.desk.submit(Order(verb=Verb.DRAIN))
    bench.leader.poll()
    assert end.done()
    assert kinds_of(bench) == [OrderKind.FIND]
    bench.desk.submit(Order(verb=Verb.RESUME))
    bench.leader.poll()
    assert once(bench) == 0
    assert kinds_of(bench) == [OrderKind.FETCH]
    bench.assert_idle()


def test_nothing_is_brought_up_that_was_reset_or_that_took_too_long() -> None:
    for spoil in (
        lambda bench: bench.leader.chain.reset({Tier.HOST}),
        lambda bench: bench.clock.advance(ERRAND_S),
    ):
        bench = Bench(wait_s=0.0)
        in_store(bench, range(5))
        assert once(bench) == 0
        spoil(bench)
        assert kinds_of(bench) == [OrderKind.FIND]
        bench.assert_idle()


def test_prompts_that_are_brought_up_at_once_are_bounded_and_the_newest_count() -> None:
    bench = Bench(num_slots=400, wait_s=0.0)
    prompts = [list(range(1000 * i, 1000 * i + 8)) for i in range(1, MOST_ERRANDS + 4)]
    for prompt in prompts:
        bench.has["near"].update(bench.keys(prompt))
        assert once(bench, prompt) == 0
    assert kinds_of(bench).count(OrderKind.FETCH) == MOST_ERRANDS
    assert once(bench, prompts[-1]) == 4
    kinds_of(bench)
    bench.assert_idle()


def test_nothing_is_held_while_a_request_waits() -> None:
    bench = Bench()
    bench.store(PROMPT[:9])
    bench.reply()
    in_store(bench, range(5))
    state = bench.open()
    assert bench.match(state, PROMPT) is None and bench.leader.chain.live_leases == 0
    bench.leader.finish(state)
    bench.reply()
    bench.assert_idle()


@pytest.fixture
def searches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows with each search for a prefix that can be held."""
    found, search = list[int](), onboard_module.longest_prefix_tokens

    def counted(*args: Any) -> int:
        found.append(search(*args))
        return found[-1]

    monkeypatch.setattr(onboard_module, "longest_prefix_tokens", counted)
    return found


def test_who_asks_again_when_nothing_has_changed_has_nothing_searched(searches: list[int]) -> None:
    bench = Bench()
    in_store(bench, range(5))
    state = bench.open()
    for _ in range(2):
        for _ in range(3):
            assert bench.match(state, PROMPT) is None
        bench.reply()
    assert bench.match(state, PROMPT) == 16 and searches == [0, 0, 16]
    bench.leader.finish(state)
    bench.assert_idle()


@pytest.mark.parametrize(
    ("change", "answer"),
    [
        (lambda bench: bench.store(PROMPT[:9], "other"), None),
        (lambda bench: bench.store(PROMPT, "other"), 16),
        (lambda bench: bench.leader.reset(), None),
        (lambda bench: bench.store_of().turn_off("no such folder"), 0),
        (lambda bench: bench.clock.advance(WAIT_S), 0),
        (lambda bench: vars(bench.leader._pace).update(_num_samples=9, _sum_s=1.0, _sum_tokens=9.0), None),
    ],
    ids=[
        "a part comes",
        "all comes",
        "a reset",
        "the store is off",
        "it waits too long",
        "the pace is known",
    ],
)
def test_who_asks_again_hears_of_each_change(
    searches: list[int], change: Callable[[Bench], object], answer: int | None
) -> None:
    bench = Bench()
    in_store(bench, range(5))
    state = bench.open()
    assert bench.match(state, PROMPT) is None and bench.match(state, PROMPT) is None
    change(bench)
    searches.clear()
    assert bench.match(state, PROMPT) == answer and searches
    bench.leader.finish(state)
    while bench.reply():
        pass
    bench.assert_idle()


def test_who_was_told_that_it_comes_hears_that_it_is_late() -> None:
    bench = Bench()
    in_store(bench, range(5))
    state = bench.open()
    assert bench.match(state, PROMPT) is None
    bench.reply()
    assert bench.match(state, PROMPT) is None and bench.match(state, PROMPT) is None
    (fetch,) = bench.take_sent()
    bench.leader.acknowledge(0, [JobResult(fetch.job_id, Outcome.TIMED_OUT, 0, 0.5, 0.25, is_late=True)])
    assert bench.match(state, PROMPT) == 0, "nobody knows when it will be over"
    bench.say(fetch.job_id)
    bench.leader.poll()
    bench.leader.finish(state)
    bench.assert_idle()


def test_no_request_waits_longer_than_it_may() -> None:
    bench = Bench()
    bench.store(PROMPT[:9])
    bench.reply()
    in_store(bench, range(5))
    state = bench.open()
    assert bench.match(state, PROMPT) is None
    bench.clock.advance(WAIT_S / 2)
    bench.reply()
    assert bench.match(state, PROMPT) is None  # found; it is being fetched, and does not come
    bench.clock.advance(WAIT_S / 2)
    assert bench.match(state, PROMPT) == 8  # what there is
    assert bench.match(state, PROMPT) == 8
    plan = bench.leader.onboard(state, 8, TABLE)
    bench.answer(plan)
    bench.leader.finish(state)
    bench.reply()
    assert bench.resident_blocks(PROMPT) == 4  # it came after all, for the next one
    bench.assert_idle()


def test_who_may_not_wait_at_all_gets_what_there_is_and_the_next_one_more() -> None:
    bench = Bench(wait_s=0.0)
    in_store(bench, range(5))
    first = bench.open("first")
    assert bench.match(first, PROMPT) == 0
    bench.reply()
    assert bench.match(first, PROMPT) == 0
    bench.reply()
    assert bench.match(first, PROMPT) == 16
    bench.leader.finish(first)
    bench.assert_idle()


@pytest.mark.parametrize("blocks", [(), (1, 2, 3)])
def test_what_is_not_there_is_not_waited_for(blocks: tuple[int, ...]) -> None:
    bench = Bench()
    in_store(bench, blocks)
    state = bench.open()
    assert bench.match(state, PROMPT) is None
    bench.reply()
    assert bench.match(state, PROMPT) == 0 and not bench.sent
    bench.leader.finish(state)
    bench.assert_idle()


@pytest.mark.parametrize("outcome", [Outcome.IO_ERROR, Outcome.TIMED_OUT, Outcome.BUSY, Outcome.CORRUPT])
def test_a_store_in_trouble_is_not_waited_for(outcome: Outcome) -> None:
    bench = Bench()
    bench.store(PROMPT[:9])
    bench.reply()
    in_store(bench, range(5))
    state = bench.open()
    assert bench.match(state, PROMPT) is None
    bench.reply()
    assert bench.match(state, PROMPT) is None
    (fetch,) = bench.take_sent()
    bench.say(fetch.job_id, outcome)
    bench.leader.poll()
    assert bench.match(state, PROMPT) == 8
    bench.leader.finish(state)
    bench.assert_idle()


def test_a_store_that_is_off_or_left_alone_is_not_waited_for() -> None:
    bench = Bench()
    in_store(bench, range(5))
    bench.store_of().turn_off("no such folder")
    state = bench.open()
    assert bench.match(state, PROMPT) == 0 and not bench.sent
    bench.leader.finish(state)
    bench.assert_idle()


def test_a_prefix_may_lie_in_host_disk_and_two_stores() -> None:
    bench = Bench(names=("near", "far"))
    bench.store(PROMPT[:8])
    bench.reply()
    for name in bench.has:
        bench.has[name].clear()
        bench.store_of(name).reset()
    leave_host(bench, [1])  # block 0 in the host, 1 on the disk, 2 far away, 3 near
    in_store(bench, [2], "far")
    in_store(bench, [3], "near")
    state, asked = bench.open(), 0
    while (matched := bench.match(state, PROMPT)) is None:
        fetching = sum(bench.store_of(name).fetching_blocks for name in bench.has)
        assert bench.tier.pending_blocks == fetching, "slots for the disk's blocks are held while one waits"
        bench.clock.advance(0.1)
        bench.reply()
        asked += 1
    assert matched == 16 and asked <= 5
    plan = bench.leader.onboard(state, 16, TABLE)
    keys = bench.keys(PROMPT)
    assert plan is not None and [(read.tier, read.keys) for read in plan.reads] == [("disk", (keys[1],))]
    bench.answer(plan)
    bench.leader.finish(state)
    bench.reply()
    bench.assert_idle()


def test_the_next_store_is_asked_for_what_those_before_it_do_not_have() -> None:
    bench = Bench(names=("near", "far"))
    in_store(bench, range(2), "near")
    in_store(bench, range(5), "far")
    state, orders = bench.open(), list[TierOrder]()
    while bench.match(state, PROMPT) is None:
        orders += bench.reply()
    asked = [(order.tier, order.kind, len(order.keys)) for order in orders]
    assert asked == [
        ("near", OrderKind.FIND, 4),
        ("near", OrderKind.FETCH, 2),
        ("far", OrderKind.FIND, 2),
        ("far", OrderKind.FETCH, 2),
    ]
    bench.leader.finish(state)
    bench.assert_idle()


def test_a_store_that_has_the_blocks_and_no_room_for_them_hands_nothing_on() -> None:
    bench = Bench(num_slots=8, names=("near", "far"))
    bench.store(OTHER)
    bench.reply()
    holder = bench.open("holder")
    assert bench.match(holder, OTHER) == 16
    bench.store(list(range(500, 516)), "filler")
    bench.reply()
    filler = bench.open("filler too")
    assert bench.match(filler, list(range(500, 517))) == 16
    in_store(bench, range(5))
    state = bench.open()
    assert bench.match(state, PROMPT) is None
    assert [order.tier for order in bench.reply()] == ["near"]
    assert bench.match(state, PROMPT) == 0 and not bench.sent
    for request in (holder, filler, state):
        bench.leader.finish(request)
    bench.assert_idle()


def test_groups_are_fetched_in_the_order_of_the_prompt_and_of_a_window_only_what_is_needed() -> None:
    bench = Bench(groups=WINDOWED)
    keys = bench.keys(PROMPT)  # five of the first group, five of the second
    bench.has["near"].update(keys)
    state = bench.open()
    assert bench.match(state, PROMPT) is None
    (find,) = bench.reply()
    assert find.keys == (keys[0], keys[5], keys[1], keys[6], keys[2], keys[7], keys[3], keys[8])
    assert bench.match(state, PROMPT) is None
    bench.reply()
    assert bench.match(state, PROMPT) == 16
    plan = bench.leader.onboard(state, 16, [TABLE[0], [0, 0, 21, 22, 23]])
    bench.answer(plan)
    bench.leader.finish(state)
    bench.reply()
    bench.assert_idle()


def test_of_a_window_nothing_is_fetched_that_the_next_token_cannot_see() -> None:
    bench = Bench(groups=WINDOWED)
    prompt = list(range(100, 140))
    bench.store(prompt[:16])
    keys = bench.keys(prompt)  # ten of the first group, ten of the second
    bench.reply()
    bench.tier.forget(keys[10:11])  # out of the window by now
    state = bench.open()
    assert bench.leader.match(state, prompt, 0, 39) is None
    (find,) = bench.take_sent()
    assert keys[10] not in find.keys and find.keys == tuple(
        keys[group * 10 + block] for block in range(4, 9) for group in (0, 1)
    )
    bench.leader.finish(state)


def test_of_groups_that_have_only_a_part_there_is_no_endless_waiting() -> None:
    bench = Bench(groups=WINDOWED)
    keys = bench.keys(PROMPT)
    bench.has["near"].update(keys[:5])  # nothing of the window
    state = bench.open()
    asked = 0
    while bench.match(state, PROMPT) is None:
        bench.reply()
        asked += 1
        assert asked < 10
    assert bench.match(state, PROMPT) == 0
    bench.leader.finish(state)
    bench.reply()
    bench.assert_idle()


def test_what_was_fetched_and_used_is_offered_to_the_disk_and_not_to_where_it_came_from() -> None:
    bench = Bench()
    in_store(bench, range(5))
    state = bench.open()
    while bench.match(state, PROMPT) is None:
        bench.reply()
    bench.answer(bench.leader.onboard(state, 16, TABLE))
    bench.leader.finish(state)
    orders = bench.take_sent()
    assert [(order.tier, order.kind, len(order.keys)) for order in orders] == [("disk", OrderKind.STORE, 4)]
    bench.say(orders[0].job_id)
    bench.leader.poll()
    bench.assert_idle()


def test_blocks_that_mean_nothing_elsewhere_are_neither_stored_nor_fetched() -> None:
    """Their keys are of this process: nobody else can have them."""
    bench = Bench()
    state = bench.leader.open("r", bytes(32), None, is_lasting=False)  # type: ignore[arg-type]
    bench.answer(bench.offload(state, OTHER))
    bench.leader.finish(state)
    assert not bench.sent
    bench.assert_idle()


def test_an_aborted_request_leaves_the_fetch_to_its_end() -> None:
    bench = Bench()
    in_store(bench, range(5))
    state = bench.open()
    assert bench.match(state, PROMPT) is None
    bench.reply()
    assert bench.match(state, PROMPT) is None
    bench.leader.finish(state)
    assert bench.leader.open_requests == 0 and bench.tier.pending_blocks == 4
    bench.leader.check_integrity()
    bench.reply()
    assert bench.resident_blocks(PROMPT) == 4
    bench.assert_idle()


def test_a_reset_while_fetching() -> None:
    bench = Bench()
    in_store(bench, range(5))
    state = bench.open()
    assert bench.match(state, PROMPT) is None
    bench.reply()
    assert bench.match(state, PROMPT) is None
    (fetch,) = bench.take_sent()
    bench.leader.reset()
    assert [order.tier for order in bench.take_sent()] == ["disk"]
    bench.say(fetch.job_id)
    bench.leader.poll()
    assert bench.tier.resident_blocks == 0 == bench.tier.pending_blocks
    bench.leader.finish(state)
    bench.assert_idle()


def test_a_rank_whose_process_is_replaced_answers_no_fetch_any_more() -> None:
    bench = Bench(world_size=2)
    in_store(bench, range(5))
    state = bench.open()
    assert bench.match(state, PROMPT) is None
    bench.reply()
    assert bench.match(state, PROMPT) is None
    (fetch,) = bench.take_sent()
    bench.say(fetch.job_id, ranks=[0])
    bench.leader.poll()
    assert bench.tier.pending_blocks == 4
    bench.handshake.inbox.append(RankReplaced(1, fetch.job_id + 1))
    bench.leader.poll()
    assert bench.tier.pending_blocks == 0 == bench.tier.resident_blocks
    assert bench.match(state, PROMPT) == 0  # the new process has no memory yet
    bench.leader.finish(state)
    bench.assert_idle()


def test_a_load_that_does_not_find_room_for_the_disk_still_gets_what_stores_bring() -> None:
    """The host is full of what others read: nothing comes, and nobody waits for it."""
    bench = Bench(num_slots=8)
    bench.store(OTHER)
    bench.reply()
    holder, state = bench.open("holder"), bench.open()
    bench.has["near"].clear()
    assert bench.match(holder, OTHER) == 16
    bench.store(list(range(500, 516)), "filler")
    bench.reply()
    held = bench.open("filler too")
    assert bench.match(held, list(range(500, 517))) == 16
    in_store(bench, range(5))
    assert bench.match(state, PROMPT) is None
    bench.reply()
    assert bench.match(state, PROMPT) == 0 and not bench.sent
    for request in (holder, held, state):
        bench.leader.finish(request)
    bench.assert_idle()


def test_two_requests_of_one_prompt_cause_one_fetch() -> None:
    bench = Bench()
    in_store(bench, range(5))
    one, two = bench.open("one"), bench.open("two")
    orders: list[TierOrder] = []
    for _ in range(2):
        assert bench.match(one, PROMPT) is None and bench.match(two, PROMPT) is None
        orders += bench.reply()
    assert [order.kind for order in orders] == [OrderKind.FIND, OrderKind.FETCH]
    assert bench.match(one, PROMPT) == bench.match(two, PROMPT) == 16
    for request in (one, two):
        bench.leader.finish(request)
    bench.assert_idle()


def test_a_load_that_lost_a_block_keeps_what_came() -> None:
    """Of the disk, too: one lost block costs what lies behind it, this time; the others stay in the host."""
    bench = Bench(names=())
    stored(bench)
    leave_host(bench, range(5))
    state, plan = loading(bench)
    (reads,) = plan.reads
    failed = ((reads.slots[1], Outcome.CORRUPT), (reads.slots[2], Outcome.TIMED_OUT))
    bench.leader.acknowledge(0, [JobResult(plan.job_id, Outcome.CORRUPT, 50, 0.5, 0.25, failed=failed)])
    keys = bench.keys(PROMPT)
    assert [bench.tier.contains(key) for key in keys] == [True, False, False, True, False]
    assert [bench.disk.contains(key) for key in keys] == [True, False, True, True, True]
    assert bench.metric("kvbm_onboard_blocks_d2d") == 2
    assert bench.metric('kvbm_failures_total{kind="onboard_corrupt"}') == 1
    assert bench.match(state, PROMPT) == 4
    bench.leader.finish(state)
    bench.assert_idle()
