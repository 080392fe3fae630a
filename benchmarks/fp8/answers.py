"""What rounded KV does to answers: the same prompts on a real vLLM, computed, and from a shared store."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.suite import expect
from tests.engines.forks import python
from tests.engines.job import run_job

VOCABULARY = range(3, 500)
"""Tokens of prompts; every model has them."""
TIMEOUT_S = 1800.0


@dataclass(frozen=True)
class Asked:
    """``prompt_tokens``: of each; all but a few come from the store, 32 at a time."""

    dtype: str
    num_prompts: int
    prompt_tokens: int
    answer_tokens: int
    seed: int


@dataclass(frozen=True)
class Effect:
    """Over all tokens of all answers. ``agreed``: the share of tokens that are still the likeliest after the
    ones before. ``mean_off`` and ``max_off``: how far the token's log-probability is off, in nats.
    ``same_answers``: the share of whole answers that came out the same.
    """

    model: str
    codec: str
    num_tokens: int
    agreed: float
    mean_off: float
    max_off: float
    same_answers: float


def measure(name: str, model: Path, codec: str, asked: Asked, folder: Path) -> Effect:
    """One engine. WrongAnswer if a prompt did not come from the store."""
    made = random.Random(asked.seed)
    prompts = [
        [made.choice(VOCABULARY) for _ in range(asked.prompt_tokens)] for _ in range(asked.num_prompts)
    ]
    job = {
        "model": str(model),
        "dtype": asked.dtype,
        "codec": codec,
        "prompts": prompts,
        "answer_tokens": asked.answer_tokens,
    }
    result = run_job(
        python(sys.executable),
        "benchmarks.fp8.child",
        job,
        folder,
        environment=dict(os.environ),
        timeout_s=TIMEOUT_S,
    )
    found = min(result["cached_tokens"])
    expect(found >= asked.prompt_tokens / 2, f"{name}, {codec}: only {found} tokens came from the store")
    return effect_of(name, codec, result)


def effect_of(name: str, codec: str, result: dict[str, Any]) -> Effect:
    """Of a child's result."""
    rows = [row for answer in result["tokens"] for row in answer]
    off = [abs(before - now) for _, before, _, now in rows]
    pairs = zip(result["tokens"], result["again"], strict=True)
    same = [[row[0] for row in answer] == again for answer, again in pairs]
    agreed = sum(token == likeliest for token, _, likeliest, _ in rows)
    return Effect(
        name, codec, len(rows), agreed / len(rows), sum(off) / len(off), max(off), sum(same) / len(same)
    )


def measure_all(
    models: dict[str, Path], asked: Asked, folder: Path, told: Callable[[str], None]
) -> list[Effect]:
    """Of each model, without a codec too: what a hit changes anyway."""
    effects = []
    for name, model in models.items():
        for codec in ("none", "fp8"):
            told(f"{name}, {codec}")
            effects.append(measure(name, model, codec, asked, folder))
    return effects
