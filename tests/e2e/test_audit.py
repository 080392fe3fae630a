"""The audit on real vLLM of what comes from the disk, and of float8: what comes back is what the engine
computes, and a wrong block is found. test_lower_tiers.py has it for the host tier.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.engine_child import AUDITED, assert_nothing_left, run_engine
from tests.engines import REPOSITORY

BLOCK = 32
PROMPT_TOKENS = 700
PROMPT_BLOCKS = PROMPT_TOKENS // BLOCK
NUM_PROMPTS = 4
EQUAL = 'kvbm_audited_blocks_total{result="equal"}'
WRONG = 'kvbm_audited_blocks_total{result="wrong"}'

pytestmark = pytest.mark.timeout(900)


def conversations(rng: random.Random) -> list[list[list[int]]]:
    """Rounds of prompts: each round's begin with those of the round before, as a conversation's turns do."""
    prompts = [[rng.randrange(3, 500) for _ in range(PROMPT_TOKENS)] for _ in range(NUM_PROMPTS)]
    rounds = [prompts]
    for _ in range(2):
        prompts = [prompt + [rng.randrange(3, 500) for _ in range(70)] for prompt in prompts]
        rounds.append(prompts)
    return rounds


def job_of(model: Path, dtype: str, rounds: list[dict[str, object]]) -> dict[str, object]:
    """On a device that has forgotten a prompt before it comes again."""
    llm = {
        "block_size": BLOCK,
        "max_model_len": 1024,
        "dtype": dtype,
        "num_gpu_blocks_override": 2 * (PROMPT_BLOCKS + 8),
        "max_num_batched_tokens": 512,
    }
    return {"model": str(model), "llm": llm, "connector": True, "rounds": rounds}


@pytest.mark.nightly("an engine more; test_lower_tiers.py compares the bytes that come from the disk")
def test_what_comes_from_the_disk_is_what_is_computed(
    tiny_model: Path, tmp_path: Path, rng: random.Random
) -> None:
    # Twice each: what was used again goes to the disk.
    twice = [prompts for prompts in conversations(rng) for _ in range(2)]
    rounds = [{"prompts": prompts, "max_tokens": 40, "audited": True} for prompts in twice]
    result = run_engine(
        tmp_path / "audited",
        job_of(tiny_model, "bfloat16", rounds),
        KVBM_AUDIT_RATE="1",
        DYN_KVBM_CPU_CACHE_OVERRIDE_NUM_BLOCKS=str(2 * PROMPT_BLOCKS),
        DYN_KVBM_DISK_CACHE_GB="1",
        DYN_KVBM_DISK_CACHE_DIR=str(tmp_path / "cache"),
        KVBM_TEST_DISK_LEDGER=str(tmp_path / "ledger"),
    )
    last = result["audited"][-1]
    assert (last[WRONG], last[EQUAL] >= 2 * NUM_PROMPTS * (PROMPT_BLOCKS - 1)) == (0, True), last
    assert result["bytes"][0]["read"] > NUM_PROMPTS * PROMPT_BLOCKS
    assert_nothing_left(result)


@pytest.mark.nightly("an engine more of each kind; tests/unit/test_audit.py compares float8")
@pytest.mark.parametrize("cache_dtype", ["fp8_e4m3", "fp8_e5m2"])
def test_float8_caches_are_compared(
    tiny_model: Path, tmp_path: Path, rng: random.Random, cache_dtype: str
) -> None:
    rounds = [{"prompts": prompts, "max_tokens": 40, "audited": True} for prompts in conversations(rng)]
    rounds.append({**rounds[-1], "swaps": True})
    job = job_of(tiny_model, "bfloat16", rounds)
    job["llm"]["kv_cache_dtype"] = cache_dtype
    result = run_engine(tmp_path / "audited", job, KVBM_AUDIT_RATE="1")
    right, found = result["audited"][:3], result["audited"][3]
    assert [entry[WRONG] for entry in right] == [0, 0, 0]
    assert right[-1][EQUAL] >= 2 * NUM_PROMPTS * (PROMPT_BLOCKS - 1)
    assert found[WRONG] > 0
    assert_nothing_left(result)


@pytest.mark.nightly("the files of this folder that always run, with all of their hits computed again")
@pytest.mark.timeout(3600)
def test_hits_of_the_other_tests_are_what_is_computed(tmp_path: Path) -> None:
    counts, files = tmp_path / "counts", ("changes", "hybrid", "lower_tiers", "main_job")
    command = [sys.executable, "-m", "pytest", "-n", "0", "-q", "-p", "no:cacheprovider"]
    command += [f"tests/e2e/test_{name}.py" for name in files]
    variables = {**os.environ, "KVBM_AUDIT_RATE": "1", AUDITED: str(counts)}
    # What they say of hits does not hold: whose hit is audited is computed.
    run = subprocess.run(command, cwd=REPOSITORY, env=variables, capture_output=True, text=True)
    jobs = [json.loads(line) for line in counts.read_text().splitlines()]
    wrong, equal = (sum(job.get(name, 0) for job in jobs) for name in (WRONG, EQUAL))
    said = f"{wrong} wrong, {equal} equal of {len(jobs)} jobs: {run.stdout[-2000:]}"
    assert wrong == 0 and equal > 1000 and len(jobs) > 10, said
