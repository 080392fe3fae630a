"""Spans for OpenTelemetry: one for each request, one for each transfer between tiers (docs/tracing.md).

The provider is kvbm's own, so that an engine's stays as it is; what it sends, how much of it, and where to
say the standard OTEL_* variables. The packages are loaded only when spans are asked for.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from kvbm_core import __version__
from kvbm_core.errors import ConfigError
from kvbm_core.observe.why import Account

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Span

log = logging.getLogger("kvbm")

CLOSE_TIMEOUT_S = 3.0
_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_SETTING = "KVBM_TRACES"
_INSTALL = "needs opentelemetry-sdk and opentelemetry-exporter-otlp; pip install them"
_around: ContextVar[Sequence[Span]] = ContextVar("kvbm_around", default=())


class Traces:
    """Any thread. Nothing here waits for who receives the spans: what does not fit into the queue is lost."""

    def __init__(self, provider: TracerProvider) -> None:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = provider
        self._tracer = provider.get_tracer("kvbm", __version__)
        self._propagator = TraceContextTextMapPropagator()

    def begin(self, request_id: str, headers: Mapping[str, str] | None) -> Span:
        """A request has come. ``headers``: the W3C trace context that its client, or the engine, gave it."""
        parent = self._propagator.extract(headers) if headers else None
        return self._tracer.start_span(
            "kvbm request", context=parent, attributes={"gen_ai.request.id": request_id}
        )

    def end(self, span: Span, account: Account | None) -> None:
        """The request has ended."""
        if account is not None and span.is_recording():
            span.set_attributes(_attributes(account))
        span.end()

    @contextmanager
    def around(self, spans: Sequence[Span | None]) -> Iterator[None]:
        """Transfers that are told of in here are of these requests."""
        token = _around.set([span for span in spans if span is not None])
        try:
            yield
        finally:
            _around.reset(token)

    def transfer(self, source: str, target: str, num_bytes: int, seconds: float) -> None:
        """Bytes have gone from one tier to another, and have just been told to be there."""
        from opentelemetry.trace import Link, set_span_in_context

        spans, now_ns = _around.get(), time.time_ns()
        parent = set_span_in_context(spans[0]) if len(spans) == 1 else None
        span = self._tracer.start_span(
            f"kvbm {source} to {target}",
            context=parent,
            attributes={"kvbm.tier.from": source, "kvbm.tier.to": target, "kvbm.bytes": num_bytes},
            links=[Link(span.get_span_context()) for span in spans] if len(spans) > 1 else None,
            start_time=now_ns - int(seconds * 1e9),
        )
        span.end(now_ns)

    def close(self) -> None:
        """Sends what waits, if it is taken soon."""
        thread = threading.Thread(target=self._provider.shutdown, name="kvbm-traces-end", daemon=True)
        thread.start()
        thread.join(CLOSE_TIMEOUT_S)


def _attributes(account: Account) -> dict[str, str | int]:
    found: dict[str, str | int] = {
        "kvbm.prompt_tokens": account.prompt_tokens,
        "kvbm.hit_tokens.device": account.device_tokens,
        "kvbm.hit_tokens.host": account.host_tokens,
        "kvbm.hit_tokens.disk": account.disk_tokens,
        "kvbm.hit_tokens.remote": account.remote_tokens,
        "kvbm.missed_tokens": account.missed_tokens,
    }
    if account.reason is not None:
        found |= {"kvbm.miss.reason": account.reason.value, "kvbm.miss.text": account.text}
    return found


def is_asked_for(traces: str, environment: Mapping[str, str]) -> bool:
    """``traces``: on, off or auto, which means: as the OTEL_* variables say."""
    if traces != "auto":
        return traces == "on"
    is_off = environment.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"
    exporter = environment.get("OTEL_TRACES_EXPORTER", "otlp").strip().lower()
    return any(environment.get(name) for name in _ENDPOINTS) and not is_off and exporter in {"otlp", ""}


def open_traces(traces: str, about: Mapping[str, str]) -> Traces | None:
    """None if nobody asks for spans. ``about``: attributes of all of them. ConfigError, one line, if spans
    are set to be on and cannot be had.
    """
    if not is_asked_for(traces, os.environ):
        return None
    try:
        exporter = _exporter(os.environ)
    except (ImportError, ValueError) as error:
        why = _INSTALL if isinstance(error, ImportError) else f"cannot send spans: {error}"
        problem = ConfigError(_SETTING, traces, why)
        if traces == "on":
            raise problem from None
        log.warning("%s; no spans are sent", problem)
        return None
    return traces_to(exporter, about)


def traces_to(exporter: SpanExporter, about: Mapping[str, str]) -> Traces:
    """Spans go to ``exporter``, in batches, from a thread."""
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    given: dict[str, Any] = {"service.name": "kvbm", **about}
    if os.environ.get("OTEL_SERVICE_NAME"):  # the library prefers what is given here
        del given["service.name"]
    provider = TracerProvider(resource=Resource.create(given), shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return Traces(provider)


def _exporter(environment: Mapping[str, str]) -> SpanExporter:
    protocols = (environment.get(name, "").strip() for name in _PROTOCOLS)
    protocol = next(filter(None, protocols), "http/protobuf")
    if protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as ByGrpc

        return ByGrpc()
    if protocol != "http/protobuf":
        raise ValueError(f"{_PROTOCOLS[0]}={protocol}: write http/protobuf or grpc")
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as ByHttp

    return ByHttp()
