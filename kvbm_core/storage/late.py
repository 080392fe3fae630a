"""Late I/O: memory that nobody waits for any more, and that somebody may still read or write.

The kernel, a GPU, NIXL or a client library cannot be stopped once it has an address. Whoever gives such a
request up enters its memory in ``LATE``, before he says so to anybody, and takes it out when the request has
really ended. Whoever wants to use the memory again asks ``LATE`` first.
"""

from __future__ import annotations

import ctypes
import os
import threading
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterable
from typing import Protocol

from kvbm_core.storage.base import Memory, parts_of

Span = tuple[int, int]
"""The addresses from the first on up to, and without, the second, which is larger."""


class Tell(Protocol):
    """Hears how something ended; twice if it ``is_late`` the first time."""

    def __call__(self, *, is_late: bool) -> None:
        """Called from any thread."""


class LateMemory:
    """A table of requests that were given up. Safe to call from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last_token = 0
        self._requests: dict[int, tuple[tuple[Span, ...], object]] = {}
        self._waiters: list[tuple[list[Span], Callable[[], None]]] = []
        self._starts: list[int] = []  # of all spans, in order; and their ends, in order
        self._ends: list[int] = []

    def add(self, spans: Iterable[Span], keep: object = None) -> int:
        """A request that touches ``spans`` was given up; its token, for ``end``. Until then ``keep`` is
        referred to from here, so that what it refers to is neither freed nor unmapped.
        """
        with self._lock:
            self._last_token += 1
            own, _ = self._requests[self._last_token] = tuple(spans), keep
            for start, end in own:
                insort(self._starts, start)
                insort(self._ends, end)
            return self._last_token

    def end(self, token: int) -> None:
        """The request touches nothing any more. Calls those who waited for that, in this thread; so no lock
        may be held that they want.
        """
        ready: list[Callable[[], None]] = []
        with self._lock:
            request = self._requests.pop(token)
            for start, end in request[0]:
                del self._starts[bisect_left(self._starts, start)]
                del self._ends[bisect_left(self._ends, end)]
            waiters, self._waiters = self._waiters, []
            for spans, on_free in waiters:
                if late := self._late_of(spans):
                    self._waiters.append((late, on_free))
                else:
                    ready.append(on_free)
        for on_free in ready:
            on_free()

    def holds(self, spans: Iterable[Span]) -> bool:
        """Whether a request that was given up may still touch any of it."""
        with self._lock:
            return bool(self._late_of(spans))

    def when_free(self, spans: Iterable[Span], on_free: Callable[[], None]) -> bool:
        """Calls ``on_free`` once, when no request that was given up touches any of it. False if that is so
        already: then it is not called.
        """
        with self._lock:
            if late := self._late_of(spans):
                self._waiters.append((late, on_free))
            return bool(late)

    def tell_when_free(self, spans: Iterable[Span], tell: Tell) -> None:
        """Calls ``tell(is_late=False)`` when no request that was given up touches any of it; if that is not
        now, ``tell(is_late=True)`` before.
        """
        if self.holds(spans := list(spans)):
            tell(is_late=True)
        if not self.when_free(spans, lambda: tell(is_late=False)):
            tell(is_late=False)

    def _late_of(self, spans: Iterable[Span]) -> list[Span]:
        """Those that some request touches: more of the requests' spans begin before the end of such a one
        than end before its start.
        """
        starts, ends = self._starts, self._ends
        return [span for span in spans if bisect_left(starts, span[1]) > bisect_right(ends, span[0])]


LATE = LateMemory()
"""The one of this process: what it keeps is kept whoever else lets go of it."""
_lock = LATE._lock  # no fork amid a call: the child would have a lock that nobody opens
os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release)


def ranges_of(memory: Memory) -> list[Span]:
    """Where its pieces are; memory that cannot be written to is nowhere."""
    spans = []
    for part in parts_of(memory):
        if part.nbytes and not part.readonly:
            start = ctypes.addressof(ctypes.c_char.from_buffer(part))
            spans.append((start, start + part.nbytes))
    return spans
