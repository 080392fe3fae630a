"""The adapter with attention data parallelism: ranks with leaders and requests of their own, in lock step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="NOT RUN: TensorRT-LLM's connector against its double; torch is missing")

from tests.effort import IS_NIGHTLY
from tests.engines.ports import free_port
from tests.trtllm import scenarios_dp
from tests.trtllm.double import NEWEST, DoubleFailure, source
from tests.trtllm.harness import Kind
from tests.trtllm.test_scenarios import LISTS, play_scenario

Play = Callable[..., list[Any]]
ALL = IS_NIGHTLY
SOURCE = source.version()
NOT_HERE = {
    # A load that fails on one rank ends the forward pass of that rank alone: see the last test.
    "a_load_fails",
    "a_waited_for_load_fails",
    "a_batch_of_a_failed_load_is_dropped",
    "a_batch_of_a_waited_for_load_that_fails_is_dropped",
    "a_replay_whose_load_fails",
    # A cancel waits for the load: cancelled_while_loading is the scenario for this.
    "cancel_when_loading",
}
# Its rank is idle before it hears of the end: finished_while_saving_and_then_idle.
NOT_WITH_OVERLAP = {"finish_while_saving"}
USUAL_FROM_OTHERS = {"async_hit", "several_in_one_iteration", "windows", "preempted_and_replayed"}


def dp_kinds(ranks: int) -> list[Kind]:
    """V1 and V2, with and without overlap."""
    return [
        Kind(NEWEST, manager, overlap, ranks, True) for manager in ("v1", "v2") for overlap in (False, True)
    ]


def play_own(rank: int, name: str, kind: Kind) -> None:
    """A job of a World."""
    scenarios_dp.SCENARIOS[name].play(rank, kind)


def _own_cases() -> list[tuple[str, Kind]]:
    return [(name, kind) for name in scenarios_dp.SCENARIOS for ranks in (2, 4) for kind in dp_kinds(ranks)]


def _is_usual(name: str, kind: Kind) -> bool:
    """V2 is what the newest TensorRT-LLM runs with attention DP."""
    is_usual_kind = kind.is_v2 and kind.overlap and (kind.ranks == 2 or name == "different_loads")
    return is_usual_kind or kind.version == SOURCE


def _other_cases() -> list[tuple[str, str, Kind]]:
    return [
        (module, name, kind)
        for module, found in LISTS.items()
        for name, scenario in found.items()
        for kind in dp_kinds(2)
        if name not in NOT_HERE and scenario.fits(kind) and not (kind.overlap and name in NOT_WITH_OVERLAP)
    ]


def _is_usual_of_others(name: str, kind: Kind) -> bool:
    return (name in USUAL_FROM_OTHERS and kind.is_v2 and kind.overlap) or kind.version == SOURCE


OWN = [pytest.param(*case, id=f"{case[0]}-{case[1]}") for case in _own_cases() if ALL or _is_usual(*case)]
OTHERS = [
    pytest.param(*case, id=f"{case[1]}-{case[2]}")
    for case in _other_cases()
    if ALL or _is_usual_of_others(*case[1:])
]


@pytest.mark.parametrize(("name", "kind"), OWN)
def test_ranks_of_their_own(name: str, kind: Kind, play: Play) -> None:
    play(kind, play_own, name, kind)


@pytest.mark.parametrize(("module", "name", "kind"), OTHERS)
def test_each_rank_plays_what_one_engine_plays(module: str, name: str, kind: Kind, play: Play) -> None:
    play(kind, play_scenario, module, name, kind)


def test_all_kinds_of_attention_dp() -> None:
    left_out = [case for case in _own_cases() if not _is_usual(*case)]
    left_out_of_others = [case for case in _other_cases() if not _is_usual_of_others(*case[1:])]
    if not ALL:
        count = len(left_out) + len(left_out_of_others)
        pytest.skip(
            f"NOT RUN: {count} combinations more of scenarios and attention DP: make nightly plays them"
        )


V2 = Kind(NEWEST, "v2", True, 2, True)


@pytest.mark.parametrize("kind", [kind for kind in dp_kinds(2) if ALL or kind.is_v2], ids=str)
def test_random_lives(kind: Kind, play: Play, seed: int) -> None:
    for turn in range(20 if ALL else 2):
        play(kind, scenarios_dp.random_life, kind, seed + turn, 150)


def test_metrics_and_endpoints_do_not_collide(play: Play) -> None:
    play(V2, scenarios_dp.sees_its_own_metrics, V2, min(free_port(), 60000))


def test_the_size_of_the_host_tier_is_of_each_rank(play: Play) -> None:
    play(V2, scenarios_dp.has_its_own_memory, V2)


@pytest.mark.parametrize(
    "kind", [V2, Kind(NEWEST, "v2", True, 2, False)], ids=["attention DP", "tensor parallel"]
)
def test_the_memory_of_all_ranks_together_has_to_be_there(play: Play, kind: Kind) -> None:
    """With attention DP each of the two leaders has a tier of its own; else one tier is over both ranks."""
    num_tiers = 2 if kind.attention_dp else 1
    found = play(kind, scenarios_dp.needs_memory_with_all_others, kind, num_tiers * 1.01)
    assert True in found and False not in found
    found = play(kind, scenarios_dp.needs_memory_with_all_others, kind, num_tiers * 0.99)
    assert False in found and True not in found


def test_disk_folders_do_not_collide(play: Play, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model.safetensors").write_bytes(bytes(range(256)) * 40)
    by_rank = play(V2, scenarios_dp.has_its_own_folder, V2, str(tmp_path))
    for life in range(2):
        assert len({folders[life] for folders in by_rank}) == 2


@pytest.mark.nightly("replaces the rank processes")
def test_a_load_that_fails_on_one_rank_stops_all(play: Play) -> None:
    """As documented: nothing else can keep wrong bytes from a model, and the others wait for this rank."""
    with pytest.raises(DoubleFailure, match="failed on one rank: the others wait"):
        play(V2, scenarios_dp.a_load_fails_on_one_rank, V2)
