"""The leader's side of the disk: what goes there, resets, disks that fail, and what an earlier process
left.
"""

from __future__ import annotations

import logging

import pytest

from kvbm_core.errors import IntegrityError, Outcome
from kvbm_core.policy.frequency import FrequencyFilter
from kvbm_core.runtime.handshake import SlotsFound, SlotsReady, TierOff
from kvbm_core.runtime.leader import EMPTY_BLOCKS, TAKE_IN_BLOCKS
from kvbm_core.storage.disk.recovery import REPORT_SLOTS, Found
from kvbm_core.testing.leader_bench import ROOT, BenchDisk, LeaderBench
from kvbm_core.tiers.breaker import FAILURES_IN_A_ROW, FIRST_PAUSE_S, LONGEST_PAUSE_S
from kvbm_core.tokens.runs import run_of
from kvbm_core.transfer.plan import OrderKind, TierOrder
from kvbm_core.types import BlockKey
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

FORGET = TierOrder(0, "disk", OrderKind.FORGET, ())
FILTERED = BenchDisk(make_admission=FrequencyFilter)
FAILED = [Outcome.IO_ERROR, Outcome.TIMED_OUT, Outcome.REJECTED, Outcome.BUSY, Outcome.NO_SPACE]


# ---------------------------------------------------------------- the way down


def test_what_is_in_the_host_is_ordered_to_the_disk_from_where_it_is() -> None:
    bench = bench_of()
    bench.store(PROMPT)
    (order,) = bench.stores()
    lease = bench.tier.lease("probe", bench.keys(PROMPT), 1.0)
    assert lease is not None
    bench.tier.release(lease)
    assert [BlockKey(key) for key in order.keys] == bench.keys(PROMPT) and tuple(order.slots) == lease.slots
    assert len(set(order.places)) == 5 and all(0 <= slot < 16 for slot in order.places)
    assert on_disk(bench, PROMPT) == 0 and bench.disk.storing_blocks == 5
    assert bench.metric("kvbm_offload_blocks_h2d") == 0
    bench.say(order.job_id)
    bench.leader.poll()
    assert on_disk(bench, PROMPT) == 5
    assert bench.metric("kvbm_offload_blocks_h2d") == 5
    assert bench.metric('kvbm_tier_blocks{tier="disk",state="used"}') == 5
    assert bench.metric('kvbm_tier_blocks{tier="disk",state="capacity"}') == 16
    bench.assert_idle()


def test_blocks_that_mean_nothing_in_another_process_stay_in_host_memory() -> None:
    bench = bench_of()
    state = bench.leader.open("r", ROOT, None, is_lasting=False)
    bench.answer(bench.offload(state, PROMPT))
    bench.leader.finish(state)
    again = bench.leader.open("again", ROOT, None, is_lasting=False)
    assert bench.match(again, PROMPT) == 16
    bench.answer(bench.leader.onboard(again, 16, TABLE))
    bench.leader.finish(again)
    assert bench.metric("kvbm_onboard_blocks_h2d") == 4
    assert bench.stores() == []
    bench.assert_idle()


def test_the_filter_lets_through_what_has_been_used_again() -> None:
    bench = bench_of(disk=FILTERED)
    bench.store(PROMPT)
    bench.store(PROMPT)  # computed again, not brought up: no hit
    assert bench.stores() == []
    load(bench)
    (order,) = bench.stores()
    assert [BlockKey(key) for key in order.keys] == bench.keys(PROMPT)[:4]
    bench.say(order.job_id)
    bench.leader.poll()
    assert on_disk(bench, PROMPT) == 4
    load(bench)
    assert bench.stores() == []  # they are there
    bench.assert_idle()


def test_what_the_device_has_served_was_used_once_the_request_ends_or_is_preempted() -> None:
    bench = bench_of(disk=FILTERED)
    bench.store(PROMPT)
    state = bench.open()
    for _ in range(3):  # it waits, and is asked for again
        assert bench.match(state, PROMPT, 12) == 4
        bench.leader.decline(state)
    assert bench.stores() == []
    assert bench.offload(state, PROMPT) is None, "the host has it"
    assert bench.match(state, PROMPT, 16) == 0 and bench.write_to_disk() == 3
    assert bench.offload(state, PROMPT) is None
    bench.leader.finish(state)
    assert bench.write_to_disk() == 1
    assert on_disk(bench, PROMPT) == 4
    bench.assert_idle()


def test_a_use_is_counted_before_what_was_computed_behind_it_is_offered() -> None:
    bench = bench_of(disk=FILTERED)
    bench.store(PROMPT)
    bench.tier.forget(bench.keys(PROMPT)[2:])  # as the device has, and not the head
    state = bench.open()
    assert bench.match(state, PROMPT, 8) == 0
    bench.answer(bench.offload_step(state, PROMPT, 8, 20, [range(1, 6)]))
    assert bench.write_to_disk() == 5 and on_disk(bench, PROMPT) == 5
    bench.leader.finish(state)
    assert bench.stores() == []
    bench.assert_idle()


def test_a_head_that_the_host_has_lost_is_offloaded_again_while_the_device_has_it() -> None:
    bench = bench_of(disk=FILTERED)
    bench.store(PROMPT)
    bench.tier.forget(bench.keys(PROMPT)[:2])
    state = bench.open()
    assert bench.match(state, PROMPT, 16) == 0
    plan = bench.offload_step(state, PROMPT, 16, 20, [range(1, 6)])
    assert plan is not None and plan.num_blocks == 2
    bench.answer(plan)
    bench.leader.finish(state)
    assert bench.write_to_disk() == 4 and on_disk(bench, PROMPT) == 4
    bench.assert_idle()


def test_a_tail_is_not_stored_without_its_head() -> None:
    bench = bench_of()
    bench.store(OTHER)
    bench.write_to_disk()
    leave_host(bench, [])
    keys = bench.keys(PROMPT)
    state = bench.open()
    assert bench.match(state, PROMPT, 8) == 0  # nobody has seen the device compute its head
    state.foreign_tokens = 8
    state.restart_offload()
    plan = bench.offload_step(state, PROMPT, 8, 20, [range(1, 6)])
    assert plan is not None and plan.num_blocks == 3
    bench.answer(plan)
    bench.leader.finish(state)
    assert bench.tier.match_prefix(keys[2:]) == 3 and bench.stores() == []
    bench.assert_idle()


def test_what_the_host_serves_stays_on_the_disk_too() -> None:
    bench = bench_of(disk=BenchDisk(8))
    bench.store(PROMPT)
    bench.store(OTHER[:12], "other")
    bench.write_to_disk()
    load(bench)
    bench.store(list(range(500, 508)), "third")
    assert bench.write_to_disk() == 2
    assert on_disk(bench, PROMPT) == 4 and on_disk(bench, OTHER[:12]) == 2


def test_a_block_is_on_the_disk_when_every_rank_has_said_so() -> None:
    bench = bench_of(world_size=2)
    bench.store(PROMPT)
    (order,) = bench.stores()
    for outcome in (Outcome.OK, Outcome.IO_ERROR):  # a rank's first word counts
        bench.say(order.job_id, outcome, ranks=[1])
        bench.leader.poll()
        assert on_disk(bench, PROMPT) == 0 and bench.tier.live_leases == 1
    bench.say(order.job_id, ranks=[0])
    bench.leader.poll()
    assert on_disk(bench, PROMPT) == 5
    bench.say(order.job_id, Outcome.IO_ERROR, ranks=[0])  # over: it changes nothing
    bench.leader.poll()
    assert on_disk(bench, PROMPT) == 5 and bench.leader.stale_results_total == 2
    bench.assert_idle()


def test_without_a_host_tier_a_block_counts_once_and_none_is_of_the_host(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO, "kvbm"):
        bench = LeaderBench(0, disk=BenchDisk(has_host_tier=False))
        bench.handshake.inbox.append(SlotsReady(16, 16, 1, 1000, "fingerprint"))
        bench.leader.poll()
    assert "blocks on their way to the disk ready: 16" in caplog.text and "smaller" not in caplog.text
    stored(bench)
    load(bench)  # out of the memory that it passed
    leave_host(bench, [0, 1, 2, 3, 4])
    load(bench)  # from the disk
    bench.tier.reset()
    numbers = bench.leader.metrics.snapshot().items()
    moved = {name: n for name, n in numbers if n and "seconds" not in name and "slowest" not in name}
    assert {name: n for name, n in moved.items() if "blocks_" in name or "host" in name} == {
        "kvbm_offload_blocks_d2d": 5,
        "kvbm_onboard_blocks_d2d": 8,
        'kvbm_tier_transfer_bytes_total{from="device",to="host"}': 100,
        'kvbm_tier_transfer_bytes_total{from="host",to="device"}': 200,
        'kvbm_tier_transfer_bytes_total{from="host",to="disk"}': 100,
    }
    assert moved["kvbm_disk_cache_hit_rate"] > 0


@pytest.mark.parametrize("outcome", FAILED)
def test_a_store_that_failed_on_one_rank_leaves_nothing_and_is_tried_again_with_the_next_hit(
    outcome: Outcome,
) -> None:
    bench = bench_of(world_size=2)
    bench.store(PROMPT)
    (order,) = bench.stores()
    bench.say(order.job_id, outcome, ranks=[0])
    bench.say(order.job_id, ranks=[1])
    bench.leader.poll()
    assert on_disk(bench, PROMPT) == 0
    assert bench.metric(f'kvbm_failures_total{{kind="offload_{outcome}"}}') == 1
    assert bench.metric('kvbm_dropped_blocks_total{reason="transfer_failed"}') == 5
    assert bench.metric("kvbm_offload_blocks_h2d") == 0
    bench.assert_idle()
    load(bench)
    assert bench.write_to_disk() == 4
    assert on_disk(bench, PROMPT) == 4


def test_what_finds_no_place_is_dropped_and_counted_and_what_is_old_makes_room() -> None:
    bench = bench_of(disk=BenchDisk(3))
    bench.store(PROMPT)
    (order,) = bench.stores()
    no_space = 'kvbm_dropped_blocks_total{reason="no_space"}'
    assert [BlockKey(key) for key in order.keys] == bench.keys(PROMPT)[:3] and bench.metric(no_space) == 2
    bench.store(OTHER)  # all places are being written
    assert bench.stores() == [] and bench.metric(no_space) == 7
    bench.say(order.job_id)
    bench.leader.poll()
    assert on_disk(bench, PROMPT) == 3
    bench.store(list(range(500, 508)))
    assert bench.write_to_disk() == 2
    assert on_disk(bench, PROMPT) == 1  # the tail went first
    assert bench.metric('kvbm_evicted_blocks_total{tier="disk",reason="room"}') == 2
    bench.assert_idle()


def test_a_slot_that_is_being_stored_is_not_given_away_however_long_it_takes() -> None:
    bench = bench_of(num_slots=5)
    bench.store(PROMPT)
    (order,) = bench.stores()
    for pause_s in (4.0, 4.0, 1000.0):  # the last is longer than the lease, without a poll in between
        bench.clock.advance(pause_s)
        bench.leader.poll()
    assert bench.offload(bench.open("other"), OTHER) is None  # no slot is free
    bench.tier.forget(bench.keys(PROMPT))
    assert bench.offload(bench.open("other"), OTHER) is None
    bench.say(order.job_id)
    bench.leader.poll()
    assert bench.metric('kvbm_failures_total{kind="lease_expired"}') == 0
    assert on_disk(bench, PROMPT) == 5 and bench.tier.live_leases == 0


def test_what_has_left_the_host_by_now_is_not_stored_nor_what_is_behind_it() -> None:
    bench = bench_of(disk=FILTERED)
    bench.store(PROMPT)
    leave_host(bench, [2])
    keys = bench.keys(PROMPT)
    bench.disk.hit([run_of(keys)])
    (order,) = bench.stores()
    assert [BlockKey(key) for key in order.keys] == keys[:2]
    bench.say(order.job_id)
    bench.leader.poll()
    bench.assert_idle()


def test_nothing_is_stored_before_the_slots_are_there() -> None:
    bench = bench_of(world_size=2, disk=BenchDisk(0))
    bench.store(PROMPT)
    bench.disk_found(8, ranks=[0])
    load(bench)
    assert bench.stores() == []
    bench.disk_found(8, ranks=[1])
    load(bench)
    assert bench.write_to_disk() == 4


def test_integrity_notices_a_lost_order() -> None:
    bench = bench_of()
    bench.store(PROMPT)
    bench.leader.check_integrity()
    bench.disk._storing.clear()
    with pytest.raises(IntegrityError):
        bench.leader.check_integrity()


# ---------------------------------------------------------------- resets


def test_a_reset_while_storing_forgets_here_and_on_the_disks() -> None:
    bench = bench_of(world_size=2)
    stored(bench, OTHER)
    bench.store(PROMPT)
    (order,) = bench.stores()
    bench.say(order.job_id, ranks=[0])
    bench.leader.reset()
    assert bench.take_sent() == [FORGET]
    assert bench.disk.slots.resident_blocks == 0
    bench.say(order.job_id, ranks=[1])
    bench.leader.poll()
    assert on_disk(bench, PROMPT) == 0 and bench.resident_blocks(PROMPT) == 0
    assert bench.metric("kvbm_offload_blocks_h2d") == 5  # OTHER
    assert bench.metric('kvbm_dropped_blocks_total{reason="reset"}') == 5
    bench.assert_idle()
    stored(bench)


def test_what_was_found_before_a_reset_and_is_heard_after_it_is_not_taken_in() -> None:
    bench = bench_of(world_size=2, disk=BenchDisk(0))
    keys = bench.keys(PROMPT)
    bench.disk_found(4, [Found(0, keys[0], 1)], ranks=[0])
    bench.leader.reset()
    bench.disk_found(4, [Found(0, keys[0], 1)], ranks=[1])
    bench.disk_found(8, [Found(5, keys[1], 1)])
    assert bench.disk.slots.resident_blocks == 0 and bench.disk.slots.capacity_blocks == 8
    bench.take_sent()
    stored(bench)


def test_a_reset_between_match_and_load_takes_the_promise_back() -> None:
    bench = bench_of()
    stored(bench)
    leave_host(bench, range(5))
    state = bench.open()
    assert bench.match(state, PROMPT) == 16
    bench.leader.reset()
    assert bench.leader.onboard(state, 16, TABLE) is None
    bench.leader.finish(state)
    bench.assert_idle()


def test_a_reset_during_a_load_lets_it_end_and_keeps_nothing() -> None:
    bench = bench_of()
    stored(bench)
    leave_host(bench, range(5))
    state, plan = loading(bench)
    bench.leader.reset()
    assert bench.disk.slots.live_leases == 1  # it is being read
    bench.answer(plan)
    assert bench.resident_blocks(PROMPT) == 0 and on_disk(bench, PROMPT) == 0
    bench.leader.finish(state)
    bench.assert_idle()


# ---------------------------------------------------------------- a disk that fails


def break_disk(bench: LeaderBench) -> None:
    """The disk fails as often as it takes."""
    for number in range(FAILURES_IN_A_ROW):
        bench.store(range(1000 + 8 * number, 1008 + 8 * number))
        assert bench.write_to_disk(Outcome.TIMED_OUT) == 2


def test_a_disk_that_fails_is_left_alone_and_tried_again_later() -> None:
    bench = bench_of(num_slots=20)
    stored(bench)
    leave_host(bench, range(1, 5))
    break_disk(bench)
    assert not bench.disk.is_usable
    state = bench.open()
    assert bench.match(state, PROMPT) == 4  # what the host has
    bench.store(OTHER)
    assert bench.stores() == []
    bench.clock.advance(FIRST_PAUSE_S)
    assert bench.match(state, PROMPT) == 16
    bench.leader.finish(state)
    load(bench)
    bench.store(list(range(700, 708)))
    assert bench.write_to_disk() == 2
    bench.assert_idle()


def test_that_a_disk_fails_and_works_again_is_a_line_each(caplog: pytest.LogCaptureFixture) -> None:
    bench = bench_of(num_slots=20)
    stored(bench)
    break_disk(bench)
    for number in range(5):
        bench.clock.advance(LONGEST_PAUSE_S)
        bench.store(range(2000 + 8 * number, 2008 + 8 * number))
        assert bench.write_to_disk(Outcome.TIMED_OUT) == 2 and not bench.disk.is_usable
    bench.clock.advance(LONGEST_PAUSE_S)
    bench.store(list(range(700, 708)))
    assert bench.write_to_disk() == 2
    disk = "kvbm: the disk (DYN_KVBM_DISK_CACHE_DIR)"
    assert [line for line in caplog.messages if line.startswith(disk)] == [
        f"{disk} fails (timed_out): it is left alone for a while, and then tried again",
        f"{disk} works again",
    ]


def test_a_load_that_works_ends_the_count_of_failures() -> None:
    bench = bench_of(num_slots=20)
    stored(bench)
    for number in range(FAILURES_IN_A_ROW + 2):
        leave_host(bench, [3])
        load(bench)
        bench.store(range(1000 + 8 * number, 1008 + 8 * number))
        bench.write_to_disk(Outcome.IO_ERROR)
    assert bench.disk.is_usable


def test_refused_orders_are_no_failures_of_the_disk() -> None:
    bench = bench_of(num_slots=20)
    for number in range(FAILURES_IN_A_ROW):
        bench.store(range(1000 + 8 * number, 1008 + 8 * number))
        assert bench.write_to_disk(Outcome.REJECTED) == 2
    assert bench.disk.is_usable


@pytest.mark.parametrize(
    ("outcome", "is_failure"),
    [
        (Outcome.IO_ERROR, True),
        (Outcome.TIMED_OUT, True),
        (Outcome.CORRUPT, False),
        (Outcome.MISS, False),
        (Outcome.REJECTED, False),
    ],
)
def test_loads_that_fail_count_unless_only_the_record_is_bad(outcome: Outcome, is_failure: bool) -> None:
    bench = bench_of()
    prompts = [list(range(1000 * n, 1000 * n + 5)) for n in range(1, FAILURES_IN_A_ROW + 1)]
    for prompt in prompts:
        stored(bench, prompt)
        leave_host(bench, [0], prompt)
    for prompt in prompts:
        assert bench.disk.is_usable
        state = bench.open()
        assert bench.match(state, prompt) == 4
        bench.answer(bench.leader.onboard(state, 4, TABLE), outcome)
        bench.leader.finish(state)
    assert bench.disk.is_usable is not is_failure
    bench.assert_idle()


def test_a_disk_that_is_off_is_not_used_and_the_host_serves_on() -> None:
    bench = bench_of()
    stored(bench)
    leave_host(bench, [2])
    bench.handshake.inbox.append(TierOff("disk", "broken"))
    bench.handshake.inbox.append(TierOff("disk", "broken too"))
    bench.leader.poll()
    assert bench.disk.off_reason == "broken too" and not bench.disk.is_usable
    assert bench.leader.disabled_reason is None
    state = bench.open()
    assert bench.match(state, PROMPT) == 8
    bench.store(OTHER)
    assert bench.stores() == [] and bench.resident_blocks(OTHER) == 5
    bench.leader.finish(state)
    bench.assert_idle()


# ---------------------------------------------------------------- what an earlier process left


def test_only_what_every_rank_has_in_the_same_slot_is_taken_in() -> None:
    bench = bench_of(world_size=2, disk=BenchDisk(0))
    keys = bench.keys(PROMPT)
    mine = [Found(slot, key, 10) for slot, key in enumerate(keys)]
    theirs = [Found(0, keys[0], 7), Found(1, keys[2], 7), Found(2, keys[1], 7), Found(7, keys[3], 7)]
    bench.disk_found(8, mine, ranks=[0])
    assert bench.disk.slots.capacity_blocks == 0  # not before both have looked
    bench.disk_found(8, [*theirs, Found(4, keys[4], 8)], ranks=[1])
    assert bench.disk.slots.capacity_blocks == 8
    assert [bench.disk.contains(key) for key in keys] == [True, False, False, False, True]
    bench.disk.check_integrity()


def test_a_step_takes_in_a_little_of_what_was_found_and_the_start_all_of_it() -> None:
    bench = bench_of(disk=BenchDisk(0))
    most = TAKE_IN_BLOCKS // EMPTY_BLOCKS
    chunks = [SlotsFound("disk", 0, end, []) for end in range(8, 8 * (most + 4), 8)]
    bench.handshake.found.extend(chunks)
    bench.leader.poll()
    assert bench.disk.slots.capacity_blocks == 8 * most
    bench.leader.catch_up()
    assert bench.disk.slots.capacity_blocks == chunks[-1].end


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_a_step_has_little_to_do_with_a_file_of_many_blocks(num_ranks: int) -> None:
    """A step takes in one message of each rank, however many there are."""
    num_blocks = 64 * REPORT_SLOTS
    bench = bench_of(world_size=num_ranks, disk=BenchDisk(0))
    for start in range(0, num_blocks, REPORT_SLOTS):
        part = range(start, start + REPORT_SLOTS)
        found = [Found(slot, BlockKey(slot.to_bytes(32, "little")), slot // 8) for slot in part]
        for rank in range(num_ranks):
            bench.handshake.found.append(SlotsFound("disk", rank, part.stop, found))
    steps = 0
    while bench.handshake.found:
        before = bench.disk.slots.resident_blocks
        bench.leader.poll()
        steps += 1
        assert bench.disk.slots.resident_blocks - before == REPORT_SLOTS
    assert steps == 64 and bench.disk.slots.resident_blocks == num_blocks
    bench.disk.slots.check_integrity()


def test_of_three_ranks_a_block_is_there_if_all_of_them_have_it_in_the_same_slot() -> None:
    bench = bench_of(world_size=3, disk=BenchDisk(0))
    keys, (stranger, *_) = bench.keys(PROMPT), bench.keys(OTHER)
    of_rank = (
        [(0, keys[0]), (1, keys[1]), (2, keys[2]), (3, keys[3]), (4, stranger)],
        [(0, keys[0]), (1, keys[1]), (3, keys[3]), (4, keys[4])],  # not the third, and another in slot 4
        [(0, keys[0]), (2, keys[2]), (5, keys[3]), (4, stranger)],  # not the second, and the fourth elsewhere
    )
    for rank, found in enumerate(of_rank):
        assert bench.disk.slots.resident_blocks == 0
        bench.disk.take_in(rank, 8, [Found(slot, key, 1) for slot, key in found])
    assert [bench.disk.contains(key) for key in (*keys, stranger)] == [True] + [False] * 5
    assert bench.disk.slots.capacity_blocks == 8
    bench.disk.slots.check_integrity()


def test_what_was_found_can_be_loaded_and_the_oldest_makes_room() -> None:
    bench = bench_of(disk=BenchDisk(0))
    keys, others = bench.keys(PROMPT), bench.keys(OTHER)
    found = [
        *(Found(slot, key, 20) for slot, key in enumerate(keys)),
        *(Found(5 + i, others[i], 10) for i in (0, 1)),
    ]
    bench.disk_found(7, found)
    plan = load(bench)
    assert reads_of(plan).places == (0, 1, 2, 3) and reads_of(plan).keys == tuple(keys[:4])
    bench.store(list(range(500, 508)))
    assert bench.write_to_disk() == 2
    assert not any(map(bench.disk.contains, others)) and on_disk(bench, PROMPT) == 5
    bench.assert_idle()
