"""The leader's way up: what is matched, what is held meanwhile, and what a load that fails leaves behind."""

from __future__ import annotations

import pytest

from kvbm_core.errors import IntegrityError, Outcome
from kvbm_core.runtime.handshake import Disabled
from kvbm_core.runtime.leader_options import LeaderOptions
from kvbm_core.testing.leader_bench import LeaderBench
from kvbm_core.tiers.groups import GroupSpec
from kvbm_core.transfer.plan import GroupMove, TransferPlan
from kvbm_core.types import Direction

PROMPT = list(range(100, 120))  # five blocks
TABLE = [[11, 12, 13, 14, 15]]
ONBOARD = Direction.ONBOARD


def warm(**kwargs: object) -> LeaderBench:
    """A leader whose tier has PROMPT."""
    bench = LeaderBench(**kwargs)
    bench.store(PROMPT)
    return bench


def loading(bench: LeaderBench, request_id: str = "loader") -> TransferPlan:
    """A request that is being brought PROMPT's first four blocks."""
    state = bench.open(request_id)
    assert bench.match(state, PROMPT) == 16
    plan = bench.leader.onboard(state, 16, TABLE)
    assert plan is not None
    return plan


# ---------------------------------------------------------------- match


def test_one_token_is_left_to_compute_and_only_whole_blocks_count() -> None:
    bench = warm()
    state = bench.open()
    assert bench.match(state, PROMPT) == 16
    assert bench.match(state, [*PROMPT, 1]) == 20
    assert bench.match(state, [*PROMPT, 1], computed_tokens=8) == 12
    assert bench.match(state, PROMPT, computed_tokens=16) == 0
    assert bench.match(state, PROMPT[:3]) == 0
    assert bench.match(state, [*PROMPT, 1], computed_tokens=6) == 0  # not at the border of a block


def test_other_tokens_and_other_namespaces_match_nothing() -> None:
    bench = warm()
    assert bench.match(bench.open("a"), [*PROMPT[:7], 0, *PROMPT[8:]]) == 4
    assert bench.match(bench.open("b"), [0, *PROMPT[1:]]) == 0
    other = bench.leader.open("c", bench.leader.request("a").chain.hashes[0], None)
    assert bench.match(other, PROMPT) == 0


def test_nothing_is_matched_before_the_slots_are_there_or_after_the_tier_is_off() -> None:
    bench = LeaderBench(0)
    state = bench.open()
    assert not bench.leader.is_ready and bench.match(state, PROMPT) == 0
    assert bench.offload(state, PROMPT) is None
    bench.slots_ready(8)
    plan = bench.offload(state, PROMPT)
    assert plan is not None and plan.num_blocks == 5  # nothing was lost by asking too early
    bench.answer(plan)
    assert bench.match(state, PROMPT) == 16
    bench.handshake.inbox.append(Disabled("broken"))
    bench.leader.poll()
    assert bench.match(state, PROMPT) == 0 and bench.leader.disabled_reason == "broken"
    assert bench.offload(bench.open("late"), [1, 2, 3, 4]) is None
    assert bench.metric('kvbm_failures_total{kind="handshake"}') == 1
    bench.leader.finish(state)
    bench.leader.finish(bench.leader.request("late"))
    bench.assert_idle()


def test_what_is_matched_is_pinned_until_it_is_declined() -> None:
    bench = warm(num_slots=5)
    state = bench.open()
    assert bench.match(state, PROMPT) == 16
    assert bench.match(state, PROMPT) == 16  # asked again: still one lease
    assert bench.tier.live_leases == 1
    other = bench.open("other")
    plan = bench.offload(other, range(20))
    assert plan is not None and plan.num_blocks == 1  # four of five slots are pinned
    bench.leader.decline(state)
    assert bench.tier.live_leases == 0
    bench.answer(plan)
    bench.leader.finish(state)
    bench.leader.finish(other)
    bench.assert_idle()


def test_a_match_that_is_never_used_expires() -> None:
    bench = warm(options=LeaderOptions(lease_ttl_s=5.0))
    state = bench.open()
    bench.match(state, PROMPT)
    bench.clock.advance(5.0)
    bench.leader.poll()
    assert bench.tier.live_leases == 0
    assert bench.metric('kvbm_failures_total{kind="lease_expired"}') == 1
    assert bench.leader.onboard(state, 16, TABLE) is None
    assert bench.match(state, PROMPT) == 16
    bench.leader.finish(state)
    bench.assert_idle()


# ---------------------------------------------------------------- onboard


def test_a_load_names_the_slots_of_the_blocks_in_order() -> None:
    bench = LeaderBench()
    store = bench.offload(bench.open("writer"), PROMPT)
    assert store is not None
    bench.answer(store)
    plan = loading(bench)
    assert plan == TransferPlan(
        plan.job_id, ONBOARD, (GroupMove(0, (11, 12, 13, 14), store.moves[0].slots[:4]),)
    )


@pytest.mark.parametrize(
    ("num_tokens", "tables"),
    [(0, TABLE), (20, TABLE), (16, [[11, 12, 13]]), (16, []), (16, [*TABLE, *TABLE])],
    ids=["nothing", "more than matched", "table too short", "no table", "one table too many"],
)
def test_a_promise_that_cannot_be_kept_makes_no_plan_and_holds_nothing(
    num_tokens: int, tables: list[list[int]]
) -> None:
    bench = warm()
    state = bench.open()
    assert bench.match(state, PROMPT) == 16
    assert bench.leader.onboard(state, num_tokens, tables) is None
    assert bench.tier.live_leases == 0 and bench.leader.pending_jobs == 0
    assert bench.leader.onboard(state, 16, TABLE) is None  # a match is used once
    bench.leader.finish(state)
    bench.assert_idle()


@pytest.mark.parametrize(("num_tokens", "num_blocks"), [(12, 3), (9, 3), (8, 2), (1, 1)])
def test_an_engine_that_takes_less_than_was_matched_gets_the_blocks_of_that(
    num_tokens: int, num_blocks: int
) -> None:
    bench = warm()
    state = bench.open()
    assert bench.match(state, PROMPT) == 16
    plan = bench.leader.onboard(state, num_tokens, TABLE)
    assert plan is not None and plan.moves[0].device_blocks == tuple(TABLE[0][:num_blocks])
    bench.answer(plan)
    bench.leader.finish(state)
    bench.assert_idle()


def test_a_load_in_flight_outlives_its_lease_time_and_is_released_at_its_end() -> None:
    bench = warm(num_slots=5, options=LeaderOptions(lease_ttl_s=5.0))
    plan = loading(bench)
    for _ in range(10):
        bench.clock.advance(4.0)
        bench.leader.poll()
    assert bench.tier.live_leases == 1
    bench.answer(plan)
    assert bench.tier.live_leases == 0
    assert bench.metric('kvbm_failures_total{kind="lease_expired"}') == 0


def test_a_load_is_over_when_both_ranks_say_so() -> None:
    bench = warm(world_size=2)
    plan = loading(bench)
    bench.answer(plan, ranks=[1])
    state = bench.leader.request("loader")
    assert state is not None and state.onboard_job == plan.job_id
    assert bench.metric("kvbm_onboard_blocks_h2d") == 0
    bench.answer(plan, ranks=[0])
    assert state.onboard_job is None
    assert bench.metric("kvbm_onboard_blocks_h2d") == 4 and bench.metric("kvbm_matched_tokens") == 16
    assert bench.metric('kvbm_bytes_total{direction="onboard"}') == 200


@pytest.mark.parametrize("outcome", [Outcome.IO_ERROR, Outcome.CORRUPT, Outcome.TIMED_OUT, Outcome.REJECTED])
def test_a_load_that_failed_is_a_miss_from_then_on_and_written_anew(outcome: Outcome) -> None:
    bench = warm(world_size=2)
    plan = loading(bench)
    bench.answer(plan, ranks=[0])
    bench.answer(plan, outcome, ranks=[1])
    state = bench.leader.request("loader")
    assert state is not None
    assert bench.resident_blocks(PROMPT) == 0 and bench.match(state, PROMPT) == 0
    assert bench.metric(f'kvbm_failures_total{{kind="onboard_{outcome}"}}') == 1
    for series in ("kvbm_onboard_blocks_h2d", "kvbm_matched_tokens", 'kvbm_bytes_total{direction="onboard"}'):
        assert bench.metric(series) == 0
    anew = bench.offload(state, PROMPT)
    assert anew is not None and anew.num_blocks == 4
    bench.answer(anew)
    assert bench.resident_blocks(PROMPT) == 5
    bench.leader.finish(state)
    assert bench.metric("kvbm_host_cache_hit_rate") == 0
    bench.assert_idle()


def test_news_of_a_failed_load_that_come_late_do_not_lose_the_blocks() -> None:
    """The engine knows from the worker and goes on computing before the leader has read the
    acknowledgement.
    """
    bench = warm()
    plan = loading(bench)
    state = bench.leader.request("loader")
    assert state is not None
    assert bench.offload(state, PROMPT) is None  # computed again; as far as we know they are stored
    bench.answer(plan, Outcome.IO_ERROR)
    anew = bench.offload(state, PROMPT)
    assert anew is not None and anew.num_blocks == 4


def test_a_match_of_blocks_whose_load_failed_meanwhile_is_not_kept() -> None:
    bench = warm(options=LeaderOptions(share_loads=False))
    plan = loading(bench)
    state = bench.open("second")
    assert bench.match(state, PROMPT) == 16
    bench.answer(plan, Outcome.CORRUPT)
    assert bench.leader.onboard(state, 16, TABLE) is None
    assert bench.tier.live_leases == 0 and bench.tier.resident_blocks == 1


def test_a_request_aborted_while_it_loads_is_kept_until_the_copy_ends() -> None:
    bench = warm()
    plan = loading(bench)
    state = bench.leader.request("loader")
    assert state is not None
    assert bench.leader.finish(state) == ()
    assert bench.leader.open_requests == 1 and bench.leader.request("loader") is None
    bench.answer(plan)
    bench.assert_idle()


def test_an_id_used_again_while_its_old_request_still_loads_starts_afresh() -> None:
    """Tokens of the old one would else be matched for the new one."""
    bench = warm()
    old_plan = loading(bench)
    old = bench.leader.request("loader")
    assert old is not None
    bench.leader.finish(old)
    new = bench.open("loader")
    assert bench.match(new, [1, 2, 3, 4, 5, 6, 7, 8, 9]) == 0
    bench.store([1, 2, 3, 4, 5, 6, 7, 8])
    assert bench.match(new, [1, 2, 3, 4, 5, 6, 7, 8, 9]) == 8
    new_plan = bench.leader.onboard(new, 8, [[1, 2]])
    assert new_plan is not None
    bench.answer(old_plan)
    assert new.onboard_job == new_plan.job_id and bench.leader.request("loader") is new
    bench.answer(new_plan)
    bench.leader.finish(new)
    bench.assert_idle()


def test_an_id_opened_twice_lets_go_of_what_the_first_had_matched() -> None:
    bench = warm()
    bench.match(bench.open("x"), PROMPT)
    bench.leader.finish(bench.open("x"))
    bench.assert_idle()


def test_a_plan_that_was_never_sent_is_taken_back() -> None:
    bench = warm(world_size=2)
    plan = loading(bench)
    store = bench.offload(bench.open("w"), [9] * 8)
    assert store is not None
    bench.leader.abandon(plan.job_id)
    bench.leader.abandon(store.job_id)
    bench.leader.abandon(12345)
    assert bench.leader.pending_jobs == 0 and bench.resident_blocks([9] * 8) == 0
    for request_id in ("loader", "w"):
        bench.leader.finish(bench.leader.request(request_id))
    bench.assert_idle()


# ---------------------------------------------------------------- sharing


def test_a_prefix_that_another_request_is_loading_is_waited_for_but_not_for_ever() -> None:
    bench = warm(options=LeaderOptions(share_wait_s=1.0))
    plan = loading(bench)
    state = bench.open("second")
    for _ in range(4):
        assert bench.match(state, PROMPT) is None
        assert bench.tier.live_leases == 1  # who waits holds nothing
        bench.clock.advance(0.25)
    assert bench.match(state, PROMPT) == 16
    assert bench.match(state, PROMPT) == 16  # the engine had no room: the wait does not begin again
    bench.answer(plan)
    assert bench.match(state, PROMPT) == 16
    assert bench.match(state, [*PROMPT, 1], computed_tokens=16) == 4


def test_the_end_of_the_load_ends_the_wait() -> None:
    bench = warm()
    plan = loading(bench)
    state = bench.open("second")
    assert bench.match(state, PROMPT) is None
    bench.answer(plan)
    assert bench.match(state, PROMPT) == 16
    another = loading(bench, "third")
    assert bench.match(state, PROMPT) is None  # a new load, a new wait
    bench.answer(another)


def test_only_those_wait_who_need_what_is_being_loaded() -> None:
    bench = warm()
    bench.store(range(12))
    plan = loading(bench)
    assert bench.match(bench.open("other"), range(13)) == 12
    assert bench.match(bench.open("has it"), [*PROMPT, 1], computed_tokens=16) == 4
    bench.answer(plan)


def test_without_a_shared_device_cache_nobody_waits() -> None:
    bench = warm(options=LeaderOptions(share_loads=False))
    loading(bench)
    assert bench.match(bench.open("second"), PROMPT) == 16


def test_groups_with_different_block_sizes_wait_for_the_same_tokens() -> None:
    groups = (GroupSpec(0, 4), GroupSpec(1, 8))
    bench = LeaderBench(32, groups=groups)
    tokens = list(range(200, 233))
    bench.store(tokens)
    first, second = bench.open("first"), bench.open("second")
    assert bench.match(first, tokens, computed_tokens=24) == 8
    plan = bench.leader.onboard(first, 8, [range(1, 9), range(11, 15)])
    assert plan is not None and [move.group for move in plan.moves] == [0, 1] and plan.num_blocks == 3
    assert bench.match(second, tokens, computed_tokens=24) is None
    assert bench.match(second, tokens, computed_tokens=16) == 16
    bench.answer(plan)


def test_a_window_is_loaded_without_what_nobody_sees() -> None:
    groups = (GroupSpec(0, 4), GroupSpec(1, 4, window_tokens=6))
    bench = LeaderBench(32, groups=groups)
    bench.store(PROMPT)
    state = bench.open()
    assert bench.match(state, PROMPT) == 16
    plan = bench.leader.onboard(state, 16, [[1, 2, 3, 4, 5], [0, 0, 6, 7, 8]])
    assert plan is not None
    assert [move.device_blocks for move in plan.moves] == [(1, 2, 3, 4), (6, 7)]
    bench.answer(plan)
    # The engine wants a block that was not matched, because the window ended before it.
    assert bench.match(state, PROMPT) == 16
    assert bench.leader.onboard(state, 16, [[1, 2, 3, 4, 5], [0, 5, 6, 7, 8]]) is None


def test_integrity_notices_a_lost_load() -> None:
    bench = warm()
    loading(bench)
    bench.leader.check_integrity()
    bench.leader._jobs._jobs.clear()
    with pytest.raises(IntegrityError):
        bench.leader.check_integrity()
