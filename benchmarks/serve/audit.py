"""What KVBM_AUDIT_RATE costs: requests whose hits are all audited, beside the same requests on a server
without.

An audited hit is computed again. How much longer its request takes is measured where every hit is audited; at
a rate of 0.001 one of 1,000 requests takes so much longer, and nothing else changes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.client import Answer, EngineClient
from benchmarks.figures import LIMIT, Figure, Goal
from benchmarks.serve.workload import UniquePrompts

PROMPT_TOKENS = 2000
ANSWER_TOKENS = 64
FORGOTTEN_AFTER = 5  # the device cache holds four prompts
RATE = 0.001
WARM_UP_TURNS = 2
GOAL = Goal(f"time of requests that return, KVBM_AUDIT_RATE={RATE:g}: added", "%", 0.2, "lower", LIMIT)


@dataclass(frozen=True)
class Turn:
    """A prompt's second time on both servers. ``found_tokens``: brought back by the one without audits.

    ``audited_tokens``: brought back by the other; it computes all that it finds.
    """

    plain: Answer
    audited: Answer
    found_tokens: int
    audited_tokens: int

    @property
    def added_percent(self) -> float:
        """What audits at RATE add to requests like this one."""
        return 100 * RATE * (self.audited.total_s - self.plain.total_s) / self.plain.total_s


async def measure(
    plain: EngineClient, audited: EngineClient, turns: int, seed: int, told: Callable[[str], None]
) -> list[Turn]:
    """Prompts that return to both servers in turn; the first WARM_UP_TURNS are left out."""
    prompts, waiting, measured = UniquePrompts(seed), list[list[int]](), list[Turn]()
    while len(measured) < turns + WARM_UP_TURNS:
        waiting.append(prompts.next(PROMPT_TOKENS))
        for client in (plain, audited):
            await client.complete(waiting[-1], 1)
        if len(waiting) > FORGOTTEN_AFTER:
            prompt, order = waiting.pop(0), [plain, audited]
            if len(measured) % 2:
                order.reverse()
            before = {client: await client.cache_counts() for client in order}
            answers = {client: await client.complete(prompt, ANSWER_TOKENS) for client in order}
            found = {
                client: (await client.cache_counts()).since(before[client]).kvbm_tokens for client in order
            }
            measured.append(Turn(answers[plain], answers[audited], found[plain], found[audited]))
            told(f"audit: turn {len(measured)} of {turns + WARM_UP_TURNS}")
    return measured[WARM_UP_TURNS:]


def figure(turns: list[Turn]) -> Figure:
    """The row of the report."""
    return Figure(GOAL, tuple(turn.added_percent for turn in turns))


def complaints(turns: list[Turn]) -> list[str]:
    """A line for each turn that was no hit, was not audited, or was answered otherwise."""
    found = []
    for number, turn in enumerate(turns):
        if turn.found_tokens < PROMPT_TOKENS - 64:
            found.append(f"audit turn {number}: only {turn.found_tokens} tokens came back")
        if turn.audited_tokens:
            found.append(f"audit turn {number}: {turn.audited_tokens} tokens were loaded, not audited")
        if turn.plain.token_ids != turn.audited.token_ids:
            found.append(f"audit turn {number}: what came back is answered otherwise than what was computed")
    return found
