"""Audit: some hits are computed again, and what is stored is compared with what came out.

Everything else that guards against wrong bytes checks that what comes back is what was stored. This checks
that it was right to store it under its name.
"""

from __future__ import annotations

import random
from typing import NamedTuple

MAX_RATE_OF_RUNS = 0.1


class AuditedPrefix(NamedTuple):
    """What a request was not given although it was found: tokens ``start_tokens`` up to ``end_tokens``."""

    start_tokens: int
    end_tokens: int


class AuditSampler:
    """Draws a share ``rate`` of all hits: one, at random, of each 1/``rate`` in a row, so that none of those
    who are hit again and again escapes for long. An audit that came to nothing is made up for with the next
    hit.

    ``seed`` None: other hits in each process. One thread only.
    """

    def __init__(self, rate: float, seed: int | None = None) -> None:
        if not 0.0 <= rate <= 1.0:
            raise ValueError(f"an audit rate is between 0 and 1, not {rate}")
        self._rate = rate
        # Above that, runs would be too short to be exact.
        self._every = round(1 / rate) if 0 < rate <= MAX_RATE_OF_RUNS else 0
        self._random = random.Random(seed)  # noqa: S311 - which hit is drawn is no secret
        self._seen = 0
        self._drawn = self._draw()
        self._owed = 0

    def _draw(self) -> int:
        return self._random.randrange(self._every) if self._every else -1

    def draws(self) -> bool:
        """Whether this hit, the next one, is to be audited."""
        if not self._every:
            return self._random.random() < self._rate
        is_drawn = self._seen == self._drawn
        self._seen += 1
        if self._seen == self._every:
            self._seen, self._drawn = 0, self._draw()
        if not is_drawn and self._owed:
            self._owed -= 1
            return True
        return is_drawn

    def came_to_nothing(self) -> None:
        """The last one that was drawn could not be compared: its request ended before, or its blocks had
        gone.
        """
        self._owed = min(self._owed + 1, 1)
