"""What a leader does moves the metrics that it should, and no other one."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kvbm_core.blocks.slot_tier import protect_nothing
from kvbm_core.control.messages import Order, Result, Verb
from kvbm_core.errors import Outcome
from kvbm_core.observe.labels import EvictReason
from kvbm_core.observe.metrics import SLOWEST_WINDOW_S, Metrics
from kvbm_core.runtime.tenants import Tenant
from kvbm_core.testing.leader_bench import BenchDisk, LeaderBench
from kvbm_core.tiers.pace import MIN_SAMPLES, MIN_STEP_TOKENS
from kvbm_core.transfer.plan import JobResult
from tests.unit.disk_bench import OTHER, PROMPT, TABLE, bench_of, leave_host, load, loading, stored
from tests.unit.states_bench import StatesBench
from tests.unit.test_leader_fetch import Bench as StoreBench

COPIED = {
    "kvbm_bytes_total",
    "kvbm_transfer_seconds",
    "kvbm_tier_transfer_bytes_total",
    "kvbm_tier_transfer_seconds",
    "kvbm_slowest_transfer_seconds",
    "kvbm_slowest_transfer_bytes",
}
MOVED = COPIED - {"kvbm_bytes_total", "kvbm_transfer_seconds"}
HIT = {"kvbm_matched_tokens", "kvbm_hit_tokens_total"}
# What other tests move, each by what really does it.
ELSEWHERE = {
    "kvbm_peer_fetched_blocks_total": "test_peer_tier.py",
    "kvbm_peer_lent_blocks_total": "test_peer_lending.py",
    "kvbm_peer_unserved_total": "test_leader_process.py",
    "kvbm_guarded_errors_total": "test_observe.py",
    "kvbm_uncached_requests_total": "../vllm/test_scheduler_observed.py",
    "kvbm_audited_blocks_total": "test_audit.py",
    "kvbm_events_total": "test_event_stream.py",
    "kvbm_event_batches_dropped_total": "../faults/test_nats_events.py",
    "kvbm_silent_ranks": "test_rank_watch.py",
    "kvbm_held_blocks": "test_rank_watch.py",
    "kvbm_remote_too_slow_requests_total": "test_load_or_compute.py",
    "kvbm_offload_blocks_d2d": "test_slotted_tier.py",
    "kvbm_missed_requests_total": "test_why.py",
    "kvbm_headless_blocks": "test_written.py",
    "kvbm_missed_tokens_total": "test_why.py",
}


def moved(bench: LeaderBench, act: Callable[[], object]) -> dict[str, float]:
    """By how much each series has changed; histograms by their counts and sums."""
    before = bench.leader.metrics.snapshot()
    act()
    after = bench.leader.metrics.snapshot()
    changes = {series: after.get(series, 0.0) - before.get(series, 0.0) for series in before | after}
    return {series: change for series, change in changes.items() if change and "_bucket" not in series}


def families(changes: dict[str, float]) -> set[str]:
    """Their names."""
    names = {series.partition("{")[0] for series in changes}
    served = set(re.findall(r"^# TYPE (\S+)", Metrics().exposition(), re.MULTILINE))
    return {name if name in served else re.sub(r"_(sum|count)$", "", name) for name in names}


def check(
    bench: LeaderBench, act: Callable[[], object], names: set[str], **numbers: float
) -> dict[str, float]:
    """``act`` moves exactly these. ``numbers``: by how much, of some."""
    changes = moved(bench, act)
    assert families(changes) == names
    for name, number in numbers.items():
        assert changes[name] == number, name
    return changes


def test_a_block_on_its_way_down_and_up_again() -> None:
    bench = bench_of(8)
    full = {"kvbm_tier_blocks"}
    on_its_way = {"kvbm_waiting_blocks", "kvbm_live_leases"}
    stores = {"kvbm_offload_blocks_d2h", *COPIED, *full, *on_its_way}
    changes = check(bench, lambda: bench.store(PROMPT), stores, kvbm_offload_blocks_d2h=5)
    assert changes['kvbm_waiting_blocks{tier="disk"}'] == 5
    lands = {"kvbm_offload_blocks_h2d", *MOVED, *full, *on_its_way}
    changes = check(bench, bench.write_to_disk, lands, kvbm_offload_blocks_h2d=5)
    assert changes['kvbm_waiting_blocks{tier="disk"}'] == -5
    from_host = {"kvbm_onboard_blocks_h2d", "kvbm_host_cache_hit_rate", *HIT, *COPIED}
    changes = check(bench, lambda: load(bench), from_host, kvbm_onboard_blocks_h2d=4, kvbm_matched_tokens=16)
    assert changes['kvbm_hit_tokens_total{tier="host"}'] == 16
    bench.tier.reset()
    rates = {"kvbm_host_cache_hit_rate", "kvbm_disk_cache_hit_rate"}
    slowest = {"kvbm_slowest_transfer_seconds", "kvbm_slowest_transfer_bytes"}  # no slower than before
    again = {"kvbm_read_again_bytes_total"}
    from_disk = {"kvbm_onboard_blocks_d2d", *rates, *HIT, *full, *again, *(COPIED - slowest)}
    changes = check(bench, lambda: load(bench), from_disk, kvbm_onboard_blocks_d2d=4, kvbm_matched_tokens=16)
    assert changes['kvbm_hit_tokens_total{tier="disk"}'] == 16
    assert changes['kvbm_read_again_bytes_total{tier="disk"}'] == 80, "100 bytes were written, of five blocks"
    bench.tier.reset()
    assert not again & families(moved(bench, lambda: load(bench))), "a block counts at its first read"
    assert not moved(bench, lambda: bench.match(bench.open("asks"), OTHER)), "a miss is not a hit"


def test_blocks_leave_for_three_reasons_and_only_room_has_an_age() -> None:
    bench = bench_of(8)
    stored(bench)
    bench.clock.advance(20.0)
    stores = {"kvbm_offload_blocks_d2h", "kvbm_waiting_blocks", "kvbm_live_leases", "kvbm_tier_blocks"}
    leaves = {"kvbm_evicted_blocks_total", "kvbm_evicted_age_seconds"}
    took_no_longer = {"kvbm_slowest_transfer_seconds", "kvbm_slowest_transfer_bytes"}
    names = stores | leaves | (COPIED - took_no_longer)
    changes = check(bench, lambda: bench.store(OTHER), names)
    assert changes[evicted("host", EvictReason.ROOM)] == 2
    assert changes['kvbm_evicted_age_seconds_sum{tier="host"}'] == 40.0
    assert changes['kvbm_evicted_age_seconds_count{tier="host"}'] == 2
    bench.write_to_disk()
    left = {"kvbm_evicted_blocks_total", "kvbm_tier_blocks"}
    changes = check(bench, lambda: leave_host(bench, range(5)), left)
    assert changes[evicted("host", EvictReason.FORGOTTEN)] == 3
    changes = check(bench, bench.leader.reset, left)
    assert changes[evicted("host", EvictReason.RESET)] == 5
    assert changes[evicted("disk", EvictReason.RESET)] == 10


def test_what_operators_pin_and_limit() -> None:
    bench = bench_of(12)
    tenant, root = Tenant("", "s"), bench.open().chain.root

    def order(verb: Verb, **what: Any) -> None:
        end = bench.desk.submit(Order(verb=verb, salt="s", **what))
        bench.leader.poll()
        assert end.result().result is Result.DONE

    check(bench, lambda: order(Verb.PIN, pin="p", tokens=tuple(PROMPT)), {"kvbm_pins"}, kvbm_pins=1)
    number = bench.leader.tenants.number(tenant, root)
    tier = bench.tier

    def store(tokens: Sequence[int]) -> None:
        tier.commit(tier.reserve(bench.keys(tokens), protect_nothing, tenants=number))

    kept = {"kvbm_pinned_blocks", "kvbm_tier_blocks"}
    check(bench, lambda: store(PROMPT), kept, kvbm_pinned_blocks=5)
    store(OTHER)
    limits = {"kvbm_quotas", "kvbm_evicted_blocks_total", "kvbm_tier_blocks"}
    changes = check(bench, lambda: order(Verb.QUOTA, host_blocks=7), limits, kvbm_quotas=1)
    assert changes[evicted("host", EvictReason.QUOTA)] == 3  # what is pinned stays
    check(bench, lambda: order(Verb.QUOTA), {"kvbm_quotas"}, kvbm_quotas=-1)
    reset = {"kvbm_pinned_blocks", "kvbm_evicted_blocks_total", "kvbm_tier_blocks"}
    check(bench, bench.leader.reset, reset, kvbm_pinned_blocks=-5)
    store(PROMPT)
    ends = {"kvbm_pins", "kvbm_pinned_blocks"}
    check(bench, lambda: order(Verb.UNPIN, pin="p"), ends, kvbm_pinned_blocks=-5, kvbm_pins=-1)
    tier.check_integrity()


def evicted(tier: str, reason: EvictReason) -> str:
    """The series."""
    return f'kvbm_evicted_blocks_total{{tier="{tier}",reason="{reason}"}}'


def test_states_of_a_hybrid_model_are_counted_apart() -> None:
    bench = StatesBench(disk=BenchDisk(64))
    stores = {"kvbm_offload_blocks_d2h", "kvbm_waiting_blocks", "kvbm_live_leases", "kvbm_tier_blocks"}
    changes = check(bench, lambda: bench.serve(PROMPT, [12]), stores | COPIED | {"kvbm_state_blocks"})
    assert changes['kvbm_state_blocks{tier="host"}'] == 2
    lands = {"kvbm_offload_blocks_h2d", *MOVED, "kvbm_waiting_blocks", "kvbm_live_leases", "kvbm_tier_blocks"}
    changes = check(bench, bench.write_to_disk, lands | {"kvbm_state_blocks"})
    assert changes['kvbm_state_blocks{tier="disk"}'] == 2


@pytest.mark.parametrize("use", ["store", "touch", "lease", "restart"])
def test_an_age_counts_from_the_last_use(use: str) -> None:
    bench = bench_of(5)
    stored(bench)
    bench.clock.advance(100.0)
    if use == "touch":
        bench.tier.touch(bench.keys(PROMPT))
    elif use == "lease":
        lease = bench.tier.lease("reader", bench.keys(PROMPT), 50.0)
        assert lease is not None
        bench.clock.advance(10.0)
        bench.tier.release(lease)
    elif use == "restart":
        bench.store(PROMPT)
    bench.clock.advance(7.0)
    changes = moved(bench, lambda: bench.store(OTHER))
    expected_s = 107.0 if use == "store" else 7.0
    assert changes['kvbm_evicted_age_seconds_sum{tier="host"}'] == pytest.approx(5 * expected_s, rel=1e-4)


def test_failures_are_counted_and_give_no_hit() -> None:
    bench = bench_of(8)
    stored(bench)

    def fail() -> None:
        state, plan = loading(bench)
        bench.answer(plan, Outcome.CORRUPT)
        bench.leader.finish(state)

    damaged = {"kvbm_failures_total", "kvbm_evicted_blocks_total", "kvbm_tier_blocks"}
    missed = {"kvbm_missed_requests_total", "kvbm_missed_tokens_total"}
    changes = check(bench, fail, damaged | missed)
    assert changes['kvbm_failures_total{kind="onboard_corrupt"}'] == 1
    assert changes[evicted("host", EvictReason.FORGOTTEN)] == 4

    bench = bench_of(8)
    stored(bench)

    def leave_lease() -> None:
        assert bench.match(bench.open("held"), PROMPT)

    check(bench, leave_lease, {"kvbm_live_leases"}, kvbm_live_leases=1)

    def expire() -> None:
        bench.clock.advance(100.0)
        bench.leader.poll()

    changes = check(bench, expire, {"kvbm_failures_total", "kvbm_live_leases"})
    assert changes['kvbm_failures_total{kind="lease_expired"}'] == 1


def test_what_finds_no_room_is_dropped_and_what_is_under_way_is_pending() -> None:
    bench = bench_of(2)
    state = bench.open()
    begun = {"kvbm_dropped_blocks_total", "kvbm_pending_jobs"}
    changes = check(bench, lambda: bench.offload(state, PROMPT), begun, kvbm_pending_jobs=1)
    assert changes['kvbm_dropped_blocks_total{reason="no_space"}'] == 3


def test_the_slowest_transfer_is_forgotten_after_a_while() -> None:
    bench = bench_of(8)
    stored(bench)
    slowest = {"kvbm_slowest_transfer_seconds", "kvbm_slowest_transfer_bytes"}
    assert not moved(bench, lambda: bench.clock.advance(0.9 * SLOWEST_WINDOW_S))
    changes = check(bench, lambda: bench.clock.advance(1.2 * SLOWEST_WINDOW_S), slowest)
    assert changes['kvbm_slowest_transfer_seconds{from="device",to="host"}'] == -0.5


@pytest.mark.parametrize(
    ("token_s", "name"), [(0.1, "kvbm_ttft_saved_seconds_total"), (0.05, "kvbm_ttft_lost_seconds_total")]
)
def test_time_is_saved_or_lost_once_the_pace_is_known(token_s: float, name: str) -> None:
    """A load of 16 tokens takes a second."""
    bench = bench_of(64)
    stored(bench)

    def load_slowly() -> None:
        state, plan = loading(bench)
        bench.clock.advance(1.0)
        bench.answer(plan)
        bench.leader.finish(state)

    assert not any("ttft" in series for series in moved(bench, load_slowly)), "nobody knows the pace yet"
    for _ in range(MIN_SAMPLES + 60):
        state = bench.open("computes")
        bench.leader.offload(state, [], 0, MIN_STEP_TOKENS, [[]])
        bench.leader.take_offloads()
        bench.clock.advance(MIN_STEP_TOKENS * token_s)
        bench.leader.finish(state)
    changes = {series: change for series, change in moved(bench, load_slowly).items() if "ttft" in series}
    about_s = 0.2 * 16 * token_s  # the pace is an estimate
    assert changes == {name: pytest.approx(abs(16 * token_s - 1.0), abs=about_s)}


def test_a_shared_store_gives_takes_and_fails() -> None:
    bench = StoreBench(num_disk=0)
    bench.has["near"] = set(bench.keys(PROMPT))

    def fetch() -> None:
        state = bench.open("fetches")
        while bench.match(state, PROMPT) is None:
            bench.reply()
        plan = bench.leader.onboard(state, 16, TABLE)
        bench.answer(plan)
        bench.leader.finish(state)

    brought = {"kvbm_onboard_blocks_o2d", "kvbm_onboard_blocks_h2d", "kvbm_object_cache_hit_rate"}
    names = brought | HIT | COPIED | {"kvbm_tier_blocks"}
    changes = check(bench, fetch, names, kvbm_onboard_blocks_o2d=4, kvbm_matched_tokens=16)
    assert changes['kvbm_hit_tokens_total{tier="remote"}'] == 16
    bench.store(OTHER)
    (order,) = bench.take_sent()

    def take() -> None:
        bench.leader.acknowledge(0, [JobResult(order.job_id, Outcome.OK, 100, 0.1, 0.0)])

    names = MOVED | {"kvbm_offload_blocks_d2o", "kvbm_waiting_blocks", "kvbm_live_leases"}
    check(bench, take, names, kvbm_offload_blocks_d2o=5)
    bench.tier.reset()
    bench.store(OTHER[::-1])
    (order,) = bench.take_sent()

    def refuse() -> None:
        bench.leader.acknowledge(0, [JobResult(order.job_id, Outcome.IO_ERROR, 0, 0.1, 0.0)])

    refused = {"kvbm_object_write_failures", "kvbm_failures_total", "kvbm_dropped_blocks_total"}
    check(bench, refuse, refused | {"kvbm_waiting_blocks", "kvbm_live_leases"}, kvbm_object_write_failures=5)


def test_what_a_shared_store_did_not_give_is_counted() -> None:
    bench = StoreBench(num_disk=0)
    bench.has["near"] = set(bench.keys(PROMPT))
    state = bench.open("fetches")
    assert bench.match(state, PROMPT) is None
    bench.reply()  # found
    assert bench.match(state, PROMPT) is None
    (order,) = bench.take_sent()

    def fail() -> None:
        bench.leader.acknowledge(0, [JobResult(order.job_id, Outcome.IO_ERROR, 0, 0.1, 0.0)])

    names = {"kvbm_object_read_failures", "kvbm_failures_total"}
    check(bench, fail, names, kvbm_object_read_failures=len(order.keys))


def test_whose_numbers_they_are_is_told_once_it_is_known() -> None:
    bench = bench_of(8)

    def describe() -> None:
        bench.leader.metrics.describe(engine="e", model="m", name="one", rank=0, version="1")

    changes = check(bench, describe, {"kvbm_info"})
    assert list(changes.values()) == [1.0]
    assert not moved(bench, describe), "it stays 1"


WALKS: tuple[Callable[[], None], ...] = (
    test_a_block_on_its_way_down_and_up_again,
    test_blocks_leave_for_three_reasons_and_only_room_has_an_age,
    test_what_operators_pin_and_limit,
    test_states_of_a_hybrid_model_are_counted_apart,
    test_failures_are_counted_and_give_no_hit,
    test_what_finds_no_room_is_dropped_and_what_is_under_way_is_pending,
    test_the_slowest_transfer_is_forgotten_after_a_while,
    partial(test_time_is_saved_or_lost_once_the_pace_is_known, 0.1, "kvbm_ttft_saved_seconds_total"),
    partial(test_time_is_saved_or_lost_once_the_pace_is_known, 0.05, "kvbm_ttft_lost_seconds_total"),
    test_a_shared_store_gives_takes_and_fails,
    test_what_a_shared_store_did_not_give_is_counted,
    test_whose_numbers_they_are_is_told_once_it_is_known,
)


def test_every_metric_moves_in_some_act_and_stays_in_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """What another test moves has to stay where nothing of its kind happens."""
    acts, look = list[set[str]](), moved

    def note(bench: LeaderBench, act: Callable[[], object]) -> dict[str, float]:
        changes = look(bench, act)
        acts.append(families(changes))
        return changes

    monkeypatch.setitem(globals(), "moved", note)
    for walk in WALKS:
        walk()
    assert len(acts) > 20
    names = re.findall(r"^# TYPE (\S+)", Metrics().exposition(), re.MULTILINE)
    assert ELSEWHERE.keys() <= set(names) and set().union(*acts) <= set(names)
    for name in names:
        assert any(name not in act for act in acts), f"{name} always moves"
        if name not in ELSEWHERE:
            assert any(name in act for act in acts), f"{name} never moves"
            continue
        text = (Path(__file__).parent / ELSEWHERE[name]).read_text(encoding="utf-8")
        counted = re.findall(rf"\b{name}(?!\w)", text)
        assert counted, f"{name} is in no test"
