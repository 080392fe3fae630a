"""On which kinds of the double ``make test`` plays what; the others are nightly."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import pytest

from tests.trtllm.double import EARLY, NEWEST, RELEASED, source
from tests.trtllm.harness import Kind, kinds
from tests.trtllm.scenarios import Scenario

EARLY_1, EARLY_2 = (Kind(EARLY, "v1", True, ranks) for ranks in (1, 2))
RELEASED_1, RELEASED_2, RELEASED_4 = (Kind(RELEASED, "v1", True, ranks) for ranks in (1, 2, 4))
NEWEST_1, NEWEST_2 = (Kind(NEWEST, "v2", True, ranks) for ranks in (1, 2))
USUAL = {RELEASED_1, NEWEST_1, NEWEST_2}
ON_EVERY_KIND = "async_hit"
"""The scenario that is played on every version, cache and loop, and on four ranks."""
OF_1_1 = {"cancel_when_decoding", "cancel_in_the_prompt"}
"""Scenarios in which 1.1 does what no other version does: it says of cancelled requests that they ended."""
SOURCE = source.version()


def usual_kinds(name: str, scenario: Scenario) -> set[Kind]:
    """The kinds of one engine on which ``make test`` plays a scenario."""
    one = next(
        kind
        for kind in (RELEASED_1, NEWEST_1, *reversed(kinds(1, in_all_versions=True)))
        if scenario.fits(kind)
    )
    found = {one}
    if scenario.is_essential:
        two = (NEWEST_2, RELEASED_2, *reversed(kinds(2, in_all_versions=True)))
        found |= {NEWEST_1, next(kind for kind in two if scenario.fits(kind))}
    if name in OF_1_1:
        found.add(EARLY_1)
    if name == ON_EVERY_KIND:
        found |= {*kinds(1, in_all_versions=True), EARLY_2, RELEASED_2, RELEASED_4}
    return found


def case(*values: Any, kind: Kind, is_usual: bool) -> Any:
    """A parameter set, named by ``values``; nightly unless it is a usual one, or of the files of
    KVBM_TRTLLM_SOURCE.
    """
    marks = [] if is_usual or kind.version == SOURCE else [pytest.mark.nightly("more kinds of the double")]
    name = "-".join(str(value) for value in (*values, kind))
    return pytest.param(*values, kind, id=name, marks=marks)


def each(wanted: Sequence[Kind], usual: Collection[Kind] = frozenset(USUAL)) -> list[Any]:
    """These kinds as parameters, of which those in ``usual`` are played always."""
    assert not {*usual}.isdisjoint(wanted), "a test that is never played by make test"
    return [case(kind=kind, is_usual=kind in usual) for kind in wanted]
