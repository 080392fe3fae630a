"""The only source of time, so that a simulator can run the real code."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Monotonic seconds. Safe to call from any thread."""

    def now_s(self) -> float:
        """Seconds since an arbitrary fixed point; never goes back."""


class SystemClock:
    """The machine's monotonic clock."""

    def now_s(self) -> float:
        """Seconds of ``time.monotonic``."""
        return time.monotonic()


class ManualClock:
    """A clock that moves only when told to; for tests and simulation."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s

    def now_s(self) -> float:
        """The time set last."""
        return self._now_s

    def advance(self, seconds: float) -> None:
        """Moves time forward by ``seconds`` (not negative)."""
        if seconds < 0:
            raise ValueError(f"time cannot go back ({seconds} s)")
        self._now_s += seconds
