"""KvbmHiCache on SGLang's own host pools, without an engine."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engines.worker import Worker

MHA = ("layer_first", "page_first", "page_first_direct", "page_head")
MLA = ("layer_first", "page_first", "page_first_direct")
POOLS = [*(("mha", layout) for layout in MHA), *(("mla", layout) for layout in MLA)]
SCENES = "tests.sglang.pools"


@pytest.mark.parametrize(("kind", "layout"), POOLS)
def test_pages_come_back_also_after_a_restart(
    sglang: Worker, kind: str, layout: str, tmp_path: Path, seed: int
) -> None:
    found = sglang.run(f"{SCENES}:back_and_forth", folder=str(tmp_path), kind=kind, layout=layout, seed=seed)
    heads = 2 * 2 * 64 if kind == "mha" else 512 + 64
    assert found["page_bytes"] == 16 * 4 * heads * 2


def test_pages_of_others_are_not_found(sglang: Worker, tmp_path: Path, seed: int) -> None:
    assert len(sglang.run(f"{SCENES}:not_found_by_others", folder=str(tmp_path), seed=seed)) == 12


def test_models_find_their_pages_in_whatever_order_they_start(
    sglang: Worker, tmp_path: Path, seed: int
) -> None:
    assert sglang.run(f"{SCENES}:in_any_order", folder=str(tmp_path), seed=seed) == 2


def test_a_file_that_another_process_has_joins_later(sglang: Worker, tmp_path: Path, seed: int) -> None:
    sglang.run(f"{SCENES}:joins_later", folder=str(tmp_path), seed=seed)


def test_kinds_of_float8_are_told_apart(sglang: Worker, tmp_path: Path, seed: int) -> None:
    sglang.run(f"{SCENES}:bytes_of_unknown_meaning", folder=str(tmp_path), seed=seed)


def test_what_shapes_k_and_v_is_told_apart_and_what_does_not_is_not(
    sglang: Worker, tmp_path: Path, seed: int
) -> None:
    assert sglang.run(f"{SCENES}:told_apart", folder=str(tmp_path), seed=seed) == []


def test_what_means_nothing_after_a_restart_is_not_cached_and_said(
    sglang: Worker, tmp_path: Path, seed: int
) -> None:
    said = sglang.run(f"{SCENES}:not_cached", folder=str(tmp_path), seed=seed)
    words = {
        "dummy": "load_format",
        "lora": "enable_lora",
        "lora at start": "lora_paths",
        "images": "is_multimodal",
        "a newer SGLang": "of_tomorrow",
    }
    assert set(said) == set(words)
    for what, word in words.items():
        (line,) = said[what]
        assert word in line


def test_ranks_read_what_one_of_them_writes(sglang: Worker, tmp_path: Path, seed: int) -> None:
    sglang.run(f"{SCENES}:ranks_of_one_writer", folder=str(tmp_path), seed=seed)


def test_ranks_read_an_indexer_and_a_draft_as_they_read_latents(
    sglang: Worker, tmp_path: Path, seed: int
) -> None:
    found = sglang.run(f"{SCENES}:ranks_of_one_writer_and_an_indexer", folder=str(tmp_path), seed=seed)
    assert found == [8, 8]


def test_each_rank_has_states_of_its_own_beside_the_same_latents(
    sglang: Worker, tmp_path: Path, seed: int
) -> None:
    found = sglang.run(f"{SCENES}:states_beside_latents", folder=str(tmp_path), seed=seed)
    assert found == [[4, 0], [4, 4]]


@pytest.mark.parametrize("how", ["bit of the payload", "bit of the header", "zeroed", "swapped", "truncated"])
def test_a_damaged_page_is_not_loaded_and_is_written_again(
    sglang: Worker, how: str, tmp_path: Path, seed: int
) -> None:
    failures = sglang.run(f"{SCENES}:damaged", folder=str(tmp_path), how=how, seed=seed)
    expected = {} if how in ("truncated", "swapped") else {'kvbm_failures_total{kind="onboard_corrupt"}': 1.0}
    assert failures == expected


def test_clear_removes_only_what_is_ours(sglang: Worker, tmp_path: Path, seed: int) -> None:
    sglang.run(f"{SCENES}:cleared", folder=str(tmp_path), seed=seed)


def test_an_operator_resets_and_drains(sglang: Worker, tmp_path: Path, seed: int) -> None:
    sglang.run(f"{SCENES}:orders", folder=str(tmp_path), seed=seed)


def test_side_pools_follow_sglangs_policies(sglang: Worker, tmp_path: Path, seed: int) -> None:
    sglang.run(f"{SCENES}:side_pools", folder=str(tmp_path), seed=seed)


def test_states_get_room_on_the_disk_for_the_kv_that_needs_them(
    sglang: Worker, tmp_path: Path, seed: int
) -> None:
    """Divided as SGLang's host memory, most KV has no state behind it (sglang PR 39436)."""
    assert sglang.run(f"{SCENES}:divided_disk", folder=str(tmp_path), seed=seed) == [1] * 8


def test_a_size_is_over_all_ranks(sglang: Worker, tmp_path: Path, seed: int) -> None:
    """Of latents one rank has the file; of states beside them each."""
    found = sglang.run(f"{SCENES}:sizes_of_all_ranks", folder=str(tmp_path), seed=seed)
    assert [len(shares) for shares in found.values()] == [1, 2, 4, 2]
    assert all(0.95 < sum(shares) <= 1 for shares in found.values()), found
    assert found["two"][0] == found["two"][1] and found["latents"][0] > found["latents"][1] > 0, found


def test_with_a_pool_that_is_not_known_nothing_is_cached_and_said(
    sglang: Worker, tmp_path: Path, seed: int
) -> None:
    said = sglang.run(f"{SCENES}:side_pools_not_known", folder=str(tmp_path), seed=seed)
    assert said.pop("none") == []
    words = {
        "of tomorrow": "pool of_tomorrow is not supported (this SGLang is newer than this kvbm",
        "compressed": "DeepSeek-V4's compressed pages",
        "state beside states": "slot side states",
        "mixed chunks": "--enable-mixed-chunk",  # sglang issue 39342
        "8 bits": "--enable-int8-mamba-checkpoint",
        "enable_return_routed_experts": "--enable-return-routed-experts",
        "enable_return_indexer_topk": "--enable-return-indexer-topk",
        "a draft's heads": "pool draft is divided by heads, and SGLang stores it for one of 2 ranks alone",
    }
    assert {what: len(lines) for what, lines in said.items()} == dict.fromkeys(words, 1)
    assert all(word in said[what][0] for what, word in words.items()), said


def test_a_host_pool_can_be_had_beside_another_engine(sglang: Worker, seed: int) -> None:
    assert sglang.run(f"{SCENES}:pools_beside_another_engine", seed=seed) >= 2 * 32 * 16


def test_odd_calls_are_refused(sglang: Worker, tmp_path: Path, seed: int) -> None:
    guarded = sglang.run(f"{SCENES}:odd_calls", folder=str(tmp_path), seed=seed)
    assert guarded == {'kvbm_guarded_errors_total{seam="batch_set"}': 1.0}


def test_weights_that_are_updated_in_place_find_and_keep_nothing(
    sglang: Worker, tmp_path: Path, seed: int
) -> None:
    found = sglang.run(f"{SCENES}:weights_updated", folder=str(tmp_path), seed=seed)
    assert found == [4, 4, 4, 4, *[4, 0] * 7]


def test_a_flush_of_sglangs_cache_keeps_the_names_of_the_same_weights_alone(
    sglang: Worker, tmp_path: Path, seed: int
) -> None:
    assert sglang.run(f"{SCENES}:flushed", folder=str(tmp_path), seed=seed) == [2, 2, 0, 0, 2]


def test_statistics(sglang: Worker, tmp_path: Path, seed: int) -> None:
    found = sglang.run(f"{SCENES}:statistics", folder=str(tmp_path), seed=seed)
    assert (found["backup_pgs"], found["prefetch_pgs"]) == ([8], [4])
    numbers = found["numbers"]
    page_bytes = 16 * 4 * 2 * 2 * 64 * 2
    assert numbers["kvbm_matched_tokens"] == 8 * 16
    assert (numbers["kvbm_offload_blocks_h2d"], numbers["kvbm_onboard_blocks_d2d"]) == (8, 4)
    assert numbers['kvbm_bytes_total{direction="offload"}'] == 8 * page_bytes
    assert numbers['kvbm_tier_transfer_bytes_total{from="host",to="disk"}'] == 8 * page_bytes
    assert numbers['kvbm_tier_transfer_bytes_total{from="disk",to="host"}'] == 4 * page_bytes
    assert numbers['kvbm_read_again_bytes_total{tier="disk"}'] == 4 * page_bytes
    assert numbers["kvbm_disk_cache_hit_rate"] == 0.8
    assert numbers['kvbm_tier_blocks{tier="disk",state="used"}'] == 8


@pytest.mark.parametrize("url", ["file://{}/share", "toy://pools"])
@pytest.mark.parametrize("kind", ["mha", "mla"])
def test_pages_of_another_machine_are_found(
    sglang: Worker, kind: str, url: str, tmp_path: Path, seed: int
) -> None:
    numbers = sglang.run(
        f"{SCENES}:shared",
        folder=str(tmp_path),
        kind=kind,
        url=url.replace("pools", f"{kind}{seed}"),
        seed=seed,
    )
    assert numbers["kvbm_onboard_blocks_o2d"] == 8 and "kvbm_onboard_blocks_d2d" not in numbers
    assert "kvbm_offload_blocks_d2o" not in numbers, "what came from there is put there again"
    page_bytes = 16 * 4 * (2 * 2 * 64 if kind == "mha" else 512 + 64) * 2
    assert numbers['kvbm_tier_transfer_bytes_total{from="remote",to="host"}'] == 8 * page_bytes
    assert "kvbm_disk_cache_hit_rate" not in numbers
    assert numbers["kvbm_object_cache_hit_rate"] == 13 / 17
    assert numbers["kvbm_matched_tokens"] == 13 * 16


def test_pages_are_shared_behind_those_before_them_which_the_disk_keeps(
    sglang: Worker, tmp_path: Path, seed: int
) -> None:
    found = sglang.run(f"{SCENES}:heads_first", folder=str(tmp_path), seed=seed)
    assert found["shared"] == [0, 4, 8, 12], "without their head, the head, both, and where nobody says"
    assert found["kept"] == 6
    (line,) = found["lines"]
    assert "hicache_storage_pass_prefix_keys" in line


def test_a_wrong_setting_is_one_line(sglang: Worker, tmp_path: Path) -> None:
    def refused(**extra: object) -> str:
        line: str = sglang.run(f"{SCENES}:refused", extra={"DYN_KVBM_DISK_CACHE_DIR": str(tmp_path), **extra})
        assert "\n" not in line
        return line

    assert "DYN_KVBM_DISK_CACHE_GB" in refused()
    assert "interface_v1=0" in refused(interface_v1=0, DYN_KVBM_DISK_CACHE_GB=1)
    assert "much" in refused(DYN_KVBM_DISK_CACHE_GB="much")


def test_a_router_hears_of_pages_under_the_hashes_that_sglang_publishes(
    sglang: Worker, short_path: Path, seed: int
) -> None:
    assert sglang.run(f"{SCENES}:events", folder=str(short_path), seed=seed) == []


def test_each_setting_is_read_by_hicache_or_its_user_is_told(
    sglang: Worker, tmp_path: Path, seed: int
) -> None:
    assert sglang.run(f"{SCENES}:settings_of_hicache", folder=str(tmp_path), seed=seed) == []


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({}, ""),
        ({"pp_size": 2}, "pipeline parallelism (--pp-size) is not supported by the linker"),
        ({"is_eagle": True}, "KV of a draft model is not supported by the linker"),
        (
            {"given": {"enable_return_routed_experts": True}},
            "--enable-return-routed-experts is not supported by the linker",
        ),
        (
            {"components": ["FULL", "MAMBA", "SWA"]},
            "a model with FULL, MAMBA, SWA components is not supported by the linker; nothing is cached",
        ),
    ],
)
def test_what_the_linker_must_not_cache_it_names(
    sglang: Worker, params: dict[str, object], words: str, tmp_path: Path
) -> None:
    said = sglang.run(f"{SCENES}:not_cached_by_linker", folder=str(tmp_path), **params)
    assert len(said) == bool(words) and all(words in line for line in said)


@pytest.mark.parametrize("rank", [0, 1])
def test_each_setting_is_read_by_the_linker_or_its_user_is_told(
    sglang: Worker, tmp_path: Path, rank: int
) -> None:
    assert sglang.run(f"{SCENES}:settings_of_linker", folder=str(tmp_path), rank=rank) == []
