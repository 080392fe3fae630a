"""Late I/O: memory that nobody waits for any more, and that somebody may still read or write.

The kernel, a GPU, NIXL or a client library cannot be stopped once it has an address. Whoever gives such a
request up enters its addresses here and takes them out when it has really ended. Whoever wants to use the
memory again asks here first.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection


class LateMemory:
    """Addresses are those where a block, or a part of one, begins. Safe to call from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last_token = 0
        self._requests: dict[int, frozenset[int]] = {}
        self._waiters: list[tuple[set[int], Callable[[], None]]] = []

    def add(self, addresses: Collection[int]) -> int:
        """A request that touches ``addresses`` was given up; its token, for ``end``."""
        with self._lock:
            self._last_token += 1
            self._requests[self._last_token] = frozenset(addresses)
            return self._last_token

    def end(self, token: int) -> None:
        """The request touches nothing any more. Calls those who wait for that, in this thread."""
        ready: list[Callable[[], None]] = []
        with self._lock:
            del self._requests[token]
            waiters, self._waiters = self._waiters, []
            for tokens, on_free in waiters:
                tokens.discard(token)
                if tokens:
                    self._waiters.append((tokens, on_free))
                else:
                    ready.append(on_free)
        for on_free in ready:
            on_free()

    def holds(self, address: int) -> bool:
        """Whether a request that was given up may still touch this address."""
        with self._lock:
            return any(address in addresses for addresses in self._requests.values())

    def when_free(self, addresses: Collection[int], on_free: Callable[[], None]) -> bool:
        """Calls ``on_free`` once, when no request that was given up before now touches ``addresses``. False
        if that is so already: then it is not called.
        """
        with self._lock:
            wanted = set(addresses)
            tokens = {token for token, own in self._requests.items() if not wanted.isdisjoint(own)}
            if tokens:
                self._waiters.append((tokens, on_free))
            return bool(tokens)
