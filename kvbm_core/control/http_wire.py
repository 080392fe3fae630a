"""Orders over HTTP: for whoever has the token.

``POST /v1/orders`` with an Order as JSON is answered with an Answer. Not encrypted: on this machine alone,
unless the user says that the network is his own.
"""

from __future__ import annotations

import asyncio
import hmac
import io
import json
import logging
import threading
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from kvbm_core.config import KvbmSettings
from kvbm_core.config.addresses import is_loopback
from kvbm_core.control.budget import ORDERS_PER_S, Budget
from kvbm_core.control.listed import PATH
from kvbm_core.control.messages import MAX_ORDER_BYTES, Answer, Order, Result, decode, flaw_in
from kvbm_core.control.responder import Responder
from kvbm_core.errors import ConfigError
from kvbm_core.observe.labels import FailureKind
from kvbm_core.observe.log import RateLimitedLogger
from kvbm_core.observe.metrics import Metrics
from kvbm_core.observe.server import BoundedServer
from kvbm_core.storage.remote.secret import MAX_BYTES, read_private

log = logging.getLogger("kvbm")

TOKEN_FILE, BIND = "KVBM_CONTROL_TOKEN_FILE", "KVBM_CONTROL_HTTP"
MIN_TOKEN_BYTES = 24
MAX_HTTP_WAIT_S, EXTRA_WAIT_S = 7.0, 2.0
"""Together less than a connection may last."""
_REMEDY = "make one with: (umask 077; openssl rand -base64 32 > FILE)"
_STATUS = {
    Result.DONE: "200 OK",
    Result.PENDING: "202 Accepted",
    Result.REFUSED: "409 Conflict",
}


class HttpWire:
    """The engine's side. ConfigError, one line, without a token, or if there can be no port."""

    def __init__(self, settings: KvbmSettings, responder: Responder, metrics: Metrics) -> None:
        self._token = read_token(settings)
        self._settings = settings
        self._responder = responder
        self._metrics = metrics
        self._budget, self._strangers, self._turn = Budget(), Budget(), threading.Lock()
        self._log = RateLimitedLogger(log)
        self._loop: asyncio.AbstractEventLoop | None = None
        host, first_port = http_address(settings)
        if not is_loopback(host):
            log.warning(
                "kvbm: %s=%s is not encrypted: others may hear the token", BIND, settings.control_http
            )
        number = first_port + responder.about.rank
        try:
            self._server = BoundedServer(host, number, self._application, "kvbm-orders-request")
        except (OSError, OverflowError, UnicodeError) as error:
            raise ConfigError(BIND, f"{host}:{number}", f"cannot be had ({error}); set another") from None

    @property
    def token(self) -> bytes:
        """Of those whose orders are taken."""
        return self._token

    @property
    def host(self) -> str:
        """The address that it is bound to."""
        return http_address(self._settings)[0]

    @property
    def port(self) -> int:
        """Where it listens."""
        return self._server.server_port

    async def serve(self, closing: asyncio.Event) -> None:
        """Until ``closing``."""
        self._loop = asyncio.get_running_loop()
        thread = threading.Thread(target=self._server.serve_forever, args=(0.1,), name="kvbm-orders-http")
        thread.daemon = True
        thread.start()
        log.info("kvbm: orders are taken over HTTP at port %d, with the token of %s", self.port, TOKEN_FILE)
        await closing.wait()
        await asyncio.to_thread(self._server.shutdown)
        await asyncio.to_thread(thread.join)

    def close(self) -> None:
        """May be called twice."""
        self._server.server_close()

    # ---------------------------------------------------------------- one request, on a thread of its own

    def _application(self, environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        status, content = self._answer(environ)
        start(status, [("Content-Type", "application/json"), ("Content-Length", str(len(content)))])
        return [content]

    def _answer(self, environ: dict[str, Any]) -> tuple[str, bytes]:
        refused = self._refused_caller(environ.get("HTTP_AUTHORIZATION", "")) or _refused_request(environ)
        if refused is not None:
            return refused
        source: io.BufferedIOBase = environ["wsgi.input"]
        content = source.read(int(environ["CONTENT_LENGTH"]))
        order = decode(content, Order)
        if order is None:
            return "400 Bad Request", _line(f"this version does not know such an order: {flaw_in(content)}")
        return self._give(msgspec.structs.replace(order, wait_s=min(order.wait_s, MAX_HTTP_WAIT_S)))

    def _refused_caller(self, header: str) -> tuple[str, bytes] | None:
        """A flood of strangers keeps nobody out who has the token."""
        has_token = self._has_token(header)
        with self._turn:
            is_in_budget = (self._budget if has_token else self._strangers).take()
        if not is_in_budget:
            return "429 Too Many Requests", _line(f"more than {ORDERS_PER_S:g} orders a second")
        if has_token:
            return None
        self._metrics.failure(FailureKind.BAD_MESSAGE)
        self._log.warning("token", "kvbm: refused an order over HTTP: not the token of %s", TOKEN_FILE)
        return "401 Unauthorized", _line("write the header Authorization: Bearer TOKEN")

    def _has_token(self, header: str) -> bool:
        given = header.removeprefix("Bearer ").encode("latin-1", "replace")
        return header.startswith("Bearer ") and hmac.compare_digest(given, self._token)

    def _give(self, order: Order) -> tuple[str, bytes]:
        if self._loop is None:
            return "503 Service Unavailable", _line("it ends, or begins")
        future = asyncio.run_coroutine_threadsafe(self._responder.answer(order), self._loop)
        try:
            answer: Answer = future.result(order.wait_s + EXTRA_WAIT_S)
        except Exception:  # the end of the engine, most of all
            future.cancel()
            return "503 Service Unavailable", _line("no answer")
        return _STATUS[answer.result], msgspec.json.encode(answer) + b"\n"


def http_address(settings: KvbmSettings) -> tuple[str, int]:
    """Where rank 0 listens. ConfigError for an address that others reach, unless the user has said that the
    network is his own.
    """
    host, _, port = settings.control_http.rpartition(":")
    host = host.strip("[]")
    if not settings.fleet_insecure and not is_loopback(host):
        why = "others could hear the token, as HTTP is not encrypted; bind 127.0.0.1 behind a proxy "
        raise ConfigError(BIND, settings.control_http, f"{why}with TLS, or set KVBM_FLEET_INSECURE=1")
    return host, int(port)


def _refused_request(environ: dict[str, Any]) -> tuple[str, bytes] | None:
    """By what it says before its body."""
    length = environ.get("CONTENT_LENGTH") or ""
    if environ["PATH_INFO"] != PATH:
        return "404 Not Found", _line(f"orders go to POST {PATH}")
    if environ["REQUEST_METHOD"] != "POST":
        return "405 Method Not Allowed", _line("POST an order as JSON")
    if not length.isdecimal():
        return "411 Length Required", _line("say the length of the order")
    if len(length) > len(str(MAX_ORDER_BYTES)) or int(length) > MAX_ORDER_BYTES:
        return "413 Content Too Large", _line(f"an order has at most {MAX_ORDER_BYTES:,} bytes")
    return None


def _line(text: str) -> bytes:
    return json.dumps({"text": text}).encode() + b"\n"


def read_token(settings: KvbmSettings) -> bytes:
    """ConfigError, one line, for none, or one that others can read or guess."""
    path = settings.control_token_file
    if not path:
        raise ConfigError(TOKEN_FILE, "(unset)", f"nobody could give orders over HTTP; {_REMEDY}")
    token = read_private(TOKEN_FILE, path, _REMEDY, is_hidden=True)
    if not MIN_TOKEN_BYTES <= len(token) <= MAX_BYTES:
        size = f"holds {len(token)} bytes, not {MIN_TOKEN_BYTES} to {MAX_BYTES}"
        raise ConfigError(TOKEN_FILE, path, f"{size}; {_REMEDY}")
    return token
