"""Tokens per second, and CPU time per token, with nothing to reuse: with kvbm against without.

CPU time of all of a server's processes depends less on what else the machine does than time does. A copy or a
poll that takes a core which the engine needs is in both.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain

from benchmarks.figures import BEST_PEER, Figure, Goal
from benchmarks.serve.workload import TIE_NATS, Side, UniquePrompts
from tests.engines.client import EngineClient

WARM_UP_ROUNDS = 2
MAX_ASKED_AGAIN = 32
QUIET_S = (
    1.5  # vLLM's processes spin for a second after their last step, on cores that the other server needs
)

Prompt = list[int]


@dataclass(frozen=True)
class Load:
    """What one round asks: ``batches`` one after the other, each of ``concurrency`` prompts in one HTTP
    request.

    Not a connection for each: two processes of vLLM's CPU build spin while they wait for each other, a client
    beside them on two cores gets so little time that its prompts reach the engine one by one, and a round
    then takes 3,000 steps instead of 50, with any server.
    """

    goal: Goal
    cpu_goal: Goal
    batches: int
    prompt_tokens: int
    answer_tokens: int
    concurrency: int

    @property
    def text(self) -> str:
        """For the report."""
        return (
            f"{self.batches} times {self.concurrency} prompts of {self.prompt_tokens} tokens at once,"
            f" {self.answer_tokens} answer tokens each"
        )


LOADS = (
    Load(
        Goal("throughput with nothing to reuse", "tokens/s", 0.97, "higher", BEST_PEER),
        Goal("CPU time per token with nothing to reuse", "ms", 1.02, "lower", BEST_PEER),
        *(6, 512, 48, 8),
    ),
    # As many as the device cache holds at once: none is preempted, and each step has 64 requests in it.
    Load(
        Goal("throughput, 64 requests at once", "tokens/s", 0.97, "higher", BEST_PEER),
        Goal("CPU time per token, 64 requests at once", "ms", 1.02, "lower", BEST_PEER),
        *(4, 64, 48, 64),
    ),
)


@dataclass(frozen=True)
class Pace:
    """What one server needed. Tokens are those of prompts and answers."""

    tokens_per_s: float
    cpu_ms_per_token: float


@dataclass(frozen=True)
class Round:
    """The same prompts, new to both servers, on each in turn."""

    with_kvbm: Pace
    without: Pace
    differing: tuple[Prompt, ...]  # answered otherwise by the two


async def measure(
    with_kvbm: Side,
    without: Side,
    load: Load,
    *,
    rounds: int,
    seed: int,
    told: Callable[[str], None],
) -> list[Round]:
    """Rounds on both servers, the first place alternating; WARM_UP_ROUNDS are run and left out."""
    prompts = UniquePrompts(seed)
    measured: list[Round] = []
    for number in range(rounds + WARM_UP_ROUNDS):
        batches = [
            [prompts.next(load.prompt_tokens) for _ in range(load.concurrency)] for _ in range(load.batches)
        ]
        order = (with_kvbm, without) if number % 2 else (without, with_kvbm)
        served = {side: await _serve(side, load, batches) for side in order}
        (pace, answers), (plain_pace, plain_answers) = served[with_kvbm], served[without]
        asked = chain.from_iterable(batches)
        pairs = zip(asked, answers, plain_answers, strict=True)
        differing = tuple(prompt for prompt, ours, theirs in pairs if ours != theirs)
        measured.append(Round(pace, plain_pace, differing))
        told(f"{load.goal.name}: round {number + 1} of {rounds + WARM_UP_ROUNDS}")
    return measured[WARM_UP_ROUNDS:]


async def _serve(side: Side, load: Load, batches: list[list[Prompt]]) -> tuple[Pace, list[tuple[int, ...]]]:
    """How fast, and the answers."""
    await asyncio.sleep(QUIET_S)
    answers: list[tuple[int, ...]] = []
    cpu_s, started_s = side.server.cpu_s(), time.perf_counter()
    for batch in batches:
        answers += await side.client.complete_batch(batch, load.answer_tokens)
    seconds, cpu_s = time.perf_counter() - started_s, side.server.cpu_s() - cpu_s
    tokens = len(answers) * (load.prompt_tokens + load.answer_tokens)
    return Pace(tokens / seconds, 1000 * cpu_s / tokens), answers


async def ask_again_alone(
    with_kvbm: EngineClient, without: EngineClient, load: Load, rounds: list[Round]
) -> list[str]:
    """Prompts whose answers differed, one at a time: in a batch, rounding depends on what else is in it.

    The second answer counts: on both servers it resumes from cached KV at the same token. With many requests
    at once hundreds differ; MAX_ASKED_AGAIN of them, spread over all rounds, are asked again.
    """
    differing = [(number, prompt) for number, a_round in enumerate(rounds) for prompt in a_round.differing]
    found: list[str] = []
    for number, prompt in differing[:: -(-len(differing) // MAX_ASKED_AGAIN) or 1]:
        for _ in range(2):
            ours = await with_kvbm.complete(prompt, load.answer_tokens)
            theirs = await without.complete(prompt, load.answer_tokens)
        answers = ours.token_ids, theirs.token_ids
        if answers[0] != answers[1] and await without.gap_nats(prompt, *answers) > TIE_NATS:
            found.append(f"{load.goal.name}, round {number}: a prompt is answered otherwise with kvbm")
    return found


def figures(load: Load, rounds: list[Round], peer: str) -> list[Figure]:
    """The rows of the report."""
    ours, theirs = [a_round.with_kvbm for a_round in rounds], [a_round.without for a_round in rounds]
    return [
        Figure(
            load.goal,
            tuple(pace.tokens_per_s for pace in ours),
            {peer: tuple(pace.tokens_per_s for pace in theirs)},
        ),
        Figure(
            load.cpu_goal,
            tuple(pace.cpu_ms_per_token for pace in ours),
            {peer: tuple(pace.cpu_ms_per_token for pace in theirs)},
        ),
    ]
