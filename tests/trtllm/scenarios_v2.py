"""Scenarios of KVCacheManagerV2: windows, replays, offers that are taken in part."""

from __future__ import annotations

from typing import Any

from kvbm_core.errors import Outcome
from kvbm_core.types import Direction
from tests.trtllm.harness import KeepingExecutor, Kind, Serving, serve
from tests.trtllm.scenarios import ALL_SYNC, CAP, EACH_BLOCK, PROMPT, cap_of, is_v2, scenario_list

SCENARIOS, scenario = scenario_list()
WINDOWS: dict[str, Any] = {"attention_windows": (None, 8), "num_layers": 4}


@scenario(is_v2, is_essential=True)
def windows(rank: int, kind: Kind) -> None:
    regions = {"split_kv_regions": True, "slot_padding_bytes": 64}
    for shape in (WINDOWS, {**WINDOWS, **regions}, {**WINDOWS, "chunk_tokens": 8}):
        with serve(rank, kind, **shape) as serving:
            first = serving.ask(PROMPT, 30)
            serving.forget_device()
            serving.expect_match(serving.ask(PROMPT), (CAP, True))
            serving.forget_device()
            serving.expect_match(serving.ask(PROMPT[:21]), (20, True))
            serving.forget_device()
            whole = [*PROMPT, *serving.output(first)]
            serving.expect_match(serving.ask(whole, 4), (cap_of(len(whole)), True))


@scenario(lambda kind: kind.is_v2 and kind.shards == 1)
def roles_that_are_the_same_on_all_ranks(rank: int, kind: Kind) -> None:
    with serve(rank, kind, replicated_roles=("value",), **WINDOWS) as serving:
        serving.ask(PROMPT)
        serving.forget_device()
        serving.expect_match(serving.ask(PROMPT), (CAP, True))


@scenario(is_v2)
def windows_of_odd_sizes(rank: int, kind: Kind) -> None:
    for window in (2, 5, 9, 11):
        # Few blocks: what a window has left belongs to somebody else at once.
        with serve(rank, kind, attention_windows=(None, window), num_layers=2, num_blocks=40) as serving:
            serving.gate.fail_next(Direction.OFFLOAD, Outcome.REJECTED, times=3)
            serving.may_fail = True
            first, *_ = [serving.submit(range(100 * i, 100 * i + 9 + i), 30) for i in range(3)]
            serving.executor.run_until_idle()
            serving.forget_device()
            whole = [*range(9), *serving.output(first)]
            assert serving.reason(serving.ask(whole, 4)) == "length"
            serving.forget_device()
            for i in range(3):
                assert serving.reason(serving.ask(range(100 * i, 100 * i + 9 + i), 30)) == "length"


@scenario(is_v2, is_essential=True)
def preempted_and_replayed(rank: int, kind: Kind) -> None:
    for shape in ({}, WINDOWS):
        with serve(rank, kind, env=EACH_BLOCK, **shape) as serving:
            request = serving.submit(PROMPT, 30)
            other = serving.submit(range(200, 230), 30)
            for _ in range(12):
                serving.executor.step()
            serving.executor.preempt(request)
            serving.executor.run_until_idle()
            assert serving.reason(request) == serving.reason(other) == "length"
            if serving.is_leading:
                calls = serving.executor.calls.named("get_num_new_matched_tokens")
                assert sum(call.values["request_id"] == request for call in calls) == 2
            serving.forget_device()
            whole = [*PROMPT, *serving.output(request)]
            serving.expect_match(serving.ask(whole, 4), (cap_of(len(whole)), True))


@scenario(is_v2)
def replayed_from_the_host(rank: int, kind: Kind) -> None:
    with serve(rank, kind, env=EACH_BLOCK) as serving:
        request = serving.submit(PROMPT, 30)
        for _ in range(12):
            serving.executor.step()
        serving.executor.preempt(request)
        serving.executor.step()
        serving.settle()
        serving.executor.drop_device_cache()
        serving.executor.run_until_idle()
        assert serving.reason(request) == "length"


@scenario(is_v2)
def preempted_for_want_of_blocks(rank: int, kind: Kind) -> None:
    with serve(rank, kind, num_blocks=30, env=EACH_BLOCK) as serving:
        serving.may_fail = True
        requests = [serving.submit(range(100 * i, 100 * i + 30), 40) for i in range(5)]
        serving.executor.run_until_idle()
        assert {serving.reason(request) for request in requests} == {"length"}


@scenario(is_v2)
def a_replay_whose_load_fails(rank: int, kind: Kind) -> None:
    # While the replayed request waits for its load, its former blocks are given to somebody else.
    with serve(rank, kind, num_blocks=64, env=EACH_BLOCK) as serving:
        request = serving.submit(PROMPT, 30)
        for _ in range(6):
            serving.executor.step()
        serving.executor.preempt(request)
        serving.settle()
        taker = serving.submit(range(500, 520), 1)  # younger: behind the replay
        serving.executor.run_until_idle()
        assert serving.reason(request) == serving.reason(taker) == "length"
        serving.forget_device()
        # The device has the blocks of the preempted one no more, and hands them out in the same order.
        victim = serving.submit(range(700, 740), 30)
        for _ in range(6):
            serving.executor.step()
        serving.settle_without_steps()  # else it might reach its last token
        assert serving.executor.state_of(victim) == "generation"
        serving.executor.preempt(victim)
        serving.gate.hold(Direction.ONBOARD)
        serving.executor.blocks.drop_cache()
        serving.step_until(lambda: serving.executor.state_of(victim) != "generation")
        serving.executor.blocks.drop_cache()
        serving.step_until(lambda: serving.executor.state_of(victim) == "loading")
        others = [serving.submit(range(1000 * i, 1000 * i + 60), 4) for i in (1, 2)]
        serving.step_until(lambda: all(other in serving.executor.outputs for other in others))
        serving.fails_here(Direction.ONBOARD)
        serving.gate.release(Direction.ONBOARD)
        serving.executor.run_until_idle()
        assert serving.reason(victim) == "error"


@scenario(is_v2, is_essential=True)
def a_replay_that_nobody_is_asked_about(rank: int, kind: Kind) -> None:
    """A request that was loaded while it was parked is not queried for its replay. The device may have its
    prefix from a load that has failed.
    """
    for has_wrong_blocks in (False, True):
        with serve(rank, kind, executor_class=KeepingExecutor, env=EACH_BLOCK) as serving:
            serving.may_fail = True
            serving.ask(PROMPT)
            serving.forget_device()
            victim = serving.submit(PROMPT, 30)
            serving.run_to(victim, "generation")
            serving.executor.step()
            serving.settle_without_steps()  # else it would reach its last token
            serving.executor.drop_device_cache()
            if has_wrong_blocks:
                _leave_wrong_blocks(serving)
            assert serving.executor.state_of(victim) == "generation"
            serving.executor.preempt(victim)
            serving.executor.run_until_idle()
            assert serving.reason(victim) == ("error" if has_wrong_blocks else "length")
            serving.ask(range(2000, 2200), 1)  # takes the blocks of the cancelled one, and so ends it
            if serving.is_leading:
                calls = serving.executor.calls.named("get_num_new_matched_tokens")
                assert [call.values["request_id"] for call in calls].count(victim) == 1


def _leave_wrong_blocks(serving: Serving) -> None:
    """A load of PROMPT is cancelled, and fails; the device has the blocks for those who come."""
    serving.gate.hold(Direction.ONBOARD)
    request = serving.submit(PROMPT, 4)
    serving.run_to(request, "loading")
    serving.executor.cancel(request)
    serving.executor.step()
    serving.fails_here(Direction.ONBOARD)
    serving.gate.release(Direction.ONBOARD)
    serving.settle_without_steps()  # the others would reach their last tokens
    worker = serving.executor.worker.side.worker

    def is_over() -> bool:
        worker.wait_note(0.2)  # the leader's word on it, for which steps would be too quick
        return not serving.executor.manager.has_pending(request)  # type: ignore[union-attr]

    serving.step_until(is_over)


@scenario(is_v2, is_essential=True)
def honours_less_than_offered(rank: int, kind: Kind) -> None:
    for shape in ({}, WINDOWS, {**WINDOWS, "attention_windows": (None, 5)}):
        for env in ({}, ALL_SYNC):
            with serve(rank, kind, chunk_tokens=16, refuse_growth=True, env=env, **shape) as serving:
                serving.ask(PROMPT)
                serving.forget_device()
                before = serving.executor.num_computed_tokens
                again = serving.ask(PROMPT)
                assert serving.reason(again) == "length"
                # The first chunk has pages for 16 tokens; its last block is computed.
                assert serving.executor.num_computed_tokens - before == 40 - 12 + 7


@scenario(is_v2)
def honours_nothing(rank: int, kind: Kind) -> None:
    with serve(rank, kind, chunk_tokens=4, refuse_growth=True) as serving:
        serving.ask(PROMPT)
        serving.forget_device()
        assert serving.reason(serving.ask(PROMPT)) == "length"
