"""Spans of requests and transfers under vLLM's own scheduler: in memory, and as a collector receives them
over HTTP.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("opentelemetry.sdk", reason="NOT RUN: needs opentelemetry-sdk")

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from kvbm_core.errors import ConfigError
from kvbm_core.observe.traces import is_asked_for, open_traces, traces_to
from kvbm_core.types import Direction
from tests.vllm.kvbm_engine import KvbmEngine

PROMPT = range(50)
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
ENDPOINT = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"


def headers(flags: str = "01") -> dict[str, str]:
    """As vLLM passes on what a client sent."""
    return {"traceparent": f"00-{TRACE}-{PARENT}-{flags}"}


@contextmanager
def exported(engine: KvbmEngine) -> Iterator[InMemorySpanExporter]:
    """Where the engine's spans are found after the end of it."""
    exporter = InMemorySpanExporter()
    traces = traces_to(exporter, {"kvbm.model": "fake"})
    engine.leader.metrics.traces = traces
    try:
        yield exporter
    finally:
        engine.leader.metrics.traces = None
        traces.close()


def by_name(exporter: InMemorySpanExporter) -> dict[str, list[Any]]:
    """Finished spans."""
    found: dict[str, list[Any]] = {}
    for span in exporter.get_finished_spans():
        found.setdefault(span.name, []).append(span)
    return found


def test_a_request_and_its_transfers_are_spans_of_the_clients_trace(tmp_path: Path) -> None:
    with KvbmEngine(tmp_path) as engine:
        with exported(engine) as exporter:
            engine.add("first", PROMPT, 1).trace_headers = headers()
            engine.run()
            engine.forget_device()
            engine.add("again", [*PROMPT, *range(900, 910)], 1).trace_headers = headers()
            engine.run()
            engine.settle()
        spans = by_name(exporter)
        first, again = spans["kvbm request"]
        for span in (first, again):
            assert f"{span.context.trace_id:032x}" == TRACE and f"{span.parent.span_id:016x}" == PARENT
        assert first.attributes["kvbm.miss.reason"] == "never_seen"
        assert first.attributes["gen_ai.request.id"] == "first"
        assert again.attributes["kvbm.hit_tokens.host"] == 48
        assert again.attributes["kvbm.missed_tokens"] == 8
        (load,) = spans["kvbm host to device"]
        assert (
            load.parent.span_id == again.context.span_id and load.context.trace_id == again.context.trace_id
        )
        assert load.attributes["kvbm.tier.from"] == "host" and load.attributes["kvbm.tier.to"] == "device"
        assert load.attributes["kvbm.bytes"] == engine.metric('kvbm_bytes_total{direction="onboard"}')
        assert load.end_time >= load.start_time
        offloads = spans["kvbm device to host"]
        assert {span.parent.span_id for span in offloads} <= {first.context.span_id, again.context.span_id}
        assert first.resource.attributes["kvbm.model"] == "fake"
        engine.assert_clean()


def test_the_tier_is_told_that_it_came_from(tmp_path: Path) -> None:
    with KvbmEngine(tmp_path, host_blocks=14, disk_blocks=64) as engine:
        engine.ask("first", PROMPT, 1)
        engine.forget_device()
        engine.ask("other", range(500, 550), 1)
        engine.forget_device()
        with exported(engine) as exporter:
            engine.ask("again", PROMPT, 1)
            engine.settle()
        spans = by_name(exporter)
        (again,) = spans["kvbm request"]
        assert again.parent is None and again.attributes["kvbm.hit_tokens.disk"] > 0
        for name in ("kvbm disk to host", "kvbm host to device"):
            assert [span.parent.span_id for span in spans[name]] == [again.context.span_id]


def test_what_a_step_offloads_of_several_requests_is_linked_to_them(tmp_path: Path) -> None:
    with KvbmEngine(tmp_path) as engine:
        with exported(engine) as exporter:
            engine.add("a", range(100, 120), 1)
            engine.add("b", range(200, 220), 1)
            engine.run()
            engine.settle()
        spans = by_name(exporter)
        ids = {span.context.span_id for span in spans["kvbm request"]}
        (offload,) = spans["kvbm device to host"]
        assert offload.parent is None and {link.context.span_id for link in offload.links} == ids
        engine.assert_clean()


def test_a_trace_that_is_not_sampled_stays_so(tmp_path: Path) -> None:
    with KvbmEngine(tmp_path) as engine, exported(engine) as exporter:
        engine.add("first", PROMPT, 1).trace_headers = headers("00")
        engine.run()
        engine.settle()
        assert not exporter.get_finished_spans()


def test_a_failed_load_and_a_request_that_is_passed_by(tmp_path: Path) -> None:
    with KvbmEngine(tmp_path) as engine:
        engine.ask("first", PROMPT, 1)
        engine.forget_device()
        with exported(engine) as exporter:
            engine.executors[0].fail_next(Direction.ONBOARD)
            engine.ask("again", PROMPT, 1)
            skip = {"extra_args": {"kv_transfer_params": {"kvbm": {"skip": True}}}}
            engine.ask("skipped", range(300, 350), 1, **skip)
            engine.settle()
        spans = by_name(exporter)
        assert [span.attributes["kvbm.miss.reason"] for span in spans["kvbm request"]] == [
            "failed",
            "opted_out",
        ]
        assert "kvbm host to device" not in spans
        engine.assert_clean()


# ---------------------------------------------------------------- over HTTP


class Collector(ThreadingHTTPServer):
    """Takes spans as an OpenTelemetry collector does. ``status``: what it answers."""

    daemon_threads = True

    def __init__(self, status: int = 200) -> None:
        self.status = status
        self.asked: list[str] = []
        self.spans: list[Any] = []
        super().__init__(("127.0.0.1", 0), _Handler)


class _Handler(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.asked.append(self.path)
        if self.server.status == 200:
            message = ExportTraceServiceRequest.FromString(body)
            for resource in message.resource_spans:
                names = {item.key: item.value.string_value for item in resource.resource.attributes}
                for scope in resource.scope_spans:
                    self.server.spans += [(names, span) for span in scope.spans]
        self.send_response(self.server.status)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def collecting(status: int = 200) -> Iterator[Collector]:
    collector = Collector(status)
    thread = threading.Thread(target=collector.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield collector
    finally:
        collector.shutdown()
        thread.join()
        collector.server_close()


@pytest.mark.shows("KVBM_TRACES=auto")
def test_spans_reach_a_collector_over_http(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with collecting() as collector:
        monkeypatch.setenv(ENDPOINT, f"http://127.0.0.1:{collector.server_port}/v1/traces")
        with KvbmEngine(tmp_path, extra={"instance": "one"}) as engine:
            engine.add("first", PROMPT, 1).trace_headers = headers()
            engine.run()
            engine.settle()
            engine.assert_clean()
        assert set(collector.asked) == {"/v1/traces"}
        names = {span.name for _, span in collector.spans}
        assert names == {"kvbm request", "kvbm device to host"}
        resource, span = collector.spans[0]
        assert resource["service.name"] == "kvbm" and resource["service.instance.id"] == "one"
        assert span.trace_id.hex() == TRACE


def test_an_engine_ends_soon_when_nobody_takes_its_spans(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with collecting(status=503) as collector:
        monkeypatch.setenv(ENDPOINT, f"http://127.0.0.1:{collector.server_port}/v1/traces")
        with KvbmEngine(tmp_path) as engine:
            engine.ask("first", PROMPT, 1)
            engine.assert_clean()
        assert collector.asked and not collector.spans


# ---------------------------------------------------------------- whether spans are asked for


@pytest.mark.shows("KVBM_TRACES=auto")
def test_nobody_asks_for_spans_by_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (ENDPOINT, "OTEL_EXPORTER_OTLP_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    with KvbmEngine(tmp_path) as engine:
        assert engine.leader.metrics.traces is None
        engine.add("first", PROMPT, 1).trace_headers = headers()
        engine.run()
        engine.assert_clean()


@pytest.mark.shows("KVBM_TRACES=on", "KVBM_TRACES=off", "KVBM_TRACES=auto")
def test_the_standard_variables_decide_unless_the_setting_does() -> None:
    there = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:4318"}
    assert is_asked_for("auto", there) and not is_asked_for("auto", {})
    assert not is_asked_for("auto", {**there, "OTEL_SDK_DISABLED": "true"})
    assert not is_asked_for("auto", {**there, "OTEL_TRACES_EXPORTER": "none"})
    assert not is_asked_for("off", there) and is_asked_for("on", {})


def test_what_cannot_be_had_is_one_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "carrier-pigeon")
    with pytest.raises(ConfigError, match=r"KVBM_TRACES.*carrier-pigeon: write http/protobuf or grpc"):
        open_traces("on", {})
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    assert open_traces("auto", {}) is None
    assert "carrier-pigeon" in caplog.text and caplog.text.count("\n") == 1
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_PROTOCOL")
    monkeypatch.setitem(
        __import__("sys").modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None
    )
    with pytest.raises(ConfigError, match="pip install them"):
        open_traces("on", {})
