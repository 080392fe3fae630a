"""Tokens per second with nothing to reuse, with kvbm against without a connector."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.client import Answer, EngineClient
from benchmarks.serve.figures import Figure
from benchmarks.serve.workload import UniquePrompts

PROMPT_TOKENS = 512
ANSWER_TOKENS = 48
REQUESTS = 48
CONCURRENCY = 8
WARM_UP_ROUNDS = 2
QUIET_S = 1.5  # vLLM's processes spin for a second after their last step, on cores that the other server needs
GOAL = 0.97

Prompt = list[int]


@dataclass(frozen=True)
class Round:
    """The same prompts, new to both servers, on each in turn. Rates: tokens of prompt and answer per second."""

    with_kvbm: float
    without: float
    differing: tuple[Prompt, ...]  # answered otherwise by the two


async def measure(
    with_kvbm: EngineClient, without: EngineClient, rounds: int, seed: int, told: Callable[[str], None]
) -> list[Round]:
    """Rounds on both servers, the first place alternating; WARM_UP_ROUNDS are run and left out."""
    prompts = UniquePrompts(seed)
    measured: list[Round] = []
    for number in range(rounds + WARM_UP_ROUNDS):
        batch = [prompts.next(PROMPT_TOKENS) for _ in range(REQUESTS)]
        if number % 2:
            rate, answers = await _load(with_kvbm, batch)
            plain_rate, plain_answers = await _load(without, batch)
        else:
            plain_rate, plain_answers = await _load(without, batch)
            rate, answers = await _load(with_kvbm, batch)
        same = (ours.token_ids == theirs.token_ids for ours, theirs in zip(answers, plain_answers, strict=True))
        differing = tuple(prompt for prompt, equal in zip(batch, same, strict=True) if not equal)
        measured.append(Round(rate, plain_rate, differing))
        told(f"throughput: round {number + 1} of {rounds + WARM_UP_ROUNDS}")
    return measured[WARM_UP_ROUNDS:]


async def _load(client: EngineClient, batch: list[Prompt]) -> tuple[float, list[Answer]]:
    turns = asyncio.Semaphore(CONCURRENCY)

    async def ask(prompt: Prompt) -> Answer:
        async with turns:
            return await client.complete(prompt, ANSWER_TOKENS)

    await asyncio.sleep(QUIET_S)
    started_s = time.perf_counter()
    answers = await asyncio.gather(*(ask(prompt) for prompt in batch))
    seconds = time.perf_counter() - started_s
    return len(batch) * (PROMPT_TOKENS + ANSWER_TOKENS) / seconds, list(answers)


async def ask_again_alone(with_kvbm: EngineClient, without: EngineClient, rounds: list[Round]) -> list[str]:
    """Prompts whose answers differed, one at a time: in a batch, rounding depends on what else is in it.

    The second answer counts: on both servers it resumes from cached KV at the same token.
    """
    found: list[str] = []
    for number, a_round in enumerate(rounds):
        for prompt in a_round.differing:
            for _ in range(2):
                ours = await with_kvbm.complete(prompt, ANSWER_TOKENS)
                theirs = await without.complete(prompt, ANSWER_TOKENS)
            if ours.token_ids != theirs.token_ids:
                found.append(f"throughput round {number}: a prompt is answered otherwise with kvbm")
    return found


def figure(rounds: list[Round], peer: str) -> Figure:
    """The row of the report."""
    return Figure(
        name="throughput with nothing to reuse",
        unit="tokens/s",
        pairs=tuple((a_round.with_kvbm, a_round.without) for a_round in rounds),
        peer=peer,
        goal=GOAL,
        better="higher",
    )
