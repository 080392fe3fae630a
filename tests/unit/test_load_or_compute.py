"""Prompts that are computed faster than a store brings them do not wait for it."""

from __future__ import annotations

import logging

import pytest

from kvbm_core.clock import ManualClock
from kvbm_core.config import KvbmSettings
from kvbm_core.errors import Outcome
from kvbm_core.runtime.assembly import lower_makers
from kvbm_core.tiers.keyed import KeyedTier
from kvbm_core.tiers.lower import Seeker, Sought
from kvbm_core.tiers.pace import (
    FRESH_S,
    MIN_SAMPLES,
    MIN_STEP_TOKENS,
    SHORT_LOAD_S,
    WORTH,
    ComputePace,
    LoadPace,
)
from kvbm_core.tokens.runs import BlockRun
from kvbm_core.transfer.plan import JobResult, OrderKind
from tests.unit.extent_bench import ExtentBench, chain
from tests.unit.test_leader_fetch import Bench as LeaderBench
from tests.unit.tier_bench import TierBench

BLOCK_TOKENS = 16


def steps(pace: ComputePace, clock: ManualClock, *planned: tuple[int, float]) -> None:
    """Each step computes so many tokens and takes so long."""
    for tokens, seconds in planned:
        pace.computes(tokens)
        pace.planned()
        clock.advance(seconds)


def test_a_prompt_in_chunks_says_how_fast_it_is_computed() -> None:
    clock = ManualClock()
    pace = ComputePace(clock)
    assert pace.token_s is None
    steps(pace, clock, *[(2048, 0.5)] * (MIN_SAMPLES + 5), (1, 0.01), (1, 0.01))
    assert pace.token_s == pytest.approx(0.5 / 2048, rel=0.2)


def test_under_asynchronous_scheduling_a_step_is_not_taken_for_the_one_before_it() -> None:
    """A prompt's step is planned while a short one runs; what comes next waits for the prompt's."""
    clock = ManualClock()
    pace = ComputePace(clock)
    for _ in range(20):
        steps(pace, clock, *[(0, 0.01)] * 5, (4096, 0.01), (0, 1.0))
    assert pace.token_s == pytest.approx(1.01 / 4096, rel=0.2)


def test_steps_that_say_nothing_do_not_count() -> None:
    clock = ManualClock()
    pace = ComputePace(clock)
    steps(pace, clock, *[(MIN_STEP_TOKENS - 1, 9.0)] * 50)
    assert pace.token_s is None
    steps(pace, clock, *[(1000, 0.1), (0, 0.1), (0, 3600.0)] * 20)
    assert pace.token_s == pytest.approx(0.2 / 1000, rel=0.1), "the engine had nothing to do for an hour"


@pytest.mark.parametrize("beside", [0, 3])
def test_a_load_is_worth_it_if_it_is_clearly_faster(beside: int) -> None:
    pace = LoadPace(ManualClock())
    for _ in range(MIN_SAMPLES):
        assert pace.is_worth(1000, 16_000, 1e-9), "nobody knows yet"
        pace.brought(100, 1.0 * (1 + beside), beside)
    assert pace.is_worth(1000, 16_000, None)
    limit = 10.0 / 16_000 / WORTH
    assert pace.is_worth(1000, 16_000, limit * 1.01) and not pace.is_worth(1000, 16_000, limit * 0.99)
    short = int(SHORT_LOAD_S * 100)
    assert pace.is_worth(short, 16 * short, 1e-9) and not pace.is_worth(short + 1, 16 * short, 1e-9)


def fetch_slowly(bench: ExtentBench, seconds: float) -> None:
    """Some prompts come, each extent in so long."""
    for salt in range(1, 1 + MIN_SAMPLES):
        keys, seeker = chain(8, salt), Seeker()
        bench.put(keys)
        while bench.tier.wanted([BlockRun(keys, 0, 8, BLOCK_TOKENS)], seeker) is Sought.COMING:
            for order in bench.take_sent():
                is_fetch = order.kind is OrderKind.FETCH
                took_s = seconds * len(order.keys) if is_fetch else 0.0
                bench.jobs.acknowledge(0, JobResult(order.job_id, Outcome.OK, 1, took_s, 0.0))
        assert bench.host.match_prefix(keys) == 8


@pytest.mark.shows("KVBM_REMOTE_LOAD=faster")
def test_what_is_computed_faster_is_looked_for_and_not_fetched(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    bench, keys = ExtentBench(full_blocks=8), chain(64)
    fetch_slowly(bench, 0.1)
    bench.put(keys)
    fast, slow = Seeker(token_s=0.001), Seeker(token_s=0.1)
    run = [BlockRun(keys, 0, 64, BLOCK_TOKENS)]
    assert bench.tier.wanted(run, fast) is Sought.COMING, "first whether there is anything"
    bench.reply()
    for _ in range(4):
        assert bench.tier.wanted(run, fast) is Sought.STUCK
        assert {order.kind for order in bench.reply()} <= {OrderKind.FIND}
    assert len(bench.asked) > 1, "it is not stored again, as it is known to be there"
    assert bench.metrics.snapshot()["kvbm_remote_too_slow_requests_total"] == 1
    assert caplog.text.count("computed faster than the shared store (KVBM_REMOTE_URL) brings them") == 1
    assert bench.tier.wanted(run, slow) is Sought.COMING
    assert OrderKind.FETCH in {order.kind for order in bench.reply()}


@pytest.mark.shows("KVBM_REMOTE_LOAD", "KVBM_REMOTE_LOAD=faster", "KVBM_REMOTE_LOAD=always")
@pytest.mark.parametrize(("load", "sought"), [("faster", Sought.STUCK), ("always", Sought.COMING)])
def test_the_setting_decides_whether_what_is_computed_faster_is_fetched(load: str, sought: Sought) -> None:
    given = {"cpu_cache_gb": 1, "remote_url": "s3://kv", "remote_load": load}
    made = TierBench(lower_makers(KvbmSettings.from_env(given), ManualClock())["remote"]).tier
    assert isinstance(made, KeyedTier)
    bench, keys = ExtentBench(full_blocks=8, always_loads=made._keyed.always_loads), chain(64)
    fetch_slowly(bench, 0.1)
    bench.put(keys)
    run, seeker = [BlockRun(keys, 0, 64, BLOCK_TOKENS)], Seeker(token_s=0.001)
    assert bench.tier.wanted(run, seeker) is Sought.COMING, "first whether there is anything"
    bench.reply()
    assert bench.tier.wanted(run, seeker) is sought


@pytest.mark.shows("KVBM_REMOTE_LOAD=always")
def test_who_always_loads_waits_for_a_slow_store_too() -> None:
    bench, keys = ExtentBench(full_blocks=8, always_loads=True), chain(64)
    fetch_slowly(bench, 0.1)
    bench.put(keys)
    run = [BlockRun(keys, 0, 64, BLOCK_TOKENS)]
    assert bench.tier.wanted(run, Seeker(token_s=0.001)) is Sought.COMING
    bench.reply()
    assert bench.tier.wanted(run, Seeker(token_s=0.001)) is Sought.COMING
    assert OrderKind.FETCH in {order.kind for order in bench.reply()}


def test_a_slow_store_is_tried_again_after_a_while() -> None:
    bench, keys = ExtentBench(full_blocks=8), chain(64)
    fetch_slowly(bench, 0.1)
    bench.put(keys)
    fast, run = Seeker(token_s=0.001), [BlockRun(keys, 0, 64, BLOCK_TOKENS)]
    bench.tier.wanted(run, fast)
    bench.reply()
    assert bench.tier.wanted(run, fast) is Sought.STUCK
    bench.reply()
    bench.clock.advance(FRESH_S + 0.1)
    assert bench.tier.wanted(run, fast) is Sought.COMING
    assert OrderKind.FETCH in {order.kind for order in bench.reply()}


def test_the_leader_measures_the_engine_and_holds_nothing_back_for_a_slow_store() -> None:
    bench = LeaderBench(400, num_disk=400)
    prompt = list(range(4 * 300 + 1))
    keys = bench.keys(prompt)
    for i in range(MIN_SAMPLES + 1):  # 1000 tokens in a second; the double's fetches take half a second each
        other = [5000 + i * 2000 + token for token in range(1000)]
        state = bench.open(f"computed {i}")
        plan = bench.offload_step(state, other, 0, 1000, [range(1, 251)])
        bench.clock.advance(1.0)
        bench.take_offloads()
        bench.clock.advance(0.0)
        bench.answer(plan)
        bench.leader.finish(state)
        bench.reply()
    for i in range(MIN_SAMPLES):
        own = [500_000 + 1000 * i + token for token in range(9)]
        bench.has["near"].update(bench.keys(own))
        state = bench.open(f"fetched {i}")
        while bench.match(state, own) is None:
            bench.reply()
        bench.leader.finish(state)
        bench.reply()
    bench.has["near"].update(keys)
    state = bench.open()
    assert bench.match(state, prompt) == 0, "300 blocks in 75 s, against 1,200 tokens in 1.2 s"
    bench.reply()
    assert bench.match(state, prompt) == 0 == bench.store_of().fetching_blocks
    bench.leader.finish(state)
    bench.reply()
    assert bench.metric("kvbm_remote_too_slow_requests_total") == 1
