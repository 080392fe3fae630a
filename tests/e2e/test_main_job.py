"""The main job on real vLLM: what the device cache forgot comes back from host memory, byte for byte, token
for token.

The yardstick is the same engine without kvbm and with a device cache large enough for everything: cold
answers in the first round, answers after a device prefix hit in the second.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.engine_child import answers, assert_bytes_equal, assert_nothing_left, cached, run_engine

BLOCK = 32
PROMPT_TOKENS = 4000
NUM_PROMPTS = 10
DEVICE_FOR_TWO = 2 * (PROMPT_TOKENS // BLOCK + 2) + 1
CHUNKED = {"max_num_batched_tokens": 512, "max_model_len": 2304, "dtype": "float32"}
DEVICE_FOR_ALL = NUM_PROMPTS * (PROMPT_TOKENS // BLOCK + 4) + 1

pytestmark = pytest.mark.timeout(900)


def _prompts(rng: random.Random, count: int, length: int) -> list[list[int]]:
    return [[rng.randrange(3, 500) for _ in range(length)] for _ in range(count)]


def _job(
    model: Path, rounds: list[dict[str, Any]], *, connector: bool, blocks: int, **llm: Any
) -> dict[str, Any]:
    settings = {"block_size": BLOCK, "max_model_len": 4096, "num_gpu_blocks_override": blocks, **llm}
    return {"model": str(model), "llm": settings, "connector": connector, "rounds": rounds}


def _two_rounds(prompts: list[list[int]], max_tokens: int = 8) -> list[dict[str, Any]]:
    return [{"prompts": prompts, "max_tokens": max_tokens}] * 2


@pytest.mark.parametrize("chunk_tokens", [8192, 512], ids=["whole", "chunked"])
def test_ten_prompts_come_back(
    tiny_model: Path, tmp_path: Path, rng: random.Random, chunk_tokens: int
) -> None:
    rounds = _two_rounds(_prompts(rng, NUM_PROMPTS, PROMPT_TOKENS))
    llm = {"max_num_batched_tokens": chunk_tokens}
    plain = run_engine(
        tmp_path / "plain", _job(tiny_model, rounds, connector=False, blocks=DEVICE_FOR_ALL, **llm)
    )
    ours = run_engine(
        tmp_path / "ours", _job(tiny_model, rounds, connector=True, blocks=DEVICE_FOR_TWO, **llm)
    )
    assert cached(plain, 1) == [(PROMPT_TOKENS - 1) // BLOCK * BLOCK] * NUM_PROMPTS
    assert min(cached(ours, 1)) >= PROMPT_TOKENS - BLOCK
    assert ours["metrics"]["kvbm_matched_tokens"] == sum(cached(ours, 1))
    assert answers(ours, 0) == answers(plain, 0)
    assert answers(ours, 1) == answers(plain, 1)
    assert_bytes_equal(ours, ranks=1, at_least=NUM_PROMPTS * (PROMPT_TOKENS // BLOCK - 1))
    assert_nothing_left(ours)


def test_tensor_parallel(tiny_model: Path, tmp_path: Path, rng: random.Random) -> None:
    rounds = _two_rounds(_prompts(rng, NUM_PROMPTS, PROMPT_TOKENS))
    llm = {"tensor_parallel_size": 2}
    plain = run_engine(
        tmp_path / "plain", _job(tiny_model, rounds, connector=False, blocks=DEVICE_FOR_ALL, **llm)
    )
    ours = run_engine(
        tmp_path / "ours", _job(tiny_model, rounds, connector=True, blocks=DEVICE_FOR_TWO, **llm)
    )
    assert min(cached(ours, 1)) >= PROMPT_TOKENS - BLOCK
    assert answers(ours, 0) == answers(plain, 0)
    assert answers(ours, 1) == answers(plain, 1)
    assert_bytes_equal(ours, ranks=2, at_least=NUM_PROMPTS * (PROMPT_TOKENS // BLOCK - 1))


def test_preemption(tiny_model: Path, tmp_path: Path, rng: random.Random) -> None:
    """More requests than the device cache can decode at once: some are preempted, resumed, and find their
    blocks again.

    float32, because preemption changes who shares a batch, and with it the rounding of bf16.
    """
    spec = {"prompts": _prompts(rng, 8, 640), "max_tokens": 256, "together": True}
    plain = run_engine(
        tmp_path / "plain",
        _job(tiny_model, [spec], connector=False, blocks=400, dtype="float32", max_model_len=2048),
    )
    ours = run_engine(
        tmp_path / "ours",
        _job(tiny_model, [spec], connector=True, blocks=120, dtype="float32", max_model_len=2048),
    )
    assert plain["preemptions"] == 0
    assert ours["preemptions"] > 0
    assert answers(ours, 0) == answers(plain, 0)
    assert_bytes_equal(ours, ranks=1, at_least=1)
    assert_nothing_left(ours)


def test_blocks_made_while_decoding_serve_the_next_turn(
    tiny_model: Path, tmp_path: Path, rng: random.Random
) -> None:
    """Turn two repeats question and answer; the answer's blocks were written during decode and are matched as
    well.
    """
    first, filler, question = (_prompts(rng, n, length) for n, length in ((1, 300), (4, 1500), (1, 40)))
    opening = {"prompts": first, "max_tokens": 200}
    plain = run_engine(
        tmp_path / "a", _job(tiny_model, [opening], connector=False, blocks=600, dtype="float32")
    )
    second = {"prompts": [first[0] + answers(plain, 0)[0] + question[0]], "max_tokens": 16}
    flood = {"prompts": filler, "max_tokens": 1}
    baseline = run_engine(
        tmp_path / "plain",
        _job(tiny_model, [opening, flood, second], connector=False, blocks=600, dtype="float32"),
    )
    # vLLM needs room for one sequence of max_model_len at least; the fillers then push everything else out.
    ours = run_engine(
        tmp_path / "ours",
        _job(
            tiny_model,
            [opening, flood, second],
            connector=True,
            blocks=70,
            dtype="float32",
            max_model_len=2048,
        ),
    )
    assert [answers(ours, i) for i in (0, 2)] == [answers(baseline, i) for i in (0, 2)]
    assert cached(ours, 2)[0] >= (300 + 199) // BLOCK * BLOCK
    assert ours["metrics"]["kvbm_onboard_blocks_h2d"] >= (300 + 199) // BLOCK
    assert_nothing_left(ours)


def test_hybrid_model(tiny_hybrid_model: Path, tmp_path: Path, rng: random.Random) -> None:
    """Sliding window and full attention: two KV cache groups, each with its own blocks under its own keys."""
    rounds = _two_rounds(_prompts(rng, 6, 2000))
    plain = run_engine(
        tmp_path / "plain", _job(tiny_hybrid_model, rounds, connector=False, blocks=1400, **CHUNKED)
    )
    ours = run_engine(
        tmp_path / "ours", _job(tiny_hybrid_model, rounds, connector=True, blocks=180, **CHUNKED)
    )
    assert min(cached(ours, 1)) >= 2000 - 2 * BLOCK
    assert ours["metrics"]["kvbm_onboard_blocks_h2d"] > 0
    assert answers(ours, 0) == answers(plain, 0)
    assert answers(ours, 1) == answers(plain, 1)
    assert_bytes_equal(ours, ranks=1, at_least=100)
    assert_nothing_left(ours)


@pytest.mark.parametrize("kind", ["one_group", "hybrid"])
def test_failed_loads_are_recomputed(
    tiny_model: Path, tiny_hybrid_model: Path, tmp_path: Path, rng: random.Random, kind: str
) -> None:
    """Every second load fails and leaves garbage on the device: vLLM recomputes, no answer changes."""
    model = tiny_model if kind == "one_group" else tiny_hybrid_model
    small, large = (200, 500) if kind == "one_group" else (180, 1400)
    rounds = _two_rounds(_prompts(rng, 6, 2000))
    plain = run_engine(tmp_path / "plain", _job(model, rounds, connector=False, blocks=large, **CHUNKED))
    ours = run_engine(
        tmp_path / "ours",
        _job(model, rounds, connector=True, blocks=small, **CHUNKED),
        KVBM_TEST_FAIL_EVERY="2",
    )
    assert sum(counts["failed_on_purpose"] for counts in ours["bytes"]) >= 2
    assert ours["metrics"]['kvbm_failures_total{kind="onboard_io_error"}'] >= 2
    assert answers(ours, 0) == answers(plain, 0)
    assert answers(ours, 1) == answers(plain, 1)
    assert_nothing_left(ours)
