"""Guards, log lines and the event buffer."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading

import pytest

from kvbm_core.clock import ManualClock
from kvbm_core.config import KvbmSettings
from kvbm_core.config.readers import LOG_LEVELS, OUR_LOG_TARGET
from kvbm_core.errors import StuckCopyError
from kvbm_core.observe import log as log_module
from kvbm_core.observe.guard import GuardState, guarded, seams_of
from kvbm_core.observe.log import CacheStatsLog, RateLimitedLogger, get_logger, level_of
from kvbm_core.observe.metrics import Metrics

GET_FINISHED = 'kvbm_guarded_errors_total{seam="get_finished"}'


class Connector:
    """Something with guarded methods."""

    def __init__(self) -> None:
        self.guard_state = GuardState(Metrics(seams=seams_of(Connector)))

    @guarded("get_finished", lambda self, error, more=0: -1 - more)
    def call(self, error: BaseException | None, more: int = 0) -> int:
        """Its own words."""
        if error is not None:
            raise error
        return 1 + more

    @guarded("get_finished", lambda self: 1 // 0, last_resort=None)
    def doomed(self) -> int | None:
        raise RuntimeError("first")

    @guarded("get_finished", lambda self: 1 // 0)
    def unprotected(self) -> int:
        raise RuntimeError("first")

    @guarded("get_finished", lambda self, error: self.call(error), last_resort=0)
    def stop_in_fallback(self, error: BaseException) -> int:
        raise RuntimeError("first")

    def errors(self) -> float:
        return self.guard_state.metrics.snapshot()[GET_FINISHED]


def test_a_guard_is_invisible_when_all_is_well() -> None:
    connector = Connector()
    assert connector.call(None, more=4) == 5
    assert (connector.call.__name__, connector.call.__doc__) == ("call", "Its own words.")
    assert connector.errors() == 0


def test_an_error_becomes_the_fallback_and_a_count(caplog: pytest.LogCaptureFixture) -> None:
    connector = Connector()
    assert connector.call(RuntimeError("boom"), more=2) == -3
    assert connector.call(RuntimeError("boom again"), 2) == -3
    assert connector.errors() == 2
    (record,) = caplog.records
    assert record.name == "kvbm"
    assert "get_finished" in record.getMessage()
    assert record.exc_info is not None
    assert "boom" in str(record.exc_info[1])


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3), StuckCopyError("kvbm: stuck")])
def test_the_user_can_still_stop_it_and_so_can_a_copy_that_hangs(error: BaseException) -> None:
    connector = Connector()
    with pytest.raises(type(error)):
        connector.call(error)
    assert connector.errors() == 0
    with pytest.raises(type(error)):
        connector.stop_in_fallback(error)
    assert connector.errors() == 1


def test_a_failing_fallback() -> None:
    connector = Connector()
    assert connector.doomed() is None
    assert connector.errors() == 2
    with pytest.raises(ZeroDivisionError):
        connector.unprotected()


def test_a_half_built_object_is_guarded_too(caplog: pytest.LogCaptureFixture) -> None:
    connector = object.__new__(Connector)
    assert connector.call(RuntimeError("boom")) == -1
    assert "boom" in caplog.records[0].getMessage()


class Renamed(Connector):
    """A connector with one more hook, which is guarded under another name than its own."""

    @guarded("start_load", lambda self: None)
    def start_layer_wise_load(self) -> None:
        """Its own words."""

    def not_guarded(self) -> None:
        """Its own words."""


def test_all_guarded_hooks_of_a_class_and_its_bases_are_known_once() -> None:
    assert seams_of(Connector) == ("get_finished",)
    assert seams_of(Renamed, Connector) == ("start_load", "get_finished")


def test_a_guard_that_the_numbers_were_not_told_of_is_counted_as_other() -> None:
    connector = Connector()
    connector.guard_state = GuardState(Metrics(seams=("start_load",)))
    assert connector.call(RuntimeError("boom")) == -1
    counted = connector.guard_state.metrics.snapshot()
    assert counted['kvbm_guarded_errors_total{seam="other"}'] == 1
    assert counted['kvbm_guarded_errors_total{seam="start_load"}'] == 0


# ---------------------------------------------------------------- log lines


def test_a_line_at_most_once_per_interval_and_key(caplog: pytest.LogCaptureFixture) -> None:
    clock = ManualClock()
    lines = RateLimitedLogger(get_logger("test"), interval_s=10, clock=clock)
    assert [lines.warning("a", "at %d", i) for i in range(4)] == [True, False, False, False]
    assert lines.warning("b", "other")
    clock.advance(9.9)
    assert not lines.warning("a", "too early")
    clock.advance(0.1)
    assert lines.warning("a", "at %d", 10)
    assert [record.getMessage() for record in caplog.records] == [
        "at 0",
        "other",
        "at 10 (4 more like this were left out)",
    ]


def test_keys_are_bounded(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)
    log = RateLimitedLogger(get_logger("test"), clock=ManualClock())
    for i in range(10_000):
        log.warning(i, "line")
    assert len(log._seen) == 256


def test_threads_log_it_once(caplog: pytest.LogCaptureFixture) -> None:
    log = RateLimitedLogger(get_logger("test"), clock=ManualClock())
    threads = [threading.Thread(target=log.warning, args=("same", "line")) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(caplog.records) == 1


def test_hit_rate_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "kvbm")
    clock, metrics = ManualClock(), Metrics()
    stats = CacheStatsLog(metrics, interval_s=5, worker="7", clock=clock)
    metrics.request_hits(3, 1, 8)
    assert not stats.tick()
    clock.advance(5)
    assert stats.tick()
    assert not stats.tick()
    clock.advance(5)
    assert not stats.tick(), "nothing new"
    metrics.request_hits(0, 0, 4)
    clock.advance(5)
    assert stats.tick()
    metrics.request_hits(0, 0, 4, 3)
    clock.advance(5)
    assert stats.tick()
    assert [record.getMessage() for record in caplog.records] == [
        "KVBM [7] Cache Hit Rates - Host: 37.5% (3/8), Disk: 12.5% (1/8)",
        "KVBM [7] Cache Hit Rates - Host: 25.0% (3/12), Disk: 8.3% (1/12)",
        "KVBM [7] Cache Hit Rates - Host: 18.8% (3/16), Disk: 6.2% (1/16), Object: 18.8% (3/16)",
    ]


@pytest.mark.parametrize(
    ("directives", "level"),
    [
        ("info", logging.INFO),
        ("DEBUG", logging.DEBUG),
        ("trace", logging.DEBUG),
        ("warn", logging.WARNING),
        ("error,kvbm=debug,nixl=trace", logging.DEBUG),
        ("kvbm=warn,debug", logging.WARNING),
        ("nixl=trace", logging.INFO),
        ("", logging.INFO),
        ("loud", logging.INFO),
    ],
)
def test_dyn_log(directives: str, level: int) -> None:
    assert level_of(directives) == level


@pytest.mark.parametrize("value", ["loud", "kvbm=loud,debug", "noisy,nixl=trace"])
def test_a_dyn_log_that_names_no_level_is_warned_of(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("DYN_LOG", value)
    settings = KvbmSettings.from_env()
    assert settings.log_level == "info"
    (line,) = settings.warnings
    assert line.startswith(f"kvbm: DYN_LOG={value}: write one of error, warn, ")


@pytest.mark.parametrize("value", ["WARN", "off", "debug,dynamo_llm", "nixl=loud", "kvbm=debug,dynamo_llm"])
def test_a_dyn_log_that_says_something_of_others_is_taken_as_it_is(
    monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv("DYN_LOG", value)
    settings = KvbmSettings.from_env()
    assert (settings.log_level, settings.warnings) == (value, ())


def test_the_levels_that_are_taken_are_those_that_are_known() -> None:
    assert set(LOG_LEVELS) == set(log_module._LEVELS) and log_module.ROOT_LOGGER == OUR_LOG_TARGET


def test_lines_are_seen_in_a_process_that_configured_nothing() -> None:
    code = (
        "import logging; from kvbm_core.observe.log import setup_logging, get_logger;"
        "setup_logging('info'); setup_logging('info'); get_logger('part').info('hello');"
        "get_logger().debug('silent')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stderr.count("hello") == 1
    assert "silent" not in done.stderr
