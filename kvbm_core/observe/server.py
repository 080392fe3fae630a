"""The metrics endpoint: GET /metrics and /health on one port, from daemon threads."""

from __future__ import annotations

import contextlib
import socket
import socketserver
import threading
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Final

from kvbm_core.observe.exposition import CONTENT_TYPE
from kvbm_core.observe.log import get_logger
from kvbm_core.observe.metrics import Metrics
from kvbm_core.observe.readiness import Readiness, always_ready

_MAX_CONNECTIONS: Final = 8
_SOCKET_TIMEOUT_S: Final = 5.0
_JOIN_TIMEOUT_S: Final = 5.0
_POLL_S: Final = 0.1
_PLAIN: Final = "text/plain; charset=utf-8"


class MetricsServer:
    """
    Serves ``metrics`` from ``start`` until ``close``. One owner thread calls both.

    ``port`` 0 takes any free port (see ``bound_port``). If the port cannot be had, there is one warning and
    no endpoint; the engine goes on. ``readiness`` is called from any thread, for each GET of /health: it
    must not wait.
    """

    def __init__(
        self,
        port: int,
        metrics: Metrics,
        host: str = "0.0.0.0",
        readiness: Callable[[], Readiness] = always_ready,
    ) -> None:
        self._host = host
        self._readiness = readiness
        self._port = port
        self._metrics = metrics
        self._server: _Server | None = None
        self._thread: threading.Thread | None = None
        self.warning: str | None = None
        """Why the last ``start`` failed, with variable, value and remedy."""

    def start(self) -> bool:
        """True once the endpoint answers, or if it does already; False, after one warning, if it cannot."""
        if self._server is not None:
            return True
        try:
            self._server = _Server(self._host, self._port, self._metrics, self._readiness)
            thread = threading.Thread(target=self._server.serve_forever, args=(_POLL_S,), daemon=True)
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
        return self._server.server_address[1] if self._server is not None else None

    def close(self) -> None:
        """Stops serving: connections, socket and threads are gone on return. May be called again."""
        if self._server is None or self._thread is None:
            return
        self._server.shutdown()
        self._thread.join(_JOIN_TIMEOUT_S)
        self._server.server_close()
        self._server = self._thread = None


class _Server(HTTPServer):
    """An HTTPServer with few connections at once, each on a daemon thread, all ended by server_close."""

    allow_reuse_address = True
    request_queue_size = 2 * _MAX_CONNECTIONS

    def __init__(self, host: str, port: int, metrics: Metrics, readiness: Callable[[], Readiness]) -> None:
        self.metrics = metrics
        self.readiness = readiness
        self._lock = threading.Lock()
        self._connections: dict[threading.Thread, socket.socket] = {}
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, port), _Handler)

    def server_bind(self) -> None:
        # HTTPServer's own would look up the host's name, which can take seconds.
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = "kvbm", self.server_address[1]

    def process_request(self, request: socket.socket, client_address: object) -> None:  # type: ignore[override]
        thread = threading.Thread(target=self._serve, args=(request, client_address), daemon=True)
        with self._lock:
            if len(self._connections) >= _MAX_CONNECTIONS:
                self.shutdown_request(request)
                return
            thread.start()
            self._connections[thread] = request

    def _serve(self, request: socket.socket, client_address: object) -> None:
        try:
            self.finish_request(request, client_address)
        except Exception:
            self.handle_error(request, client_address)
        self.shutdown_request(request)
        with self._lock:  # held while the thread was entered, so it is in
            del self._connections[threading.current_thread()]

    def handle_error(self, request: object, client_address: object) -> None:
        # Mostly clients that went away; never worth a traceback on the engine's stderr.
        get_logger("metrics").debug("kvbm: a request for metrics failed", exc_info=True)

    def server_close(self) -> None:
        super().server_close()
        with self._lock:
            open_connections = dict(self._connections)
        for connection in open_connections.values():
            with contextlib.suppress(OSError):  # already closed by its thread
                connection.shutdown(socket.SHUT_RDWR)
        for thread in open_connections:
            thread.join(_JOIN_TIMEOUT_S)


class _Handler(BaseHTTPRequestHandler):
    """Answers one GET or HEAD and closes the connection (HTTP/1.0)."""

    server: _Server
    server_version = "kvbm"
    sys_version = ""
    timeout = _SOCKET_TIMEOUT_S

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def _answer(self, *, with_body: bool) -> None:
        path = self.path.partition("?")[0]
        if path == "/metrics":
            status, content_type, text = HTTPStatus.OK, CONTENT_TYPE, self.server.metrics.exposition()
        elif path == "/health":
            status, content_type, text = self._health()
        else:
            status, content_type, text = HTTPStatus.NOT_FOUND, _PLAIN, "try /metrics or /health\n"
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if with_body:
            self.wfile.write(body)

    def _health(self) -> tuple[HTTPStatus, str, str]:
        now = self.server.readiness()
        if now.is_ready:
            return HTTPStatus.OK, _PLAIN, "ok\n"
        return HTTPStatus.SERVICE_UNAVAILABLE, _PLAIN, f"not ready: {now.reason}\n"

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: a scrape every few seconds is not worth a line."""
