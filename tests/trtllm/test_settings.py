"""Each setting works under TensorRT-LLM, or its user is told."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="NOT RUN: TensorRT-LLM's connector against its double; torch is missing")

from kvbm_core.config import Adapter
from tests import settings_walk
from tests.trtllm import scenarios
from tests.trtllm.double import NEWEST, RELEASED, World
from tests.trtllm.harness import Kind, kinds, serve

Play = Callable[..., list[Any]]
KIND = next(kind for kind in kinds(1) if kind.version == NEWEST and not kind.is_v2)


def play_scenario(rank: int, name: str, kind: Kind) -> None:
    """A job of a World."""
    scenarios.SCENARIOS[name].play(rank, kind)


def test_each_setting_is_read_or_its_user_is_told(short_path: Path) -> None:
    kind = next(kind for kind in kinds(1) if kind.version == RELEASED)
    runs = []
    for in_blocks in (True, False):
        port = settings_walk.free_port()
        with (
            settings_walk.everything_set(str(short_path), port, in_blocks=in_blocks, has_fleet=False) as seen,
            World(kind.version),
            serve(0, kind, host_blocks=None) as serving,
        ):
            serving.ask(range(40))
        runs.append(seen)
    runs.append(settings_walk.apart(str(short_path)))
    assert settings_walk.neither_read_nor_told(Adapter.TRTLLM, runs) == []


@pytest.mark.shows("DYN_KVBM_HOST_OFFLOAD_PREFIX_MIN_PRIORITY")
def test_offload_stops_at_a_block_of_lower_priority(play: Play) -> None:
    play(KIND, play_scenario, "retention_priorities", KIND)


@pytest.mark.shows("KVBM_SYNC_ONBOARD_BYTES", "KVBM_SYNC_ONBOARD_BYTES=0")
@pytest.mark.parametrize("name", ["small_loads_are_sync", "device_hit_and_host_hit"])
def test_the_loop_waits_for_loads_of_so_few_bytes(name: str, play: Play) -> None:
    play(KIND, play_scenario, name, KIND)
