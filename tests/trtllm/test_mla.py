"""MLA with DYN_KVBM_NCCL_MLA_MODE: rank 0 alone stores and loads, and broadcasts (gloo here) to the
others.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.trtllm.double import NEWEST, RELEASED
from tests.trtllm.harness import Kind, serve
from tests.trtllm.kinds import NEWEST_2, RELEASED_2, RELEASED_4, each

KINDS = [RELEASED_2, NEWEST_2]
MODE = {"DYN_KVBM_NCCL_MLA_MODE": "true"}
PROMPT = range(40)


def latents_come_back(rank: int, kind: Kind, model: Path) -> bool:
    with serve(rank, kind, env=MODE, kv_factor=1, model=str(model)) as serving:
        serving.ask(PROMPT, 12)
        serving.forget_device()
        again = serving.ask(PROMPT, 12)
        serving.expect_match(again, (36, True))
        return serving.executor.worker.side.worker._memory is not None


def shards_come_back(rank: int, kind: Kind) -> bool:
    with serve(rank, kind, env=MODE) as serving:
        serving.ask(PROMPT, 12)
        serving.forget_device()
        again = serving.ask(PROMPT, 12)
        serving.expect_match(again, (36, True))
        return serving.executor.worker.side.worker._memory is not None


@pytest.mark.parametrize("kind", each([*KINDS, RELEASED_4], KINDS))
def test_only_rank_0_has_host_memory_and_all_ranks_get_its_bytes(
    kind: Kind, play: Callable[..., list[Any]], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text('{"kv_lora_rank": 512}')
    assert play(kind, latents_come_back, kind, tmp_path) == [rank == 0 for rank in range(kind.ranks)]


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_model_whose_ranks_have_shards_has_copies_on_every_rank(
    kind: Kind, play: Callable[..., list[Any]]
) -> None:
    assert play(kind, shards_come_back, kind) == [True] * kind.ranks


def keys_elsewhere(rank: int, kind: Kind, model: Path | None, words: str) -> None:
    options = {} if model is None else {"model": str(model)}
    with serve(rank, kind, kv_factor=1, is_ready=False, **options) as serving:
        serving.may_fail = True
        serving.may_begin.set()
        serving.step_until(
            lambda: serving.from_leader(lambda: serving.leader.is_ready or serving.leader.disabled_reason)
        )
        assert words in serving.from_leader(lambda: serving.leader.disabled_reason or "it is in service")


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ('{"index_topk": 2048}', "the model's configuration has index_topk"),
        ('{"kv_lora_rank": 512}', "it is in service"),
        (None, "cannot be read"),
    ],
)
def test_an_indexer_that_only_the_model_knows_of(
    config: str | None, words: str, play: Callable[..., list[Any]], tmp_path: Path
) -> None:
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    kind = Kind(RELEASED, "v1", False)
    play(kind, keys_elsewhere, kind, None if config is None else tmp_path, words)
    v2 = Kind(NEWEST, "v2", False)  # the indexer's keys are among the regions
    play(v2, keys_elsewhere, v2, None if config is None else tmp_path, "it is in service")
