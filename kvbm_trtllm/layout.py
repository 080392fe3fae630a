"""TensorRT-LLM's KV memory -> device memory that the transfer engine understands, or a refusal.

V1: one tensor ``[num_blocks, num_layers, kv_factor, elements of a layer's block]``. V2: a ``KvCacheLayout``
of layer groups, whose regions are byte ranges that repeat once per page slot. Sizes and strides are read,
never assumed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from kvbm_core.errors import LayoutError
from kvbm_core.layout.fingerprint import LayerIdentity, LayoutIdentity
from kvbm_core.layout.tensors import memory_order, view_of_tensors
from kvbm_core.tiers.groups import GroupSpec
from kvbm_core.transfer.executor import DeviceMemory
from kvbm_core.transfer.torch_memory import describe_tensors
from kvbm_core.types import MAX_GROUPS

if TYPE_CHECKING:
    import torch

POOL_AXES = 4
UNSCALED_DTYPES = frozenset({"int8", "uint8"})
"""What V1 makes pools of whose elements mean nothing without others: packed 4-bit numbers, and integers."""


class Ranks(NamedTuple):
    """This rank among those that hold shards."""

    rank: int
    world_size: int


WHOLE = Ranks(0, 1)
"""What a rank has of latents, as every other."""


class KvMemory(NamedTuple):
    """``fingerprint``: of the bytes in one slot of this rank. ``is_latent``: MLA's, the same on all ranks.

    ``is_told``: TensorRT-LLM has said how many tokens a block holds.
    """

    memory: DeviceMemory
    groups: tuple[GroupSpec, ...]
    fingerprint: str
    is_latent: bool
    is_told: bool


def pool_memory(pool: torch.Tensor, block_tokens: int, ranks: Ranks) -> KvMemory:
    """The pool of the V1 manager. LayoutError when in doubt."""
    shape = tuple(pool.shape)
    if len(shape) != POOL_AXES or shape[2] not in (1, 2):
        raise LayoutError(
            f"kvbm: a KV pool of shape {shape} is not [blocks, layers, 1 or 2, elements of a layer's block]"
        )
    infos, storages = describe_tensors({"pool": pool}, ["pool"])
    if infos[0].dtype in UNSCALED_DTYPES:
        raise LayoutError(
            f"kvbm: a KV pool of {infos[0].dtype} (NVFP4, also by the checkpoint's choice) has its scales in "
            "a pool that TensorRT-LLM does not hand to connectors: use kv_cache_config.dtype=fp8"
        )
    view = view_of_tensors(infos, shape[0])
    is_latent = shape[2] == 1
    held = WHOLE if is_latent else ranks
    order = f"TensorRT-LLM pool {shape[2]} {memory_order(infos[0])}"
    layer = LayerIdentity(infos[0].dtype, shape[2] * shape[3] * infos[0].itemsize, order)
    identity = LayoutIdentity(
        layers=(layer,) * shape[1],
        block_size_tokens=block_tokens,
        kv_heads_local=0,
        head_size=0,
        rank=held.rank,
        world_size=held.world_size,
    )
    return KvMemory(
        DeviceMemory((view,), storages),
        (GroupSpec(0, block_tokens),),
        identity.fingerprint(),
        is_latent=is_latent,
        is_told=False,
    )


def layout_memory(layout: Any, ranks: Ranks) -> KvMemory:
    """The layer groups of the V2 manager, with all their regions. LayoutError when in doubt."""
    groups = list(layout.groups)
    if not 1 <= len(groups) <= MAX_GROUPS or [int(group.layer_group_id) for group in groups] != [
        *range(len(groups))
    ]:
        ids = [group.layer_group_id for group in groups]
        raise LayoutError(
            f"kvbm: layer groups {ids}: only 0 to {MAX_GROUPS - 1}, without gaps, are supported"
        )
    block_tokens = int(layout.tokens_per_block)
    regions = [_regions_of(group) for group in groups]
    roles = {str(buffer.role).lower() for found in regions for region in found for buffer in region.buffers}
    is_latent = bool(roles) and roles <= {"key"}
    held = WHOLE if is_latent else ranks
    tensors = {
        f"{g} {i}": region.as_tensor() for g, found in enumerate(regions) for i, region in enumerate(found)
    }
    infos, storages = describe_tensors(tensors, list(tensors))
    info_of = dict(zip(tensors, infos, strict=True))
    views, specs, identities = [], [], []
    dtype = str(getattr(layout, "dtype", "bytes"))
    for g, (group, found) in enumerate(zip(groups, regions, strict=True)):
        slots = int(found[0].num_slots)
        view = view_of_tensors([info_of[f"{g} {i}"] for i in range(len(found))], slots)
        views.append(view)
        window = getattr(group, "window_size", None)
        specs.append(GroupSpec(g, block_tokens, None if window is None else int(window)))
        identities.append(_group_identity(group, found, dtype, block_tokens, held).fingerprint())
    memory = DeviceMemory(tuple(views), storages)
    return KvMemory(memory, tuple(specs), "+".join(identities), is_latent, is_told=True)


def _regions_of(group: Any) -> list[Any]:
    regions = [*group.regions, *getattr(group, "replicated_regions", ())]
    if not regions or len({int(region.num_slots) for region in regions}) != 1:
        raise LayoutError(
            f"kvbm: layer group {group.layer_group_id} has regions of different numbers of slots, or none"
        )
    if any(int(buffer.expansion) != 1 for region in regions for buffer in region.buffers):
        raise LayoutError(
            f"kvbm: layer group {group.layer_group_id} has layers with blocks of their own size"
        )
    return regions


def _group_identity(
    group: Any, regions: Sequence[Any], dtype: str, block_tokens: int, ranks: Ranks
) -> LayoutIdentity:
    buffers = [f"{buffer.layer_id}:{buffer.role}" for region in regions for buffer in region.buffers]
    return LayoutIdentity(
        layers=tuple(LayerIdentity(dtype, int(region.size), "TensorRT-LLM region") for region in regions),
        block_size_tokens=block_tokens,
        kv_heads_local=0,
        head_size=0,
        rank=ranks.rank,
        world_size=ranks.world_size,
        extra=(("layers", str(group.layer_ids)), ("buffers", " ".join(buffers))),
    )
