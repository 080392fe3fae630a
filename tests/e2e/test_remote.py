"""Stores that engines share, on real vLLM: what one engine has computed is a hit in another one."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.engine_child import answers, assert_nothing_left, cached, run_engine
from tests.e2e.test_disk import BLOCK, PROMPT_BLOCKS, PROMPT_TOKENS, job
from tests.engines.object_servers import SECRET_KEY
from tests.engines.shared_stores import bucket, directory, mooncake, valkey

NUM_PROMPTS = 3
DEVICE_FOR_ALL = NUM_PROMPTS * (PROMPT_BLOCKS + 4) + 1

pytestmark = pytest.mark.timeout(600)


ENVIRONMENT = {
    "DYN_KVBM_CPU_CACHE_OVERRIDE_NUM_BLOCKS": str(8 * PROMPT_BLOCKS),
    "KVBM_REMOTE_LOAD": "always",  # models this small are computed sooner
    "KVBM_REMOTE_WAIT_S": "20",
    "KVBM_REMOTE_DEADLINE_S": "20",
}
"""A host tier for all prompts."""


@pytest.fixture
def prompts(rng: random.Random) -> list[list[int]]:
    """Some that share nothing."""
    return [[rng.randrange(3, 500) for _ in range(PROMPT_TOKENS)] for _ in range(NUM_PROMPTS)]


@pytest.mark.nightly("two engines more of each store; test_lower_tiers.py has a bucket")
@pytest.mark.parametrize(
    "store",
    [
        directory,
        pytest.param(valkey, marks=pytest.mark.valkey),
        pytest.param(mooncake, marks=pytest.mark.mooncake),
    ],
)
def test_what_one_engine_has_computed_is_a_hit_in_another(
    tiny_model: Path,
    tmp_path: Path,
    prompts: list[list[int]],
    store: Callable[[Path], AbstractContextManager[dict[str, str]]],
) -> None:
    with store(tmp_path) as of_store:
        settings = {**ENVIRONMENT, **of_store}
        first, _ = compute_and_find(tiny_model, tmp_path, prompts, settings)
    if store is directory:  # it is gone
        assert_computes(tmp_path, whole_job(tiny_model, prompts), settings, first)


@pytest.mark.nightly("three engines more; tests/faults/test_s3_credentials.py always has a wrong key")
def test_an_engine_with_the_wrong_key_of_a_bucket_computes(
    tiny_model: Path, tmp_path: Path, prompts: list[list[int]]
) -> None:
    with bucket(tmp_path) as of_store:
        settings = {**ENVIRONMENT, **of_store}
        first, _ = compute_and_find(tiny_model, tmp_path, prompts, settings)
        settings["AWS_SECRET_ACCESS_KEY"] = "another"
        third = assert_computes(tmp_path, whole_job(tiny_model, prompts), settings, first)
    assert "the credentials are wrong" in third["log"]
    assert not any(SECRET_KEY in engine["log"] for engine in (first, third))


def whole_job(model: Path, prompts: list[list[int]], rounds: int = 1) -> dict[str, Any]:
    """All prompts, with room for them on the device."""
    # In bfloat16 vLLM without a connector may answer a hit otherwise than a miss, where two logits are close.
    whole = {"num_gpu_blocks_override": DEVICE_FOR_ALL, "dtype": "float32"}
    return job(model, prompts, rounds, llm=whole)


def assert_computes(
    folder: Path, job: dict[str, Any], settings: dict[str, str], other: dict[str, Any]
) -> dict[str, Any]:
    """The result of a third engine, which finds nothing and serves: it answers as the other one."""
    third = run_engine(folder / "third", job, **settings)
    assert max(cached(third, 0)) == 0 and answers(third, 0) == answers(other, 0)
    assert_nothing_left(third)
    return third


def compute_and_find(
    model: Path, folder: Path, prompts: list[list[int]], settings: dict[str, str]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The results of an engine that computes, and is asked again, and of another one that finds all of it."""
    first = run_engine(folder / "first", whole_job(model, prompts, rounds=2), **settings)
    assert max(cached(first, 0)) == 0
    assert first["metrics"]["kvbm_offload_blocks_d2o"] >= NUM_PROMPTS * PROMPT_BLOCKS
    assert_nothing_left(first)

    second = run_engine(folder / "second", whole_job(model, prompts), **settings)
    assert min(cached(second, 0)) >= PROMPT_TOKENS - BLOCK
    assert answers(second, 0) == answers(first, 0)
    (counts,) = second["bytes"]  # this engine has not seen what was stored: the store's own checks have
    assert counts["onboarded"] >= NUM_PROMPTS * (PROMPT_BLOCKS - 1) and counts["different"] == 0
    assert second["metrics"]["kvbm_onboard_blocks_o2d"] >= NUM_PROMPTS * (PROMPT_BLOCKS - 1)
    assert second["metrics"]["kvbm_object_read_failures"] == 0
    assert_nothing_left(second)
    return first, second
