"""The metrics page as a real Prometheus reads it (KVBM_PROMETHEUS: its program, if not on the PATH)."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import threading
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvbm_core.observe.metrics import Metrics
from kvbm_core.observe.server import MetricsServer
from kvbm_core.types import Tier
from tests.engines.ports import free_port

PROGRAM = os.environ.get("KVBM_PROMETHEUS") or shutil.which("prometheus")
READY_S = 60.0

pytestmark = pytest.mark.skipif(
    PROGRAM is None, reason="NOT RUN: a real Prometheus; apt-get install prometheus, or KVBM_PROMETHEUS"
)


@pytest.fixture
def page() -> Iterator[MetricsServer]:
    metrics = Metrics()
    metrics.matched_tokens(64)
    metrics.tier_transfer(Tier.HOST, Tier.DISK, 4096, 0.01)
    server = MetricsServer(0, metrics, "127.0.0.1")
    assert server.start()
    yield server
    server.close()


@pytest.fixture
def ask(page: MetricsServer, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Prometheus's API, once it has scraped the page."""
    config = tmp_path / "prometheus.yml"
    target = f"127.0.0.1:{page.bound_port}"
    config.write_text(
        "global: {scrape_interval: 1s}\n"
        f"scrape_configs: [{{job_name: kvbm, static_configs: [{{targets: ['{target}']}}]}}]\n"
    )
    port = free_port()
    process = subprocess.Popen(
        [
            str(PROGRAM),
            f"--config.file={config}",
            f"--storage.tsdb.path={tmp_path / 'data'}",
            f"--web.listen-address=127.0.0.1:{port}",
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )

    def get(path: str, **query: str) -> Any:
        url = f"http://127.0.0.1:{port}/api/v1/{path}?{urllib.parse.urlencode(query)}"
        with urllib.request.urlopen(url, timeout=10) as answer:
            return json.load(answer)["data"]

    ended = threading.Event()
    for _ in range(int(READY_S / 0.2)):
        try:
            if get("query", query="kvbm_matched_tokens")["result"]:
                break
        except OSError:
            pass  # not up yet
        ended.wait(0.2)
    yield get
    process.terminate()
    process.wait(30)


def value(data: Any) -> str:
    (found,) = data["result"]
    return str(found["value"][1])


def test_kvbms_names_are_queried_as_they_are(ask: Callable[..., Any]) -> None:
    assert value(ask("query", query="kvbm_matched_tokens")) == "64"
    assert ask("query", query="kvbm_matched_tokens_total")["result"] == []
    hop = '{from="host",to="disk"}'
    assert value(ask("query", query=f"kvbm_tier_transfer_bytes_total{hop}")) == "4096"
    assert value(ask("query", query=f"kvbm_tier_transfer_seconds_count{hop}")) == "1"
    types = {name: entries[0]["type"] for name, entries in ask("metadata").items()}
    assert types["kvbm_matched_tokens"] == types["kvbm_offload_blocks_d2h"] == "counter"
    assert types["kvbm_tier_transfer_seconds"] == "histogram"
