"""A trace made up from a few numbers: users who talk with a model, each in one conversation at a time."""

from __future__ import annotations

import heapq
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

from kvbm_core.replay.trace import Request, Trace, request_of

ANSWER_TOKENS_S = 30.0
"""How fast answers are read as they come."""
_SPREAD = 0.6
"""Of lengths: the sigma of their logarithms; half of them are within two thirds and one and a half times the
middle.
"""
BLOCK_TOKENS = 64
MAX_TOKENS = 131_072
"""Of a conversation, where the model does not say."""


@dataclass(frozen=True, slots=True)
class Load:
    """Means of what vary: turns of a conversation, new tokens of a prompt, tokens of an answer, seconds until
    the next prompt. ``system_tokens`` begin every prompt.
    """

    users: int
    turns: float = 5
    system_tokens: int = 500
    prompt_tokens: int = 500
    answer_tokens: int = 300
    think_s: float = 30
    seconds: float = 3600
    max_tokens: int = MAX_TOKENS
    seed: int = 1

    def trace(self, block_tokens: int = BLOCK_TOKENS) -> Trace:
        """Requests of ``seconds``; the same for the same seed."""
        rng = random.Random(self.seed)  # noqa: S311 - a load, not a secret
        due = [(rng.uniform(0, self.think_s), user) for user in range(self.users)]
        heapq.heapify(due)
        names = iter(range(1 << 31, 1 << 62))
        talks: dict[int, Iterator[tuple[Request, float]]] = {}
        requests: list[Request] = []
        while due[0][0] < self.seconds:
            at_s, user = due[0]
            turn = next(talks[user], None) if user in talks else None
            if turn is None:
                talks[user] = self._talk(rng, block_tokens, names)
                turn = next(talks[user])
            asked, busy_s = turn
            requests.append(replace(asked, at_s=at_s))
            heapq.heapreplace(due, (at_s + busy_s + rng.expovariate(1 / max(self.think_s, 1e-3)), user))
        return Trace(f"{self.users} users", block_tokens, requests)

    def _talk(
        self, rng: random.Random, block_tokens: int, names: Iterator[int]
    ) -> Iterator[tuple[Request, float]]:
        """The turns of one conversation; times are the caller's. With each, how long its answer takes."""
        ids = list(range(self.system_tokens // block_tokens))
        tokens, most = self.system_tokens, self.max_tokens
        is_first = True
        while is_first or rng.random() >= 1 / max(1.0, self.turns):
            tokens += _about(rng, self.prompt_tokens)
            answer_tokens = _about(rng, self.answer_tokens)
            end = tokens + answer_tokens
            if end > most and not is_first:
                return
            tokens, end = min(tokens, most), min(end, most)
            while (len(ids) + 1) * block_tokens <= end:
                ids.append(next(names))
            yield request_of(0.0, tokens, tuple(ids), block_tokens), answer_tokens / ANSWER_TOKENS_S
            tokens, is_first = end, False


def _about(rng: random.Random, mean: float) -> int:
    """A length, at least 1, whose mean is ``mean``."""
    return max(1, round(mean * rng.lognormvariate(-_SPREAD * _SPREAD / 2, _SPREAD)))
