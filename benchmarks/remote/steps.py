"""How long vLLM's steps take while a shared store does not answer, beside the same engine without a store.

Two engines, each in a process of its own, take turns. Of each round only steps are timed in which four
requests decode and no prompt is computed; meanwhile four others come, whose prefixes the store is asked for.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from random import Random
from statistics import median, quantiles
from typing import Any

from benchmarks.figures import Figure, Goal
from benchmarks.suite import CannotRun, Options, expect
from benchmarks.timing import rotated
from tests.engines.forks import python
from tests.engines.silent_server import silent_server
from tests.engines.tiny_model import ensure_model
from tests.engines.worker import Worker

PEER = "kvbm without a store"
GOALS = {
    "median": Goal("a store that hangs: vLLM's step", "ms", 1.05, "lower", PEER),
    "p99": Goal("a store that hangs: vLLM's step, 99th percentile", "ms", 1.25, "lower", PEER),
}
TOGETHER = 4
PROMPT_TOKENS = 256
ANSWER_TOKENS = 96
JOIN_AFTER_STEPS = 24
THIS = "benchmarks.remote.steps"
KVBM = {
    "DYN_KVBM_CPU_CACHE_GB": "0.5",
    "KVBM_REMOTE_LOAD": "always",  # a model this small is computed sooner, and nobody would be asked
    "KVBM_REMOTE_FILTER": "all",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the scheduler's steps are in the process that times them
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",  # several wait for each other by spinning, and for whatever else runs
}


def measure(options: Options) -> list[Figure]:
    """CannotRun without vLLM."""
    if find_spec("vllm") is None:
        raise CannotRun("vLLM is not installed; make setup brings it")
    model = ensure_model(options.output / "tiny-qwen3")
    samples: dict[str, dict[str, list[float]]] = {what: {PEER: [], "kvbm": []} for what in GOALS}
    with ExitStack() as stack:
        server = stack.enter_context(silent_server())
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        hanging = {"KVBM_REMOTE_URL": "s3://bucket/steps", **server.environment}
        engines = []
        for name, more in ((PEER, {}), ("kvbm", hanging)):
            worker = Worker(python(sys.executable), {**os.environ, **KVBM, **more}, folder / f"{name}.log")
            stack.callback(worker.close)
            worker.run(f"{THIS}:start", model=str(model))
            engines.append((name, worker))
        for number in range(-1, options.choose(2, 8, 16)):
            for name, worker in rotated(engines, number):
                steps_ms = worker.run(f"{THIS}:decode", seed=1000 * options.seed + number)
                if number >= 0:
                    samples["median"][name].append(median(steps_ms))
                    samples["p99"][name].append(quantiles(steps_ms, n=100)[-1])
        asked = server.connections()
        expect(asked > 0, "nobody asked the store that hangs")
    note = f"{asked} connections that nobody answered"
    return [
        Figure(goal, tuple(samples[what]["kvbm"]), {PEER: tuple(samples[what][PEER])}, note)
        for what, goal in GOALS.items()
    ]


# -------------------------------------------------------------------- in an engine's process

_engines: list[Any] = []


def start(model: str) -> None:
    """The engine of this process."""
    from vllm import LLM

    connector = {
        "kv_connector": "DynamoConnector",
        "kv_role": "kv_both",
        "kv_connector_module_path": "kvbm.vllm_integration.connector",
    }
    llm = LLM(
        model, enforce_eager=True, seed=0, block_size=32, max_model_len=1024, kv_transfer_config=connector
    )
    _engines.append(llm.llm_engine)


def decode(seed: int) -> list[float]:
    """One round; milliseconds of each step in which so many requests decode and nothing else is computed."""
    from vllm import SamplingParams

    (engine,) = _engines
    rng = Random(seed)
    sampling = SamplingParams(temperature=0.0, max_tokens=ANSWER_TOKENS, ignore_eos=True)

    def add(numbers: Sequence[int]) -> None:
        for number in numbers:
            tokens = [rng.randrange(3, 500) for _ in range(PROMPT_TOKENS)]
            engine.add_request(str(number), {"prompt_token_ids": tokens}, sampling)

    add(range(TOGETHER))
    steps_ms: list[float] = []
    num_steps = 0
    while engine.has_unfinished_requests():
        started_s = time.perf_counter()
        outputs = engine.step()
        took_ms = (time.perf_counter() - started_s) * 1e3
        num_steps += bool(outputs)
        if len(outputs) == TOGETHER and all(len(output.outputs[0].token_ids) > 1 for output in outputs):
            steps_ms.append(took_ms)
        if outputs and num_steps == JOIN_AFTER_STEPS:
            add(range(TOGETHER, 2 * TOGETHER))
    return steps_ms
