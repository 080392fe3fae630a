"""How far apart states of hybrid models should be kept: ``python -m benchmarks.plan.states``.

Loads with and without a long beginning that prompts share, served by the product's own Leader without an
engine, at several distances and in the same memory. Prefill is cut at the ends of blocks, as vLLM does, and
leaves a state at each cut; an answer leaves one with each block. What engines keep on the device is not
counted: every request asks the host. Writes a table in Markdown.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import count, groupby
from multiprocessing import get_context
from typing import NamedTuple

from benchmarks.plan.loads import BLOCK_TOKENS, agents, documents
from kvbm_core.blocks.slot_tier import BlockTier
from kvbm_core.clock import ManualClock
from kvbm_core.errors import IntegrityError, Outcome
from kvbm_core.observe.metrics import Metrics
from kvbm_core.policy.lru import LruPolicy
from kvbm_core.replay.trace import Request, Trace, request_of
from kvbm_core.runtime.handshake import Handshake, RankAnswer, SlotsReady
from kvbm_core.runtime.leader import Leader, LeaderParts
from kvbm_core.runtime.leader_options import LeaderOptions
from kvbm_core.runtime.request import NULL_BLOCK, RequestState, StateOnDevice
from kvbm_core.sizing.load import Load
from kvbm_core.tiers.groups import GroupSpec
from kvbm_core.tokens.namespace import KeyNamespace
from kvbm_core.transfer.plan import JobResult
from kvbm_core.types import Tier

DISTANCES = (0, 2048, 4096, 8192, 16_384, 1 << 30)
"""In tokens. 0: every state; the last: none but that of each prompt's and each answer's end."""
SHARES = (0.1, 0.4)
"""Of the memory that the KV of the whole load takes."""


class Hybrid(NamedTuple):
    """A model: tokens in a block, all groups the same bytes, and groups that have states."""

    name: str
    block_tokens: int
    state_groups: int

    @property
    def state_tokens(self) -> int:
        """As much KV as a state takes, in tokens."""
        return self.block_tokens * self.state_groups


MODELS = (Hybrid("3:1", 1024, 3), Hybrid("7:1", 1280, 7))
"""As large blocks and as many groups as vLLM makes for Qwen3-Next-80B-A3B and Nemotron Nano 9B v2."""


def chats(seed: int = 1, seconds: float = 600) -> Trace:
    """Many who talk, with short instructions and long pauses."""
    load = Load(
        users=120,
        turns=8,
        system_tokens=1000,
        prompt_tokens=600,
        answer_tokens=500,
        think_s=45,
        seconds=seconds,
        seed=seed,
    )
    return Trace("chats", BLOCK_TOKENS, load.trace(BLOCK_TOKENS).requests)


def apps(seed: int = 1, num_requests: int = 1500, num_apps: int = 50) -> Trace:
    """Programs with long instructions of their own, 4,000 to 24,000 tokens, and another text of 2,000 to
    6,000 tokens behind these in each request.
    """
    rng = random.Random(seed)
    names = count(1)
    beginnings = [
        [next(names) for _ in range(rng.randrange(4000, 24_000) // BLOCK_TOKENS)] for _ in range(num_apps)
    ]
    requests = []
    for number in range(num_requests):
        own = rng.randrange(2000, 6000) // BLOCK_TOKENS
        ids = (*rng.choice(beginnings), *(next(names) for _ in range(own)))
        requests.append(request_of(float(number), len(ids) * BLOCK_TOKENS + 1, ids, BLOCK_TOKENS))
    return Trace("apps", BLOCK_TOKENS, requests)


LOADS: tuple[Callable[[], Trace], ...] = (
    chats,
    apps,
    partial(agents, seconds=450),
    partial(documents, num_requests=2000),
)


@dataclass(frozen=True, slots=True)
class Case:
    """One replay."""

    load: int
    model: Hybrid
    step_tokens: int
    share: float
    every_tokens: int


@dataclass(frozen=True, slots=True)
class Row:
    """What came of it: the share of prompt tokens that was found, and of the blocks in use at the end that
    were states.
    """

    case: Case
    trace: str
    found: float
    state_share: float


class StatesReplay:
    """A machine that serves one request after the other. A token of the leader is a block of the model."""

    def __init__(self, model: Hybrid, slots: int, every_tokens: int, step_tokens: int) -> None:
        self.found_tokens = 0
        self._model = model
        self._step_blocks = max(1, step_tokens // model.block_tokens)
        self._root = KeyNamespace("states").root()
        self._clock = ManualClock()
        self._groups = (
            *(GroupSpec(index, 1, is_state=True) for index in range(model.state_groups)),
            GroupSpec(model.state_groups, 1),
        )
        self._handshake = Handshake(1, lambda block_bytes: slots, clock=self._clock)
        self.host = BlockTier(Tier.HOST, LruPolicy(), self._clock)
        self._leader = Leader(
            self._groups,
            self.host,
            self._handshake,
            clock=self._clock,
            metrics=Metrics(),
            options=LeaderOptions(state_every_tokens=-(-every_tokens // model.block_tokens)),
            parts=LeaderParts(),
        )
        self._handshake.inbox.append(SlotsReady(slots, slots, 1, 1, "states"))
        self._leader.poll()

    def serve(self, request: Request) -> None:
        """Takes what the host has, computes the rest step by step, and answers."""
        self._clock.advance(max(0.0, request.at_s - self._clock.now_s()))
        state = self._leader.open("request", self._root, None)
        found = self._bring_up(state, request)
        self.found_tokens += found * self._model.block_tokens
        at = found
        while at < request.prompt_blocks:
            at = self._compute(state, request, at, min(request.prompt_blocks, at + self._step_blocks))
        while at < len(request.ids):
            at = self._compute(state, request, at, at + 1)
        self._leader.finish(state)

    def _bring_up(self, state: RequestState, request: Request) -> int:
        found = self._leader.match(state, request.ids, 0, request.reusable_blocks)
        if not found:
            return 0
        tables = [
            [NULL_BLOCK] * (found - 1) + [1] if group.is_state else [1] * found for group in self._groups
        ]
        plan = self._leader.onboard(state, found, tables)
        if plan is None:
            raise IntegrityError("blocks were promised and could not be loaded")
        self._answer(plan.job_id)
        return found

    def _compute(self, state: RequestState, request: Request, start: int, end: int) -> int:
        tables: list[Sequence[int]] = [[1] * end for _ in self._groups]
        self._leader.offload(state, request.ids, start, end, tables)
        handed = [StateOnDevice(position, 1, end) for position in range(self._model.state_groups)]
        self._leader.offload_states(state, request.ids, handed, request.prompt_blocks)
        job = self._leader.take_offloads()
        if job is not None:
            self._answer(job.job_id)
        return end

    def _answer(self, job_id: int) -> None:
        self._handshake.inbox.append(RankAnswer(0, JobResult(job_id, Outcome.OK, 1, 0.0, 0.0)))
        self._leader.poll()

    def state_share(self) -> float:
        """Of the blocks in use, how many are states."""
        self._leader.check_integrity()
        return self.host.resident_states / max(1, self.host.resident_blocks)


def run(case: Case) -> Row:
    """One case."""
    whole = LOADS[case.load]()
    trace = whole.coarser(case.model.block_tokens // whole.block_tokens)
    slots = max(8, int(case.share * trace.distinct_blocks))
    machine = StatesReplay(case.model, slots, case.every_tokens, case.step_tokens)
    for request in trace.requests:
        machine.serve(request)
    found = machine.found_tokens / trace.prompt_tokens
    return Row(case, trace.name, found, machine.state_share())


def cases(loads: Sequence[int], steps: Sequence[int]) -> list[Case]:
    """All of them."""
    return [
        Case(load, model, step, share, every)
        for model in MODELS
        for step in steps
        for load in loads
        for share in SHARES
        for every in DISTANCES
    ]


def table(rows: Sequence[Row]) -> list[str]:
    """In Markdown: a line for each load and memory, a column for each distance."""
    names = [
        "all" if not every else "ends" if every == DISTANCES[-1] else f"{every:,}" for every in DISTANCES
    ]
    lines = [
        "| model | steps | load | memory | " + " | ".join(names) + " |",
        "| --- | --- | --- | --- | " + " | ".join("---" for _ in names) + " |",
    ]
    for (model, step, name, share), group in groupby(
        rows, lambda row: (row.case.model.name, row.case.step_tokens, row.trace, row.case.share)
    ):
        found = [row.found for row in group]
        best = max(found)
        marked = [f"**{each:.1%}**" if each > best - 0.005 else f"{each:.1%}" for each in found]
        lines.append(f"| {model} | {step:,} | {name} | {share:.0%} | " + " | ".join(marked) + " |")
    return lines


def main(argv: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plan.states", description=__doc__)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--steps", type=int, nargs="+", default=[2048, 8192], help="tokens of a prefill step")
    arguments = parser.parse_args(argv)
    todo = cases(range(len(LOADS)), arguments.steps)
    with ProcessPoolExecutor(arguments.processes, get_context("spawn")) as pool:
        rows = list(pool.map(run, todo))
    print("\n".join(table(rows)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
