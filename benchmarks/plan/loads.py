"""Two loads with habits of their own: agents that work through long contexts, and questions on documents."""

from __future__ import annotations

import random
from itertools import accumulate, count

from kvbm_core.replay.trace import Trace, request_of
from kvbm_core.sizing.load import Load

BLOCK_TOKENS = 128
POPULAR = 0.8
"""Exponent of how often documents are asked about: the n-th as often as 1 / n ** POPULAR."""
DRIFT_S = 600.0
"""So often other documents become the popular ones."""


def agents(seed: int = 1, seconds: float = 900) -> Trace:
    """Few who ask often, with long instructions, many short turns, and hardly a pause."""
    load = Load(
        users=40,
        turns=20,
        system_tokens=6000,
        prompt_tokens=900,
        answer_tokens=150,
        think_s=4,
        seconds=seconds,
        seed=seed,
    )
    return Trace("agents", BLOCK_TOKENS, load.trace(BLOCK_TOKENS).requests)


def documents(seed: int = 1, num_requests: int = 9000, num_documents: int = 3000) -> Trace:
    """One question each on one of many documents of very different length, of which some are asked about
    again and again; every ten minutes others.
    """
    rng = random.Random(seed)
    names = count(1)
    texts: list[list[int]] = []
    for _ in range(num_documents):
        blocks = max(1, round(rng.lognormvariate(3.2, 0.8)))
        texts.append([0, *(next(names) for _ in range(min(blocks, 400)))])
    weights = list(accumulate(1 / (rank + 1) ** POPULAR for rank in range(num_documents)))
    requests, at_s, shift = [], 0.0, 0
    for _ in range(num_requests):
        at_s += rng.expovariate(2.5)
        shift = int(at_s // DRIFT_S) * (num_documents // 8)
        (rank,) = rng.choices(range(num_documents), cum_weights=weights)
        text = texts[(rank + shift) % num_documents]
        question_tokens = rng.randrange(20, 3 * BLOCK_TOKENS)
        ids = [*text, *(next(names) for _ in range(question_tokens // BLOCK_TOKENS))]
        requests.append(
            request_of(at_s, len(text) * BLOCK_TOKENS + question_tokens, tuple(ids), BLOCK_TOKENS)
        )
    return Trace("documents", BLOCK_TOKENS, requests)
