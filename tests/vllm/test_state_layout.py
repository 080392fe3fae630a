"""What a state's bytes mean is part of the layout's fingerprint: vLLM hands over a tensor of bytes alone."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest
import torch
from vllm.model_executor.layers.mamba import mamba_utils
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, MambaSpec, UniformTypeKVCacheSpecs

from kvbm_core.transfer.executor import DeviceMemory
from kvbm_vllm.layout import Audited, device_memory

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
NUM_BLOCKS, PAGE_BYTES = 6, 256
BASE: dict[str, Any] = {
    "block_size": 4,
    "shapes": ((3, 8), (2, 4, 4)),
    "dtypes": (BF16, F32),
    "page_size_padded": PAGE_BYTES,
    "mamba_type": MambaAttentionBackendEnum.GDN_ATTN,
    "mamba_cache_mode": "align",
}
OTHERS: dict[str, dict[str, Any]] = {
    "the shape of the convolution's": {"shapes": ((8, 3), (2, 4, 4))},
    "the shape of the recurrence's": {"shapes": ((3, 8), (4, 2, 4))},
    "as many bytes of other numbers": {"shapes": ((3, 8), (2, 4, 8)), "dtypes": (BF16, F16)},
    "another 16-bit type": {"dtypes": (F16, F32)},
    "the other order": {"shapes": ((2, 4, 4), (3, 8)), "dtypes": (F32, BF16)},
    "another kind of layer": {"mamba_type": MambaAttentionBackendEnum.MAMBA2},
    "replicated on all ranks": {"tp_replicated": True},
    "blocks of another size": {"block_size": 8},
}


def memory_of(spec: Any, num_layers: int = 1) -> tuple[DeviceMemory, str]:
    """As vLLM gives it: content of a padded page, in bytes."""
    names = [f"layers.{i}.mixer" for i in range(num_layers)]
    inner = next(iter(getattr(spec, "kv_cache_specs", {}).values()), spec)
    content = inner.state_content_size_bytes
    caches = {
        name: torch.zeros(NUM_BLOCKS, PAGE_BYTES, dtype=torch.int8)[:, None, None, :content] for name in names
    }
    config = KVCacheConfig(NUM_BLOCKS, [], [KVCacheGroupSpec(names, spec)])
    return device_memory(caches, config, Audited("auto"), 0, 1)


def test_states_that_differ_in_what_their_bytes_mean_have_different_names(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = {"as it is": memory_of(MambaSpec(**BASE))[1]}
    names |= {what: memory_of(MambaSpec(**(BASE | change)))[1] for what, change in OTHERS.items()}
    monkeypatch.setenv("VLLM_SSM_CONV_STATE_LAYOUT", "DS")
    mamba_utils.get_conv_state_layout.cache_clear()
    names["axes in the other order"] = memory_of(MambaSpec(**BASE))[1]
    monkeypatch.delenv("VLLM_SSM_CONV_STATE_LAYOUT")
    mamba_utils.get_conv_state_layout.cache_clear()
    for (one, name), (other, same) in combinations(names.items(), 2):
        assert name != same, (one, other)
    assert memory_of(MambaSpec(**BASE))[1] == names["as it is"]


def test_the_same_states_have_the_same_name_whatever_they_are_padded_to() -> None:
    padded, name = memory_of(MambaSpec(**BASE))
    bare, bare_name = memory_of(MambaSpec(**(BASE | {"page_size_padded": None})))
    assert name == bare_name
    assert padded.views[0].block_bytes == bare.views[0].block_bytes == 3 * 8 * 2 + 2 * 4 * 4 * 4


def test_layers_of_one_group_whose_states_differ_are_all_named() -> None:
    def both(second: dict[str, Any]) -> str:
        specs = {"layers.0.mixer": MambaSpec(**BASE), "layers.1.mixer": MambaSpec(**(BASE | second))}
        return memory_of(UniformTypeKVCacheSpecs(block_size=4, kv_cache_specs=specs), num_layers=2)[1]

    assert both({}) != both({"shapes": ((3, 8), (4, 2, 4))})


@pytest.mark.parametrize("padded", [PAGE_BYTES, None])
def test_bytes_of_states_are_no_numbers_that_could_be_rounded(padded: int | None) -> None:
    memory, _ = memory_of(MambaSpec(**(BASE | {"page_size_padded": padded})))
    assert memory.dtype_of(0) == ""
