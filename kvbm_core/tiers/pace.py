"""Load or compute: how fast a store brings blocks, and how fast the engine computes their tokens.

Both are measured, as averages in which older samples count less. As long as either is unknown, loading counts
as faster.
"""

from __future__ import annotations

from kvbm_core.clock import Clock

WORTH = 0.8
"""Loading is worth waiting for if it takes at most this share of the time that computing takes."""
SHORT_LOAD_S = 0.1
"""A load that takes no longer than this is always worth it."""
FRESH_S = 30.0
"""After so long without a load a store is tried again, however slow it was."""
MIN_STEP_TOKENS = 256
"""Steps that compute fewer tokens are no samples: they say little about the speed of prompts."""
LONGEST_STEP_S = 30.0
MIN_SAMPLES = 3
KEPT = 0.9


class ComputePace:
    """Seconds that the engine takes per token of a prompt. One thread.

    Under asynchronous scheduling a step is planned while the one before still runs. So a step's time is taken
    to be the time until the next two plans. Where plans do not overlap, that is a little too much.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._tokens = 0
        self._planned_at_s = 0.0
        self._open_intervals = 0
        self._num_samples = 0
        self._sum_tokens = self._sum_s = 0.0

    def computes(self, num_tokens: int) -> None:
        """In the step that is being planned, a request computes ``num_tokens`` more."""
        self._tokens += num_tokens

    def planned(self) -> None:
        """A step's plan is complete."""
        now_s, tokens = self._clock.now_s(), self._tokens
        step_s, self._planned_at_s, self._tokens = now_s - self._planned_at_s, now_s, 0
        if self._open_intervals:
            self._open_intervals -= 1
            if step_s <= LONGEST_STEP_S:  # else the engine had nothing to do
                self._sum_s += step_s
        if tokens >= MIN_STEP_TOKENS:
            self._sum_tokens, self._sum_s = KEPT * self._sum_tokens + tokens, KEPT * self._sum_s
            self._open_intervals = 2
            self._num_samples += 1

    @property
    def token_s(self) -> float | None:
        """Seconds per token; None: not known yet."""
        is_known = self._num_samples > MIN_SAMPLES and self._sum_s > 0.0
        return self._sum_s / self._sum_tokens if is_known else None


class LoadPace:
    """How long a store takes per block that it brings, and per look-up that it answers. One thread."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._answer_s = 0.0
        self._num_samples = 0
        self._sum_blocks = self._sum_s = 0.0
        self._tried_at_s = float("-inf")

    def answered(self, seconds: float) -> None:
        """A look-up was answered after ``seconds``."""
        self._answer_s += (1.0 - KEPT) * (seconds - self._answer_s)

    @property
    def answers_soon(self) -> bool:
        """Whether a request may wait for a look-up, as answers come within SHORT_LOAD_S."""
        return self._answer_s <= SHORT_LOAD_S

    def brought(self, num_blocks: int, seconds: float, num_beside: int) -> None:
        """An order has brought ``num_blocks`` in ``seconds``, while ``num_beside`` other orders were under
        way.
        """
        self._sum_blocks = KEPT * self._sum_blocks + num_blocks
        self._sum_s = KEPT * self._sum_s + seconds / (1 + num_beside)
        self._num_samples += 1
        self._tried_at_s = self._clock.now_s()

    def is_worth(self, num_blocks: int, num_tokens: int, token_s: float | None) -> bool:
        """Whether loading is faster than computing ``num_tokens`` in ``token_s`` each."""
        is_known = self._num_samples >= MIN_SAMPLES
        if token_s is None or not is_known or self._clock.now_s() - self._tried_at_s > FRESH_S:
            return True
        load_s = 2 * self._answer_s + num_blocks * self._sum_s / max(self._sum_blocks, 1.0)
        return load_s <= max(SHORT_LOAD_S, WORTH * num_tokens * token_s)
