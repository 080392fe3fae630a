"""A store from an installed package, the one of docs/extending.md, below host and disk under TensorRT-LLM.
The double checks every byte that a forward pass reads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="NOT RUN: TensorRT-LLM's connector against its double; torch is missing")

from tests.outside import sqlite_store
from tests.trtllm.double import NEWEST, RELEASED
from tests.trtllm.harness import Kind, Serving
from tests.trtllm.test_disk import CAP, PROMPT, folder, push_out, serve_with_disk
from tests.trtllm.test_stores import DISK_BLOCKS, HOST_BLOCKS, TO_STORE, fetch

__all__ = ["folder"]

Play = Callable[..., list[Any]]
KINDS = [Kind(RELEASED, "v1", True, 1), Kind(NEWEST, "v2", True, 2)]


@contextmanager
def serve(rank: int, kind: Kind, folder: Path, host_blocks: int) -> Iterator[Serving]:
    """All three tiers. Each rank is a process, in which the package is installed for so long."""
    url, sizes = f"sqlite://{folder}/objects.db", {"host_blocks": host_blocks, "disk_blocks": DISK_BLOCKS}
    with (
        sqlite_store(folder / f"site-{rank}"),
        serve_with_disk(rank, kind, folder, store=url, **sizes) as serving,
    ):
        yield serving


def comes_back(rank: int, kind: Kind, folder: Path) -> None:
    """A job: what host and disk have lost comes back, and stays in the host."""
    with serve(rank, kind, folder, 30) as serving:
        serving.ask(PROMPT)
        serving.forget_device()
        push_out(serving)
        fetch(serving, CAP // 4, "toys")
        serving.expect_match(serving.ask(PROMPT), (CAP, True))


def fill(rank: int, kind: Kind, folder: Path) -> None:
    """A job: one prompt is stored."""
    with serve(rank, kind, folder, HOST_BLOCKS) as serving:
        serving.ask(PROMPT)
        serving.forget_device()
        assert serving.metric(TO_STORE) >= CAP // 4


def find(rank: int, kind: Kind, folder: Path) -> None:
    """A job: an engine whose disk is empty has the prompt from the store."""
    with serve(rank, kind, folder, HOST_BLOCKS) as serving:
        fetch(serving, CAP // 4, "toys")
        serving.expect_match(serving.ask(PROMPT), (CAP, True))


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_what_host_and_disk_have_lost_comes_back(kind: Kind, folder: Path, play: Play) -> None:
    play(kind, comes_back, kind, folder)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_another_engine_finds_what_the_first_one_stored(kind: Kind, folder: Path, play: Play) -> None:
    play(kind, fill, kind, folder)
    for path in (folder / "disk").rglob("*.blocks"):
        path.unlink()
    play(kind, find, kind, folder)
