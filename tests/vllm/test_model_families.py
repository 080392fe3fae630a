"""Verdicts of the table of model families, with vLLM's own classes in place of what stands in for them."""

from __future__ import annotations

from math import prod
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.model_executor.layers.mamba.mamba_utils import MambaStateShapeCalculator
from vllm.v1 import kv_cache_interface
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, KVCacheSpec, UniformTypeKVCacheSpecs

from kvbm_core.errors import UnsupportedError
from kvbm_core.identity.layers import state_bytes
from kvbm_vllm.config import group_specs
from kvbm_vllm.versions import probe
from tests.model_families import FAMILIES, REFUSED, Family, Layer, of_vllm

ATTENTION: dict[str, Any] = {"num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}
MORE: dict[str, dict[str, Any]] = {
    "MambaSpec": {"shapes": ((4, 4), (2, 4, 4)), "dtypes": (torch.bfloat16, torch.float32)},
    "RSWASpec": {**ATTENTION, "rswa_window": 8},
    "SinkFullAttentionSpec": {**ATTENTION, "sink_len": 16},
}


def real(layer: Layer) -> KVCacheSpec:
    """The spec that a layer of this kind gives vLLM."""
    kind, values = layer
    spec: KVCacheSpec = getattr(kv_cache_interface, kind)(
        block_size=16, **{**MORE.get(kind, ATTENTION), **values}
    )
    return spec


def group(number: int, layers: tuple[Layer, ...]) -> KVCacheGroupSpec:
    specs = {f"layers.{number}.{i}": real(layer) for i, layer in enumerate(layers)}
    one = next(iter(specs.values()))
    many = UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs=specs)
    return KVCacheGroupSpec(list(specs), many if len(specs) > 1 else one)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_the_verdict_is_the_same_with_vllms_own_classes(family: Family) -> None:
    config = KVCacheConfig(8, [], [group(i, layers) for i, layers in enumerate(family.groups)])
    model = SimpleNamespace(model_config=SimpleNamespace(model="MODEL", architecture=family.architecture))
    verdict, line = of_vllm(family)
    if verdict == REFUSED:
        with pytest.raises(UnsupportedError) as error:
            group_specs(model, config, probe())
        assert str(error.value) == line
    else:
        groups = group_specs(model, config, probe())
        assert [group.is_state for group in groups] == [
            layers[0][0] == "MambaSpec" for layers in family.groups
        ]


SHAPES = MambaStateShapeCalculator
STATE_SIZES = {
    "gated delta net": (
        {
            "linear_conv_kernel_dim": 4,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 64,
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 32,
            "mamba_ssm_dtype": "float32",
        },
        SHAPES.gated_delta_net_state_shape(1, 16, 32, 128, 64, 4),
    ),
    "Nemotron-H": (
        {
            "mamba_num_heads": 24,
            "mamba_head_dim": 80,
            "n_groups": 8,
            "ssm_state_size": 128,
            "conv_kernel": 4,
            "hidden_size": 7,
        },
        SHAPES.mamba2_state_shape(1, 24 * 80, 8, 24, 80, 128, 4),
    ),
    "Falcon-H1": (
        {
            "mamba_n_heads": 24,
            "mamba_d_ssm": 1536,
            "mamba_n_groups": 2,
            "mamba_d_state": 256,
            "mamba_d_conv": 4,
            "mamba_ssm_cache_dtype": "float32",
            "hidden_size": 7,
        },
        SHAPES.mamba2_state_shape(1, 1536, 2, 24, 64, 256, 4),
    ),
    "Granite 4": (
        {
            "mamba_n_heads": 128,
            "mamba_d_head": 64,
            "mamba_n_groups": 1,
            "mamba_d_state": 128,
            "mamba_d_conv": 4,
            "mamba_expand": 2,
            "mamba_ssm_cache_dtype": "float32",
            "hidden_size": 4096,
        },
        SHAPES.mamba2_state_shape(1, 8192, 1, 128, 64, 128, 4),
    ),
    "Kimi-Linear": (
        {"linear_attn_config": {"num_heads": 32, "head_dim": 64, "short_conv_kernel_size": 4}},
        SHAPES.kda_state_shape(1, 32, 64, conv_kernel_size=4),
    ),
    "LFM2": ({"conv_L_cache": 3, "hidden_size": 64}, SHAPES.short_conv_state_shape(1, 64, 3)),
}


@pytest.mark.parametrize("name", STATE_SIZES)
def test_a_state_is_as_large_as_vllm_makes_it(name: str) -> None:
    """The convolution's in bfloat16, the heads' in float32."""
    config, shapes = STATE_SIZES[name]
    sizes = [2, 4][: len(shapes)]
    expected = sum(prod(shape) * size for shape, size in zip(shapes, sizes, strict=True))
    assert state_bytes(config, 2) == expected
