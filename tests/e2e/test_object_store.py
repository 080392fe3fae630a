"""A bucket that engines share, on real vLLM: what one engine has computed is a hit in another one."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.e2e.engine_child import answers, assert_nothing_left, cached, run_engine
from tests.e2e.test_disk import BLOCK, DEVICE_FOR_ALL, PROMPT_BLOCKS, PROMPT_TOKENS, job
from tests.effort import IS_NIGHTLY
from tests.engines.object_servers import BUCKET, SECRET_KEY, SeaweedServer

NUM_PROMPTS = 3

pytestmark = pytest.mark.timeout(600)


@pytest.fixture
def prompts(rng: random.Random) -> list[list[int]]:
    """Some that share nothing."""
    return [[rng.randrange(3, 500) for _ in range(PROMPT_TOKENS)] for _ in range(NUM_PROMPTS)]


def test_what_one_engine_has_computed_is_a_hit_in_another(
    tiny_model: Path, tmp_path: Path, prompts: list[list[int]]
) -> None:
    # In bfloat16 vLLM without a connector may answer a hit otherwise than a miss, where two logits are close.
    whole = {"num_gpu_blocks_override": DEVICE_FOR_ALL, "dtype": "float32"}
    with SeaweedServer(tmp_path / "server") as server:
        server.make_bucket()
        environment = {
            "DYN_KVBM_CPU_CACHE_OVERRIDE_NUM_BLOCKS": str(8 * PROMPT_BLOCKS),
            "KVBM_REMOTE_URL": f"s3://{BUCKET}/e2e",
            "KVBM_REMOTE_LOAD": "always",  # models this small are computed sooner
            "KVBM_REMOTE_FILTER": "all",
            "KVBM_REMOTE_WAIT_S": "20",
            "KVBM_REMOTE_DEADLINE_S": "20",
            **server.client_environment,
        }
        first = run_engine(tmp_path / "first", job(tiny_model, prompts, 1, llm=whole), **environment)
        assert max(cached(first, 0)) == 0
        assert first["metrics"]["kvbm_offload_blocks_d2o"] >= NUM_PROMPTS * PROMPT_BLOCKS
        assert_nothing_left(first)

        second = run_engine(tmp_path / "second", job(tiny_model, prompts, 1, llm=whole), **environment)
        assert min(cached(second, 0)) >= PROMPT_TOKENS - BLOCK
        assert answers(second, 0) == answers(first, 0)
        (counts,) = second["bytes"]  # this engine has not seen what was stored: the store's own checks have
        assert counts["onboarded"] >= NUM_PROMPTS * (PROMPT_BLOCKS - 1) and counts["different"] == 0
        assert second["metrics"]["kvbm_onboard_blocks_o2d"] >= NUM_PROMPTS * (PROMPT_BLOCKS - 1)
        assert second["metrics"]["kvbm_object_read_failures"] == 0
        assert_nothing_left(second)

        engines = [first, second]
        if IS_NIGHTLY:  # tests/faults/test_s3_credentials.py always has a wrong key
            wrong = {**environment, "AWS_SECRET_ACCESS_KEY": "another"}  # it finds nothing, and serves
            third = run_engine(tmp_path / "third", job(tiny_model, prompts, 1, llm=whole), **wrong)
            assert max(cached(third, 0)) == 0 and answers(third, 0) == answers(first, 0)
            assert_nothing_left(third)
            assert "the credentials are wrong" in third["log"]
            engines.append(third)
    assert "kvbm: object store: s3://" in first["log"]
    assert not any(SECRET_KEY in engine["log"] for engine in engines)
