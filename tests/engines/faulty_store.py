"""An object store on loopback that keeps objects in memory and misbehaves as it is told; it speaks S3."""

from __future__ import annotations

import socket
import ssl
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from enum import Enum, auto
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from tests.engines.ports import HOST

TRICKLE_S = 0.05
"""Between two bytes."""
ENDLESS_CHUNK = bytes(64 << 10)


class Fault(Enum):
    """What a server may do. ``EVERY_SECOND``: 503 to each second request of all."""

    NONE = auto()
    UNAUTHORIZED = auto()
    FORBIDDEN = auto()
    BAD_KEY = auto()
    BAD_SIGNATURE = auto()
    EXPIRED = auto()
    SKEWED = auto()
    NO_BUCKET = auto()
    NOT_FOUND = auto()
    EXISTS = auto()
    CONFLICT = auto()
    ERROR = auto()
    SLOW_DOWN = auto()
    EVERY_SECOND = auto()
    FULL = auto()
    HANG = auto()
    HANG_IN_HEAD = auto()
    HANG_IN_BODY = auto()
    TRICKLE = auto()
    CLOSE = auto()
    CLOSE_IN_BODY = auto()
    SAYS_LONGER = auto()
    SAYS_SHORTER = auto()
    SAYS_NOTHING = auto()
    ENDLESS = auto()
    LARGER = auto()
    OTHER_BODY = auto()
    REDIRECT = auto()
    MOVED = auto()
    NOT_MODIFIED = auto()
    NONSENSE = auto()


ANSWERS = {
    Fault.UNAUTHORIZED: (401, "Unauthorized"),
    Fault.FORBIDDEN: (403, "AccessDenied"),
    Fault.BAD_KEY: (403, "InvalidAccessKeyId"),
    Fault.BAD_SIGNATURE: (403, "SignatureDoesNotMatch"),
    Fault.EXPIRED: (400, "ExpiredToken"),
    Fault.SKEWED: (403, "RequestTimeTooSkewed"),
    Fault.NO_BUCKET: (404, "NoSuchBucket"),
    Fault.NOT_FOUND: (404, "NoSuchKey"),
    Fault.EXISTS: (412, "PreconditionFailed"),
    Fault.CONFLICT: (409, "ConditionalRequestConflict"),
    Fault.ERROR: (500, "InternalError"),
    Fault.SLOW_DOWN: (503, "SlowDown"),
    Fault.FULL: (507, "InsufficientStorage"),
    Fault.NOT_MODIFIED: (304, "NotModified"),
}
"""Status and S3's word for it."""


class FaultyStore:
    """``fault`` may be changed at any time. Any thread."""

    def __init__(self, context: ssl.SSLContext | None = None, port: int = 0) -> None:
        self.fault = Fault.NONE
        self.only: str | None = None
        """The method that is done badly; None: all of them."""
        self.other_url = ""
        """Where a redirect leads."""
        self.objects: dict[str, bytes] = {}
        self.requests: Counter[str] = Counter()
        """Requests by method."""
        self.headers: list[dict[str, str]] = []
        """Of each request, names in small letters."""
        self.paths: list[str] = []
        """Of each request, with what was asked."""
        self.bytes_sent = 0
        self.is_over = threading.Event()
        """Ends what hangs: what HANG_IN_BODY kept back is sent then."""
        self._lock = threading.Lock()
        self._number = 0
        self._server = _Server(self, context, port)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        """Where it listens."""
        scheme = "https" if self._server.context else "http"
        return f"{scheme}://{HOST}:{self._server.server_address[1]}"

    def take(self, method: str, path: str, headers: dict[str, str]) -> Fault:
        """Notes a request; what is to be done with it."""
        with self._lock:
            self.requests[method] += 1
            self.headers.append(headers)
            self.paths.append(path)
            fault = self.fault if self.only in (None, method) else Fault.NONE
            if fault is not Fault.EVERY_SECOND:
                return fault
            self._number += 1
            return Fault.SLOW_DOWN if self._number % 2 else Fault.NONE

    def close(self) -> None:
        """Ends whatever hangs."""
        self.is_over.set()
        self._server.shutdown()
        self._server.server_close()
        self._server.close_connections()
        self._thread.join()


@contextmanager
def faulty_store(
    certificate: Path | None = None, key: Path | None = None, port: int = 0
) -> Iterator[FaultyStore]:
    """A server, closed afterwards; with TLS if it has a certificate."""
    context = None
    if certificate is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate, key)
    store = FaultyStore(context, port)
    try:
        yield store
    finally:
        store.close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def __init__(self, store: FaultyStore, context: ssl.SSLContext | None, port: int) -> None:
        self.store = store
        self.context = context
        self._lock = threading.Lock()
        self._connections: set[socket.socket] = set()
        super().__init__((HOST, port), _Handler)

    def finish_request(self, request: Any, client_address: Any) -> None:
        """In the connection's own thread: a handshake may hang."""
        connection: socket.socket = request
        try:
            if self.context is not None:
                connection = self.context.wrap_socket(request, server_side=True)
            with self._lock:
                self._connections.add(connection)
            _Handler(connection, client_address, self)
        except (OSError, ValueError):
            pass  # the client has gone
        finally:
            with self._lock:
                self._connections.discard(connection)
            connection.close()

    def close_connections(self) -> None:
        """As a server does that ends."""
        with self._lock:
            for connection in self._connections:
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: object, client_address: object) -> None:
        """Clients go as they like."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: _Server

    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""

    def do_PUT(self) -> None:
        self._handle(self._put)

    def do_GET(self) -> None:
        self._handle(self._get)

    def do_HEAD(self) -> None:
        self._handle(self._get)

    def do_DELETE(self) -> None:
        self._handle(self._delete)

    # ---------------------------------------------------------------- what a good one does

    @property
    def _store(self) -> FaultyStore:
        return self.server.store

    @property
    def _name(self) -> str:
        return unquote(urlsplit(self.path).path)

    def _put(self, fault: Fault, body: bytes) -> None:
        source = self.headers.get("x-amz-copy-source")
        if source is not None:
            found = self._store.objects.get("/" + unquote(source).lstrip("/"))
            if found is None:
                self._refuse(404, "NoSuchKey")
                return
            body = found
        self._store.objects[self._name] = body
        copied = b"<CopyObjectResult><ETag>x</ETag></CopyObjectResult>" if source is not None else b""
        self._answer(200, copied, fault)

    def _get(self, fault: Fault, body: bytes) -> None:
        content = self._store.objects.get(self._name)
        if content is None:
            self._refuse(404, "NoSuchKey")
            return
        given = self.headers.get("range")
        if given is None:
            self._answer(200, content, fault)
            return
        first, _, last = given.removeprefix("bytes=").partition("-")
        start, end = int(first), min(int(last or len(content)) + 1, len(content))
        if start >= len(content):
            self._refuse(416, "InvalidRange")
            return
        self._answer(206, content[start:end], fault, f"bytes {start}-{end - 1}/{len(content)}")

    def _delete(self, fault: Fault, body: bytes) -> None:
        self._store.objects.pop(self._name, None)
        self._answer(204, b"", fault)

    # ---------------------------------------------------------------- what a bad one does

    def _handle(self, act: Callable[[Fault, bytes], None]) -> None:
        headers = {name.lower(): value for name, value in self.headers.items()}
        fault = self._store.take(self.command, self.path, headers)
        try:
            if fault is Fault.HANG:
                self._store.is_over.wait()
                raise ConnectionAbortedError
            body = self.rfile.read(int(self.headers.get("content-length") or 0))
            if fault in ANSWERS:
                self._refuse(*ANSWERS[fault])
            elif not self._is_odd(fault):
                act(fault, body)
        except (OSError, ValueError):
            self.close_connection = True

    def _is_odd(self, fault: Fault) -> bool:
        """Whether it was answered in another way than with the object."""
        if fault is Fault.CLOSE:
            self.close_connection = True
        elif fault is Fault.HANG_IN_HEAD:
            self.wfile.write(b"HTTP/1.1 200 OK\r\nContent-")
            self._store.is_over.wait()
            self.close_connection = True
        elif fault is Fault.NONSENSE:
            self.wfile.write(b"220 mail.example ESMTP\r\n")
            self.close_connection = True
        elif fault in (Fault.REDIRECT, Fault.MOVED):
            self.send_response(307 if fault is Fault.REDIRECT else 301)
            if fault is Fault.REDIRECT:
                self.send_header("Location", self._store.other_url + self.path)
            else:
                self.send_header("x-amz-bucket-region", "eu-north-1")
            self.send_header("Content-Length", "0")
            self.end_headers()
        else:
            return False
        return True

    def _refuse(self, status: int, code: str) -> None:
        text = (
            f'<?xml version="1.0"?><Error><Code>{code}</Code><AWSAccessKeyId>{self._key_id}</AWSAccessKeyId>'
        )
        body = f"{text}<Resource>{self._name}</Resource></Error>".encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/xml")
        self.send_header("Content-Length", "0" if status == 304 else str(len(body)))
        self.end_headers()
        if self.command != "HEAD" and status != 304:
            self.wfile.write(body)

    @property
    def _key_id(self) -> str:
        """As real ones repeat it."""
        return self.headers.get("authorization", "").partition("Credential=")[2].partition("/")[0]

    def _answer(self, status: int, content: bytes, fault: Fault, content_range: str = "") -> None:
        if fault is Fault.OTHER_BODY:
            content = bytes(len(content))
        if fault is Fault.LARGER:
            content += bytes(64 << 20)
        length = len(content) + {Fault.SAYS_LONGER: 10, Fault.SAYS_SHORTER: -10}.get(fault, 0)
        self.send_response(status)
        self.send_header("ETag", '"x"')
        self.send_header("Last-Modified", self.date_time_string())
        if content_range:
            self.send_header("Content-Range", content_range)
        if fault is Fault.ENDLESS:
            self.send_header("Transfer-Encoding", "chunked")
        elif fault is not Fault.SAYS_NOTHING and status != 204:
            self.send_header("Content-Length", str(max(0, length)))
        self.end_headers()
        if self.command != "HEAD":
            self._send(content, fault)

    def _send(self, content: bytes, fault: Fault) -> None:
        cut = {Fault.HANG_IN_BODY, Fault.CLOSE_IN_BODY}
        self._write(content[: len(content) // 2] if fault in cut else b"" if fault in STREAMS else content)
        if fault is Fault.HANG_IN_BODY:
            self._store.is_over.wait()
            self._write(content[len(content) // 2 :])
        while fault is Fault.ENDLESS and not self._store.is_over.is_set():
            self._write(b"%x\r\n%b\r\n" % (len(ENDLESS_CHUNK), ENDLESS_CHUNK))
        if fault is Fault.TRICKLE:
            for at in range(len(content)):
                self._write(content[at : at + 1])
                if self._store.is_over.wait(TRICKLE_S):
                    break
        self.close_connection |= fault in {*cut, *STREAMS, Fault.SAYS_LONGER, Fault.SAYS_NOTHING}

    def _write(self, content: bytes) -> None:
        for at in range(0, len(content), len(ENDLESS_CHUNK)):
            part = content[at : at + len(ENDLESS_CHUNK)]
            self.wfile.write(part)
            self._store.bytes_sent += len(part)


STREAMS = {Fault.ENDLESS, Fault.TRICKLE}
