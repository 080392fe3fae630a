"""Weights that a trainer changes in TensorRT-LLM's process: no block of the old ones answers the new ones, as
the double's model checks of every byte.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="NOT RUN: TensorRT-LLM's connector against its double; torch is missing")

from tests.trtllm.harness import Kind, kinds, serve
from tests.trtllm.kinds import NEWEST_1, RELEASED_1, each
from tests.trtllm.test_disk import CAP, PROMPT, TO_DISK, folder, serve_with_disk

__all__ = ["folder"]

Play = Callable[..., list[Any]]
LATER = [token + 500 for token in PROMPT]


def changes(rank: int, kind: Kind, folder: Path, writes: bool) -> None:
    """A job: the weights change, by TensorRT-LLM's own way or (``writes``) by a write to the tensors and a
    reset.
    """
    with serve_with_disk(rank, kind, folder, host_blocks=100) as serving:
        serving.ask(PROMPT)
        serving.forget_device()
        serving.expect_match(serving.ask(PROMPT), (CAP, True))
        serving.forget_device()
        stored = serving.metric(TO_DISK)
        serving.update_weights("new", writes=writes)
        serving.expect_match(serving.ask(PROMPT), (0, False))
        serving.ask(LATER)
        serving.forget_device()
        serving.expect_match(serving.ask(PROMPT), (CAP, True))
        assert serving.metric(TO_DISK) == stored
    with serve_with_disk(rank, kind, folder) as serving:
        serving.expect_match(serving.ask(PROMPT), (CAP, True))
        serving.expect_match(serving.ask(LATER), (0, False))


@pytest.mark.parametrize("writes", [False, True], ids=["update", "write"])
@pytest.mark.parametrize("kind", each([*kinds(1, in_all_versions=True), *kinds(2)[1::2]]))
def test_blocks_of_old_weights_answer_nobody(kind: Kind, writes: bool, folder: Path, play: Play) -> None:
    play(kind, changes, kind, folder, writes)


def runs_across(rank: int, kind: Kind) -> None:
    """A job: weights change under a request that TensorRT-LLM does not wait for."""
    with serve(rank, kind) as serving:
        serving.may_fail = True  # a block that is on its way to the host is dropped
        serving.submit(PROMPT, 20)
        for _ in range(8):
            serving.executor.step()
        serving.update_weights("new")
        serving.forget_device()
        assert serving.from_leader(lambda: serving.leader.chain.host.resident_blocks) == 0
        serving.expect_match(serving.ask(PROMPT), (0, False))
        serving.forget_device()
        serving.expect_match(serving.ask(PROMPT), (CAP, True))


@pytest.mark.parametrize("kind", [RELEASED_1, NEWEST_1], ids=str)
def test_a_request_that_runs_across_the_change_leaves_nothing(kind: Kind, play: Play) -> None:
    play(kind, runs_across, kind)
