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
from kvbm_vllm.layout import device_memory

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
    memory, _ = device_memory({"layer": tensor}, config, cache_dtype, 0, 1)
    assert memory.dtype_of(0) == expected
    assert can_compare(expected) is bool(expected)
