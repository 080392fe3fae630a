"""How many orders in a second are listened to."""

from __future__ import annotations

import time

ORDERS_PER_S, BURST = 20.0, 40


class Budget:
    """``BURST`` at once, then ``ORDERS_PER_S``. One thread."""

    def __init__(self) -> None:
        self._left, self._at_s = float(BURST), time.monotonic()

    def take(self) -> bool:
        """False if there is none left."""
        now_s = time.monotonic()
        self._left = min(float(BURST), self._left + ORDERS_PER_S * (now_s - self._at_s))
        self._at_s = now_s
        if self._left < 1:
            return False
        self._left -= 1
        return True
