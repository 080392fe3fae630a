"""The way up from the disk: what is promised and read, what stays in the host, and what failures leave
behind.
"""

from __future__ import annotations

import pytest

from kvbm_core.errors import Outcome
from kvbm_core.testing.leader_bench import BenchDisk, LeaderBench
from kvbm_core.tiers.groups import GroupSpec
from kvbm_core.transfer.plan import GroupMove, OrderKind, TierOrder
from tests.unit.disk_bench import (
    OTHER,
    PROMPT,
    TABLE,
    bench_of,
    leave_host,
    load,
    loading,
    on_disk,
    reads_of,
    stored,
)


def test_a_prefix_may_lie_in_host_and_disk_in_turns() -> None:
    bench = bench_of()
    order = stored(bench)
    leave_host(bench, [1, 3])
    state, plan = loading(bench)
    (move,) = plan.moves
    keys = bench.keys(PROMPT)
    assert move == GroupMove(0, (11, 12, 13, 14), move.slots)
    assert (move.slots[0], move.slots[2]) == (order.slots[0], order.slots[2])
    assert len(set(move.slots)) == 4
    assert reads_of(plan) == TierOrder(
        plan.job_id,
        "disk",
        OrderKind.FETCH,
        (keys[1], keys[3]),
        (move.slots[1], move.slots[3]),
        (order.places[1], order.places[3]),
    )
    assert bench.resident_blocks(PROMPT) == 1  # nothing is there before it has come
    bench.answer(plan)
    assert bench.metric("kvbm_onboard_blocks_h2d") == 2 and bench.metric("kvbm_onboard_blocks_d2d") == 2
    assert bench.metric("kvbm_matched_tokens") == 16
    bench.leader.finish(state)
    assert bench.metric("kvbm_disk_cache_hit_rate") == 0.5 and bench.metric("kvbm_host_cache_hit_rate") == 0.5
    bench.assert_idle()


def test_what_came_up_from_the_disk_is_a_host_hit_the_next_time() -> None:
    bench = bench_of()
    stored(bench)
    leave_host(bench, range(5))
    assert len(reads_of(load(bench)).keys) == 4
    assert bench.metric("kvbm_disk_cache_hit_rate") == 1.0 and bench.metric("kvbm_host_cache_hit_rate") == 0.0
    assert bench.resident_blocks(PROMPT) == 4 and on_disk(bench, PROMPT) == 5
    assert load(bench).reads == ()
    assert bench.metric("kvbm_disk_cache_hit_rate") == 0.5 and bench.metric("kvbm_host_cache_hit_rate") == 0.5
    assert bench.stores() == []  # it is on the disk still
    bench.assert_idle()


def test_a_match_on_the_disk_that_is_asked_for_again_holds_one_promise() -> None:
    bench = bench_of()
    stored(bench)
    leave_host(bench, [1, 3])
    state = bench.open()
    for _ in range(3):
        assert bench.match(state, PROMPT) == 16
        assert (bench.tier.live_leases, bench.disk.slots.live_leases, bench.tier.pending_blocks) == (1, 1, 2)
    bench.leader.check_integrity()
    bench.leader.decline(state)
    assert (bench.tier.live_leases, bench.disk.slots.live_leases, bench.tier.pending_blocks) == (0, 0, 0)
    assert bench.leader.onboard(state, 16, TABLE) is None
    bench.leader.finish(state)
    bench.assert_idle()


def test_a_part_of_what_was_matched_is_counted_as_what_it_is() -> None:
    bench = bench_of()
    stored(bench)
    leave_host(bench, [1, 3])
    state = bench.open()
    assert bench.match(state, PROMPT) == 16
    plan = bench.leader.onboard(state, 12, TABLE)
    assert plan is not None and len(reads_of(plan).keys) == 2 and plan.num_blocks == 3
    bench.answer(plan)
    assert bench.metric("kvbm_onboard_blocks_h2d") == 2 and bench.metric("kvbm_onboard_blocks_d2d") == 1
    bench.leader.finish(state)
    bench.assert_idle()


@pytest.mark.parametrize("num_tokens", [0, 20])
def test_a_load_that_is_not_what_was_matched_holds_nothing(num_tokens: int) -> None:
    bench = bench_of()
    stored(bench)
    leave_host(bench, [1, 3])
    state = bench.open()
    assert bench.match(state, PROMPT) == 16
    assert bench.leader.onboard(state, num_tokens, TABLE) is None
    bench.leader.finish(state)
    bench.assert_idle()


def test_without_room_to_bring_blocks_up_the_host_gives_what_it_has() -> None:
    bench = bench_of(num_slots=5)
    stored(bench)
    leave_host(bench, [2, 3, 4])
    bench.store(OTHER[:12])
    bench.write_to_disk()
    pinning, state = bench.open("pinning"), bench.open()
    assert bench.match(pinning, OTHER[:13]) == 12
    assert bench.match(state, PROMPT) == 8
    assert bench.tier.pending_blocks == 0 and bench.disk.slots.live_leases == 0
    plan = bench.leader.onboard(state, 8, TABLE)
    assert plan is not None and plan.reads == ()
    bench.answer(plan)
    for request in (state, pinning):
        bench.leader.finish(request)
    bench.assert_idle()


def test_as_much_comes_up_as_there_is_room_for() -> None:
    bench = bench_of(num_slots=5)
    stored(bench)
    leave_host(bench, range(5))
    bench.store(OTHER[:12])
    bench.write_to_disk()
    pinning, state = bench.open("pinning"), bench.open()
    assert bench.match(pinning, OTHER[:13]) == 12
    assert bench.match(state, PROMPT) == 8  # two slots are free
    plan = bench.leader.onboard(state, 8, TABLE)
    assert plan is not None and reads_of(plan).keys == tuple(bench.keys(PROMPT)[:2])
    other = bench.open("other")
    bench.clock.advance(1.0)
    assert bench.match(other, list(PROMPT), computed_tokens=8) == 0  # no slot is free
    assert bench.tier.pending_blocks == 2 and bench.disk.slots.live_leases == 1
    bench.answer(plan)
    bench.leader.decline(pinning)
    assert bench.match(other, PROMPT) == 16
    for request in (state, other, pinning):
        bench.leader.finish(request)
    bench.assert_idle()


def test_groups_that_find_no_room_get_what_the_host_has_of_all_of_them() -> None:
    groups = (GroupSpec(0, 4), GroupSpec(1, 4, window_tokens=6))
    bench = LeaderBench(10, groups=groups, disk=BenchDisk(20))
    bench.store(PROMPT)
    assert bench.write_to_disk() == 10
    keys = bench.keys(PROMPT)
    bench.tier.forget([*keys[2:5], *keys[7:]])
    held = bench.offload(bench.open("holding"), OTHER[:12])
    assert held is not None and held.num_blocks == 6  # the free slots are being written
    state = bench.open()
    assert bench.match(state, PROMPT) == 8
    assert bench.disk.slots.live_leases == 0 and bench.tier.live_leases == 1
    bench.answer(held)
    assert bench.write_to_disk() == 6
    assert bench.match(state, PROMPT) == 16
    plan = bench.leader.onboard(state, 16, [TABLE[0], [0, 0, 21, 22, 23]])
    assert plan is not None and reads_of(plan).keys == (*keys[2:4], *keys[7:9])
    bench.answer(plan)
    for request_id in ("holding", "r"):
        request = bench.leader.request(request_id)
        assert request is not None
        bench.leader.finish(request)
    bench.write_to_disk()
    bench.assert_idle()


def test_nothing_is_evicted_for_groups_that_cannot_all_come_up() -> None:
    bench = LeaderBench(10, groups=(GroupSpec(0, 4), GroupSpec(1, 4, window_tokens=6)), disk=BenchDisk(20))
    bench.store(PROMPT)
    assert bench.write_to_disk() == 10
    bench.tier.forget(bench.keys(PROMPT))
    bench.store(OTHER)
    bench.write_to_disk()
    holder, state = bench.open("holder"), bench.open()
    assert bench.match(holder, OTHER) == 16  # six of ten slots are held, and six more are wanted
    before = bench.tier.evicted_blocks_total
    assert bench.match(state, PROMPT) == 0
    assert bench.tier.evicted_blocks_total == before and bench.tier.resident_blocks == 10
    bench.leader.decline(holder)
    assert bench.match(state, PROMPT) == 16
    assert bench.tier.evicted_blocks_total == before + 6
    for request in (holder, state):
        bench.leader.finish(request)
    bench.assert_idle()


def test_a_block_that_another_request_brings_up_is_not_read_twice() -> None:
    bench = bench_of()
    stored(bench)
    leave_host(bench, [2, 3])
    first, plan = loading(bench)
    second = bench.open("second")
    assert bench.match(second, PROMPT) is None  # it waits
    bench.clock.advance(1.0)
    assert bench.match(second, PROMPT) == 8  # not for ever; the rest is still on its way
    bench.answer(plan)
    assert bench.match(second, PROMPT) == 16
    again = bench.leader.onboard(second, 16, TABLE)
    assert again is not None and again.reads == ()
    bench.answer(again)
    for request in (first, second):
        bench.leader.finish(request)
    bench.assert_idle()


def test_a_promise_about_the_disk_expires() -> None:
    bench = bench_of()
    stored(bench)
    leave_host(bench, [2, 3])
    state = bench.open()
    assert bench.match(state, PROMPT) == 16
    bench.clock.advance(5.0)
    bench.leader.poll()
    assert bench.tier.live_leases == 0 and bench.disk.slots.live_leases == 0
    assert bench.metric('kvbm_failures_total{kind="lease_expired"}') == 2
    assert bench.leader.onboard(state, 16, TABLE) is None
    assert bench.tier.pending_blocks == 0
    assert bench.match(state, PROMPT) == 16
    bench.leader.finish(state)
    bench.assert_idle()


def test_places_on_the_disk_are_not_reused_while_they_are_read_however_long_it_takes() -> None:
    bench = bench_of(disk=BenchDisk(5))
    stored(bench)
    leave_host(bench, range(5))
    state, plan = loading(bench)
    for pause_s in (4.0, 4.0, 1000.0):
        bench.clock.advance(pause_s)
        bench.leader.poll()
    bench.store(OTHER)
    (order,) = bench.stores()
    assert set(order.places).isdisjoint(reads_of(plan).places) and len(order.keys) == 1
    bench.answer(plan)
    assert bench.metric('kvbm_failures_total{kind="lease_expired"}') == 0
    bench.say(order.job_id)
    bench.leader.poll()
    bench.leader.finish(state)
    bench.assert_idle()


def test_a_request_aborted_while_its_blocks_come_up_leaves_them_in_the_host() -> None:
    bench = bench_of()
    stored(bench)
    leave_host(bench, range(5))
    state, plan = loading(bench)
    bench.leader.finish(state)
    assert bench.leader.open_requests == 1 and bench.tier.pending_blocks == 4
    bench.leader.check_integrity()
    bench.answer(plan)
    assert bench.resident_blocks(PROMPT) == 4
    bench.assert_idle()


@pytest.mark.parametrize(
    ("outcome", "left_on_disk"),
    [
        (Outcome.CORRUPT, False),
        (Outcome.MISS, False),
        (Outcome.INCOMPATIBLE, False),
        (Outcome.IO_ERROR, False),
        (Outcome.TIMED_OUT, True),
        (Outcome.REJECTED, True),
    ],
)
def test_a_load_that_failed_leaves_nothing_in_the_host_and_useless_records_are_forgotten(
    outcome: Outcome, left_on_disk: bool
) -> None:
    bench = bench_of(world_size=2)
    stored(bench)
    leave_host(bench, [1, 3])
    state, plan = loading(bench)
    bench.answer(plan, ranks=[0])
    bench.answer(plan, outcome, ranks=[1])
    keys = bench.keys(PROMPT)
    assert bench.resident_blocks(PROMPT) == 0 and bench.tier.resident_blocks == 1
    assert [bench.disk.contains(key) for key in keys] == [True, left_on_disk, True, left_on_disk, True]
    assert bench.metric("kvbm_onboard_blocks_d2d") == 0
    assert bench.match(state, PROMPT) == (16 if left_on_disk else 4)
    bench.leader.finish(state)
    assert bench.metric("kvbm_disk_cache_hit_rate") == 0
    bench.assert_idle()


def test_a_plan_with_reads_that_was_never_sent_is_taken_back() -> None:
    bench = bench_of(world_size=2)
    stored(bench)
    leave_host(bench, [1, 3])
    state, plan = loading(bench)
    bench.leader.abandon(plan.job_id)
    assert on_disk(bench, PROMPT) == 5
    bench.leader.finish(state)
    bench.assert_idle()
