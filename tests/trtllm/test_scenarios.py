"""The adapter for TensorRT-LLM on the executor double: every scenario, on every kind of cache and version."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch", reason="NOT RUN: TensorRT-LLM's connector against its double; torch is missing")

from tests.trtllm import scenarios, scenarios_many, scenarios_v2
from tests.trtllm.double import RELEASED
from tests.trtllm.harness import Kind, kinds

Play = Callable[..., list[Any]]
LISTS = {module.__name__: module.SCENARIOS for module in (scenarios, scenarios_many, scenarios_v2)}


def play_scenario(rank: int, module: str, name: str, kind: Kind) -> None:
    """A job of a World."""
    LISTS[module][name].play(rank, kind)


def _cases(ranks: int) -> list[Any]:
    # Of many ranks not every combination: what differs with their number is how they keep in step.
    shown = [kind for kind in kinds(ranks) if ranks == 1 or kind.overlap]
    shown = [kind for kind in shown if ranks <= 2 or kind.version == RELEASED or kind.is_v2]
    return [
        pytest.param(module, name, kind, id=f"{name}-{kind}")
        for module, found in LISTS.items()
        for name, scenario in found.items()
        for kind in shown
        if scenario.fits(kind) and (ranks == 1 or scenario.is_essential)
    ]


@pytest.mark.parametrize(("module", "name", "kind"), _cases(1))
def test_one_rank(module: str, name: str, kind: Kind, play: Play) -> None:
    play(kind, play_scenario, module, name, kind)


@pytest.mark.parametrize(("module", "name", "kind"), _cases(2))
def test_two_ranks(module: str, name: str, kind: Kind, play: Play) -> None:
    play(kind, play_scenario, module, name, kind)


@pytest.mark.parametrize(("module", "name", "kind"), _cases(4))
def test_four_ranks(module: str, name: str, kind: Kind, play: Play) -> None:
    play(kind, play_scenario, module, name, kind)
