"""A store from an installed package, the one of docs/extending.md, and a tier of a third kind, which only
tests have, below host and disk under TensorRT-LLM. The double checks every byte that a forward pass reads.
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
from tests.outside import sqlite_store
from tests.trtllm.double import NEWEST, RELEASED
from tests.trtllm.harness import Kind, Serving
from tests.trtllm.test_disk import CAP, PROMPT, folder, push_out, serve_with_disk
from tests.trtllm.test_stores import DISK_BLOCKS, FROM_STORE, HOST_BLOCKS, TO_STORE, fetch

__all__ = ["folder"]

Play = Callable[..., list[Any]]
every_kind = pytest.mark.parametrize(
    "kind", [Kind(RELEASED, "v1", True, 1), Kind(NEWEST, "v2", True, 2)], ids=str
)
every_scheme = pytest.mark.parametrize("scheme", ["sqlite", "shelf"])


@contextmanager
def serve(rank: int, kind: Kind, folder: Path, scheme: str, host_blocks: int) -> Iterator[Serving]:
    """All three tiers. Each rank is a process, in which the package is installed for so long."""
    third_kind.register()
    url = f"sqlite://{folder}/objects.db" if scheme == "sqlite" else f"shelf://{folder.name}"
    sizes = {"host_blocks": host_blocks, "disk_blocks": DISK_BLOCKS}
    with (
        sqlite_store(folder / f"site-{rank}"),
        serve_with_disk(rank, kind, folder, store=url, **sizes) as serving,
    ):
        yield serving


def comes_back(rank: int, kind: Kind, folder: Path, scheme: str) -> None:
    """A job: what host and disk have lost comes back, and stays in the host. Of the third kind it is known
    what it has, so the first who asks has it.
    """
    with serve(rank, kind, folder, scheme, 30) as serving:
        serving.ask(PROMPT)
        serving.forget_device()
        push_out(serving)
        before = serving.metric(FROM_STORE)
        if scheme == "sqlite":
            fetch(serving, CAP // 4, "toys")
        else:
            serving.expect_match(serving.ask(PROMPT), (CAP, True))
            serving.forget_device()
        from_store = serving.metric(FROM_STORE)
        assert from_store > before
        serving.expect_match(serving.ask(PROMPT), (CAP, True))
        assert serving.metric(FROM_STORE) == from_store


def fill(rank: int, kind: Kind, folder: Path, scheme: str) -> None:
    """A job: one prompt is stored."""
    with serve(rank, kind, folder, scheme, HOST_BLOCKS) as serving:
        serving.ask(PROMPT)
        serving.forget_device()
        assert serving.metric(TO_STORE) >= CAP // 4


def find(rank: int, kind: Kind, folder: Path, scheme: str) -> None:
    """A job: an engine whose disk is empty has the prompt from there."""
    with serve(rank, kind, folder, scheme, HOST_BLOCKS) as serving:
        if scheme == "sqlite":
            fetch(serving, CAP // 4, "toys")
        else:
            look_for(serving)
        serving.expect_match(serving.ask(PROMPT), (CAP, True))
        assert serving.metric(FROM_STORE) >= CAP // 4


def look_for(serving: Serving) -> None:
    """A first request computes the prompt, and has it looked for meanwhile; what it computes is not kept."""
    if serving.is_leading:
        serving.leader.offload = lambda *request_and_step: None
    serving.expect_match(serving.ask(PROMPT, 1), (0, False))
    serving.forget_device()
    serving.step_until(lambda: serving.from_leader(lambda: shelved(serving) >= CAP // 4))
    if serving.is_leading:
        del serving.leader.offload


def shelved(serving: Serving) -> int:
    """How many blocks the leader knows to be on the shelf."""
    shelf = serving.leader.chain.named(REMOTE)
    assert isinstance(shelf, third_kind.ShelfTier)
    return shelf.usage[0]


@every_kind
@every_scheme
def test_what_host_and_disk_have_lost_comes_back(scheme: str, kind: Kind, folder: Path, play: Play) -> None:
    play(kind, comes_back, kind, folder, scheme)


@every_kind
@every_scheme
def test_another_engine_finds_what_the_first_one_stored(
    scheme: str, kind: Kind, folder: Path, play: Play
) -> None:
    play(kind, fill, kind, folder, scheme)
    for path in (folder / "disk").rglob("*.blocks"):
        path.unlink()
    play(kind, find, kind, folder, scheme)
