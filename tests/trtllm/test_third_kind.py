"""A tier of a third kind, which only tests have, below host and disk under TensorRT-LLM. The double checks
every byte that a forward pass reads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="NOT RUN: TensorRT-LLM's connector against its double; torch is missing")

from kvbm_core.runtime.assembly import REMOTE
from tests import third_kind
from tests.trtllm.double import NEWEST, RELEASED
from tests.trtllm.harness import Kind, Serving
from tests.trtllm.test_disk import CAP, PROMPT, folder, push_out, serve_with_disk
from tests.trtllm.test_stores import DISK_BLOCKS, FROM_STORE, TO_STORE

__all__ = ["folder"]

Play = Callable[..., list[Any]]
KINDS = [Kind(RELEASED, "v1", True, 1), Kind(NEWEST, "v2", True, 2)]


@contextmanager
def serve(rank: int, kind: Kind, folder: Path, host_blocks: int) -> Iterator[Serving]:
    """All three tiers; the shelf is this test's own."""
    third_kind.register()
    url, sizes = f"shelf://{folder.name}", {"host_blocks": host_blocks, "disk_blocks": DISK_BLOCKS}
    with serve_with_disk(rank, kind, folder, store=url, **sizes) as serving:
        yield serving


def comes_back(rank: int, kind: Kind, folder: Path) -> None:
    """A job: what host and disk have lost comes back, and stays in the host."""
    with serve(rank, kind, folder, 30) as serving:
        serving.ask(PROMPT)
        serving.forget_device()
        push_out(serving)
        before = serving.metric(FROM_STORE)
        serving.expect_match(serving.ask(PROMPT), (CAP, True))
        serving.forget_device()
        from_shelf = serving.metric(FROM_STORE)
        assert from_shelf > before
        serving.expect_match(serving.ask(PROMPT), (CAP, True))
        assert serving.metric(FROM_STORE) == from_shelf


def shelved(serving: Serving) -> int:
    """How many blocks the leader knows to be on the shelf."""
    shelf = serving.leader.chain.named(REMOTE)
    assert isinstance(shelf, third_kind.ShelfTier)
    return shelf.usage[0]


def fill(rank: int, kind: Kind, folder: Path) -> None:
    """A job: one prompt is stored."""
    with serve(rank, kind, folder, 80) as serving:
        serving.ask(PROMPT)
        serving.forget_device()
        assert serving.metric(TO_STORE) >= CAP // 4


def find(rank: int, kind: Kind, folder: Path) -> None:
    """A job: an engine whose disk is empty. Its first request computes the prompt, and has it looked for
    meanwhile; what it computes is not stored.
    """
    with serve(rank, kind, folder, 80) as serving:
        if serving.is_leading:
            serving.leader.offload = lambda *request_and_step: None
        serving.expect_match(serving.ask(PROMPT, 1), (0, False))
        serving.forget_device()
        serving.step_until(lambda: serving.from_leader(lambda: shelved(serving) >= CAP // 4))
        if serving.is_leading:
            del serving.leader.offload
        serving.expect_match(serving.ask(PROMPT), (CAP, True))
        assert serving.metric(FROM_STORE) >= CAP // 4


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_what_host_and_disk_have_lost_comes_back(kind: Kind, folder: Path, play: Play) -> None:
    play(kind, comes_back, kind, folder)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_another_engine_finds_what_the_first_one_stored(kind: Kind, folder: Path, play: Play) -> None:
    play(kind, fill, kind, folder)
    for path in (folder / "disk").rglob("*.blocks"):
        path.unlink()
    play(kind, find, kind, folder)
