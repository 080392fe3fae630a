"""A server that hangs: it takes connections and what is sent, as far as the kernel does, and answers not."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager

from tests.engines.ports import HOST


class SilentServer:
    """As a store of S3's; ``environment``: of its clients."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self.environment = {
            "AWS_ENDPOINT_URL_S3": f"http://{HOST}:{listener.getsockname()[1]}",
            "AWS_ACCESS_KEY_ID": "nobody",
            "AWS_SECRET_ACCESS_KEY": "nothing",
            "AWS_REGION": "us-east-1",
        }

    def connections(self) -> int:
        """How many have been made since the last call. It hangs up on them."""
        count = 0
        while True:
            try:
                self._listener.accept()[0].close()
            except BlockingIOError:
                return count
            count += 1


@contextmanager
def silent_server() -> Iterator[SilentServer]:
    """Closed afterwards."""
    with socket.create_server((HOST, 0), backlog=1024) as listener:
        listener.setblocking(False)
        yield SilentServer(listener)
