"""A store by key that only tests have, below host and disk under TensorRT-LLM: each rank has its own blocks
there. The double checks every byte that a forward pass reads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvbm_core.testing import toy_store
from kvbm_core.types import BlockKey

pytest.importorskip("torch", reason="NOT RUN: TensorRT-LLM's connector against its double; torch is missing")

from tests.trtllm.harness import Kind, Serving
from tests.trtllm.kinds import each
from tests.trtllm.test_disk import ALL_KINDS, CAP, PROMPT, folder, push_out, serve_with_disk
from tests.trtllm.test_random import FAULTS

__all__ = ["folder"]

Play = Callable[..., list[Any]]
FROM_STORE = "kvbm_onboard_blocks_o2d"
TO_STORE = "kvbm_offload_blocks_d2o"
HOST_BLOCKS, DISK_BLOCKS = 80, 40
every_scheme = pytest.mark.parametrize("scheme", ["toy", "toys"], ids=["blocks", "extents"])


@contextmanager
def serve_with_store(
    rank: int,
    kind: Kind,
    folder: Path,
    faults: str = "",
    *,
    scheme: str = "toy",
    is_new: bool = False,
    **options: Any,
) -> Iterator[Serving]:
    """All three tiers; host and disk are so small that other prompts push out what they have."""
    if is_new:
        toy_store.forget_all()
    shape = {"host_blocks": HOST_BLOCKS, "disk_blocks": DISK_BLOCKS, **options}
    with serve_with_disk(rank, kind, folder, store=f"{scheme}://blocks?{faults}", **shape) as serving:
        yield serving


def fetch(serving: Serving, num_blocks: int, scheme: str) -> None:
    """Has so many blocks of the prompt, and no more, brought into the host from the store alone.

    TensorRT-LLM cannot be told to ask again: a first request computes the prompt, and has it brought up
    meanwhile for the next one. What it computes is not stored, so that it must come from the store.
    """
    # Of a whole prompt the last block, which is always computed, is in one extent with the one before.
    more = scheme == "toys" and num_blocks == CAP // 4
    wanted = serving.metric(FROM_STORE) + num_blocks + more
    if serving.is_leading:
        serving.leader.offload = lambda *request_and_step: None
    serving.expect_match(serving.ask(PROMPT, 1), (0, False))
    serving.forget_device()
    serving.step_until(lambda: serving.metric(FROM_STORE) >= wanted)
    if serving.is_leading:
        del serving.leader.offload
    serving.settle()
    assert serving.metric(FROM_STORE) == wanted


def fill(rank: int, kind: Kind, folder: Path, scheme: str) -> list[BlockKey]:
    """A job: one prompt is stored; the names of its blocks."""
    with serve_with_store(rank, kind, folder, scheme=scheme, is_new=True) as serving:
        request = serving.submit(PROMPT)
        serving.executor.step()
        keys = serving.from_leader(lambda: list(serving.leader.request(str(request)).keys(0)))
        serving.forget_device()
        assert serving.metric(TO_STORE) >= CAP // 4
        return list(keys)


def find(rank: int, kind: Kind, folder: Path, left: int, scheme: str) -> None:
    """A job: an engine whose disk is empty has the first ``left`` blocks."""
    with serve_with_store(rank, kind, folder, scheme=scheme) as serving:
        fetch(serving, left, scheme)
        serving.expect_match(serving.ask(PROMPT), (4 * left, left > 0))


def lose(rank: int, kind: Kind, key: BlockKey) -> None:
    """A job: the last rank's store loses a block."""
    assert rank < kind.ranks - 1 or toy_store.lose("blocks", key)


@pytest.mark.parametrize("kind", each(ALL_KINDS))
@pytest.mark.parametrize("lost", [CAP // 4, 5])
@every_scheme
def test_another_engine_finds_what_the_first_one_stored(
    scheme: str, lost: int, kind: Kind, folder: Path, play: Play
) -> None:
    left = min(lost, 4) if scheme == "toys" and lost < CAP // 4 else lost  # before the extent that it was in
    keys = play(kind, fill, kind, folder, scheme)[0]
    if lost < CAP // 4:
        play(kind, lose, kind, keys[lost])
    for path in (folder / "disk").rglob("*.blocks"):
        path.unlink()
    play(kind, find, kind, folder, left, scheme)


def comes_back(rank: int, kind: Kind, folder: Path, scheme: str) -> None:
    """A job: what host and disk have lost comes back from the store, and stays in the host."""
    with serve_with_store(rank, kind, folder, scheme=scheme, is_new=True, host_blocks=30) as serving:
        serving.ask(PROMPT)
        serving.forget_device()
        push_out(serving)
        fetch(serving, CAP // 4, scheme)
        serving.expect_match(serving.ask(PROMPT), (CAP, True))


@pytest.mark.parametrize("kind", each(ALL_KINDS))
@every_scheme
def test_what_host_and_disk_have_lost_comes_back_from_the_store(
    scheme: str, kind: Kind, folder: Path, play: Play
) -> None:
    play(kind, comes_back, kind, folder, scheme)


def go_through_faults(rank: int, kind: Kind, folder: Path, scheme: str, seed: int) -> float:
    """A job: prompts from three tiers at once; the store is slow, loses blocks, fails and writes late."""
    faults = f"seed={seed}&{FAULTS}"
    with serve_with_store(
        rank, kind, folder, faults, scheme=scheme, is_new=True, host_blocks=30, chunk_tokens=16
    ) as serving:
        for turn in range(4):
            requests = [serving.submit(range(100 * i, 100 * i + 20 + 6 * turn), 5) for i in range(8)]
            serving.executor.run_until_idle()
            assert {serving.reason(request) for request in requests} == {"length"}
            serving.forget_device()
        return serving.metric(FROM_STORE)


@pytest.mark.parametrize("kind", each(ALL_KINDS))
@every_scheme
def test_faults_of_a_store_cost_hits_and_nothing_else(
    scheme: str, kind: Kind, folder: Path, play: Play, seed: int
) -> None:
    play(kind, go_through_faults, kind, folder, scheme, seed)
