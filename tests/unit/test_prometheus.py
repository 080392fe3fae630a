"""The metrics page, the dashboard and the alerts as a real Prometheus reads them."""

from __future__ import annotations

import html
import json
import math
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from kvbm_core.config import KvbmSettings
from kvbm_core.control.desk import About
from kvbm_core.observe.metrics import Metrics
from kvbm_core.runtime.assembly import MetricsPage, metrics_server
from kvbm_core.types import Tier
from tests.engines.ports import free_ports
from tests.engines.prometheus import Prometheus, find_prometheus
from tests.unit.local_bench import KEYS, LocalBench

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
SCRAPE = "global: {scrape_interval: 1s, evaluation_interval: 1s}"
LOOKBACK = "1m"
IDLE, BUSY = 0, 1
COMPARED = re.compile(r"^(.*) (?:<|>) [\d.]+$", re.DOTALL)

pytestmark = pytest.mark.skipif(
    find_prometheus() is None or find_prometheus("promtool") is None,
    reason="NOT RUN: a real Prometheus; apt-get install prometheus, or KVBM_PROMETHEUS",
)


def page(metrics: Metrics, port: int, rank: int) -> MetricsPage:
    """As an engine serves it."""
    values = {"cpu_cache_gb": 1, "metrics": True, "metrics_port": port, "instance": "one"}
    settings = KvbmSettings.from_env(values)
    served = metrics_server(settings, metrics, About("an engine", "a/model", rank))
    assert served is not None
    return served


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Prometheus, int]]:
    """A Prometheus with our configuration and our alerts, and two ranks: one that has just started, and one
    that stores blocks in host memory and on disk and loads them again. The port of the first one.
    """
    folder = tmp_path_factory.mktemp("prometheus")
    place = folder / "t"
    place.mkdir()
    port = free_ports(2)
    config = (DEPLOY / "prometheus.yml").read_text()
    config = re.sub(r"^global:.*?^\n", f"{SCRAPE}\n", config, flags=re.DOTALL | re.MULTILINE)
    assert SCRAPE in config and "host.docker.internal:6880" in config
    config = config.replace("host.docker.internal:6880", f"127.0.0.1:{port}")
    config = config.replace("kvbm.rules.yml", str(DEPLOY / "kvbm.rules.yml"))
    with ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setattr("tempfile.tempdir", str(place))
        stack.callback(page(Metrics(), port, IDLE).close)
        bench = LocalBench(folder / "disk", num_slots=4, disk_slots=16)
        stack.callback(bench.close)
        stack.callback(page(bench.metrics, port, BUSY).close)
        server = stack.enter_context(Prometheus(folder, config))
        server.wait_for("count_over_time(kvbm_info[1m]) >= 2", 2)
        for turn in range(3):
            for first in range(0, 12, 4):
                bench.store(KEYS[first : first + 4])
                bench.load(f"{turn} {first}", KEYS[first : first + 4])
        bench.metrics.matched_tokens(64)
        server.wait_for('increase(kvbm_matched_tokens{instance=~".*"}[1m]) > 0')
        yield server, port


def of_rank(text: str, port: int, rank: int) -> str:
    """A panel's query of one instance, as Grafana would send it."""
    return text.replace("$instance", f"127.0.0.1:{port + rank}").replace("$__rate_interval", LOOKBACK)


def panel_queries() -> list[tuple[str, str]]:
    """(panel, query) of the whole dashboard."""
    panels = json.loads((DEPLOY / "grafana" / "kvbm-dashboard.json").read_text())["panels"]
    found = [(panel["title"], of["expr"]) for panel in panels for of in panel.get("targets", ())]
    assert len(found) > 40
    return found


def alerts() -> list[dict[str, Any]]:
    """Our rules, as Prometheus reads them."""
    yaml = pytest.importorskip("yaml")
    (group,) = yaml.safe_load((DEPLOY / "kvbm.rules.yml").read_text())["groups"]
    rules: list[dict[str, Any]] = group["rules"]
    return rules


def test_kvbms_names_are_queried_as_they_are(run: tuple[Prometheus, int]) -> None:
    server, port = run
    busy = f'instance="127.0.0.1:{port + BUSY}"'
    assert [value for _, value in server.query(f"kvbm_matched_tokens{{{busy}}}")] == [64]
    assert server.query("kvbm_matched_tokens_total") == []
    types = {name: entries[0]["type"] for name, entries in server.get("metadata").items()}
    assert types["kvbm_matched_tokens"] == types["kvbm_offload_blocks_d2h"] == "counter"
    assert types["kvbm_tier_transfer_seconds"] == types["kvbm_evicted_age_seconds"] == "histogram"


def test_one_page_leads_prometheus_to_all_ranks(run: tuple[Prometheus, int]) -> None:
    server, port = run
    found = {labels["rank"]: labels["instance"] for labels, _ in server.query("kvbm_info")}
    assert found == {"0": f"127.0.0.1:{port}", "1": f"127.0.0.1:{port + 1}"}
    joined = "kvbm_matched_tokens * on (instance) group_left (engine, model) kvbm_info"
    assert {(labels["engine"], labels["model"]) for labels, _ in server.query(joined)} == {
        ("an engine", "a/model")
    }


@pytest.mark.parametrize("rank", [IDLE, BUSY])
def test_every_panel_shows_numbers_and_of_an_idle_engine_zeros(
    run: tuple[Prometheus, int], rank: int
) -> None:
    server, port = run
    shown: dict[str, float] = {}
    for title, text in panel_queries():
        values = [value for _, value in server.query(of_rank(text, port, rank))]
        assert values and not any(map(math.isnan, values)), f"{title}: {text}: {values}"
        shown[title] = max(shown.get(title, 0.0), *values)
    if rank == IDLE:
        assert {title for title, value in shown.items() if value} == {"Engines"}
    else:
        moved = {
            "Bytes Between Tiers",
            "Latency Between Tiers",
            "Bandwidth Between Tiers",
            "Slowest Transfer",
        }
        moved |= {"Evicted Blocks per Second", "Tier Usage", "Onboard Blocks - Host to Device"}
        assert all(shown[title] for title in moved), shown


def test_the_dashboard_can_be_drawn_without_grafana(run: tuple[Prometheus, int], tmp_path: Path) -> None:
    server, _ = run
    page_file = tmp_path / "dashboard.html"
    command = [sys.executable, str(DEPLOY / "dashboard_page.py"), f"http://127.0.0.1:{server.port}"]
    subprocess.run([*command, str(page_file), "--minutes", "0.5"], check=True)
    text = page_file.read_text()
    assert text.count("<svg") == len({title for title, _ in panel_queries()}) and "No data" not in text
    assert all(html.escape(title) in text for title, _ in panel_queries())
    away = subprocess.run(
        [*command[:2], "http://127.0.0.1:1", str(page_file)], capture_output=True, text=True
    )
    assert away.returncode == 1 and away.stderr.count("\n") == 1


def test_every_alert_has_data_and_a_healthy_engine_raises_none(run: tuple[Prometheus, int]) -> None:
    server, _ = run
    (group,) = server.get("rules")["groups"]
    states = {rule["name"]: (rule["health"], rule["state"]) for rule in group["rules"]}
    assert states.keys() == {rule["alert"] for rule in alerts()}
    assert {health for health, _ in states.values()} == {"ok"}
    # Four slots are too few indeed, and a scrape may time out on a busy machine: neither for long enough.
    pending = {name for name, (_, state) in states.items() if state != "inactive"}
    assert pending <= {"KvbmHostTierTooSmall", "KvbmDown"}
    assert "firing" not in {state for _, state in states.values()}
    for rule in alerts():
        for part in rule["expr"].split(" unless "):
            compared = COMPARED.match(part.strip())
            assert compared is not None, part
            assert server.query(compared[1]), compared[1]


# For each alert: series of one instance in a shape that raises it; then in one that does not.
FIRES: dict[str, tuple[dict[str, str], dict[str, str]]] = {
    "KvbmDown": ({"up": "0x2000"}, {"up": "1x2000"}),
    "KvbmSilentRanks": ({"kvbm_silent_ranks": "2x2000"}, {"kvbm_silent_ranks": "0x2000"}),
    "KvbmWrongBlocks": (
        {'kvbm_audited_blocks_total{result="wrong"}': "0+1x2000"},
        {
            'kvbm_audited_blocks_total{result="wrong"}': "0x2000",
            'kvbm_audited_blocks_total{result="equal"}': "0+9x2000",
        },
    ),
    "KvbmGuardedErrors": (
        {'kvbm_guarded_errors_total{seam="s"}': "0+1x2000"},
        {'kvbm_guarded_errors_total{seam="s"}': "7x2000"},
    ),
    "KvbmFailures": (
        {'kvbm_failures_total{kind="onboard_io_error"}': "0+2x2000"},
        {'kvbm_failures_total{kind="onboard_io_error"}': "0+1x5 5x1995"},
    ),
    "KvbmRemoteFailures": (
        {"kvbm_object_read_failures": "0+99x2000", "kvbm_object_write_failures": "0x2000"},
        {"kvbm_object_read_failures": "0+1x2000", "kvbm_object_write_failures": "0x2000"},
    ),
    "KvbmLoadsSlowerThanComputing": (
        {"kvbm_ttft_lost_seconds_total": "0+2x2000", "kvbm_ttft_saved_seconds_total": "0+1x2000"},
        {"kvbm_ttft_lost_seconds_total": "0+1x2000", "kvbm_ttft_saved_seconds_total": "0+2x2000"},
    ),
    "KvbmHostTierTooSmall": (
        {
            'kvbm_evicted_age_seconds_bucket{tier="host",le="15.0"}': "0+9x2000",
            'kvbm_evicted_age_seconds_bucket{tier="host",le="+Inf"}': "0+9x2000",
        },
        {
            'kvbm_evicted_age_seconds_bucket{tier="host",le="300.0"}': "0+1x2000",
            'kvbm_evicted_age_seconds_bucket{tier="host",le="900.0"}': "0+9x2000",
            'kvbm_evicted_age_seconds_bucket{tier="host",le="+Inf"}': "0+9x2000",
        },
    ),
    "KvbmBlocksNotKept": (
        {'kvbm_dropped_blocks_total{reason="queue_full"}': "0+999x2000"},
        {'kvbm_dropped_blocks_total{reason="preempted"}': "0+999x2000"},
    ),
    "KvbmNoHits": (
        {
            "kvbm_offload_blocks_d2h": "0+99x2000",
            "kvbm_offload_blocks_d2d": "0x2000",
            "kvbm_matched_tokens": "5x2000",
        },
        {
            "kvbm_offload_blocks_d2h": "0+99x2000",
            "kvbm_offload_blocks_d2d": "0x2000",
            "kvbm_matched_tokens": "0+5x2000",
        },
    ),
    "KvbmEventsLost": (
        {"kvbm_event_batches_dropped_total": "0+1x2000"},
        {"kvbm_event_batches_dropped_total": "3x2000"},
    ),
}


def with_labels(series: str) -> str:
    """As scraped from one instance."""
    name, _, labels = series.rstrip("}").partition("{")
    own = 'instance="i",job="kvbm"'
    return f"{name}{{{labels},{own}}}" if labels else f"{name}{{{own}}}"


def alert_test(name: str, shape: dict[str, str], *, is_raised: bool) -> dict[str, Any]:
    """As promtool has it."""
    query = f'count(ALERTS{{alertname="{name}",alertstate="firing"}}) or vector(0)'
    expected = [{"value": int(is_raised), "labels": "{}"}]
    at = "8h" if "6h" in next(rule["expr"] for rule in alerts() if rule["alert"] == name) else "80m"
    return {
        "name": f"{name}, {is_raised=}",
        "interval": "1m",
        "input_series": [{"series": with_labels(one), "values": values} for one, values in shape.items()],
        "promql_expr_test": [{"expr": query, "eval_time": at, "exp_samples": expected}],
    }


def test_each_alert_is_raised_when_it_should_be_and_not_otherwise(tmp_path: Path) -> None:
    assert {rule["alert"] for rule in alerts()} == FIRES.keys()
    tests = [
        alert_test(name, shape, is_raised=is_raised)
        for name, shapes in FIRES.items()
        for shape, is_raised in zip(shapes, (True, False), strict=True)
    ]
    rules = [str(DEPLOY / "kvbm.rules.yml")]
    path = tmp_path / "alerts.json"  # JSON is YAML
    path.write_text(json.dumps({"rule_files": rules, "evaluation_interval": "2m", "tests": tests}))
    promtool = find_prometheus("promtool")
    assert promtool is not None
    done = subprocess.run([promtool, "test", "rules", str(path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_promtool_likes_rules_and_configuration(tmp_path: Path) -> None:
    promtool = find_prometheus("promtool")
    assert promtool is not None
    for kind, name in (("rules", "kvbm.rules.yml"), ("config", "prometheus.yml")):
        command = [promtool, "check", kind, str(DEPLOY / name)]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


def test_promtool_lints_the_page_but_for_names_that_are_kvbms(tmp_path: Path) -> None:
    metrics = Metrics()
    metrics.tier_transfer(Tier.HOST, Tier.DISK, 4096, 0.01)
    metrics.describe(engine='an "engine"', model="a\\model\n", name="n", rank=0, version="1")
    promtool = find_prometheus("promtool")
    assert promtool is not None
    text = metrics.exposition()
    done = subprocess.run([promtool, "check", "metrics"], input=text, capture_output=True, text=True)
    complaints = {line.split()[0] for line in done.stderr.splitlines() if line.startswith("kvbm_")}
    bare = set(re.findall(r"^# TYPE (kvbm_\w+(?<!_total)) counter$", text, re.MULTILINE))
    assert complaints == bare, done.stderr
