"""How vLLM divides KV heads among tensor-parallel ranks, for stores that engines of other sizes share.

What is not known for sure is refused: each rank's blocks are stored as they are then, or, if they were to be
made smaller, not at all.
"""

from __future__ import annotations

import logging
import re
from typing import TYPE_CHECKING, Any

from kvbm_core.config import KvbmSettings
from kvbm_core.errors import LayoutError
from kvbm_core.layout.heads import FP8, NO_CODEC, HeadGroup, HeadShards, divide_heads, head_tensors
from kvbm_core.transfer.torch_memory import describe_tensors
from kvbm_vllm.config import rank_of
from kvbm_vllm.kinds import layer_specs

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec

log = logging.getLogger("kvbm")

HEAD_AXIS = 1
"""Of [blocks, heads, tokens, content], in whatever order they lie in memory."""
_WITH_HEADS = frozenset({"FullAttentionSpec", "SlidingWindowSpec"})
_LATENT = frozenset({"MLAAttentionSpec"})
_PLAIN = frozenset({"NONE", "FP8_PER_TENSOR"})
"""Modes of a quantization that keeps nothing beside the numbers."""
_HEAD_COUNTS = re.compile("(kv|key_value)_(n_)?head|head_kv")


def heads_of(
    kv_caches: dict[str, torch.Tensor],
    kv_cache_config: KVCacheConfig,
    vllm_config: VllmConfig,
    settings: KvbmSettings,
) -> HeadShards | None:
    """How this rank's blocks are divided in the store; None if they are not, and a line if that was asked
    for. Without a number of shards there are as many as ranks.
    """
    if not settings.keeps_heads:
        return None
    try:
        return _divided(kv_caches, kv_cache_config, vllm_config, settings)
    except Exception as error:  # whatever a vLLM's objects are like
        if rank_of(vllm_config) == 0:
            why = error if isinstance(error, LayoutError) else f"{type(error).__name__}: {error}"
            log.warning("kvbm: %s: %s; %s", _asked(settings), why, _instead(settings))
        return None


def _asked(settings: KvbmSettings) -> str:
    codec, shards = settings.remote_codec, settings.remote_head_shards
    asked = [f"KVBM_REMOTE_CODEC={codec}"] if settings.is_lossy else []
    return ", ".join([*asked, f"KVBM_REMOTE_HEAD_SHARDS={shards}"] if shards else asked)


def _instead(settings: KvbmSettings) -> str:
    if settings.is_lossy:
        return "nothing is kept in the shared store; with KVBM_REMOTE_CODEC=none or zstd blocks are"
    what = "blocks are stored as each rank has them"
    return f"{what}, and engines of another tensor-parallel size do not find them"


def _divided(
    kv_caches: dict[str, torch.Tensor],
    kv_cache_config: KVCacheConfig,
    vllm_config: VllmConfig,
    settings: KvbmSettings,
) -> HeadShards:
    parallel = vllm_config.parallel_config
    if parallel.pipeline_parallel_size > 1:
        raise LayoutError("it is not for pipeline parallelism, whose ranks have other layers")
    if vllm_config.speculative_config is not None:
        raise LayoutError("it is not for speculative decoding, whose draft may divide its heads otherwise")
    groups = kv_cache_config.kv_cache_groups
    kinds = {type(spec).__name__ for group in groups for spec in layer_specs(group)}
    if not kinds <= _WITH_HEADS and not kinds <= _LATENT:
        raise LayoutError(f"it is not for layers of these kinds: {', '.join(sorted(kinds))}")
    total_heads = None if kinds <= _LATENT else _total_heads(vllm_config)
    for spec in (spec for group in groups for spec in layer_specs(group)):
        _check_spec(spec, total_heads)
    axis = None if total_heads is None else HEAD_AXIS
    num_blocks = int(kv_cache_config.num_blocks)
    made = tuple(_group(group, kv_caches, num_blocks, axis) for group in groups)
    ranks = int(parallel.tensor_parallel_size)
    max_shards = settings.remote_head_shards or ranks
    codec = FP8 if settings.is_lossy else NO_CODEC
    return divide_heads(made, total_heads, rank_of(vllm_config), ranks, max_shards, codec=codec)


def _total_heads(vllm_config: VllmConfig) -> int:
    """Of every layer. LayoutError if layers differ in that, as far as the model's configuration says."""
    total = int(vllm_config.model_config.get_total_num_kv_heads())
    config = vllm_config.model_config.hf_text_config
    for name, value in vars(config).items():
        is_other = value != total and (not isinstance(value, list) or set(value) != {total})
        if _HEAD_COUNTS.search(name) and value is not None and is_other:
            raise LayoutError(f"it is not for a model whose layers differ in KV heads ({name}={value})")
    return total


def _check_spec(spec: Any, total_heads: int | None) -> None:
    mode = getattr(getattr(spec, "kv_quant_mode", None), "name", "NONE")
    if mode not in _PLAIN and total_heads is not None:
        raise LayoutError(f"it is not for KV that is quantized as {mode}")
    if getattr(spec, "num_head_slots", None) is not None:
        raise LayoutError("it is not for this attention backend, which keeps heads in a way of its own")
    shards = getattr(spec, "max_tp_shards", None)
    if shards is not None and shards != (total_heads or 1):
        raise LayoutError(f"vLLM divides a layer into {shards} shards, and not into {total_heads or 1}")


def _group(
    group: KVCacheGroupSpec, kv_caches: dict[str, torch.Tensor], num_blocks: int, axis: int | None
) -> HeadGroup:
    names = list(group.layer_names)
    infos, _ = describe_tensors({name: kv_caches[name] for name in names}, names)
    specs = dict(zip(names, _per_layer(group), strict=True))
    block_tokens = int(group.kv_cache_spec.block_size)
    for info in infos if axis is not None else ():
        spec, per_block = specs[info.name], info.shape[0] // num_blocks
        content = (spec.head_size + getattr(spec, "head_size_v", spec.head_size)) * spec.dtype.itemsize
        expected = (num_blocks * per_block, spec.num_kv_heads, block_tokens // per_block, content)
        if (*info.shape[:-1], info.shape[-1] * info.itemsize) != expected:
            raise LayoutError(f"a layer of shape {info.shape} is not [blocks, heads, tokens, K and V]")
    return HeadGroup(block_tokens, head_tensors(infos, num_blocks, axis))


def _per_layer(group: KVCacheGroupSpec) -> list[Any]:
    specs = getattr(group.kv_cache_spec, "kv_cache_specs", None)
    return [specs[name] if specs else group.kv_cache_spec for name in group.layer_names]
