"""The adapter for TensorRT-LLM on the executor double: every scenario, on every kind of cache and version."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch", reason="NOT RUN: TensorRT-LLM's connector against its double; torch is missing")

from tests.effort import IS_NIGHTLY
from tests.trtllm import scenarios, scenarios_many, scenarios_v2
from tests.trtllm.double import EARLY, MID, NEWEST, RELEASED, source
from tests.trtllm.harness import Kind, kinds

Play = Callable[..., list[Any]]
ALL = IS_NIGHTLY
SOURCE = source.version()
OF_SOME = {(EARLY, 1), (MID, 1), (EARLY, 2), (RELEASED, 2), (RELEASED, 4)}
"""Versions and numbers of ranks on which ``make test`` plays the essential scenarios, with overlap."""
LISTS = {module.__name__: module.SCENARIOS for module in (scenarios, scenarios_many, scenarios_v2)}


def play_scenario(rank: int, module: str, name: str, kind: Kind) -> None:
    """A job of a World."""
    LISTS[module][name].play(rank, kind)


def _all_cases(ranks: int) -> list[tuple[str, str, Kind]]:
    return [
        (module, name, kind)
        for module, found in LISTS.items()
        for name, scenario in found.items()
        for kind in kinds(ranks, in_all_versions=True)
        if scenario.fits(kind)
    ]


def _is_usual(module: str, name: str, kind: Kind) -> bool:
    """Of many ranks not every combination: what differs with their number is how they keep in step.

    Nor of versions that are before or between the main ones.
    """
    if kind.version == SOURCE or (kind.ranks == 1 and kind.version in {RELEASED, NEWEST}):
        return True
    is_usual_kind = (kind.version, kind.ranks) in OF_SOME or (kind.is_v2 and kind.ranks == 2)
    return is_usual_kind and kind.overlap and LISTS[module][name].is_essential


def _cases(ranks: int) -> list[Any]:
    cases = [case for case in _all_cases(ranks) if ALL or _is_usual(*case)]
    return [pytest.param(*case, id=f"{case[1]}-{case[2]}") for case in cases]


@pytest.mark.parametrize(("module", "name", "kind"), _cases(1))
def test_one_rank(module: str, name: str, kind: Kind, play: Play) -> None:
    play(kind, play_scenario, module, name, kind)


@pytest.mark.parametrize(("module", "name", "kind"), _cases(2))
def test_two_ranks(module: str, name: str, kind: Kind, play: Play) -> None:
    play(kind, play_scenario, module, name, kind)


@pytest.mark.parametrize(("module", "name", "kind"), _cases(4))
def test_four_ranks(module: str, name: str, kind: Kind, play: Play) -> None:
    play(kind, play_scenario, module, name, kind)


def test_every_combination_of_versions_and_ranks() -> None:
    cases = [*_all_cases(1), *_all_cases(2), *_all_cases(4)]
    left_out = [case for case in cases if not _is_usual(*case)]
    assert 0 < len(left_out) < len(cases)
    if not ALL:
        pytest.skip(
            f"NOT RUN: {len(left_out)} combinations more of scenarios, versions and ranks: make "
            "nightly plays them"
        )
