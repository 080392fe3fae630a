"""Hybrid models: SGLang's own pools, tree and controller with kvbm under them, without an engine."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engines.worker import Worker

SCENES = "tests.sglang.hybrid"


HOW = [
    ("page_first", "kernel", "write_through"),
    ("page_first", "kernel", "write_back"),
    ("page_first_direct", "direct", "write_through"),
]


@pytest.mark.parametrize("how", HOW, ids=" ".join)
def test_states_come_back_with_their_kv_also_after_a_restart(
    sglang: Worker, how: tuple[str, str, str], tmp_path: Path, seed: int
) -> None:
    """Every byte of KV and state is compared, of hits at a state's own end too (sglang issue 39830)."""
    layout, io, policy = how
    found = sglang.run(
        f"{SCENES}:back_and_forth", folder=str(tmp_path), layout=layout, io=io, policy=policy, seed=seed
    )
    assert found == {place: [96, 96, 64, 64, 96] for place in ("device", "host", "disk", "restart")}


def test_kv_without_its_state_is_no_hit(sglang: Worker, tmp_path: Path, seed: int) -> None:
    found = sglang.run(f"{SCENES}:without_states", folder=str(tmp_path), seed=seed)
    assert "the state after 128 tokens" in found.pop("a state that was not read"), "it was not compared"
    assert found == {
        "a damaged state": [0, 64],  # SGLang takes all of a fetch or nothing; then it is known to be gone
        "no state": 0,
        "a state that was computed again": 64,
    }


def test_states_of_other_shapes_and_dtypes_are_told_apart(sglang: Worker, tmp_path: Path, seed: int) -> None:
    found = sglang.run(f"{SCENES}:told_apart", folder=str(tmp_path), seed=seed)
    assert found == {"shape": 0, "dtype": 0, "the same": 64}


def test_a_state_that_comes_later_than_its_kv_is_stored_as_well(
    sglang: Worker, tmp_path: Path, seed: int
) -> None:
    """sglang PR 39856."""
    found = sglang.run(f"{SCENES}:late_state", folder=str(tmp_path), seed=seed)
    assert found == {"before": 0, "on the device": 64, "after a restart": 64, "the first one": 128}


def test_the_linker_brings_states_with_their_kv_also_after_a_restart(
    sglang: Worker, tmp_path: Path, seed: int
) -> None:
    found = sglang.run(f"{SCENES}:by_linker", folder=str(tmp_path), seed=seed)
    assert found == {place: [96, 96, 64, 64, 96] for place in ("device", "host", "restart")}


def test_the_linker_needs_all_parts_of_a_state(sglang: Worker, tmp_path: Path, seed: int) -> None:
    found = sglang.run(f"{SCENES}:linker_without_states", folder=str(tmp_path), seed=seed)
    assert "the state after 128 tokens" in found.pop("another slot"), "it was not compared"
    assert found == {"parts": 7, "a part is gone": 64, "both are": 0}


def test_hybrid_models_that_the_linker_must_not_cache_it_names(sglang: Worker, tmp_path: Path) -> None:
    of_store, of_chunks = sglang.run(f"{SCENES}:refused_by_linker", folder=str(tmp_path))
    assert "a hybrid model (states beside attention) with KVBM_REMOTE_URL is not supported" in of_store
    assert "a hybrid model (states beside attention) with --enable-mixed-chunk is not supported" in of_chunks


@pytest.mark.parametrize("is_packed", [True, False], ids=["in its pages", "in a pool"])
@pytest.mark.parametrize("how", [("page_first", "kernel"), ("layer_first", "direct")], ids=" ".join)
def test_a_drafts_kv_comes_back_with_the_models(
    sglang: Worker, how: tuple[str, str], is_packed: bool, tmp_path: Path, seed: int
) -> None:
    """Pages are named by pairs of tokens, as in the events that SGLang publishes (dynamo PR 6872, 10982)."""
    layout, io = how
    found = sglang.run(
        f"{SCENES}:drafts", folder=str(tmp_path), layout=layout, io=io, is_packed=is_packed, seed=seed
    )
    assert found.pop("without the draft's", 0) == 0
    assert found == {"names": True, "pages": 7, "disk": 112, "restart": 112}
