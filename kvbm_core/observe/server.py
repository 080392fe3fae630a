"""The page for Prometheus: GET /metrics, /live, /ready and /targets on one port, from daemon threads."""

from __future__ import annotations

import contextlib
import socket
import socketserver
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler

from prometheus_client.exposition import ThreadingWSGIServer

from kvbm_core.observe.log import get_logger
from kvbm_core.observe.metrics import Metrics
from kvbm_core.observe.readiness import Readiness, always_ready

# Never OpenMetrics, which wants "_total" after the names of all counters; Prometheus reads both.
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
MAX_CONNECTIONS = 32
MAX_CONNECTION_S = 10.0
_JOIN_TIMEOUT_S = 5.0
_POLL_S = 0.1
_PLAIN = "text/plain; charset=utf-8"
_JSON = "application/json"

# As in PEP 3333; wsgiref has types for them since Python 3.11.
Environment = dict[str, Any]
Application = Callable[[Environment, Callable[..., Any]], Iterable[bytes]]


class MetricsServer:
    """
    Serves ``metrics`` from ``start`` until ``close``. One owner thread calls both.

    ``port`` 0 takes any free port (see ``bound_port``). If the port cannot be had, there is one warning and
    no page; the engine goes on. ``readiness`` is called from any thread, for each GET of /ready: it must not
    wait. ``targets``: what /targets answers to a question whose Host is this.
    """

    def __init__(
        self,
        port: int,
        metrics: Metrics,
        host: str = "0.0.0.0",
        readiness: Callable[[], Readiness] = always_ready,
        targets: Callable[[str], str] = lambda host: "[]",
    ) -> None:
        self._host = host
        self._targets = targets
        self._readiness = readiness
        self._port = port
        self._metrics = metrics
        self._server: BoundedServer | None = None
        self._thread: threading.Thread | None = None
        self.warning: str | None = None
        """Why the last ``start`` failed, with variable, value and remedy."""

    def start(self) -> bool:
        """True once the page answers, or if it does already; False, after one warning, if it cannot."""
        if self._server is not None:
            return True
        try:
            self._server = BoundedServer(
                self._host,
                self._port,
                _application(self._metrics, self._readiness, self._targets),
                "kvbm-metrics-request",
            )
            thread = threading.Thread(
                target=self._server.serve_forever, args=(_POLL_S,), name="kvbm-metrics", daemon=True
            )
            thread.start()
        except (OSError, OverflowError, UnicodeError, RuntimeError) as error:
            self._give_up(error)
            return False
        self._thread, self.warning = thread, None
        return True

    def _give_up(self, error: Exception) -> None:
        if self._server is not None:  # bound, but no thread could be started
            self._server.server_close()
        self._server = self._thread = None
        self.warning = (
            f"kvbm: DYN_KVBM_METRICS_PORT={self._port}: cannot serve metrics on {self._host} ({error}); "
            "the engine goes on without: set it to a free port, or KVBM_METRICS_HOST to an own address"
        )
        get_logger("metrics").warning(self.warning)

    @property
    def bound_port(self) -> int | None:
        """The port that is served, None if none is."""
        return self._server.server_port if self._server is not None else None

    def close(self) -> None:
        """Stops serving: connections, socket and threads are gone on return. May be called again."""
        if self._server is None or self._thread is None:
            return
        self._server.shutdown()
        self._thread.join(_JOIN_TIMEOUT_S)
        self._server.server_close()
        self._server = self._thread = None


def _application(
    metrics: Metrics, readiness: Callable[[], Readiness], targets: Callable[[str], str]
) -> Application:
    def answer(path: str, host: str) -> tuple[str, str, str]:
        if path == "/metrics":
            return "200 OK", CONTENT_TYPE, metrics.exposition()
        if path == "/live":
            return "200 OK", _PLAIN, "ok\n"
        if path in {"/ready", "/health"}:
            now = readiness()
            if now.is_ready:
                return "200 OK", _PLAIN, "ok\n"
            return "503 Service Unavailable", _PLAIN, f"not ready: {now.reason}\n"
        if path == "/targets":
            return "200 OK", _JSON, targets(host)
        return "404 Not Found", _PLAIN, "try /metrics, /live, /ready or /targets\n"

    def application(environ: Environment, start_response: Callable[..., Any]) -> Iterable[bytes]:
        if environ["REQUEST_METHOD"] not in {"GET", "HEAD"}:
            status, content_type, text = "405 Method Not Allowed", _PLAIN, "GET or HEAD\n"
        else:
            try:
                status, content_type, text = answer(environ["PATH_INFO"], environ.get("HTTP_HOST", ""))
            except Exception:
                get_logger("metrics").exception("kvbm: %s cannot be answered", environ["PATH_INFO"])
                status, content_type, text = "500 Internal Server Error", _PLAIN, "see the engine's log\n"
        body = text.encode()
        start_response(status, [("Content-Type", content_type), ("Content-Length", str(len(body)))])
        return [] if environ["REQUEST_METHOD"] == "HEAD" else [body]

    return application


class BoundedServer(ThreadingWSGIServer):
    """prometheus_client's, with an end to every connection: the library's own holds a thread for each one,
    however long it says nothing.

    One connection more than MAX_CONNECTIONS ends the oldest, and none lasts longer than MAX_CONNECTION_S: a
    scrape takes milliseconds, and neither idle nor slow clients keep it out. One thread serves; it alone
    knows the connections.
    """

    allow_reuse_address = True
    request_queue_size = 128

    def __init__(self, host: str, port: int, application: Application, thread_name: str) -> None:
        self._thread_name = thread_name
        self._connections: dict[threading.Thread, tuple[socket.socket, float]] = {}
        self._closing = threading.Lock()
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, port), _Handler)
        self.set_app(application)

    def server_bind(self) -> None:
        # HTTPServer's own would look up the host's name, which can take seconds.
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = "kvbm", self.server_address[1]
        self.setup_environ()

    def process_request(self, request: socket.socket, client_address: object) -> None:  # type: ignore[override]
        self._forget_ended()
        while len(self._connections) >= MAX_CONNECTIONS:
            self._end(next(iter(self._connections)))
        thread = threading.Thread(
            target=self.process_request_thread,
            args=(request, client_address),
            name=self._thread_name,
            daemon=True,
        )
        thread.start()
        self._connections[thread] = (request, time.monotonic())

    def service_actions(self) -> None:
        self._forget_ended()
        too_old_s = time.monotonic() - MAX_CONNECTION_S
        for thread in [thread for thread, (_, since_s) in self._connections.items() if since_s < too_old_s]:
            self._end(thread)

    def _forget_ended(self) -> None:
        for thread in [thread for thread in self._connections if not thread.is_alive()]:
            del self._connections[thread]

    def _end(self, thread: threading.Thread) -> None:
        request, _ = self._connections.pop(thread)
        with self._closing, contextlib.suppress(OSError):  # closed by its thread already
            request.shutdown(socket.SHUT_RDWR)
        thread.join(_JOIN_TIMEOUT_S)

    def shutdown_request(self, request: socket.socket) -> None:  # type: ignore[override]
        with self._closing:  # or ``_end`` might shut another socket, which has got this one's number
            super().shutdown_request(request)

    def handle_error(self, request: object, client_address: object) -> None:
        # Mostly clients that went away; never worth a traceback on the engine's stderr.
        get_logger("metrics").debug("kvbm: a request for metrics failed", exc_info=True)

    def server_close(self) -> None:
        super().server_close()
        for thread in list(self._connections):
            self._end(thread)


class _Handler(WSGIRequestHandler):
    """Answers one request and closes the connection (HTTP/1.0)."""

    server_version = "kvbm"
    sys_version = ""

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: a scrape every few seconds is not worth a line."""
