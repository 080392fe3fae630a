"""The adapter for TensorRT-LLM on the executor double: every scenario, on every kind of cache and version."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch", reason="NOT RUN: TensorRT-LLM's connector against its double; torch is missing")

from tests.trtllm import scenarios, scenarios_many, scenarios_v2
from tests.trtllm.harness import Kind, kinds
from tests.trtllm.kinds import case, usual_kinds

Play = Callable[..., list[Any]]
SCENARIOS = {**scenarios.SCENARIOS, **scenarios_many.SCENARIOS, **scenarios_v2.SCENARIOS}


def play_scenario(rank: int, name: str, kind: Kind) -> None:
    """A job of a World."""
    SCENARIOS[name].play(rank, kind)


def _cases(ranks: int) -> list[Any]:
    """Of many ranks not every combination: what differs with their number is how they keep in step."""
    return [
        case(name, kind=kind, is_usual=kind in usual_kinds(name, scenario))
        for name, scenario in SCENARIOS.items()
        for kind in kinds(ranks, in_all_versions=True)
        if scenario.fits(kind)
    ]


@pytest.mark.parametrize(("name", "kind"), _cases(1))
def test_one_rank(name: str, kind: Kind, play: Play) -> None:
    play(kind, play_scenario, name, kind)


@pytest.mark.parametrize(("name", "kind"), _cases(2))
def test_two_ranks(name: str, kind: Kind, play: Play) -> None:
    play(kind, play_scenario, name, kind)


@pytest.mark.parametrize(("name", "kind"), _cases(4))
def test_four_ranks(name: str, kind: Kind, play: Play) -> None:
    play(kind, play_scenario, name, kind)
