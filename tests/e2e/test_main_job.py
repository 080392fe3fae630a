"""The main job on real vLLM: what the device cache forgot comes back from host memory, byte for byte, token
for token.

The yardstick is the same engine without kvbm and with a device cache large enough for everything: cold
answers in the first round, answers after a device prefix hit in the second. In float32, as who shares a batch
and where a prompt is cut change the rounding of bfloat16; test_disk.py compares in bfloat16, with whole
prompts. An engine is started once and asked by several tests, on empty caches.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.engine_child import (
    Engine,
    answers,
    assert_bytes_equal,
    assert_nothing_left,
    cached,
    run_engine,
)
from tests.effort import tries

BLOCK = 32
PROMPT_TOKENS = tries(2000, nightly=4000)
NUM_PROMPTS = tries(5, nightly=10)
DEVICE_FOR_ONE = 4096 // BLOCK + 2  # vLLM wants room for one request of max_model_len
DEVICE_FOR_ALL = NUM_PROMPTS * (PROMPT_TOKENS // BLOCK + 4) + 1
HYBRID = {"max_model_len": 2304}

pytestmark = pytest.mark.timeout(900)


def _prompts(rng: random.Random, count: int, length: int) -> list[list[int]]:
    return [[rng.randrange(3, 500) for _ in range(length)] for _ in range(count)]


def _job(model: Path, *, connector: bool, blocks: int, **llm: Any) -> dict[str, Any]:
    settings: dict[str, Any] = {"block_size": BLOCK, "max_model_len": 4096, "dtype": "float32"}
    settings |= {"max_num_batched_tokens": 512, "num_gpu_blocks_override": blocks, **llm}
    return {"model": str(model), "llm": settings, "connector": connector}


def _two_rounds(prompts: list[list[int]], max_tokens: int = 8) -> list[dict[str, Any]]:
    return [{"prompts": prompts, "max_tokens": max_tokens}] * 2


@pytest.fixture(scope="module")
def engine_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the engines that tests share."""
    return tmp_path_factory.mktemp("engines")


@pytest.fixture(scope="module")
def plain(tiny_model: Path, engine_folder: Path) -> Iterator[Engine]:
    """Without kvbm, and with room for everything."""
    engine = Engine(engine_folder / "plain", _job(tiny_model, connector=False, blocks=DEVICE_FOR_ALL))
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def ours(tiny_model: Path, engine_folder: Path) -> Iterator[Engine]:
    """With kvbm, on a device that holds the longest prompt and no more."""
    engine = Engine(engine_folder / "ours", _job(tiny_model, connector=True, blocks=DEVICE_FOR_ONE))
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def hybrid_plain(tiny_hybrid_model: Path, engine_folder: Path) -> Iterator[Engine]:
    """As ``plain``, with windows."""
    job = _job(tiny_hybrid_model, connector=False, blocks=1400, **HYBRID)
    engine = Engine(engine_folder / "hybrid-plain", job)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def hybrid_ours(tiny_hybrid_model: Path, engine_folder: Path) -> Iterator[Engine]:
    """As ``ours``, with windows."""
    engine = Engine(
        engine_folder / "hybrid-ours", _job(tiny_hybrid_model, connector=True, blocks=180, **HYBRID)
    )
    yield engine
    engine.close()


def test_prompts_come_back(plain: Engine, ours: Engine, rng: random.Random) -> None:
    rounds = _two_rounds(_prompts(rng, NUM_PROMPTS, PROMPT_TOKENS))
    right, found = plain.serve(rounds), ours.serve(rounds)
    assert cached(right, 1) == [(PROMPT_TOKENS - 1) // BLOCK * BLOCK] * NUM_PROMPTS
    assert min(cached(found, 1)) >= PROMPT_TOKENS - BLOCK
    assert found["metrics"]["kvbm_matched_tokens"] == sum(cached(found, 1))
    assert answers(found, 0) == answers(right, 0)
    assert answers(found, 1) == answers(right, 1)
    assert_bytes_equal(found, ranks=1, at_least=NUM_PROMPTS * (PROMPT_TOKENS // BLOCK - 1))
    assert_nothing_left(found)


@pytest.mark.nightly("an engine of two ranks more; tests/e2e/test_remote.py has one, with a host tier")
def test_tensor_parallel(tiny_model: Path, tmp_path: Path, rng: random.Random) -> None:
    """Cold, and from the host memory of both ranks."""
    rounds = _two_rounds(_prompts(rng, NUM_PROMPTS, PROMPT_TOKENS))
    job = _job(tiny_model, connector=True, blocks=DEVICE_FOR_ONE, tensor_parallel_size=2)
    found = run_engine(tmp_path / "ours", job | {"rounds": rounds})
    assert max(cached(found, 0)) == 0
    assert min(cached(found, 1)) >= PROMPT_TOKENS - BLOCK
    assert answers(found, 1) == answers(found, 0)
    assert_bytes_equal(found, ranks=2, at_least=NUM_PROMPTS * (PROMPT_TOKENS // BLOCK - 1))


def test_preemption(plain: Engine, ours: Engine, rng: random.Random) -> None:
    """More requests than the device cache can decode at once: some are preempted, resumed, and find their
    blocks again.
    """
    rounds = [{"prompts": _prompts(rng, 8, 640), "max_tokens": 96, "together": True}]
    right, found = plain.serve(rounds), ours.serve(rounds)
    assert right["metrics"]["preemptions"] == 0
    assert found["metrics"]["preemptions"] > 0
    assert answers(found, 0) == answers(right, 0)
    assert_bytes_equal(found, ranks=1, at_least=1)
    assert_nothing_left(found)


def test_blocks_made_while_decoding_serve_the_next_turn(
    plain: Engine, ours: Engine, rng: random.Random
) -> None:
    """Turn two repeats question and answer; the answer's blocks were written during decode and are matched as
    well.
    """
    first, filler, question = (_prompts(rng, n, length) for n, length in ((1, 300), (4, 1500), (1, 40)))
    opening = {"prompts": first, "max_tokens": 100}
    answer = answers(plain.serve([opening]), 0)[0]
    second = {"prompts": [first[0] + answer + question[0]], "max_tokens": 16}
    rounds = [opening, {"prompts": filler, "max_tokens": 1}, second]
    right, found = plain.serve(rounds), ours.serve(rounds)
    assert [answers(found, i) for i in (0, 2)] == [answers(right, i) for i in (0, 2)]
    assert cached(found, 2)[0] >= (300 + 99) // BLOCK * BLOCK
    assert found["metrics"]["kvbm_onboard_blocks_h2d"] >= (300 + 99) // BLOCK
    assert_nothing_left(found)


def test_hybrid_model(hybrid_plain: Engine, hybrid_ours: Engine, rng: random.Random) -> None:
    """Sliding window and full attention: two KV cache groups, each with its own blocks under its own keys."""
    rounds = _two_rounds(_prompts(rng, 6, 2000))
    right, found = hybrid_plain.serve(rounds), hybrid_ours.serve(rounds)
    assert min(cached(found, 1)) >= 2000 - 2 * BLOCK
    assert found["metrics"]["kvbm_onboard_blocks_h2d"] > 0
    assert answers(found, 0) == answers(right, 0)
    assert answers(found, 1) == answers(right, 1)
    assert_bytes_equal(found, ranks=1, at_least=100)
    assert_nothing_left(found)


@pytest.mark.parametrize("kind", ["one_group", "hybrid"])
def test_failed_loads_are_recomputed(request: pytest.FixtureRequest, rng: random.Random, kind: str) -> None:
    """Every second load fails and leaves garbage on the device: vLLM recomputes, no answer changes."""
    engines = ("plain", "ours") if kind == "one_group" else ("hybrid_plain", "hybrid_ours")
    plain, ours = (request.getfixturevalue(name) for name in engines)
    rounds = _two_rounds(_prompts(rng, 6, 2000))
    right, found = plain.serve(rounds), ours.serve(rounds, fail_every=2)
    assert sum(counts["failed_on_purpose"] for counts in found["bytes"]) >= 2
    assert found["metrics"]['kvbm_failures_total{kind="onboard_io_error"}'] >= 2
    assert answers(found, 0) == answers(right, 0)
    assert answers(found, 1) == answers(right, 1)
    assert_nothing_left(found)
