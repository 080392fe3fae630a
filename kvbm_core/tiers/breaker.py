"""Keeps off something that fails again and again, and tries it again later."""

from __future__ import annotations

from kvbm_core.clock import Clock
from kvbm_core.transfer.plan import OrderKind

FAILURES_IN_A_ROW = 3
FIRST_PAUSE_S = 5.0
LONGEST_PAUSE_S = 300.0
PROOF = {OrderKind.STORE: 0, OrderKind.FIND: 1, OrderKind.FETCH: 2}
"""How much a success proves. One that takes all and gives nothing fails, and so does one that knows what it
has and does not give it.
"""


class Breaker:
    """After ``failures_in_a_row`` everything is refused for a pause; then it is tried again.

    Failures are in a row if no success came between them that proves as much as each of them (see PROOF): a
    success says nothing of what proves more, and a failure that was made up for counts no longer. After a
    pause anything may be tried, and the next failure of such a row begins the next one, which is twice as
    long, from ``first_pause_s`` to ``longest_pause_s``. When no row is so long any more, all begins anew. One
    thread only.
    """

    def __init__(
        self,
        clock: Clock,
        *,
        failures_in_a_row: int = FAILURES_IN_A_ROW,
        first_pause_s: float = FIRST_PAUSE_S,
        longest_pause_s: float = LONGEST_PAUSE_S,
    ) -> None:
        self._clock = clock
        self._rows = [0] * (1 + max(PROOF.values()))
        """Failures of orders that prove at least so much, since one of these has worked."""
        self._most_failures = failures_in_a_row
        self._until_s = float("-inf")
        self._first_pause_s = self._pause_s = first_pause_s
        self._longest_pause_s = longest_pause_s

    @property
    def is_open(self) -> bool:
        """Whether it is to be left alone now."""
        return self._clock.now_s() < self._until_s

    def succeeded(self, kind: OrderKind = OrderKind.FETCH) -> bool:
        """An order of this kind has worked. True unless something that proves more is known to fail."""
        num_proved = PROOF[kind] + 1
        self._rows[:num_proved] = [0] * num_proved
        if max(self._rows) >= self._most_failures:
            return False
        self._pause_s, self._until_s = self._first_pause_s, float("-inf")
        return True

    def failed(self, kind: OrderKind = OrderKind.FETCH) -> bool:
        """One has not. True if this begins a pause."""
        num_counting = PROOF[kind] + 1
        longer = [failures + 1 for failures in self._rows[:num_counting]]
        self._rows[:num_counting] = longer
        if max(longer) < self._most_failures or self.is_open:
            return False
        self._until_s = self._clock.now_s() + self._pause_s
        self._pause_s = min(2 * self._pause_s, self._longest_pause_s)
        return True
