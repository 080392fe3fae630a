"""The adapter with attention data parallelism: ranks with leaders and requests of their own, in lock step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="NOT RUN: TensorRT-LLM's connector against its double; torch is missing")

from tests.effort import tries
from tests.engines.ports import free_port
from tests.trtllm import scenarios_dp
from tests.trtllm.double import NEWEST, DoubleFailure
from tests.trtllm.harness import Kind
from tests.trtllm.kinds import NEWEST_2, case, each
from tests.trtllm.test_scenarios import SCENARIOS, play_scenario

Play = Callable[..., list[Any]]
V2, V2_OF_4 = (Kind(NEWEST, "v2", True, ranks, True) for ranks in (2, 4))
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
# A rank is idle before it hears of the end, and a dummy may take blocks whose copies are held back:
# finished_while_saving_and_then_idle is the scenario for these.
NOT_WITH_OVERLAP = {"finish_while_saving", "the_last_turn_while_the_loop_sleeps"}
USUAL_FROM_OTHERS = {"async_hit", "several_in_one_iteration", "windows", "preempted_and_replayed"}


def dp_kinds(ranks: int) -> list[Kind]:
    """V1 and V2, with and without overlap."""
    return [
        Kind(NEWEST, manager, overlap, ranks, True) for manager in ("v1", "v2") for overlap in (False, True)
    ]


def play_own(rank: int, name: str, kind: Kind) -> None:
    """A job of a World."""
    scenarios_dp.SCENARIOS[name].play(rank, kind)


def _own_cases() -> list[Any]:
    """V2 is what the newest TensorRT-LLM runs with attention DP."""
    return [
        case(name, kind=kind, is_usual=kind == V2 or (name, kind) == ("different_loads", V2_OF_4))
        for name in scenarios_dp.SCENARIOS
        for ranks in (2, 4)
        for kind in dp_kinds(ranks)
    ]


def _other_cases() -> list[Any]:
    return [
        case(name, kind=kind, is_usual=name in USUAL_FROM_OTHERS and kind == V2)
        for name, scenario in SCENARIOS.items()
        for kind in dp_kinds(2)
        if name not in NOT_HERE and scenario.fits(kind) and not (kind.overlap and name in NOT_WITH_OVERLAP)
    ]


@pytest.mark.parametrize(("name", "kind"), _own_cases())
def test_ranks_of_their_own(name: str, kind: Kind, play: Play) -> None:
    play(kind, play_own, name, kind)


@pytest.mark.parametrize(("name", "kind"), _other_cases())
def test_each_rank_plays_what_one_engine_plays(name: str, kind: Kind, play: Play) -> None:
    play(kind, play_scenario, name, kind)


@pytest.mark.parametrize("kind", each(dp_kinds(2), [V2]))
def test_random_lives(kind: Kind, play: Play, seed: int) -> None:
    for turn in range(tries(2, nightly=20)):
        play(kind, scenarios_dp.random_life, kind, seed + turn, 150)


def test_metrics_and_endpoints_do_not_collide(play: Play) -> None:
    play(V2, scenarios_dp.sees_its_own_metrics, V2, min(free_port(), 60000))


def test_the_size_of_the_host_tier_is_of_each_rank(play: Play) -> None:
    play(V2, scenarios_dp.has_its_own_memory, V2)


@pytest.mark.parametrize("kind", [V2, NEWEST_2], ids=["attention DP", "tensor parallel"])
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
