"""Late I/O: memory that nobody waits for any more, and that somebody may still read or write.

The kernel, a GPU, NIXL or a client library cannot be stopped once it has an address. Whoever gives such a
request up enters its memory in ``LATE``, before he says so to anybody, and takes it out when the request has
really ended. Whoever wants to use the memory again asks ``LATE`` first.
"""

from __future__ import annotations

import ctypes
import logging
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable
from itertools import count
from typing import NamedTuple, Protocol

from kvbm_core.storage.base import Memory, parts_of

log = logging.getLogger("kvbm")

Span = tuple[int, int]
"""The addresses from the first on up to, and without, the second, which is larger."""


class Tell(Protocol):
    """Hears how something ended; twice if it ``is_late`` the first time."""

    def __call__(self, *, is_late: bool) -> None:
        """Called from any thread."""


class _Waiter(NamedTuple):
    number: int
    spans: list[Span]
    on_free: Callable[[], None]


class LateMemory:
    """A table of requests that were given up. Safe to call from any thread, and amid another call of the same
    thread, as a finalizer may: nothing is locked, and each step that changes a dict is whole by itself.
    """

    def __init__(self) -> None:
        self._numbers = count(1)
        self._requests: dict[int, tuple[tuple[Span, ...], object]] = {}
        self._waiters: dict[int, _Waiter] = {}

    def add(self, spans: Iterable[Span], keep: object = None) -> int:
        """A request that touches ``spans`` was given up; its token, for ``end``. Until then ``keep`` is
        referred to from here, so that what it refers to is neither freed nor unmapped.
        """
        token = next(self._numbers)
        self._requests[token] = tuple(spans), keep
        return token

    def end(self, token: int) -> None:
        """The request touches nothing any more. Calls those who waited for that, in this thread; so no lock
        may be held that they want. One that fails keeps no other from being called.
        """
        del self._requests[token]
        waiters = list(self._waiters.values())
        if not waiters:
            return
        touched = self._touched()  # not before: who asks after this sees himself what is late
        ready = [one for one in waiters if not _meet(one.spans, touched)]
        for waiter in ready:
            if self._waiters.pop(waiter.number, None) is not None:  # else another end has called it
                try:
                    waiter.on_free()
                except Exception:  # a bug of the listener must not cost others their memory
                    log.exception("kvbm: listener failed on memory that is free")

    def holds(self, spans: Iterable[Span]) -> bool:
        """Whether a request that was given up may still touch any of it."""
        return bool(self._requests) and _meet(spans, self._touched())

    def when_free(self, spans: Iterable[Span], on_free: Callable[[], None]) -> bool:
        """Calls ``on_free`` once, when no request that was given up touches any of it. False if that is so
        already: then it is not called.
        """
        waiter = _Waiter(next(self._numbers), list(spans), on_free)
        self._waiters[waiter.number] = waiter  # first: whatever ends from now on finds it
        return self.holds(waiter.spans) or self._waiters.pop(waiter.number, None) is None

    def tell_when_free(self, spans: Iterable[Span], tell: Tell) -> None:
        """Calls ``tell(is_late=False)`` when no request that was given up touches any of it; if that is not
        now, ``tell(is_late=True)`` before.
        """
        if self.holds(spans := list(spans)):
            tell(is_late=True)
        if not self.when_free(spans, lambda: tell(is_late=False)):
            tell(is_late=False)

    def _touched(self) -> tuple[list[int], list[int]]:
        """Where the spans of all requests begin, and where they end; both in order."""
        spans = [span for own, _ in list(self._requests.values()) for span in own]
        return sorted(start for start, _ in spans), sorted(end for _, end in spans)


def _meet(spans: Iterable[Span], touched: tuple[list[int], list[int]]) -> bool:
    """Whether a request touches one of ``spans``: more of the requests' begin before its end than end before
    its start.
    """
    starts, ends = touched
    return any(bisect_left(starts, end) > bisect_right(ends, start) for start, end in spans)


LATE = LateMemory()
"""The one of this process: what it keeps is kept whoever else lets go of it."""


def ranges_of(memory: Memory) -> list[Span]:
    """Where its pieces are; memory that cannot be written to is nowhere."""
    spans = []
    for part in parts_of(memory):
        if part.nbytes and not part.readonly:
            start = ctypes.addressof(ctypes.c_char.from_buffer(part))
            spans.append((start, start + part.nbytes))
    return spans
