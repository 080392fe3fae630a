"""Rank processes of the executor double, started once and shared by all tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

pytest.register_assert_rewrite("tests.trtllm.harness", "tests.trtllm.scenarios", "tests.trtllm.scenarios_many")

from tests.trtllm.double import World  # noqa: E402 - after the line above
from tests.trtllm.harness import Kind  # noqa: E402

Play = Callable[..., list[Any]]


@pytest.fixture(scope="session")
def _worlds() -> Iterator[Callable[[str, int], World]]:
    with ExitStack() as stack:
        worlds: dict[tuple[str, int], World] = {}

        def find(version: str, ranks: int) -> World:
            if (version, ranks) not in worlds:
                worlds[version, ranks] = stack.enter_context(World(version, ranks))
            return worlds[version, ranks]

        yield find


@pytest.fixture
def play(_worlds: Callable[[str, int], World]) -> Play:
    """``play(kind, job, *args)`` runs ``job(rank, *args)`` on all ranks of a kind; what it returned, by rank."""

    def run(kind: Kind, job: Callable[..., Any], *args: Any) -> list[Any]:
        if kind.ranks > 1:
            return _worlds(kind.version, kind.ranks).run(job, *args)
        with World(kind.version) as world:
            return world.run(job, *args)

    return run
