"""A warm interpreter with vLLM that forks engines for test_kills.py: one for each line on standard input.

Orders: number of the engine, seed, folder, settings as JSON with "store"; what else a store takes is in the
environment. See tests/faults/nurseries.py; a call is a request.
"""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path
from random import Random
from typing import Any

from tests.faults.nurseries import MOST_CALLS, Calls, Moment, fork_for_each_line
from tests.vllm.kvbm_engine import KvbmEngine

NUM_PROMPTS, NUM_SHARED = 6, 2
"""The first few are asked by another engine meanwhile."""
ANSWER_TOKENS = 4
HOST_BLOCKS = 120


def prompts_of(engine: int) -> list[list[int]]:
    """What the engine with this number is asked; no other one has any block of it."""
    return [[1 + engine, *range(start, start + 49)] for start in range(0, 100 * NUM_PROMPTS, 100)]


def opened(folder: Path, settings: dict[str, Any]) -> KvbmEngine:
    """An engine whose host tier holds all prompts."""
    extra = dict(settings)
    store = extra.pop("store", None)
    return KvbmEngine(folder, host_blocks=HOST_BLOCKS, store=store, extra=extra)


def write(order: str, moment: Moment) -> None:
    """Answers until it is killed; what it has computed goes to the store. One prompt is there, whole, before
    its first call.
    """
    number, seed, folder, settings = order.split(" ", 3)
    rng, prompts = Random(int(seed)), prompts_of(int(number))
    with opened(Path(folder), json.loads(settings)) as engine:
        engine.ask("whole", rng.choice(prompts[NUM_SHARED:]), ANSWER_TOKENS)
        engine.settle()
        calls = Calls(moment)
        for call in range(MOST_CALLS):
            prompt = rng.choice(prompts)
            calls.begin(call)
            engine.ask(str(call), prompt, ANSWER_TOKENS)


if __name__ == "__main__":
    import_module(sys.argv[1])  # the store's client, loaded once for all engines
    fork_for_each_line(write)
