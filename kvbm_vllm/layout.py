"""vLLM's KV tensors -> device memory that the transfer engine understands, or a refusal.

Shapes and strides differ per version and attention backend; they are read, never assumed (vLLM 0.26 to 0.33:
4-D [blocks, heads, tokens, content] or MLA's 3-D, with any strides, several kernel blocks per block allowed).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from kvbm_core.errors import LayoutError
from kvbm_core.layout.fingerprint import LayerIdentity, LayoutIdentity
from kvbm_core.layout.tensors import (
    TensorInfo,
    block_axis,
    content_strides_bytes,
    view_of_tensors,
    without_shared,
)
from kvbm_core.layout.view import BlockView
from kvbm_core.transfer.executor import DeviceMemory
from kvbm_core.transfer.torch_memory import describe_tensors

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

_PLACE = re.compile(r"(.*?)\.(\d+)(?:\.|$)")
# Ways to draft in which nothing that drafts keeps KV.
_DRAFTS_WITHOUT_KV = frozenset({"ngram", "ngram_gpu", "suffix"})


class Audited(NamedTuple):
    """What an audit has to know of KV. ``cache_dtype``: vLLM's. ``num_layers``: of the model itself, if it
    drafts with layers that keep KV too; None: it does not.
    """

    cache_dtype: str
    num_layers: int | None = None


def audited_of(vllm_config: VllmConfig) -> Audited:
    """What audits compare in this engine."""
    cache_dtype, drafting = str(vllm_config.cache_config.cache_dtype), vllm_config.speculative_config
    if drafting is None or drafting.method in _DRAFTS_WITHOUT_KV:
        return Audited(cache_dtype)
    return Audited(cache_dtype, int(vllm_config.model_config.get_total_num_hidden_layers()))


def own_layers(names: Iterable[str], num_layers: int) -> frozenset[str]:
    """Those of ``names`` that are the model's, which has ``num_layers``, and not a draft's. vLLM numbers a
    draft's behind them (model.layers.32) or calls them otherwise (mtp.layers.0). Empty where it cannot be
    told.
    """
    places = {name: place for name in names if (place := _PLACE.match(name)) and int(place[2]) < num_layers}
    ranked = Counter(place[1] for place in places.values()).most_common(2)
    if not ranked or (len(ranked) > 1 and ranked[0][1] == ranked[1][1]):
        return frozenset()
    return frozenset(name for name, place in places.items() if place[1] == ranked[0][0])


def device_memory(
    kv_caches: dict[str, torch.Tensor],
    kv_cache_config: KVCacheConfig,
    audited: Audited,
    rank: int,
    world_size: int,
) -> tuple[DeviceMemory, str]:
    """The device tier's blocks, group by group, and the fingerprint of one slot's bytes. LayoutError when in
    doubt.
    """
    names = [name for group in kv_cache_config.kv_cache_groups for name in group.layer_names]
    missing = [name for name in names if name not in kv_caches]
    if missing:
        raise LayoutError(f"kvbm: no KV tensor for layer {missing[0]} ({len(missing)} missing)")
    not_tensors = [name for name in names if not hasattr(kv_caches[name], "untyped_storage")]
    if not_tensors:
        raise LayoutError(f"kvbm: layer {not_tensors[0]} has no single KV tensor")
    unique = _without_shared_layers(names, kv_caches)
    infos, storages = describe_tensors({name: kv_caches[name] for name in unique}, unique)
    info_of = {info.name: info for info in infos}
    views: list[BlockView] = []
    identities: list[str] = []
    dtypes: list[str] = []
    parts: list[tuple[slice, ...] | None] = []
    num_layers = audited.num_layers
    own = None if num_layers is None else own_layers(unique, num_layers)
    for group in kv_cache_config.kv_cache_groups:
        layers = [info_of[name] for name in group.layer_names if name in info_of]
        view = view_of_tensors(layers, int(kv_cache_config.num_blocks))
        views.append(view)
        dtypes.append(_dtype_of(group.kv_cache_spec, layers, audited.cache_dtype))
        each = tuple(_layer_identity(layer, view.num_blocks) for layer in layers)
        identity = _identity(group.kv_cache_spec, each, dtypes[-1], rank, world_size)
        identities.append(identity.fingerprint())
        parts.append(None if own is None else _parts_of(layers, own, view.num_blocks))
    return DeviceMemory(tuple(views), storages, tuple(dtypes), tuple(parts)), "+".join(identities)


def _parts_of(layers: list[TensorInfo], own: frozenset[str], num_blocks: int) -> tuple[slice, ...]:
    """Where the model's own layers are in a block's content, which is one layer after the other."""
    parts: list[slice] = []
    at_bytes = 0
    for layer in without_shared(layers):
        start, at_bytes = at_bytes, at_bytes + _page_bytes(layer, num_blocks)
        if layer.name not in own:
            continue
        if parts and parts[-1].stop == start:
            start = parts.pop().start
        parts.append(slice(start, at_bytes))
    return tuple(parts)


def _page_bytes(layer: TensorInfo, num_blocks: int) -> int:
    return prod(layer.shape) * layer.itemsize // num_blocks


def _without_shared_layers(names: list[str], kv_caches: dict[str, torch.Tensor]) -> list[str]:
    """Layers that reuse another layer's cache of the same group hold the same tensor object; each is stored
    once.
    """
    seen: dict[int, str] = {}
    for name in names:
        seen.setdefault(id(kv_caches[name]), name)
    return list(seen.values())


def _dtype_of(spec: Any, layers: list[TensorInfo], cache_dtype: str) -> str:
    """See DeviceMemory.dtypes; padding is no number, nor are the bytes of several tensors."""
    specs = list(getattr(spec, "kv_cache_specs", {}).values()) or [spec]
    is_padded = any(hasattr(layer_spec, "shapes") for layer_spec in specs) or any(
        getattr(layer_spec, "page_size_padded", None) is not None for layer_spec in specs
    )
    names = {layer.dtype.removeprefix("torch.") for layer in layers}
    if len(names) != 1 or is_padded:
        return ""
    return _float8_of(specs, cache_dtype) if names == {"uint8"} else names.pop()


def _float8_of(specs: list[Any], cache_dtype: str) -> str:
    """vLLM keeps float8 as uint8, and also blocks that hold scales or packed numbers: "" for those."""
    if any(
        getattr(getattr(spec, "kv_quant_mode", None), "name", "") != "FP8_PER_TENSOR"
        or getattr(spec, "state_content_bytes", None) is not None
        or getattr(spec, "cache_dtype_str", None) not in {None, cache_dtype}
        for spec in specs
    ):
        return ""
    if cache_dtype == "fp8_e5m2":
        return "float8_e5m2"
    if cache_dtype not in {"fp8", "fp8_e4m3"}:
        return ""
    try:
        from vllm.platforms import current_platform
    except ImportError:  # nothing can be compared then, and an audit says so
        return ""
    return str(current_platform.fp8_dtype()).removeprefix("torch.")


def _state_of(spec: Any) -> str:
    """What the bytes of a state mean: the tensor that vLLM hands over is of bytes alone. "" for KV."""
    specs = getattr(spec, "kv_cache_specs", {})
    texts = [_one_state(each) for each in (specs[name] for name in sorted(specs))] or [_one_state(spec)]
    return "|".join(texts) if any(texts) else ""


def _one_state(spec: Any) -> str:
    shapes = getattr(spec, "shapes", None)
    if shapes is None:
        return ""
    parts = [f"{dtype}{tuple(shape)}" for shape, dtype in zip(shapes, spec.dtypes, strict=True)]
    kind = getattr(spec.mamba_type, "name", spec.mamba_type)
    replicated = getattr(spec, "tp_replicated", False)
    return f"{kind} {' '.join(parts)} {conv_layout()} replicated={replicated}"


def conv_layout() -> str:
    """The order of a convolution state's axes, which vLLM reads from the environment."""
    try:
        from vllm.model_executor.layers.mamba.mamba_utils import get_conv_state_layout
    except ImportError:
        return ""
    return str(get_conv_state_layout())


def _identity(
    spec: Any, layers: tuple[LayerIdentity, ...], numbers: str, rank: int, world_size: int
) -> LayoutIdentity:
    """``numbers``: what the bytes of all layers are, where the tensors' dtype does not say it."""
    inner = next(iter(getattr(spec, "kv_cache_specs", {}).values()), spec)
    return LayoutIdentity(
        layers=layers,
        block_size_tokens=int(spec.block_size),
        kv_heads_local=int(getattr(inner, "num_kv_heads", 1)),
        head_size=int(getattr(inner, "head_size", 0)),
        extra=(("state", _state_of(spec)), ("numbers", numbers)),
        rank=rank,
        world_size=world_size,
    )


def _layer_identity(layer: TensorInfo, num_blocks: int) -> LayerIdentity:
    """The order: of each axis within a block how many there are, and how many bytes are between neighbors."""
    sizes = list(layer.shape)
    sizes[block_axis(layer, num_blocks)] //= num_blocks
    strides = content_strides_bytes(layer, num_blocks)
    axes = (str(n) if n == 1 else f"{n}:{stride}" for n, stride in zip(sizes, strides, strict=True))
    return LayerIdentity(layer.dtype, _page_bytes(layer, num_blocks), "x".join(axes))
