"""Renews in the store what has been read, so that eviction takes others first."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from contextlib import suppress

from kvbm_core.clock import Clock
from kvbm_core.errors import Outcome
from kvbm_core.observe.log import RateLimitedLogger
from kvbm_core.storage.remote.engine import ObjectEngine

RENEW_EVERY_S = 3600.0
"""A hit renews an object at most so often."""
PAUSE_S = 5.0
"""From a first use to the renewal of all that was used by then."""
MAX_KNOWN = 16_384
MAX_TOGETHER = 64
DEADLINE_S = 10.0
"""Of one call that renews; there is one at a time."""
CLOSE_S = 2.0

limited_log = RateLimitedLogger()


class Renewals:
    """Of one engine, in a thread of its own, which is there while something is due: nobody who reads waits
    for it, and an engine that only reads renews too. Bounded: an object that it forgets may be renewed too
    often or too late. Any thread.
    """

    def __init__(self, engine: ObjectEngine, clock: Clock) -> None:
        self._engine = engine
        self._clock = clock
        self._lock = threading.Lock()
        self._renewed_s: OrderedDict[str, float] = OrderedDict()
        self._due: OrderedDict[str, None] = OrderedDict()
        self._timer: threading.Timer | None = None
        self._is_closed = False

    def used(self, names: Iterable[str]) -> None:
        """These objects were read."""
        now_s = self._clock.now_s()
        with self._lock:
            for name in names:
                renewed_s = self._renewed_s.get(name)
                if renewed_s is None or now_s - renewed_s > RENEW_EVERY_S:
                    self._due[name] = None
            while len(self._due) > MAX_KNOWN:
                self._due.popitem(last=False)
            if self._due and self._timer is None and not self._is_closed:
                timer = threading.Timer(PAUSE_S, self._work)
                timer.name, timer.daemon = "kvbm-renew", True
                with suppress(RuntimeError):  # no thread to be had now: at the next use
                    timer.start()
                    self._timer = timer

    def written(self, names: Iterable[str]) -> None:
        """These objects were written just now."""
        with self._lock:
            self._note(names)

    def close(self) -> None:
        """What is due is not renewed any more. To be called after the engine's ``close``; idempotent."""
        with self._lock:
            self._is_closed = True
            timer = self._timer
        if timer is not None:
            timer.cancel()
            timer.join(CLOSE_S)

    # ---------------------------------------------------------------- inside

    def _note(self, names: Iterable[str]) -> None:
        now_s = self._clock.now_s()
        for name in names:
            self._due.pop(name, None)
            self._renewed_s[name] = now_s
            self._renewed_s.move_to_end(name)
        while len(self._renewed_s) > MAX_KNOWN:
            self._renewed_s.popitem(last=False)

    def _work(self) -> None:
        while names := self._take():
            self._renew(names)

    def _take(self) -> list[str]:
        """Some names that are due. They count as renewed from now on, so that no use makes them due again."""
        with self._lock:
            if self._is_closed or not self._due:
                self._timer = None
                return []
            names = list(self._due)[:MAX_TOGETHER]
            self._note(names)
            return names

    def _renew(self, names: Sequence[str]) -> None:
        """A store that renews none of them is left alone until something is read again."""
        try:
            outcomes = self._engine.renew(names, deadline_s=DEADLINE_S)
        except Exception as error:  # a bug of the engine must not end renewals for good
            limited_log.warning("renew", "kvbm: objects cannot be renewed: %s", error, exc_info=error)
            outcomes = [Outcome.IO_ERROR] * len(names)
        with self._lock:
            for name, outcome in zip(names, outcomes, strict=True):
                if outcome is not Outcome.OK:
                    self._renewed_s.pop(name, None)
            if not {Outcome.OK, Outcome.MISS} & set(outcomes):
                self._due.clear()
