"""The disk tier on real vLLM: what neither the device nor the host has room for comes back from disk after
SIGKILL, byte for byte, with all ranks of a tensor-parallel engine, with windows, and without a host tier.
test_lower_tiers.py has one rank.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.engine_child import answers, assert_bytes_equal, assert_nothing_left, cached, run_engine

BLOCK = 32
PROMPT_TOKENS = 4000
PROMPT_BLOCKS = PROMPT_TOKENS // BLOCK
NUM_PROMPTS = 10
DEVICE_FOR_TWO = 2 * (PROMPT_BLOCKS + 2) + 1

pytestmark = pytest.mark.timeout(900)


def environment(tmp_path: Path, **more: str) -> dict[str, str]:
    """A host tier for four prompts, and a disk for all."""
    return {
        "DYN_KVBM_CPU_CACHE_OVERRIDE_NUM_BLOCKS": str(4 * PROMPT_BLOCKS),
        "DYN_KVBM_DISK_CACHE_GB": "1.5",
        "DYN_KVBM_DISK_CACHE_DIR": str(tmp_path / "cache"),
        "KVBM_TEST_DISK_LEDGER": str(tmp_path / "ledger"),
        **more,
    }


def job(model: Path, prompts: list[list[int]], rounds: int, **more: Any) -> dict[str, Any]:
    """The prompts one after the other, ``rounds`` times."""
    llm = {
        "block_size": BLOCK,
        "max_model_len": 4096,
        "num_gpu_blocks_override": DEVICE_FOR_TWO,
        "dtype": "float32",  # in bfloat16 an engine without connector may answer otherwise at a tie
        **more.pop("llm", {}),
    }
    spec = [{"prompts": prompts, "max_tokens": 8}] * rounds
    return {"model": str(model), "llm": llm, "connector": True, "rounds": spec, **more}


@pytest.fixture
def prompts(rng: random.Random) -> list[list[int]]:
    """That share nothing."""
    return [[rng.randrange(3, 500) for _ in range(PROMPT_TOKENS)] for _ in range(NUM_PROMPTS)]


@pytest.mark.nightly("two engines more, of two ranks each; tests/vllm/test_scheduler_disk.py has two ranks")
def test_both_ranks_find_their_shards_after_sigkill(
    tiny_model: Path, tmp_path: Path, prompts: list[list[int]]
) -> None:
    env = environment(tmp_path)
    llm = {"tensor_parallel_size": 2}
    first = run_engine(tmp_path / "first", job(tiny_model, prompts[:5], 2, llm=llm, dies=True), **env)
    again = run_engine(tmp_path / "again", job(tiny_model, prompts[:5], 1, llm=llm), **env)
    assert min(cached(again, 0)) >= PROMPT_TOKENS - BLOCK
    assert answers(again, 0) == answers(first, 1)
    assert_bytes_equal(again, ranks=2, at_least=4 * (PROMPT_BLOCKS - 1))
    assert all(counts["read"] >= 4 * (PROMPT_BLOCKS - 1) for counts in again["bytes"])


@pytest.mark.nightly("two engines more; tests/vllm/test_scheduler_disk.py has windows, and no host tier")
def test_windows_and_a_disk_without_a_host_tier(
    tiny_hybrid_model: Path, tmp_path: Path, rng: random.Random
) -> None:
    texts = [[rng.randrange(3, 500) for _ in range(1500)] for _ in range(6)]
    env = environment(tmp_path, DYN_KVBM_CPU_CACHE_OVERRIDE_NUM_BLOCKS="", DYN_KVBM_CPU_CACHE_GB="")
    llm = {"num_gpu_blocks_override": 260, "max_model_len": 2048, "dtype": "float32"}
    first = run_engine(tmp_path / "first", job(tiny_hybrid_model, texts, 2, llm=llm, dies=True), **env)
    again = run_engine(tmp_path / "again", job(tiny_hybrid_model, texts, 1, llm=llm), **env)
    assert max(cached(first, 0)) == 0
    assert answers(first, 0) == answers(first, 1) == answers(again, 0)
    assert min(cached(again, 0)) > 0
    assert again["bytes"][0]["read"] > 0
    assert_bytes_equal(again, ranks=1, at_least=1)
    assert_nothing_left(again)
