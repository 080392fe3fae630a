"""What type the numbers of a block are, as an audit must read them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVQuantMode,
    MLAAttentionSpec,
)

from kvbm_core.transfer.compare import can_compare
from kvbm_vllm.layout import Audited, device_memory, own_layers

FP8, NONE = KVQuantMode.FP8_PER_TENSOR, KVQuantMode.NONE
PER_TOKEN = KVQuantMode.FP8_PER_TOKEN_HEAD
NUM_BLOCKS = 4


@pytest.mark.parametrize(
    ("cache_dtype", "mode", "made", "more", "expected"),
    [
        ("auto", NONE, torch.bfloat16, {}, "bfloat16"),
        ("fp8", FP8, torch.uint8, {}, "float8_e4m3fn"),
        ("fp8_e4m3", FP8, torch.uint8, {}, "float8_e4m3fn"),
        ("fp8_e5m2", FP8, torch.uint8, {}, "float8_e5m2"),
        ("fp8", NONE, torch.bfloat16, {}, "bfloat16"),  # a layer that is left out
        ("fp8", FP8, torch.uint8, {"cache_dtype_str": "fp8"}, "float8_e4m3fn"),  # MLA
        ("fp8", NONE, torch.uint8, {"cache_dtype_str": None}, ""),  # an indexer's keys and their scales
        ("fp8_ds_mla", FP8, torch.uint8, {"cache_dtype_str": "fp8_ds_mla"}, ""),  # float8, scales, bfloat16
        ("fp8", FP8, torch.uint8, {"cache_dtype_str": "fp8_ds_mla"}, ""),
        ("fp8_per_token_head", PER_TOKEN, torch.uint8, {}, ""),
        ("nvfp4", KVQuantMode.NVFP4, torch.uint8, {}, ""),
    ],
)
def test_float8_is_told_from_other_bytes(
    cache_dtype: str, mode: KVQuantMode, made: torch.dtype, more: dict[str, Any], expected: str
) -> None:
    kind = MLAAttentionSpec if more else FullAttentionSpec
    spec = kind(block_size=4, num_kv_heads=1, head_size=64, dtype=made, kv_quant_mode=mode, **more)
    config = KVCacheConfig(NUM_BLOCKS, [], [KVCacheGroupSpec(["layer"], spec)])
    tensor = torch.zeros(NUM_BLOCKS, 1, 4, 64, dtype=made)
    memory, _ = device_memory({"layer": tensor}, config, Audited(cache_dtype), 0, 1)
    assert memory.dtype_of(0) == expected
    assert can_compare(expected) is bool(expected)


@pytest.mark.parametrize(
    ("names", "own"),
    [
        ("model.layers.0.attn model.layers.1.attn model.layers.2.attn", 2),  # EAGLE, DeepSeek's MTP
        ("model.layers.0.linear_attn model.layers.1.attn mtp.layers.0.attn", 2),
        ("language_model.model.layers.0.attn language_model.model.layers.1.attn model.layers.2.attn", 2),
        ("model.layers.0.attn model.layers.1.attn model.mtp.layers.0.attn", 2),
        ("model.layers.0.attn mtp.layers.0.attn", 0),  # either may be the draft's
        ("attn.a attn.b", 0),
    ],
)
def test_a_drafts_layers_are_told_from_the_models(names: str, own: int) -> None:
    every = names.split()
    assert own_layers(every, 2) == set(every[:own])


@pytest.mark.parametrize(
    ("num_layers", "parts"), [(None, [slice(None)]), (3, [slice(0, 512), slice(768, 1024)])]
)
def test_an_audit_leaves_out_a_drafts_part_of_a_block(num_layers: int | None, parts: list[slice]) -> None:
    names = [f"layers.{number}.attn" for number in (0, 1, 3, 2)]
    spec = FullAttentionSpec(block_size=4, num_kv_heads=1, head_size=8, dtype=torch.float32)
    config = KVCacheConfig(NUM_BLOCKS, [], [KVCacheGroupSpec(names, spec)])
    caches = {name: torch.zeros(NUM_BLOCKS, 1, 4, 16) for name in names}
    memory, _ = device_memory(caches, config, Audited("auto", num_layers), 0, 1)
    assert memory.views[0].block_bytes == 1024
    assert memory.audited_of(0) == tuple(parts)
