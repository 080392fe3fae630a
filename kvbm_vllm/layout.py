"""vLLM's KV tensors -> device memory that the transfer engine understands, or a refusal.

Shapes and strides differ per version and attention backend; they are read, never assumed (vLLM 0.26 to 0.33:
4-D [blocks, heads, tokens, content] or MLA's 3-D, with any strides, several kernel blocks per block allowed).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvbm_core.errors import LayoutError
from kvbm_core.layout.fingerprint import LayoutIdentity
from kvbm_core.layout.tensors import TensorInfo, view_of_tensors
from kvbm_core.layout.view import BlockView
from kvbm_core.transfer.executor import DeviceMemory
from kvbm_core.transfer.torch_memory import describe_tensors

if TYPE_CHECKING:
    import torch
    from vllm.v1.kv_cache_interface import KVCacheConfig


def device_memory(
    kv_caches: dict[str, torch.Tensor],
    kv_cache_config: KVCacheConfig,
    cache_dtype: str,
    rank: int,
    world_size: int,
) -> tuple[DeviceMemory, str]:
    """The device tier's blocks, group by group, and the fingerprint of one slot's bytes. LayoutError when in
    doubt. ``cache_dtype``: vLLM's.
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
    for group in kv_cache_config.kv_cache_groups:
        layers = [info_of[name] for name in group.layer_names if name in info_of]
        view = view_of_tensors(layers, int(kv_cache_config.num_blocks))
        views.append(view)
        identities.append(_identity(group.kv_cache_spec, layers, view, rank, world_size).fingerprint())
        dtypes.append(_dtype_of(group.kv_cache_spec, layers, cache_dtype))
    return DeviceMemory(tuple(views), storages, tuple(dtypes)), "+".join(identities)


def _without_shared_layers(names: list[str], kv_caches: dict[str, torch.Tensor]) -> list[str]:
    """Layers that reuse another layer's cache of the same group hold the same tensor object; each is stored
    once.
    """
    seen: dict[int, str] = {}
    for name in names:
        seen.setdefault(id(kv_caches[name]), name)
    return list(seen.values())


def _dtype_of(spec: Any, layers: list[TensorInfo], cache_dtype: str) -> str:
    """See DeviceMemory.dtypes; padding is no number."""
    specs = list(getattr(spec, "kv_cache_specs", {}).values()) or [spec]
    is_padded = any(getattr(layer_spec, "page_size_padded", None) is not None for layer_spec in specs)
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


def _identity(
    spec: Any, layers: list[TensorInfo], view: BlockView, rank: int, world_size: int
) -> LayoutIdentity:
    first = layers[0]
    order = sorted(range(1, len(first.shape)), key=lambda axis: -first.strides[axis])
    inner = next(iter(getattr(spec, "kv_cache_specs", {}).values()), spec)
    return LayoutIdentity(
        dtype=first.dtype,
        block_size_tokens=int(spec.block_size),
        num_layers=len(layers),
        layer_page_bytes=tuple(sum(s.nbytes for s in view.segments) // len(layers) for _ in layers[:1]),
        order="x".join(f"{axis}:{first.shape[axis]}" for axis in order),
        kv_heads_local=int(getattr(inner, "num_kv_heads", 1)),
        head_size=int(getattr(inner, "head_size", 0)),
        rank=rank,
        world_size=world_size,
    )
