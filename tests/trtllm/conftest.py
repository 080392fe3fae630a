"""Rank processes of the executor double, started once and shared by the tests of this folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest

SCENARIOS = ("scenarios", "scenarios_many", "scenarios_v2")
pytest.register_assert_rewrite("tests.trtllm.harness", *(f"tests.trtllm.{name}" for name in SCENARIOS))

if TYPE_CHECKING:
    from tests.trtllm.double import World
    from tests.trtllm.harness import Kind

Play = Callable[..., list[Any]]


@pytest.fixture(scope="package")
def _worlds() -> Iterator[Callable[[str, int], World]]:
    from tests.trtllm.double import World  # needs torch

    with ExitStack() as stack:
        worlds: dict[tuple[str, int], World] = {}

        def find(version: str, ranks: int) -> World:
            if (version, ranks) not in worlds:
                worlds[version, ranks] = stack.enter_context(World(version, ranks))
            return worlds[version, ranks]

        yield find


@pytest.fixture
def play(_worlds: Callable[[str, int], World]) -> Play:
    """``play(kind, job, *args)`` runs ``job(rank, *args)`` on all ranks of a kind; what it returned, by
    rank.
    """

    def run(kind: Kind, job: Callable[..., Any], *args: Any) -> list[Any]:
        if kind.ranks > 1:
            return _worlds(kind.version, kind.ranks).run(job, *args)
        from tests.trtllm.double import World

        with World(kind.version) as world:
            return world.run(job, *args)

    return run
