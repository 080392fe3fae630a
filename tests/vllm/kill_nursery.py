"""A warm interpreter with vLLM that forks engines for test_kills.py: one for each line on standard input.

Lines in: seed, folder, settings as JSON with "store". Lines out: see tests/faults/nurseries.py; a call is a
request.
"""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

from tests.faults.nurseries import MOST_CALLS, fork_for_each_line, say
from tests.vllm.kvbm_engine import KvbmEngine

PROMPTS = [range(start, start + 50) for start in range(0, 800, 100)]
ANSWER_TOKENS = 4
HOST_BLOCKS = 120


def opened(folder: Path, settings: dict[str, Any]) -> KvbmEngine:
    """An engine whose host tier holds all prompts."""
    extra = dict(settings)
    store = extra.pop("store", None)
    return KvbmEngine(folder, host_blocks=HOST_BLOCKS, store=store, extra=extra)


def write(line: str) -> None:
    """Answers until it is killed; what it has computed goes to the store."""
    seed, folder, settings = line.split(" ", 2)
    rng = Random(int(seed))
    with opened(Path(folder), json.loads(settings)) as engine:
        for call in range(MOST_CALLS):
            prompt = rng.choice(PROMPTS)
            say("put", call)
            engine.ask(str(call), prompt, ANSWER_TOKENS)


if __name__ == "__main__":
    fork_for_each_line(write)
