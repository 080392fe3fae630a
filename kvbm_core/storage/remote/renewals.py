"""Which objects have been read and are to be renewed in the store, so that eviction takes others first."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable

from kvbm_core.clock import Clock

RENEW_EVERY_S = 3600.0
"""A hit renews an object at most so often."""
MAX_KNOWN = 16_384
MAX_TOGETHER = 64


class Renewals:
    """Bounded: an object that it forgets may be renewed too often or too late. Any thread."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._renewed_s: OrderedDict[str, float] = OrderedDict()
        self._due: OrderedDict[str, None] = OrderedDict()

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

    def renewed(self, names: Iterable[str]) -> None:
        """These objects were written or renewed just now."""
        now_s = self._clock.now_s()
        with self._lock:
            for name in names:
                self._due.pop(name, None)
                self._renewed_s[name] = now_s
                self._renewed_s.move_to_end(name)
            while len(self._renewed_s) > MAX_KNOWN:
                self._renewed_s.popitem(last=False)

    def take_due(self) -> list[str]:
        """Some names that are due, at most MAX_TOGETHER. The caller renews them; they are given out once."""
        with self._lock:
            count = min(MAX_TOGETHER, len(self._due))
            return [self._due.popitem(last=False)[0] for _ in range(count)]
