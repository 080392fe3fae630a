"""What KVBM_AUDIT_RATE costs: requests whose hits are all audited, beside the same requests on a server
without.

An audited hit is computed again. How much longer its request takes, and how much more CPU time, is measured
where every hit is audited; at a rate of 0.001 one of 1,000 requests takes so much more, and nothing else
changes. CPU time depends less on what else the machine does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from benchmarks.figures import LIMIT, Figure, Goal
from benchmarks.serve.workload import TIE_NATS, Side, UniquePrompts
from tests.engines.client import Answer

PROMPT_TOKENS = 2000
ANSWER_TOKENS = 64
FORGOTTEN_AFTER = 5  # the device cache holds four prompts
RATE = 0.001
WARM_UP_TURNS = 2
GOAL = Goal(f"time of requests that return, KVBM_AUDIT_RATE={RATE:g}: added", "%", 0.2, "lower", LIMIT)
CPU_GOAL = Goal(
    f"CPU time of requests that return, KVBM_AUDIT_RATE={RATE:g}: added", "%", 0.2, "lower", LIMIT
)


class Served(NamedTuple):
    """One request. ``loaded_tokens``: what kvbm brought back for it."""

    answer: Answer
    loaded_tokens: int
    cpu_s: float


@dataclass(frozen=True)
class Turn:
    """A prompt's second time on both servers."""

    plain: Served
    audited: Served
    gap_nats: float = 0.0
    """Between the two tokens at which the answers part; 0.0: they do not."""

    @property
    def added_percent(self) -> float:
        """What audits at RATE add to the time of requests like this one."""
        return 100 * RATE * (self.audited.answer.total_s / self.plain.answer.total_s - 1)

    @property
    def added_cpu_percent(self) -> float:
        """And to the CPU time of all of the server's processes."""
        return 100 * RATE * (self.audited.cpu_s / self.plain.cpu_s - 1)


async def measure(
    plain: Side, audited: Side, turns: int, seed: int, told: Callable[[str], None]
) -> list[Turn]:
    """Prompts that return to both servers in turn; the first WARM_UP_TURNS are left out."""
    prompts, waiting, measured = UniquePrompts(seed), list[list[int]](), list[Turn]()
    while len(measured) < turns + WARM_UP_TURNS:
        waiting.append(prompts.next(PROMPT_TOKENS))
        for side in (plain, audited):
            await side.client.complete(waiting[-1], 1)
        if len(waiting) > FORGOTTEN_AFTER:
            prompt, order = waiting.pop(0), [plain, audited]
            if len(measured) % 2:
                order.reverse()
            served = {side: await _serve(side, prompt) for side in order}
            answers = [served[side].answer.token_ids for side in (plain, audited)]
            is_same = answers[0] == answers[1]
            gap_nats = 0.0 if is_same else await plain.client.gap_nats(prompt, *answers)
            measured.append(Turn(served[plain], served[audited], gap_nats))
            told(f"audit: turn {len(measured)} of {turns + WARM_UP_TURNS}")
    return measured[WARM_UP_TURNS:]


async def _serve(side: Side, prompt: list[int]) -> Served:
    counts, cpu_s = await side.client.cache_counts(), side.server.cpu_s()
    answer = await side.client.complete(prompt, ANSWER_TOKENS)
    cpu_s = side.server.cpu_s() - cpu_s
    return Served(answer, (await side.client.cache_counts()).since(counts).kvbm_tokens, cpu_s)


def figures(turns: list[Turn]) -> list[Figure]:
    """The rows of the report."""
    return [
        Figure(GOAL, tuple(turn.added_percent for turn in turns)),
        Figure(CPU_GOAL, tuple(turn.added_cpu_percent for turn in turns)),
    ]


def complaints(turns: list[Turn]) -> list[str]:
    """A line for each turn that was no hit, was not audited, or was answered otherwise, but at a tie."""
    found = []
    for number, turn in enumerate(turns):
        if turn.plain.loaded_tokens < PROMPT_TOKENS - 64:
            found.append(f"audit turn {number}: only {turn.plain.loaded_tokens} tokens came back")
        if turn.audited.loaded_tokens:
            found.append(f"audit turn {number}: {turn.audited.loaded_tokens} tokens were loaded, not audited")
        if turn.gap_nats > TIE_NATS:
            found.append(f"audit turn {number}: what came back is answered otherwise than what was computed")
    return found
