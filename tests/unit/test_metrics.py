"""Names and types of the metrics, their arithmetic, and the endpoint that serves them."""

from __future__ import annotations

import http.client
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from kvbm_core.errors import Outcome
from kvbm_core.observe import server as server_module
from kvbm_core.observe.labels import FAILURE_KINDS, DropReason, FailureKind, UncachedReason
from kvbm_core.observe.metrics import Metrics, series
from kvbm_core.observe.readiness import Readiness
from kvbm_core.observe.server import CONTENT_TYPE, MAX_CONNECTIONS, MetricsServer
from kvbm_core.tiers.jobs import count_transfer
from kvbm_core.transfer.plan import Fetched, JobResult
from kvbm_core.types import Direction, Tier

AGES_S = 3600.0

# What dashboards made for KVBM query: the names to the letter, without labels.
KVBM_TYPES = {
    "kvbm_matched_tokens": "counter",
    "kvbm_offload_blocks_d2h": "counter",
    "kvbm_offload_blocks_h2d": "counter",
    "kvbm_offload_blocks_d2d": "counter",
    "kvbm_offload_blocks_d2o": "counter",
    "kvbm_onboard_blocks_h2d": "counter",
    "kvbm_onboard_blocks_d2d": "counter",
    "kvbm_onboard_blocks_o2d": "counter",
    "kvbm_object_read_failures": "counter",
    "kvbm_remote_too_slow_requests_total": "counter",
    "kvbm_object_write_failures": "counter",
    "kvbm_host_cache_hit_rate": "gauge",
    "kvbm_disk_cache_hit_rate": "gauge",
    "kvbm_object_cache_hit_rate": "gauge",
}
OWN_TYPES = {
    "kvbm_peer_fetched_blocks_total": "counter",
    "kvbm_peer_lent_blocks_total": "counter",
    "kvbm_peer_unserved_total": "counter",
    "kvbm_audited_blocks_total": "counter",
    "kvbm_bytes_total": "counter",
    "kvbm_tier_transfer_bytes_total": "counter",
    "kvbm_read_again_bytes_total": "counter",
    "kvbm_headless_blocks": "gauge",
    "kvbm_transfer_seconds": "histogram",
    "kvbm_tier_transfer_seconds": "histogram",
    "kvbm_tier_blocks": "gauge",
    "kvbm_info": "gauge",
    "kvbm_hit_tokens_total": "counter",
    "kvbm_ttft_saved_seconds_total": "counter",
    "kvbm_ttft_lost_seconds_total": "counter",
    "kvbm_slowest_transfer_seconds": "gauge",
    "kvbm_slowest_transfer_bytes": "gauge",
    "kvbm_waiting_blocks": "gauge",
    "kvbm_state_blocks": "gauge",
    "kvbm_evicted_age_seconds": "histogram",
    "kvbm_evicted_blocks_total": "counter",
    "kvbm_dropped_blocks_total": "counter",
    "kvbm_failures_total": "counter",
    "kvbm_guarded_errors_total": "counter",
    "kvbm_uncached_requests_total": "counter",
    "kvbm_missed_requests_total": "counter",
    "kvbm_missed_tokens_total": "counter",
    "kvbm_events_total": "counter",
    "kvbm_event_batches_dropped_total": "counter",
    "kvbm_pending_jobs": "gauge",
    "kvbm_live_leases": "gauge",
    "kvbm_pins": "gauge",
    "kvbm_pinned_blocks": "gauge",
    "kvbm_quotas": "gauge",
    "kvbm_silent_ranks": "gauge",
    "kvbm_held_blocks": "gauge",
}
LABELLED = {
    ("kvbm_peer_fetched_blocks_total",),
    ("kvbm_peer_lent_blocks_total",),
    ("kvbm_peer_unserved_total", "reason"),
    ("kvbm_bytes_total", "direction"),
    ("kvbm_tier_transfer_bytes_total", "from", "to"),
    ("kvbm_read_again_bytes_total", "tier"),
    ("kvbm_transfer_seconds_bucket", "direction", "le"),
    ("kvbm_transfer_seconds_sum", "direction"),
    ("kvbm_transfer_seconds_count", "direction"),
    ("kvbm_tier_transfer_seconds_bucket", "from", "le", "to"),
    ("kvbm_tier_transfer_seconds_sum", "from", "to"),
    ("kvbm_tier_transfer_seconds_count", "from", "to"),
    ("kvbm_tier_blocks", "state", "tier"),
    ("kvbm_info", "engine", "model", "name", "rank", "version"),
    ("kvbm_hit_tokens_total", "tier"),
    ("kvbm_ttft_saved_seconds_total",),
    ("kvbm_ttft_lost_seconds_total",),
    ("kvbm_slowest_transfer_seconds", "from", "to"),
    ("kvbm_slowest_transfer_bytes", "from", "to"),
    ("kvbm_waiting_blocks", "tier"),
    ("kvbm_state_blocks", "tier"),
    ("kvbm_evicted_age_seconds_bucket", "le", "tier"),
    ("kvbm_evicted_age_seconds_sum", "tier"),
    ("kvbm_evicted_age_seconds_count", "tier"),
    ("kvbm_evicted_blocks_total", "reason", "tier"),
    ("kvbm_dropped_blocks_total", "reason"),
    ("kvbm_failures_total", "kind"),
    ("kvbm_guarded_errors_total", "seam"),
    ("kvbm_uncached_requests_total", "reason"),
    ("kvbm_missed_requests_total", "reason"),
    ("kvbm_missed_tokens_total", "reason"),
    ("kvbm_audited_blocks_total", "result"),
    ("kvbm_events_total", "event"),
    ("kvbm_event_batches_dropped_total",),
    ("kvbm_pending_jobs",),
    ("kvbm_live_leases",),
    ("kvbm_pins",),
    ("kvbm_pinned_blocks",),
    ("kvbm_quotas",),
    ("kvbm_silent_ranks",),
    ("kvbm_held_blocks",),
}
DOWN = [
    (Tier.DEVICE, Tier.HOST, "d2h"),
    (Tier.HOST, Tier.DISK, "h2d"),
    (Tier.DEVICE, Tier.DISK, "d2d"),
    (Tier.DEVICE, Tier.REMOTE, "d2o"),
    (Tier.HOST, Tier.REMOTE, "d2o"),
]
UP = [
    (Tier.HOST, Tier.DEVICE, "h2d"),
    (Tier.DISK, Tier.DEVICE, "d2d"),
    (Tier.REMOTE, Tier.HOST, "o2d"),
]


def changed(metrics: Metrics) -> dict[str, float]:
    return {series: value for series, value in metrics.snapshot().items() if value}


def parsed(text: str) -> dict[str, float]:
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    result = {key(written(s.name), s.labels): s.value for s in samples}
    assert len(result) == len(samples)
    return result


def key(name: str, labels: Mapping[str, str]) -> str:
    """A series whatever the order of its labels."""
    return series(name, dict(sorted(labels.items())))


def written(name: str) -> str:
    """The name on the page: this parser adds ``_total`` to every counter that has none; Prometheus does
    not.
    """
    bare = name.removesuffix("_total")
    return bare if bare in KVBM_TYPES else name


def test_names_and_types_on_the_page() -> None:
    lines = Metrics().exposition().splitlines()
    types = dict(line.split()[2:] for line in lines if line.startswith("# TYPE "))
    assert types == KVBM_TYPES | OWN_TYPES
    for name in KVBM_TYPES:
        assert f"{name} 0.0" in lines, "there from the start, without labels"


def test_every_series_has_the_labels_it_always_had() -> None:
    metrics = Metrics()
    metrics.describe(engine="e", model="m", name="n", rank=0, version="v")
    found = {
        (sample.name, *sorted(sample.labels)) for metric in metrics.collect() for sample in metric.samples
    }
    assert found == {(name,) for name in KVBM_TYPES} | LABELLED


def test_the_page_is_whole_and_apart_where_the_engine_counts_in_files(tmp_path: Path) -> None:
    """vLLM and SGLang make prometheus_client keep all numbers of the process in shared files."""
    code = (
        "import prometheus_client as p; from kvbm_core.observe.metrics import Metrics;"
        "p.Counter('engine', '').inc(); m = Metrics(); m.matched_tokens(64); print(m.exposition());"
        "print('engine_total' in p.generate_latest().decode(), 'kvbm' in p.generate_latest().decode())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    *page, last = done.stdout.splitlines()
    assert "kvbm_matched_tokens 64.0" in page and last == "True False"
    assert not any("engine_total" in line for line in page)
    counted = [path.read_bytes() for path in tmp_path.iterdir()]
    assert counted and not any(b"kvbm" in data for data in counted)


def test_a_parser_reads_back_every_value() -> None:
    metrics = Metrics()
    metrics.matched_tokens(12345678901234)
    metrics.transfer_seconds(Direction.OFFLOAD, 0.0123)
    metrics.request_hits(1, 0, 3)
    metrics.dropped(DropReason.NO_SPACE, 2)
    metrics.tier_transfer(Tier.HOST, Tier.DISK, 4096, 0.5)
    known = {
        key(sample.name, sample.labels): sample.value
        for metric in metrics.collect()
        for sample in metric.samples
    }
    assert parsed(metrics.exposition()) == known


@pytest.mark.parametrize(("source", "target", "suffix"), DOWN)
def test_offload_names(source: Tier, target: Tier, suffix: str) -> None:
    metrics = Metrics()
    metrics.offloaded_blocks(3, source, target)
    assert changed(metrics) == {f"kvbm_offload_blocks_{suffix}": 3}


@pytest.mark.parametrize(("source", "target", "suffix"), UP)
def test_onboard_names(source: Tier, target: Tier, suffix: str) -> None:
    metrics = Metrics()
    metrics.onboarded_blocks(3, source, target)
    assert changed(metrics) == {f"kvbm_onboard_blocks_{suffix}": 3}


def test_without_a_host_tier_what_goes_to_the_remote_tier_is_counted_once() -> None:
    metrics = Metrics(has_host_tier=False)
    metrics.offloaded_blocks(3, Tier.DEVICE, Tier.HOST)
    metrics.offloaded_blocks(3, Tier.HOST, Tier.REMOTE)
    assert changed(metrics) == {"kvbm_offload_blocks_d2o": 3}


@pytest.mark.parametrize(("is_write", "name"), [(True, "write"), (False, "read")])
def test_what_a_remote_tier_did_not_take_or_give_is_counted(is_write: bool, name: str) -> None:
    metrics = Metrics()
    metrics.remote_failures(2, is_write=is_write)
    assert changed(metrics) == {f"kvbm_object_{name}_failures": 2}


def test_pairs_that_kvbm_has_no_name_for() -> None:
    metrics = Metrics()
    metrics.offloaded_blocks(3, Tier.DISK, Tier.HOST)
    metrics.onboarded_blocks(3, Tier.DISK, Tier.HOST)
    assert changed(metrics) == {}


def test_labels_as_enum_or_text() -> None:
    metrics = Metrics(seams=("get_finished",))
    metrics.bytes_moved(Direction.ONBOARD, 4096)
    metrics.tier_transfer(Tier.DISK, Tier.HOST, 512, 0.25)
    metrics.tier_transfer(Tier.DEVICE, Tier.DISK, 512, 0.25)  # no such way down
    metrics.evicted(Tier.HOST, 2)
    metrics.dropped(DropReason.NO_SPACE)
    metrics.dropped("no_space", 4)
    metrics.failure(FailureKind.WORKER_LOST)
    metrics.failure("onboard_corrupt")
    metrics.guarded_error("get_finished")
    metrics.uncached_request(UncachedReason.PROMPT_EMBEDS)
    metrics.set_pending_jobs(3)
    metrics.set_live_leases(5)
    metrics.set_ordered(1, 40, 3)
    metrics.set_silent_ranks(2, 7)
    metrics.tier_usage(Tier.HOST, 10, 64)
    buckets = [name for name in changed(metrics) if "_bucket" in name]
    assert len(buckets) == 9, "those of 0.25 s and more"
    assert {name: value for name, value in changed(metrics).items() if name not in buckets} == {
        'kvbm_bytes_total{direction="onboard"}': 4096,
        'kvbm_tier_transfer_bytes_total{from="disk",to="host"}': 512,
        'kvbm_tier_transfer_seconds_sum{from="disk",to="host"}': 0.25,
        'kvbm_tier_transfer_seconds_count{from="disk",to="host"}': 1,
        'kvbm_slowest_transfer_seconds{from="disk",to="host"}': 0.25,
        'kvbm_slowest_transfer_bytes{from="disk",to="host"}': 512,
        'kvbm_evicted_blocks_total{tier="host",reason="room"}': 2,
        'kvbm_dropped_blocks_total{reason="no_space"}': 5,
        'kvbm_failures_total{kind="worker_lost"}': 1,
        'kvbm_failures_total{kind="onboard_corrupt"}': 1,
        'kvbm_guarded_errors_total{seam="get_finished"}': 1,
        'kvbm_uncached_requests_total{reason="prompt_embeds"}': 1,
        "kvbm_pending_jobs": 3,
        "kvbm_live_leases": 5,
        "kvbm_pins": 1,
        "kvbm_pinned_blocks": 40,
        "kvbm_quotas": 3,
        "kvbm_silent_ranks": 2,
        "kvbm_held_blocks": 7,
        'kvbm_tier_blocks{tier="host",state="used"}': 10,
        'kvbm_tier_blocks{tier="host",state="capacity"}': 64,
    }


@given(st.lists(st.text(), max_size=20))
def test_labels_are_bounded(values: list[str]) -> None:
    metrics = Metrics()
    before = metrics.snapshot().keys()
    for value in values:
        metrics.dropped(value)
        metrics.failure(value)
        metrics.guarded_error(value)
        metrics.uncached_request(value)
    assert metrics.snapshot().keys() == before
    assert sum(changed(metrics).values()) == 4 * len(values)


def test_all_failures_of_transfers_have_a_kind() -> None:
    assert "offload_timed_out" in FAILURE_KINDS
    assert "onboard_io_error" in FAILURE_KINDS
    assert "onboard_ok" not in FAILURE_KINDS
    assert len(set(FAILURE_KINDS)) == len(FAILURE_KINDS)


def test_nothing_counts_backwards() -> None:
    metrics = Metrics()
    metrics.matched_tokens(-5)
    metrics.matched_tokens(0)
    metrics.bytes_moved(Direction.OFFLOAD, -1)
    metrics.transfer_seconds(Direction.OFFLOAD, -1.0)
    metrics.tier_transfer(Tier.HOST, Tier.DISK, 0, 1.0)
    assert changed(metrics) == {}


@given(
    st.lists(st.tuples(*[st.integers(0, 9)] * 3, st.integers(0, 30)), max_size=40),
    st.integers(1, 10),
)
def test_hit_rates_are_those_of_the_last_requests(requests: list[tuple[int, ...]], window: int) -> None:
    metrics = Metrics(window_requests=window)
    for host, disk, remote, more in requests:
        metrics.request_hits(host, disk, host + disk + remote + more, remote)
    last = requests[-window:]
    queried = sum(sum(request) for request in last)
    values = metrics.snapshot()
    for position, tier in enumerate(("host", "disk", "object")):
        expected = Fraction(sum(request[position] for request in last), queried) if queried else Fraction(0)
        assert values[f"kvbm_{tier}_cache_hit_rate"] == pytest.approx(float(expected))


@given(st.lists(st.floats(0, 100), max_size=50))
def test_histogram_is_cumulative_and_complete(seconds: list[float]) -> None:
    metrics = Metrics()
    for value in seconds:
        metrics.transfer_seconds(Direction.ONBOARD, value)
    values = metrics.snapshot()
    for sample in (sample for metric in metrics.collect() for sample in metric.samples):
        if sample.name == "kvbm_transfer_seconds_bucket" and sample.labels["direction"] == "onboard":
            assert sample.value == sum(value <= float(sample.labels["le"]) for value in seconds)
    assert values['kvbm_transfer_seconds_count{direction="onboard"}'] == len(seconds)
    assert values['kvbm_transfer_seconds_sum{direction="onboard"}'] == pytest.approx(sum(seconds))
    assert values['kvbm_transfer_seconds_count{direction="offload"}'] == 0


def test_no_count_is_lost_between_threads() -> None:
    metrics = Metrics(window_requests=10)
    start = threading.Barrier(5)

    def work() -> None:
        start.wait()
        for _ in range(2000):
            metrics.offloaded_blocks(1)
            metrics.transfer_seconds(Direction.OFFLOAD, 0.1)
            metrics.request_hits(1, 0, 2)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    start.wait()
    while any(thread.is_alive() for thread in threads):
        values = metrics.snapshot()
        bucket = 'kvbm_transfer_seconds_bucket{direction="offload",le="+Inf"}'
        assert values[bucket] == values['kvbm_transfer_seconds_count{direction="offload"}']
    values = metrics.snapshot()
    assert values["kvbm_offload_blocks_d2h"] == 8000
    assert values['kvbm_transfer_seconds_count{direction="offload"}'] == 8000
    assert metrics.hit_window() == (10, 0, 0, 20)


def test_two_instances_share_nothing() -> None:
    first, second = Metrics(), Metrics()
    first.matched_tokens(7)
    assert changed(second) == {}


# ---------------------------------------------------------------- the endpoint


@pytest.fixture
def server() -> Iterator[MetricsServer]:
    metrics = Metrics()
    metrics.matched_tokens(64)
    endpoint = MetricsServer(0, metrics, "127.0.0.1")
    assert endpoint.start()
    yield endpoint
    endpoint.close()


def get(server: MetricsServer, path: str) -> tuple[int, str, str]:
    url = f"http://127.0.0.1:{server.bound_port}{path}"
    try:
        with urllib.request.urlopen(url, timeout=10) as response:
            return response.status, response.headers["Content-Type"], response.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.headers["Content-Type"], error.read().decode()


def is_cut_off(client: socket.socket) -> bool:
    """Waits for its end. A reset: it came before the server had read what the client had sent."""
    try:
        return client.recv(1) == b""
    except ConnectionResetError:
        return True


def open_sockets() -> set[str]:
    """The sockets of this process, by inode."""
    found = set()
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{descriptor}")
        except FileNotFoundError:
            continue  # the directory's own descriptor
        if target.startswith("socket:"):
            found.add(target)
    return found


def test_scrape(server: MetricsServer) -> None:
    status, content_type, page = get(server, "/metrics")
    assert (status, content_type) == (200, CONTENT_TYPE)
    assert parsed(page)["kvbm_matched_tokens"] == 64
    assert get(server, "/metrics?name[]=x")[0] == 200
    assert get(server, "/health")[::2] == get(server, "/ready")[::2] == get(server, "/live")[::2]
    assert get(server, "/health")[::2] == (200, "ok\n")
    assert get(server, "/else")[0] == 404


def test_health_says_what_is_not_ready() -> None:
    missing = Readiness(False, "ranks 1 and 3 have not answered")
    now = [missing, missing, Readiness(True)]
    server = MetricsServer(0, Metrics(), "127.0.0.1", lambda: now.pop(0))
    assert server.start()
    try:
        for page in ("/health", "/ready"):
            assert get(server, page)[::2] == (503, "not ready: ranks 1 and 3 have not answered\n")
            assert get(server, "/live")[::2] == (200, "ok\n")  # or a probe would restart what serves
        assert get(server, "/health")[::2] == (200, "ok\n")
    finally:
        server.close()


def test_head_has_no_body(server: MetricsServer) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", server.bound_port, timeout=10)
    connection.request("HEAD", "/metrics")
    response = connection.getresponse()
    assert (response.status, response.read()) == (200, b"")
    connection.close()


def test_writing_is_refused(server: MetricsServer) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", server.bound_port, timeout=10)
    connection.request("POST", "/metrics")
    assert connection.getresponse().status == 405
    connection.close()


def test_names_are_the_same_for_who_would_rather_have_openmetrics(server: MetricsServer) -> None:
    url = f"http://127.0.0.1:{server.bound_port}/metrics"
    request = urllib.request.Request(url, headers={"Accept": "application/openmetrics-text;version=1.0.0"})
    with urllib.request.urlopen(request, timeout=10) as answer:
        assert answer.headers["Content-Type"] == CONTENT_TYPE
        assert "\nkvbm_matched_tokens 64.0\n" in answer.read().decode()


def test_a_readiness_that_cannot_be_asked_is_an_error_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    def ask() -> Readiness:
        raise RuntimeError("a bug")

    server = MetricsServer(0, Metrics(), "127.0.0.1", ask)
    assert server.start()
    try:
        assert get(server, "/health")[0] == 500
    finally:
        server.close()
    assert "/health cannot be answered" in caplog.text


def test_a_port_in_use_is_one_warning(server: MetricsServer, caplog: pytest.LogCaptureFixture) -> None:
    sockets = open_sockets()
    second = MetricsServer(server.bound_port or 0, Metrics(), "127.0.0.1")
    assert second.start() is False
    (record,) = caplog.records
    assert (record.name, record.levelname) == ("kvbm.metrics", "WARNING")
    assert record.getMessage() == second.warning
    assert f"DYN_KVBM_METRICS_PORT={server.bound_port}: " in record.getMessage()
    assert "set it to a free port" in record.getMessage()
    assert second.bound_port is None
    assert open_sockets() == sockets
    second.close()
    assert get(server, "/health")[0] == 200


@pytest.mark.parametrize(
    ("host", "port"), [("203.0.113.1", 0), ("no.such.host.invalid", 0), ("127.0.0.1", 99999)]
)
def test_an_address_that_cannot_be_bound_never_raises(host: str, port: int) -> None:
    server = MetricsServer(port, Metrics(), host)
    assert server.start() is False
    assert server.warning is not None


def test_close_leaves_no_thread_and_no_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "MAX_CONNECTION_S", AGES_S)  # clients are cut off, not waited for
    threads, sockets = set(threading.enumerate()), open_sockets()
    server = MetricsServer(0, Metrics(), "127.0.0.1")
    assert server.start()
    assert server.start(), "a second start changes nothing"
    port = server.bound_port or 0
    assert get(server, "/metrics")[0] == 200
    # One client that says nothing and one that stops in the middle must not hold it open.
    idle = [socket.create_connection(("127.0.0.1", port), timeout=10) for _ in range(2)]
    idle[1].sendall(b"GET /metr")
    assert get(server, "/health")[0] == 200, "accepted after the idle ones"
    server.close()
    server.close()
    assert server.bound_port is None
    for client in idle:
        assert is_cut_off(client)
        client.close()
    assert set(threading.enumerate()) <= threads
    assert open_sockets() == sockets
    again = MetricsServer(port, Metrics(), "127.0.0.1")
    assert again.start(), "the port is free at once"
    again.close()


def test_neither_idle_nor_slow_clients_keep_a_scrape_out(
    server: MetricsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "MAX_CONNECTION_S", AGES_S)  # none of them goes by itself
    before = threading.active_count()
    address = ("127.0.0.1", server.bound_port or 0)
    with ExitStack() as stack:
        clients = [stack.enter_context(socket.create_connection(address, timeout=30)) for _ in range(200)]
        for number, client in enumerate(clients[-MAX_CONNECTIONS:]):
            client.sendall((b"", b"GET /metr", b"GET /metrics HTTP/1.1\r\nHost: x\r\n")[number % 3])
        for _ in range(5):
            assert get(server, "/metrics")[0] == 200
        assert threading.active_count() <= before + MAX_CONNECTIONS
        assert all(map(is_cut_off, clients[:-MAX_CONNECTIONS])), "the oldest"


def test_a_client_that_says_a_little_now_and_then_is_cut_off(
    server: MetricsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "MAX_CONNECTION_S", 0.3)
    client = socket.create_connection(("127.0.0.1", server.bound_port or 0), timeout=0.01)
    ends_at_s = time.monotonic() + 30
    is_open = True
    while is_open and time.monotonic() < ends_at_s:
        try:
            client.sendall(b"x")
            is_open = client.recv(1) != b""
        except TimeoutError:
            continue
        except OSError:
            is_open = False
    client.close()
    assert not is_open


def test_what_went_straight_to_the_device_is_counted_once_and_apart_from_what_passed_the_host() -> None:
    metrics = Metrics()
    straight = Fetched("disk", 300, 2.0, is_direct=True)
    results = [
        JobResult(1, Outcome.OK, 1000, 3.0, 0.5, fetched=(straight, Fetched("disk", 640, 1.0)), copy_s=0.25),
        JobResult(1, Outcome.OK, 300, 4.0, 0.0, fetched=(straight._replace(seconds=3.0),)),
    ]
    count_transfer(metrics, Direction.ONBOARD, results, lambda name: Tier.DISK)
    assert {
        name: value for name, value in changed(metrics).items() if "_bytes_total" in name or "_sum" in name
    } == {
        'kvbm_bytes_total{direction="onboard"}': 1300,
        'kvbm_transfer_seconds_sum{direction="onboard"}': 4.0,
        'kvbm_tier_transfer_bytes_total{from="disk",to="device"}': 600,
        'kvbm_tier_transfer_seconds_sum{from="disk",to="device"}': 3.0,
        'kvbm_tier_transfer_bytes_total{from="disk",to="host"}': 640,
        'kvbm_tier_transfer_seconds_sum{from="disk",to="host"}': 1.0,
        'kvbm_tier_transfer_bytes_total{from="host",to="device"}': 700,
        'kvbm_tier_transfer_seconds_sum{from="host",to="device"}': 0.25,
    }
