"""The leader's way down: what is copied, what makes room for it, when it counts, and what a reset leaves."""

from __future__ import annotations

import pytest

from kvbm_core.errors import Outcome
from kvbm_core.runtime.request import RequestState
from kvbm_core.runtime.transfer_jobs import JobPart
from kvbm_core.testing.leader_bench import LeaderBench
from kvbm_core.tiers.groups import GroupSpec
from kvbm_core.transfer.plan import GroupMove, JobResult, TransferPlan
from kvbm_core.types import Direction

PROMPT = list(range(100, 120))  # five blocks
OTHER = list(range(300, 320))


def offload(
    bench: LeaderBench, state: RequestState, tokens: list[int], first_device_block: int = 1
) -> TransferPlan:
    plan = bench.offload(state, tokens, first_device_block)
    assert plan is not None
    return plan


# ---------------------------------------------------------------- what is copied


def test_full_blocks_are_copied_once_in_order_as_they_fill() -> None:
    bench = LeaderBench()
    state = bench.open()
    table = [[11, 12, 13, 14, 15]]
    first = bench.offload_step(state, PROMPT, 0, 10, table)
    assert first is not None
    assert first == TransferPlan(first.job_id, Direction.OFFLOAD, (GroupMove(0, (11, 12), (0, 1)),))
    assert bench.offload_step(state, PROMPT, 10, 11, table) is None
    second = bench.offload_step(state, PROMPT, 11, 20, table)
    assert second is not None and second.moves[0].device_blocks == (13, 14, 15)


def test_a_bug_that_one_answer_meets_costs_no_other_one() -> None:
    def fail(part: JobPart, is_committed: bool) -> None:
        if part.state.request_id == "one":
            raise RuntimeError("a bug")

    bench = LeaderBench(on_offload_end=fail)
    plans = [offload(bench, bench.open("one"), PROMPT), offload(bench, bench.open("two"), OTHER, 11)]
    answers = [JobResult(plan.job_id, Outcome.OK, 100, 0.5, 0.25) for plan in plans]
    with pytest.raises(RuntimeError, match="a bug"):
        bench.leader.acknowledge(0, answers)
    bench.leader.poll()
    assert bench.resident_blocks(OTHER) == 5 and not bench.leader.pending_jobs


def test_blocks_made_by_decode_are_copied_too() -> None:
    bench = LeaderBench()
    state = bench.open()
    bench.answer(offload(bench, state, PROMPT[:8]))
    tokens, stored = PROMPT[:8], []
    for token in range(12):
        tokens = [*tokens, token]
        plan = bench.offload_step(state, tokens, len(tokens) - 1, len(tokens), [range(1, 10)])
        if plan is not None:
            stored += plan.moves[0].device_blocks
            bench.answer(plan)
    assert stored == [3, 4, 5] and bench.resident_blocks(tokens) == 5


def test_blocks_the_engine_does_not_keep_are_left_out() -> None:
    bench = LeaderBench()
    plan = bench.offload_step(bench.open(), PROMPT, 0, 20, [[11, 0, 13, 0, 15]])
    assert plan is not None and plan.moves[0].device_blocks == (11, 13, 15)


def test_a_table_or_a_chain_that_is_short_bounds_what_is_copied() -> None:
    bench = LeaderBench()
    plan = bench.offload_step(bench.open("a"), PROMPT, 0, 20, [[11, 12]])
    assert plan is not None and plan.num_blocks == 2
    plan = bench.offload_step(bench.open("b"), OTHER[:9], 0, 20, [[11, 12, 13, 14, 15]])
    assert plan is not None and plan.num_blocks == 2


def test_blocks_that_a_window_may_have_given_up_are_not_read() -> None:
    bench = LeaderBench(groups=(GroupSpec(0, 4, window_tokens=5),))
    plan = bench.offload_step(bench.open(), PROMPT, 16, 20, [[11, 12, 13, 14, 15]])
    # Position 16 sees 12 .. 16: block 3 is still there, those before may hold another request's bytes.
    assert plan is not None and plan.moves[0].device_blocks == (14, 15)


def test_the_same_prompt_at_the_same_time_is_copied_once() -> None:
    bench = LeaderBench()
    first, second = bench.open("first"), bench.open("second")
    plan = offload(bench, first, PROMPT)
    assert bench.offload(second, PROMPT, first_device_block=50) is None
    longer = offload(bench, bench.open("third"), [*PROMPT, 1, 2, 3, 4], 70)
    assert longer.moves[0].device_blocks == (75,)
    bench.answer(plan)
    bench.answer(longer)
    assert bench.tier.resident_blocks == 6
    assert bench.offload(bench.open("fourth"), PROMPT) is None
    assert bench.metric("kvbm_offload_blocks_d2h") == 6


def gather(bench: LeaderBench, state: RequestState, tokens: list[int], first_device_block: int) -> None:
    table = range(first_device_block, first_device_block + len(tokens) // 4)
    assert bench.leader.offload(state, tokens, 0, len(tokens), [table]) is not None


def test_what_several_requests_fill_in_one_step_is_one_job() -> None:
    bench = LeaderBench(16)
    first, second = bench.open("first"), bench.open("second")
    gather(bench, first, PROMPT, 1)
    gather(bench, second, OTHER, 11)
    plan = bench.take_offloads()
    assert plan is not None and bench.take_offloads() is None
    assert plan.moves == (GroupMove(0, (1, 2, 3, 4, 5, 11, 12, 13, 14, 15), tuple(range(10))),)
    assert bench.leader.finish(first) == bench.leader.finish(second) == (plan.job_id,)
    bench.answer(plan)
    assert bench.resident_blocks(PROMPT) == bench.resident_blocks(OTHER) == 5
    assert bench.metric("kvbm_offload_blocks_d2h") == 10
    bench.assert_idle()


def test_a_job_cancelled_because_of_one_request_is_made_again_for_the_others() -> None:
    bench = LeaderBench(16)
    preempted, other = bench.open("preempted"), bench.open("other")
    gather(bench, preempted, PROMPT, 1)
    gather(bench, other, OTHER, 11)
    bench.answer(bench.take_offloads(), Outcome.REJECTED)
    assert bench.resident_blocks(PROMPT) == bench.resident_blocks(OTHER) == 0
    again = bench.offload_step(other, [*OTHER, 1], 20, 21, [range(11, 17)])
    assert again is not None and again.moves[0].device_blocks == (11, 12, 13, 14, 15)
    bench.answer(again)
    assert bench.resident_blocks(OTHER) == 5


def test_an_open_job_can_be_abandoned_and_the_next_one_is_another() -> None:
    bench = LeaderBench(16)
    state = bench.open()
    gather(bench, state, PROMPT, 1)
    (job_id,) = state.offload_jobs
    bench.leader.abandon(job_id)
    assert bench.take_offloads() is None and bench.tier.pending_blocks == 0
    plan = offload(bench, state, PROMPT)
    assert plan.job_id != job_id
    bench.answer(plan)
    bench.leader.finish(state)
    bench.assert_idle()


def test_a_request_scheduled_again_is_considered_from_its_start() -> None:
    bench = LeaderBench()
    state = bench.open()
    bench.answer(offload(bench, state, PROMPT), Outcome.IO_ERROR)
    assert bench.offload(state, PROMPT) is None
    assert bench.match(state, PROMPT) == 0  # preempted: the engine asks again
    assert offload(bench, state, PROMPT).num_blocks == 5


# ---------------------------------------------------------------- when it counts


def test_nothing_is_matched_before_all_ranks_have_it() -> None:
    bench = LeaderBench(world_size=2)
    state = bench.open()
    plan = offload(bench, state, PROMPT)
    assert bench.resident_blocks(PROMPT) == 0
    bench.answer(plan, ranks=[0])
    bench.answer(plan, ranks=[0])  # twice the same rank is not two ranks
    assert bench.resident_blocks(PROMPT) == 0 and bench.leader.stale_results_total == 1
    bench.answer(plan, ranks=[1])
    assert bench.resident_blocks(PROMPT) == 5
    assert (
        bench.metric("kvbm_offload_blocks_d2h") == 5
        and bench.metric('kvbm_bytes_total{direction="offload"}') == 200
    )


@pytest.mark.parametrize("outcome", [outcome for outcome in Outcome if outcome is not Outcome.OK])
def test_a_copy_that_failed_on_one_rank_leaves_nothing_and_counts_no_block(outcome: Outcome) -> None:
    bench = LeaderBench(5, world_size=2)
    state = bench.open()
    plan = offload(bench, state, PROMPT)
    bench.answer(plan, outcome, ranks=[0])
    assert bench.tier.pending_blocks == 5  # the other rank still writes into these slots
    bench.answer(plan, ranks=[1])
    assert bench.tier.pending_blocks == 0 and bench.resident_blocks(PROMPT) == 0
    assert (
        bench.metric("kvbm_offload_blocks_d2h") == 0
        and bench.metric('kvbm_bytes_total{direction="offload"}') == 0
    )
    if outcome is Outcome.REJECTED:
        assert bench.metric('kvbm_dropped_blocks_total{reason="preempted"}') == 5
    elif outcome is not Outcome.MISS:
        assert bench.metric(f'kvbm_failures_total{{kind="offload_{outcome}"}}') == 1
    bench.answer(plan)  # late
    bench.leader.finish(state)
    bench.store(OTHER)
    assert bench.resident_blocks(OTHER) == 5
    bench.assert_idle()


def test_the_listener_hears_of_every_end_and_what_it_meant() -> None:
    heard: list[tuple[int, str, bool]] = []

    def on_end(part: JobPart, committed: bool) -> None:
        heard.append((part.job_id, part.state.request_id, committed))

    bench = LeaderBench(on_offload_end=on_end)
    state = bench.open("r")
    good, bad, late = (offload(bench, state, PROMPT[:n], 1) for n in (4, 8, 12))
    bench.answer(good)
    bench.answer(bad, Outcome.IO_ERROR)
    bench.leader.finish(state)
    bench.answer(late)
    assert heard == [(good.job_id, "r", True), (bad.job_id, "r", False), (late.job_id, "r", True)]


# ---------------------------------------------------------------- room


def test_a_tier_that_is_short_takes_the_head_and_says_what_it_left() -> None:
    bench = LeaderBench(3)
    plan = offload(bench, bench.open(), PROMPT)
    assert plan.moves[0].device_blocks == (1, 2, 3)
    assert bench.metric('kvbm_dropped_blocks_total{reason="no_space"}') == 2
    bench.answer(plan)
    assert bench.resident_blocks(PROMPT) == 3


def test_a_short_tier_is_shared_by_the_groups_so_that_a_prefix_is_whole() -> None:
    bench = LeaderBench(6, groups=(GroupSpec(0, 4), GroupSpec(1, 8)))
    bench.store(range(32))
    state = bench.open()
    assert bench.match(state, range(33)) == 16


def test_the_own_chain_never_makes_room_for_its_own_end() -> None:
    bench = LeaderBench(4)
    state = bench.open()
    bench.answer(offload(bench, state, PROMPT[:16]))
    assert bench.offload(state, PROMPT) is None
    assert bench.resident_blocks(PROMPT) == 4 and bench.tier.evicted_blocks_total == 0
    assert bench.metric('kvbm_dropped_blocks_total{reason="no_space"}') == 1


def test_chains_of_one_job_make_no_room_for_each_other() -> None:
    bench = LeaderBench(8)
    states = [bench.open(name) for name in ("one", "two")]
    prompts = (PROMPT, OTHER)
    for state, prompt in zip(states, prompts, strict=True):
        bench.answer(offload(bench, state, prompt[:16]))
    for state, prompt in zip(states, prompts, strict=True):
        bench.leader.offload(state, prompt, 16, len(prompt), [range(1, 1 + len(prompt) // 4)])
    assert bench.take_offloads() is None
    assert [bench.resident_blocks(prompt) for prompt in prompts] == [4, 4]
    assert bench.tier.evicted_blocks_total == 0


def test_pinned_and_pending_blocks_never_make_room() -> None:
    bench = LeaderBench(6)
    bench.store(PROMPT[:8])
    reader = bench.open("reader")
    assert bench.match(reader, PROMPT[:9]) == 8
    writer = bench.open("writer")
    pending = offload(bench, writer, OTHER[:8])
    third = offload(bench, bench.open("third"), list(range(500, 520)))
    assert third.num_blocks == 2
    used = {
        *pending.moves[0].slots,
        *third.moves[0].slots,
        *(reader.match.held.slots if reader.match else ()),
    }
    assert len(used) == 6 and bench.tier.evicted_blocks_total == 0


def test_the_tail_of_a_prompt_makes_room_before_its_head_and_the_oldest_prompt_first() -> None:
    bench = LeaderBench(10)
    bench.store(PROMPT)
    bench.store(OTHER)
    bench.store(PROMPT, "again")
    bench.store(range(900, 912))
    assert bench.resident_blocks(OTHER) == 2 and bench.resident_blocks(PROMPT) == 5
    assert bench.metric('kvbm_evicted_blocks_total{tier="host",reason="room"}') == 3


def test_blocks_stored_after_the_request_ended_do_not_outlive_their_head() -> None:
    bench = LeaderBench(6)
    state = bench.open()
    bench.answer(offload(bench, state, PROMPT[:16]))
    last = offload(bench, state, PROMPT)
    assert bench.leader.finish(state) == (last.job_id,)
    bench.answer(last)
    bench.store(OTHER[:12])
    assert bench.resident_blocks(PROMPT) == 3


def test_a_prefix_the_device_had_does_not_go_before_the_part_that_was_loaded() -> None:
    bench = LeaderBench(7)
    bench.store(PROMPT)
    bench.store(OTHER[:8])
    state = bench.open()
    assert bench.match(state, [*PROMPT, 1], computed_tokens=8) == 12
    plan = bench.leader.onboard(state, 12, [range(1, 7)])
    assert plan is not None
    bench.answer(plan)
    bench.store(range(900, 916))
    assert bench.resident_blocks(OTHER) == 0 and bench.resident_blocks(PROMPT) == 3


def test_groups_make_room_together_from_the_end() -> None:
    bench = LeaderBench(9, groups=(GroupSpec(0, 4), GroupSpec(1, 8)))
    tokens = list(range(24))
    bench.store(tokens)  # 6 + 3 blocks
    bench.store(range(700, 708))  # 2 + 1 blocks
    state = bench.open()
    assert bench.match(state, [*tokens, 1]) == 16


# ---------------------------------------------------------------- the end of a request


def test_finish_names_the_copies_that_still_read_its_blocks() -> None:
    bench = LeaderBench()
    state = bench.open()
    first, second = offload(bench, state, PROMPT[:8]), offload(bench, state, PROMPT)
    assert bench.leader.readers_of([2]) == {first.job_id} and bench.leader.readers_of([9]) == set()
    assert bench.leader.finish(state) == (first.job_id, second.job_id)
    assert bench.leader.open_requests == 1
    bench.answer(first)
    assert bench.leader.readers_of([1, 2, 3]) == {second.job_id}
    bench.answer(second)
    bench.assert_idle()
    assert bench.resident_blocks(PROMPT) == 5


def test_hit_rates_never_exceed_one_however_often_a_request_is_preempted() -> None:
    bench = LeaderBench()
    bench.store(PROMPT)
    state = bench.open()
    tokens = [*PROMPT, 1]
    assert bench.match(state, tokens) == 20
    plan = bench.leader.onboard(state, 20, [range(1, 7)])
    assert plan is not None
    bench.answer(plan)
    assert bench.match(state, [*tokens, 1, 1, 1], computed_tokens=16) == 4
    bench.leader.finish(state)
    window = bench.leader.metrics.hit_window()
    assert (window.host_hit_blocks, window.queried_blocks) == (5, 5)


# ---------------------------------------------------------------- reset


def test_what_was_being_stored_at_a_reset_is_never_matched() -> None:
    bench = LeaderBench()
    bench.store(OTHER)
    state = bench.open()
    plan = offload(bench, state, PROMPT)
    bench.leader.reset()
    assert bench.resident_blocks(OTHER) == 0
    bench.answer(plan)
    assert bench.resident_blocks(PROMPT) == 0
    assert bench.metric('kvbm_dropped_blocks_total{reason="reset"}') == 5
    assert bench.metric("kvbm_offload_blocks_d2h") == 5  # of OTHER
    bench.leader.finish(state)
    bench.assert_idle()
    bench.store(PROMPT)
    assert bench.resident_blocks(PROMPT) == 5


def test_a_reset_breaks_promises_and_leaves_loads_their_slots() -> None:
    bench = LeaderBench(5)
    bench.store(PROMPT)
    loader, waiting = bench.open("loader"), bench.open("waiting")
    assert bench.match(loader, PROMPT) == 16
    plan = bench.leader.onboard(loader, 16, [range(1, 6)])
    assert plan is not None
    assert bench.match(waiting, [*PROMPT, 1], computed_tokens=16) == 4
    bench.leader.reset()
    assert bench.leader.onboard(waiting, 4, [range(1, 7)]) is None
    assert bench.match(waiting, PROMPT) == 0
    for _ in range(5):  # the load takes longer than its lease: its slots are still not given away
        bench.clock.advance(20.0)
        bench.leader.poll()
        store = bench.offload(bench.open("writer"), OTHER)
        if store is not None:
            assert not {*store.moves[0].slots} & {*plan.moves[0].slots}
    bench.answer(plan)
    assert bench.resident_blocks(PROMPT) == 0 and bench.tier.resident_blocks == 0
    bench.leader.check_integrity()


def test_what_nobody_here_has_seen_computed_is_never_offloaded() -> None:
    bench = LeaderBench()
    state = bench.open()
    state.foreign_tokens = 8
    assert bench.match(state, PROMPT) == 0  # starts the request's offload anew
    plan = bench.offload(state, PROMPT)
    assert plan is not None and plan.moves[0].device_blocks == (3, 4, 5)
    bench.answer(plan, Outcome.REJECTED)
    again = bench.offload(state, PROMPT)
    assert again is not None and again.moves == plan.moves, "not even when the first copy was cancelled"
    bench.answer(again)
    bench.leader.finish(state)
    bench.assert_idle()
