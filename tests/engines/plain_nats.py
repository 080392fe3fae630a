"""Who listens where a NATS server with TLS should be: speaks NATS without TLS, and keeps what it hears."""

from __future__ import annotations

import json
import socket
import threading
from contextlib import suppress

from tests.engines.ports import HOST


class PlainNats:
    """A context manager. ``others``: addresses that it says its cluster has."""

    def __init__(self, port: int = 0, others: tuple[str, ...] = ()) -> None:
        self._listening = socket.create_server((HOST, port))
        self.port: int = self._listening.getsockname()[1]
        self.heard = bytearray()
        self.num_ended = 0
        about = {"server_id": "x", "version": "2.10.0", "proto": 1, "headers": True, "max_payload": 1 << 20}
        about |= {"auth_required": True, "nonce": "n", "connect_urls": list(others)}
        self._info = f"INFO {json.dumps(about)}\r\n".encode()
        self._open: list[socket.socket] = []
        self._thread = threading.Thread(target=self._accept)
        self._threads = [self._thread]
        self._thread.start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listening.accept()
                self._open.append(client)
                self._threads.append(threading.Thread(target=self._listen, args=(client,)))
                self._threads[-1].start()

    def _listen(self, client: socket.socket) -> None:
        with suppress(OSError):
            client.sendall(self._info)
            while part := client.recv(65536):
                self.heard += part
                if b"PING" in part:
                    client.sendall(b"PONG\r\n")
        self.num_ended += 1

    def __enter__(self) -> PlainNats:
        return self

    def __exit__(self, *exc_info: object) -> None:
        for each in (self._listening, *self._open):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        for each in (self._listening, *self._open):
            each.close()
