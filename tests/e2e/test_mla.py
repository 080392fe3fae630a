"""DYN_KVBM_NCCL_MLA_MODE on real vLLM: two ranks with the same latents, stored once, loaded by one of
them.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.engine_child import answers, assert_bytes_equal, cached, run_engine
from tests.engines.tiny_model import build_model

BLOCK = 16
"""The only size that vLLM's CPU kernel for MLA has."""
PROMPT_TOKENS = 400
PROMPT_BLOCKS = PROMPT_TOKENS // BLOCK
NUM_PROMPTS = 3

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_model(tmp_path_factory.mktemp("tiny") / "deepseek", "deepseek")


def job(model: Path, prompts: list[list[int]], rounds: int, ranks: int, **more: Any) -> dict[str, Any]:
    llm = {"block_size": BLOCK, "max_model_len": 1024, "num_gpu_blocks_override": 200, "dtype": "float32"}
    llm["tensor_parallel_size"] = ranks
    llm["attention_backend"] = "CPU_MLA"  # what vLLM prefers where there is AMX has no float32
    spec = [{"prompts": prompts, "max_tokens": 8}] * rounds
    return {"model": str(model), "llm": llm, "connector": True, "rounds": spec, **more}


@pytest.mark.nightly("three engines of two ranks; tests/vllm/test_mla.py: on vLLM's scheduler")
def test_latents_are_stored_once_and_come_back_to_both_ranks(
    model: Path, tmp_path: Path, rng: random.Random
) -> None:
    prompts = [[rng.randrange(3, 500) for _ in range(PROMPT_TOKENS)] for _ in range(NUM_PROMPTS)]
    env = {
        "DYN_KVBM_NCCL_MLA_MODE": "true",
        "DYN_KVBM_CPU_CACHE_GB": "0.05",
        "DYN_KVBM_DISK_CACHE_GB": "0.2",
        "DYN_KVBM_DISK_CACHE_DIR": str(tmp_path / "cache"),
        "KVBM_TEST_DISK_LEDGER": str(tmp_path / "ledger"),
    }
    plain = run_engine(tmp_path / "plain", job(model, prompts, 1, 2) | {"connector": False})
    first = run_engine(tmp_path / "first", job(model, prompts, 2, 2), **env)
    assert answers(first, 0) == answers(first, 1) == answers(plain, 0)
    assert max(cached(first, 0)) == 0 and min(cached(first, 1)) >= PROMPT_TOKENS - BLOCK
    assert_bytes_equal(first, ranks=2, at_least=NUM_PROMPTS * (PROMPT_BLOCKS - 1))
    files = [path.name for path in (tmp_path / "cache").glob("**/*.blocks")]
    assert files == ["rank-0-of-1.blocks"], "two ranks, one file"
    again = run_engine(tmp_path / "again", job(model, prompts, 1, 2), **env)
    assert min(cached(again, 0)) >= PROMPT_TOKENS - BLOCK, "after a restart, from the disk"
    assert answers(again, 0) == answers(plain, 0)
