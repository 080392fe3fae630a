"""Keeps off something that fails again and again, and tries it again later."""

from __future__ import annotations

from kvbm_core.clock import Clock

FAILURES_IN_A_ROW = 3
FIRST_PAUSE_S = 5.0
LONGEST_PAUSE_S = 300.0


class Breaker:
    """After FAILURES_IN_A_ROW everything is refused for a pause; then it is tried again.

    Each further failure doubles the pause, a success ends it. One thread only.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._failures = 0
        self._until_s = float("-inf")
        self._pause_s = FIRST_PAUSE_S

    @property
    def is_open(self) -> bool:
        """Whether it is to be left alone now."""
        return self._clock.now_s() < self._until_s

    def succeeded(self) -> None:
        """It works."""
        self._failures, self._pause_s = 0, FIRST_PAUSE_S
        self._until_s = float("-inf")

    def failed(self) -> bool:
        """It does not. True if this begins a pause."""
        self._failures += 1
        if self._failures < FAILURES_IN_A_ROW or self.is_open:
            return False
        self._until_s = self._clock.now_s() + self._pause_s
        self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
        return True
