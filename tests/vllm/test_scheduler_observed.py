"""What others see: stats, metrics, the source of a hit. Counted is what was done, not what was
tried.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

import pytest

from kvbm_core.clock import ManualClock
from kvbm_core.observe.metrics import Metrics
from kvbm_core.replay.machine import FILTER, Sizes, replay
from kvbm_core.replay.trace import read_trace
from kvbm_core.types import Direction, Tier
from kvbm_vllm.stats import StatsReporter
from tests.vllm.kvbm_engine import KvbmEngine

PROMPT = range(50)


def test_metrics_count_what_was_committed(tmp_path: Path) -> None:
    with KvbmEngine(tmp_path) as engine:
        engine.hold(Direction.OFFLOAD)
        engine.add("a", PROMPT, 1)
        engine.step()
        engine.step()
        assert engine.metric("kvbm_offload_blocks_d2h") == 0
        engine.release(Direction.OFFLOAD)
        engine.run()
        engine.forget_device()
        assert engine.metric("kvbm_offload_blocks_d2h") == 12
        resident = engine.leader.chain.host.resident_blocks
        block_bytes = resident and engine.metric('kvbm_bytes_total{direction="offload"}') / 12
        assert block_bytes == 2 * 4 * 2 * 2 * 8 * 4  # layers, tokens, K and V, heads, head size, float32
        for turn in range(3):
            engine.ask(f"hit {turn}", PROMPT, 1)
            engine.forget_device()
        assert engine.metric("kvbm_matched_tokens") == 3 * 48
        assert engine.metric("kvbm_onboard_blocks_h2d") == 3 * 12
        assert engine.metric("kvbm_host_cache_hit_rate") == pytest.approx(3 * 12 / (4 * 12))
        assert engine.metric('kvbm_tier_blocks{tier="host",state="used"}') == 12
        engine.assert_clean()


def test_a_query_asked_again_and_again_counts_once(tmp_path: Path) -> None:
    # No room on the device for a while: vLLM asks in every step.
    with KvbmEngine(tmp_path) as engine:
        engine.ask("a", PROMPT, 1)
        engine.forget_device()
        engine.take_blocks(leave=5)
        engine.add("b", PROMPT, 1)
        for _ in range(4):
            engine.step()
        engine.give_blocks()
        engine.run()
        assert engine.promised("b") == [48] * 5
        engine.settle()
        assert engine.metric("kvbm_matched_tokens") == 48
        engine.assert_clean()


def test_stats_reach_vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvbm_vllm.stats.REPORT_INTERVAL_S", 0.0)
    with KvbmEngine(tmp_path) as engine:
        engine.ask("a", PROMPT, 2)
        engine.forget_device()
        engine.ask("b", PROMPT, 2)
        engine.settle()
        engine.ask("c", range(200, 206), 2)
        total: dict[str, float] = {}
        for report in engine.record.stats:
            for name, amount in report.items():
                total[name] = total.get(name, 0) + amount
        assert total["matched_tokens"] == engine.metric("kvbm_matched_tokens") == 48
        assert total["offloaded_blocks"] == 12 or total["offloaded_blocks"] == 13
        assert total["onboarded_blocks"] == 12
        engine.assert_clean()


def test_all_that_goes_to_a_lower_tier_and_comes_back_is_told_to_vllm() -> None:
    metrics, clock = Metrics(), ManualClock()
    reporter = StatsReporter(metrics, clock)
    for tier in (Tier.DISK, Tier.REMOTE):
        metrics.offloaded_blocks(3, Tier.HOST, tier)
        metrics.onboarded_blocks(2, tier, Tier.DEVICE if tier is Tier.DISK else Tier.HOST)
        metrics.tier_transfer(Tier.HOST, tier, 3000, 0.1)
        metrics.tier_transfer(tier, Tier.HOST, 2000, 0.1)
    metrics.remote_failures(5, is_write=False)
    metrics.remote_failures(7, is_write=True)
    taken = reporter.take()
    assert taken is not None and taken.data == {
        "stored_on_disk_blocks": 3,
        "onboarded_from_disk_blocks": 2,
        "written_to_disk_bytes": 3000,
        "read_from_disk_bytes": 2000,
        "stored_in_remote_blocks": 3,
        "fetched_from_remote_blocks": 2,
        "not_fetched_from_remote_blocks": 5,
        "not_stored_in_remote_blocks": 7,
        "written_to_remote_bytes": 3000,
        "read_from_remote_bytes": 2000,
    }


def test_vllm_counts_the_hits_as_coming_from_the_host(tmp_path: Path) -> None:
    with KvbmEngine(tmp_path) as engine:
        engine.ask("a", PROMPT, 1)
        engine.forget_device()
        engine.add("b", PROMPT, 1)
        engine.scheduler.connector_prefix_cache_stats.reset = True
        sources = engine.connector.get_external_cache_hit_sources(engine.scheduler.requests["b"], 48)
        assert {str(source.value).lower(): tokens for source, tokens in sources.items()} == {"host": 48}
        engine.assert_clean()


def test_shutting_down_ends_quickly_and_leaves_no_thread(tmp_path: Path) -> None:
    import threading

    before = set(threading.enumerate())
    with KvbmEngine(tmp_path, ranks=2) as engine:
        engine.ask("a", PROMPT, 2)
        engine.hold(Direction.OFFLOAD)
        engine.add("b", range(200, 250), 4)
        engine.step()
        started_s = time.monotonic()
    assert time.monotonic() - started_s < 45.0, "it waited for the copy, which is given up after 60 s"
    left = [thread.name for thread in set(threading.enumerate()) - before if thread.name.startswith("kvbm")]
    assert not left


def wish(value: Any) -> dict[str, Any]:
    """What vLLM makes of a client's kv_transfer_params."""
    return {"extra_args": {"kv_transfer_params": {"kvbm": value, "do_remote_decode": False}}}


def test_a_request_can_opt_out(tmp_path: Path) -> None:
    with KvbmEngine(tmp_path) as engine:
        first = engine.ask("a", PROMPT, 8, **wish({"skip": False}))
        engine.forget_device()
        assert engine.ask("b", PROMPT, 8, **wish({"skip": True})) == first
        assert engine.promised("b") == [0], "it loads nothing"
        assert engine.ask("c", range(100, 150), 8, **wish({"skip": True}))
        engine.forget_device()
        engine.ask("d", range(100, 150), 8)
        assert engine.promised("d") == [0], "it has stored nothing"
        assert engine.metric('kvbm_uncached_requests_total{reason="opted_out"}') == 2
        engine.forget_device()
        assert engine.ask("e", PROMPT, 8) == first
        assert engine.promised("e") == [48]
        engine.assert_clean()


@pytest.mark.parametrize(
    "value", ["no", True, {"skip": "yes"}, {"skip": True, "store": False}, ["skip"] * 99]
)
def test_what_a_request_says_and_kvbm_does_not_know_is_ignored_in_one_line(
    value: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "kvbm"), KvbmEngine(tmp_path) as engine:
        engine.ask("a", PROMPT, 2, **wish(value))
        engine.forget_device()
        engine.ask("b", PROMPT, 2, **wish(value))
        assert engine.promised("b") == [48]
        assert engine.errors == 0
        engine.assert_clean()
    lines = [record.getMessage() for record in caplog.records if "kv_transfer_params" in record.getMessage()]
    assert len(lines) == 1, lines
    assert repr(value)[:40] in lines[0] and "ignored" in lines[0] and len(lines[0]) < 250


def test_clients_that_say_something_else_each_time_do_not_fill_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "kvbm"), KvbmEngine(tmp_path) as engine:
        for number in range(20):
            engine.ask(f"r{number}", PROMPT, 2, **wish(f"no {number}"))
        engine.assert_clean()
    lines = [record.getMessage() for record in caplog.records if "kv_transfer_params" in record.getMessage()]
    assert len(lines) == 1 and "'no 0'" in lines[0], lines


def test_what_a_request_says_may_be_nested_deeper_than_python_can_follow(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    value: Any = "skip"
    for _ in range(5000):
        value = [value]
    with caplog.at_level(logging.WARNING, "kvbm"), KvbmEngine(tmp_path) as engine:
        engine.ask("a", PROMPT, 2, **wish(value))
        engine.forget_device()
        engine.ask("b", PROMPT, 2, **wish(value))
        assert engine.promised("b") == [48], "it is served with the cache"
        assert engine.errors == 0
    lines = [record.getMessage() for record in caplog.records if "kv_transfer_params" in record.getMessage()]
    assert len(lines) == 1 and "ignored" in lines[0], lines


@pytest.mark.shows("DYN_KVBM_ENABLE_RECORD", "KVBM_RECORD_DIR")
def test_what_was_asked_can_be_replayed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DYN_KVBM_ENABLE_RECORD", "1")
    monkeypatch.setenv("KVBM_RECORD_DIR", str(tmp_path / "recorded"))
    with KvbmEngine(tmp_path) as engine:
        for number, prompt in enumerate((PROMPT, range(500, 530), PROMPT)):
            engine.ask(f"r{number}", prompt, 9)
            engine.forget_device()
        promised = sum(tokens or 0 for number in range(3) for tokens in engine.promised(f"r{number}"))
        engine.assert_clean()
    (folder,) = (tmp_path / "recorded").iterdir()
    trace = read_trace(folder)
    assert [request.prompt_tokens for request in trace.requests] == [50, 30, 50]
    tally = replay(trace, Sizes(0, 1000, 0), FILTER)
    assert tally.host_tokens == promised == 48
