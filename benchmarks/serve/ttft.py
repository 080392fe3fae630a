"""Time to first token of a prompt that comes back from host memory, over the same prompt's cold time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.figures import Figure, Goal
from benchmarks.serve.workload import UniquePrompts
from tests.engines.client import Answer, EngineClient

PROMPT_TOKENS = 4000
ANSWER_TOKENS = 8
FORGOTTEN_AFTER = 3  # the device cache holds two prompts, so a prompt is gone when three others have followed
WARM_UP_PAIRS = 2
COLD = "the same prompt cold"
GOAL = Goal(f"TTFT of a {PROMPT_TOKENS:,}-token host hit", "ms", 0.10, "lower", COLD)
STATES_GOAL = Goal(f"TTFT of a {PROMPT_TOKENS:,}-token host hit, with states", "ms", 0.15, "lower", COLD)


@dataclass(frozen=True)
class Pair:
    """A prompt's first and second time on the server with kvbm.

    Only one token is asked for when time is taken, as a busy machine can deliver the first token of an answer
    together with the next ones. ``cold_answer`` and ``hit_answer`` are asked for right after, untimed: both
    come out of the device cache, which holds computed KV the first time and KV from host memory the second.
    """

    cold: Answer
    cold_answer: Answer
    hit: Answer
    hit_answer: Answer
    host_tokens: int
    device_tokens: int

    @property
    def same_answer(self) -> bool:
        """Whether KV from host memory gives the answer that computed KV gave."""
        return self.cold_answer.token_ids == self.hit_answer.token_ids

    @property
    def from_host(self) -> bool:
        """Whether the second time was a host hit, to within one block, with nothing left on the device."""
        return self.device_tokens == 0 and self.host_tokens >= PROMPT_TOKENS - PROMPT_TOKENS % 32 - 32


async def measure(client: EngineClient, pairs: int, seed: int, told: Callable[[str], None]) -> list[Pair]:
    """Cold prompts and returning ones in turn; the first WARM_UP_PAIRS are measured and left out."""
    prompts = UniquePrompts(seed)
    waiting: list[tuple[list[int], Answer, Answer]] = []
    measured: list[Pair] = []
    while len(measured) < pairs + WARM_UP_PAIRS:
        prompt = prompts.next(PROMPT_TOKENS)
        cold = await client.complete(prompt, 1)
        waiting.append((prompt, cold, await client.complete(prompt, ANSWER_TOKENS)))
        if len(waiting) > FORGOTTEN_AFTER:
            measured.append(await _come_back(client, *waiting.pop(0)))
            told(f"TTFT: pair {len(measured)} of {pairs + WARM_UP_PAIRS}")
    return measured[WARM_UP_PAIRS:]


async def _come_back(client: EngineClient, prompt: list[int], cold: Answer, cold_answer: Answer) -> Pair:
    before = await client.cache_counts()
    hit = await client.complete(prompt, 1)
    found = (await client.cache_counts()).since(before)
    hit_answer = await client.complete(prompt, ANSWER_TOKENS)
    return Pair(cold, cold_answer, hit, hit_answer, found.kvbm_tokens, found.device_tokens)


def figure(pairs: list[Pair], goal: Goal = GOAL) -> Figure:
    """The row of the report."""
    hits = tuple(1000 * pair.hit.ttft_s for pair in pairs)
    return Figure(goal, hits, {goal.against: tuple(1000 * pair.cold.ttft_s for pair in pairs)})


def complaints(pairs: list[Pair]) -> list[str]:
    """A line for each host hit that was answered otherwise, or was none."""
    found = [
        f"TTFT pair {i}: the host hit is answered otherwise"
        for i, pair in enumerate(pairs)
        if not pair.same_answer
    ]
    found += [
        f"TTFT pair {i}: {pair.host_tokens} tokens from host, {pair.device_tokens} from the device: "
        "no full host hit"
        for i, pair in enumerate(pairs)
        if not pair.from_host
    ]
    return found
