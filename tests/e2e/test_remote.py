"""A directory that engines share, on real vLLM: what one engine has computed is a hit in another one."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.e2e.engine_child import answers, assert_nothing_left, cached, run_engine
from tests.e2e.test_disk import BLOCK, DEVICE_FOR_ALL, PROMPT_BLOCKS, PROMPT_TOKENS, job

NUM_PROMPTS = 3

pytestmark = pytest.mark.timeout(600)


def environment(share: Path) -> dict[str, str]:
    """A host tier for all prompts, and the directory."""
    return {
        "DYN_KVBM_CPU_CACHE_OVERRIDE_NUM_BLOCKS": str(8 * PROMPT_BLOCKS),
        "KVBM_REMOTE_URL": f"file://{share}",
        "KVBM_REMOTE_CACHE_GB": "5",
        "KVBM_REMOTE_WAIT_S": "20",
    }


@pytest.fixture
def prompts(rng: random.Random) -> list[list[int]]:
    """Some that share nothing."""
    return [[rng.randrange(3, 500) for _ in range(PROMPT_TOKENS)] for _ in range(NUM_PROMPTS)]


def test_what_one_engine_has_computed_is_a_hit_in_another(
    tiny_model: Path, tmp_path: Path, prompts: list[list[int]]
) -> None:
    share = tmp_path / "share"
    share.mkdir()
    # In bfloat16 vLLM without a connector may answer a hit otherwise than a miss, where two logits are close.
    whole = {"num_gpu_blocks_override": DEVICE_FOR_ALL, "dtype": "float32"}
    first = run_engine(tmp_path / "first", job(tiny_model, prompts, 1, llm=whole), **environment(share))
    assert max(cached(first, 0)) == 0
    assert first["metrics"]["kvbm_offload_blocks_d2o"] >= NUM_PROMPTS * PROMPT_BLOCKS
    assert_nothing_left(first)

    second = run_engine(tmp_path / "second", job(tiny_model, prompts, 1, llm=whole), **environment(share))
    assert min(cached(second, 0)) >= PROMPT_TOKENS - BLOCK
    assert answers(second, 0) == answers(first, 0)
    (counts,) = second["bytes"]  # this engine has not seen what was stored: the store's own checks have
    assert counts["onboarded"] >= NUM_PROMPTS * (PROMPT_BLOCKS - 1) and counts["different"] == 0
    assert second["metrics"]["kvbm_onboard_blocks_o2d"] >= NUM_PROMPTS * (PROMPT_BLOCKS - 1)
    assert second["metrics"]["kvbm_object_read_failures"] == 0
    assert_nothing_left(second)

    share.rename(tmp_path / "gone")  # the next one finds nothing, and serves
    third = run_engine(tmp_path / "third", job(tiny_model, prompts, 1, llm=whole), **environment(share))
    assert max(cached(third, 0)) == 0 and answers(third, 0) == answers(first, 0)
    assert_nothing_left(third)


def test_engines_of_another_tensor_parallel_size_hit_what_one_engine_has_computed(
    tiny_model: Path, tmp_path: Path, prompts: list[list[int]]
) -> None:
    """Both ways, in float32: what another size has computed differs by the order of additions alone."""
    share = tmp_path / "share"
    share.mkdir()
    env = environment(share) | {"KVBM_REMOTE_HEAD_SHARDS": "2"}
    whole = {"num_gpu_blocks_override": DEVICE_FOR_ALL, "dtype": "float32"}
    halves = whole | {"tensor_parallel_size": 2}
    of_one, of_two = prompts[:2], prompts[2:]
    first = run_engine(tmp_path / "first", job(tiny_model, of_one, 1, llm=whole), **env)
    assert max(cached(first, 0)) == 0

    both = job(tiny_model, of_one, 1, llm=halves)
    both["rounds"] += [{"prompts": of_two, "max_tokens": 8}]
    second = run_engine(tmp_path / "second", both, **env)
    assert min(cached(second, 0)) >= PROMPT_TOKENS - BLOCK and max(cached(second, 1)) == 0
    assert answers(second, 0) == answers(first, 0)

    third = run_engine(tmp_path / "third", job(tiny_model, of_two, 1, llm=whole), **env)
    assert min(cached(third, 0)) >= PROMPT_TOKENS - BLOCK
    assert answers(third, 0) == answers(second, 1)
    assert third["metrics"]["kvbm_object_read_failures"] == 0
    assert_nothing_left(third)
