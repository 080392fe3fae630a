"""MLA with DYN_KVBM_NCCL_MLA_MODE: rank 0 alone stores and loads, and broadcasts (gloo here) to the
others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.trtllm.double import NEWEST, RELEASED
from tests.trtllm.harness import Kind, serve

KINDS = [Kind(RELEASED, "v1", True, 2), Kind(NEWEST, "v2", True, 2), Kind(RELEASED, "v1", True, 4)]
MODE = {"DYN_KVBM_NCCL_MLA_MODE": "true"}
PROMPT = range(40)


def latents_come_back(rank: int, kind: Kind) -> bool:
    with serve(rank, kind, env=MODE, kv_factor=1) as serving:
        serving.ask(PROMPT, 12)
        serving.forget_device()
        again = serving.ask(PROMPT, 12)
        serving.expect_match(again, (36, True))
        return serving.executor.worker.side.worker._slab is not None


def shards_are_refused(rank: int, kind: Kind) -> None:
    with serve(rank, kind, env=MODE, is_ready=False) as serving:
        serving.may_fail = True  # counted, and said
        serving.ask(PROMPT, 12)
        serving.forget_device()
        again = serving.ask(PROMPT, 12)
        serving.expect_match(again, (0, False))


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_only_rank_0_has_host_memory_and_all_ranks_get_its_bytes(
    kind: Kind, play: Callable[..., list[Any]]
) -> None:
    assert play(kind, latents_come_back, kind) == [rank == 0 for rank in range(kind.ranks)]


@pytest.mark.parametrize("kind", KINDS[:2], ids=str)
def test_a_model_whose_ranks_have_shards_is_served_without_a_cache(
    kind: Kind, play: Callable[..., list[Any]]
) -> None:
    play(kind, shards_are_refused, kind)
