"""What stands around a leader works without the engine's steps."""

from __future__ import annotations

import logging
import threading
from pathlib import Path

import pytest

from kvbm_core.config import KvbmSettings
from kvbm_core.observe.metrics import Metrics
from kvbm_core.runtime.assembly import LeaderProcess
from kvbm_core.runtime.endpoint import Endpoint

LONG_S = 20.0


def test_the_hit_rates_are_logged_while_the_engine_has_nothing_to_do(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    is_told = threading.Event()

    class Told(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "KVBM [engine-7] Cache Hit Rates - Host: 75.0% (3/4)" in record.getMessage():
                is_told.set()

    logger, handler = logging.getLogger("kvbm"), Told()
    caplog.set_level(logging.INFO, "kvbm")
    logger.addHandler(handler)
    settings = KvbmSettings.from_env({"cpu_cache_gb": 0.001, "cache_stats_log_interval_s": 0.01})
    path, metrics = tmp_path / "socket", Metrics()
    process = LeaderProcess(
        settings,
        metrics,
        Endpoint(f"ipc://{path}", path, secret=b"s"),
        world_size=1,
        model="model",
        engine_name="engine-7",
    )
    try:
        metrics.request_hits(3, 0, 4)
        assert is_told.wait(LONG_S)
    finally:
        process.close()
        logger.removeHandler(handler)
