"""What each server is asked: prompts that come back from host memory, and a chat that outgrows the device
cache.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass

from tests.engines.client import Answer, EngineClient

EXTERNAL_HITS = "vllm:external_prefix_cache_hits_total"
SETTLE_S = 1.5  # an answer does not wait for its offloads, and peers do not say when theirs have ended


@dataclass(frozen=True)
class Load:
    """Sizes, in tokens. Each of ``users`` asks ``rounds`` times, ``at_once`` of them at a time."""

    hit_tokens: int
    hit_pairs: int
    users: int
    rounds: int
    opening_tokens: int
    turn_tokens: int
    answer_tokens: int
    at_once: int
    vocabulary: int

    @property
    def final_tokens(self) -> int:
        """Of a user's conversation at the end."""
        return self.opening_tokens + (self.rounds - 1) * self.turn_tokens + self.rounds * self.answer_tokens


@dataclass(frozen=True)
class Pair:
    """A prompt's first time and its return, and the tokens that came from beyond the device's cache."""

    cold_s: float
    hit_s: float
    external_tokens: int
    same_answer: bool


@dataclass(frozen=True)
class Played:
    """A chat: TTFTs round by round, and tokens of prompts and answers per second."""

    ttft_s: tuple[tuple[float, ...], ...]
    tokens_per_s: float
    external_tokens: int

    @property
    def all_ttft_s(self) -> list[float]:
        """Of every turn after the first, which nobody can have seen before."""
        return [each for turns in self.ttft_s[1:] for each in turns]


async def measure(client: EngineClient, load: Load, seed: int) -> tuple[list[Pair], Played]:
    """Both, one after the other, after prompts that warm the server up; the same seed asks the same."""
    draw = random.Random(seed)
    pairs = [await _pair(client, load, draw) for _ in range(load.hit_pairs + 1)]
    await client.reset_prefix_cache()
    return pairs[1:], await play(client, load, draw.randrange(1 << 30))


async def _pair(client: EngineClient, load: Load, draw: random.Random) -> Pair:
    """One request at a time: cold, answered, forgotten by the device, cold or from the host, answered."""
    prompt = _tokens(draw, load.hit_tokens, load)
    cold = await client.complete(prompt, 1)
    before = await client.complete(prompt, load.answer_tokens)
    await asyncio.sleep(SETTLE_S)
    if not await client.reset_prefix_cache():
        raise RuntimeError("the server does not forget its device cache")
    known = (await client.engine_metrics()).get(EXTERNAL_HITS, 0.0)
    hit = await client.complete(prompt, 1)
    external = (await client.engine_metrics()).get(EXTERNAL_HITS, 0.0) - known
    after = await client.complete(prompt, load.answer_tokens)
    return Pair(cold.ttft_s, hit.ttft_s, int(external), before.token_ids == after.token_ids)


async def play(client: EngineClient, load: Load, seed: int) -> Played:
    """Every user's turn of a round, then the next round, from the model's own answers."""
    draws = [random.Random(f"{seed}:{user}") for user in range(load.users)]
    histories: list[list[int]] = [[] for _ in draws]
    turns = asyncio.Semaphore(load.at_once)

    async def ask(user: int, number: int) -> Answer:
        history = histories[user]
        history += _tokens(draws[user], load.turn_tokens if number else load.opening_tokens, load)
        async with turns:
            answer = await client.complete(history, load.answer_tokens)
        history += answer.token_ids
        return answer

    known = (await client.engine_metrics()).get(EXTERNAL_HITS, 0.0)
    started_s = time.perf_counter()
    ttft_s: list[tuple[float, ...]] = []
    tokens = 0
    for number in range(load.rounds):
        answers: Sequence[Answer] = await asyncio.gather(*(ask(user, number) for user in range(load.users)))
        ttft_s.append(tuple(answer.ttft_s for answer in answers))
        tokens += sum(answer.prompt_tokens + len(answer.token_ids) for answer in answers)
    seconds = time.perf_counter() - started_s
    external = (await client.engine_metrics()).get(EXTERNAL_HITS, 0.0) - known
    return Played(tuple(ttft_s), tokens / seconds, int(external))


def _tokens(draw: random.Random, count: int, load: Load) -> list[int]:
    return [draw.randrange(3, load.vocabulary) for _ in range(count)]


def percentile(samples: Sequence[float], share: float) -> float:
    """The sample that ``share`` of all are not above."""
    ordered = sorted(samples)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
