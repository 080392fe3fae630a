"""Engines that differ in one of vLLM's own arguments, on one disk: what one of them finds there is what it
would compute, or it finds nothing. The arguments are drawn from vLLM, as in tests/vllm/test_arguments.py,
which has all of them by key.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.engine_child import answers, cached, run_engine
from tests.e2e.test_audit import BLOCK, EQUAL, PROMPT_BLOCKS, PROMPT_TOKENS, WRONG, job_of
from tests.engines.job import EngineFailed
from tests.vllm.arguments import drawn, is_harmless

NUM_PAIRS, MOST_TRIED = 12, 60
NUM_SHARING = 8
"""Pairs of these share their keys, as a table says that the argument shapes no K or V."""
IN_JOBS = {
    "block_size",
    "disable_log_stats",
    "enforce_eager",
    "max_model_len",
    "num_gpu_blocks_override",
    "seed",
}
LEFT_OUT = {*IN_JOBS, "tensor_parallel_size"}
"""Arguments that the engines of this folder have already, and what test_lower_tiers.py has."""


def pairs(sharing: bool, draw: random.Random) -> list[tuple[str, Any]]:
    """Arguments, one value each, that are declared to keep the keys, or are not."""
    found = [
        pair
        for pair in drawn()
        if pair[0] not in LEFT_OUT
        and is_harmless(*pair) is sharing
        and isinstance(pair[1], bool | int | float | str)
    ]
    draw.shuffle(found)
    return list(dict(found).items())


@pytest.mark.nightly("a dozen engines and those that do not start; tests/vllm/test_arguments.py has keys")
@pytest.mark.timeout(3600)
def test_an_engine_with_another_argument_finds_what_it_would_compute(
    tiny_model: Path, tmp_path: Path, rng: random.Random
) -> None:
    prompts = [[rng.randrange(3, 500) for _ in range(PROMPT_TOKENS)] for _ in range(2)]
    asked = {"prompts": prompts, "max_tokens": 8, "audited": True}
    disk = {"DYN_KVBM_DISK_CACHE_GB": "0.5", "DYN_KVBM_DISK_CACHE_DIR": str(tmp_path / "disk")}

    def engine(name: str, rounds: int, more: dict[str, Any], **how: Any) -> dict[str, Any]:
        job = {**job_of(tiny_model, "float32", [asked] * rounds), **how}
        job["llm"] |= more
        return run_engine(tmp_path / name, job, **disk, KVBM_AUDIT_RATE="0" if rounds > 1 else "1")

    base = engine("base", 3, {})
    assert min(cached(base, 2)) >= PROMPT_TOKENS - BLOCK
    assert base["metrics"]["kvbm_offload_blocks_h2d"] >= len(prompts) * PROMPT_BLOCKS
    compared: dict[str, float] = {}
    not_started: list[str] = []
    for sharing, wanted in ((True, NUM_SHARING), (False, NUM_PAIRS)):
        for name, value in pairs(sharing, rng):
            if len(compared) == wanted:
                break
            said = f"{name}={json.dumps(value)}"
            assert len(not_started) < MOST_TRIED, not_started
            try:
                found = engine(name, 1, {name: value})
            except EngineFailed as failed:
                with pytest.raises(EngineFailed):  # or it is kvbm with which it does not start
                    print(said, engine(f"{name}-alone", 1, {name: value}, connector=False), failed)
                not_started.append(said)
                continue
            (audited,) = found["audited"]
            assert audited[WRONG] == 0, said
            if sharing:
                assert audited[EQUAL] >= len(prompts) * (PROMPT_BLOCKS - 1), said
            assert answers(found, 0) == answers(base, 0) or not sharing, said
            compared[said] = audited[EQUAL]
    print(compared, "not started:", not_started)
    assert len(compared) == NUM_PAIRS
