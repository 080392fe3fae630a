"""The memory description that a V2 cache hands to a worker, over CPU tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from tests.trtllm.double import host


@dataclass(frozen=True)
class KvCacheBufferRef:
    """One buffer, "key" or "value", of one layer inside a region."""

    layer_id: int
    role: str
    expansion: int = 1


@dataclass(frozen=True)
class KvCacheRegion:
    """Bytes that repeat once per slot: slot i is ``size`` bytes at ``base + stride * i``."""

    base: int
    size: int
    stride: int
    num_slots: int
    buffers: tuple[KvCacheBufferRef, ...]

    def address_of(self, slot_id: int) -> int:
        """Address of a slot's first byte."""
        if not 0 <= slot_id < self.num_slots:
            raise IndexError(slot_id)
        return self.base + self.stride * slot_id

    def as_tensor(self, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
        """[num_slots, size // itemsize], a view; row i is slot i."""
        if self.size % dtype.itemsize or self.stride % dtype.itemsize:
            raise ValueError(f"{self.size} and {self.stride} bytes are not of whole elements of {dtype}")
        shape = (self.num_slots, self.size // dtype.itemsize)
        return host.tensor_at(self.base, dtype, shape, (self.stride // dtype.itemsize, 1))


@dataclass(frozen=True)
class KvCacheLayerGroupLayout:
    """Layers that share page indices. ``replicated_regions``: their bytes are the same on all ranks."""

    layer_group_id: int
    layer_ids: tuple[int, ...]
    window_size: int | None
    regions: tuple[KvCacheRegion, ...]
    replicated_regions: tuple[KvCacheRegion, ...] = ()

    @property
    def bytes_per_page(self) -> int:
        """Bytes of one slot in ``regions``."""
        return sum(region.size for region in self.regions)

    @property
    def replicated_bytes_per_page(self) -> int:
        """Bytes of one slot in ``replicated_regions``."""
        return sum(region.size for region in self.replicated_regions)


@dataclass(frozen=True)
class KvCacheLayout:
    """The whole cache."""

    tokens_per_block: int
    groups: tuple[KvCacheLayerGroupLayout, ...]
    dtype: torch.dtype = torch.uint8
    gpu_pool_mapping_bytes: int | None = None

    def group(self, layer_group_id: int) -> KvCacheLayerGroupLayout:
        """The group with this id."""
        for group in self.groups:
            if group.layer_group_id == layer_group_id:
                return group
        raise KeyError(layer_group_id)

    def group_of_layer(self, layer_id: int) -> KvCacheLayerGroupLayout:
        """The group that this layer belongs to."""
        for group in self.groups:
            if layer_id in group.layer_ids:
                return group
        raise KeyError(layer_id)

    def as_single_pool_tensor(self) -> torch.Tensor | None:
        """[num_slots, num_layers, kv_factor, block_elems] where one tensor can say it all."""
        if len(self.groups) != 1 or len(self.groups[0].regions) != 1 or self.groups[0].replicated_regions:
            return None
        region = self.groups[0].regions[0]
        layers = len(self.groups[0].layer_ids)
        flat = region.as_tensor(self.dtype)
        shape = (layers, len(region.buffers) // layers, flat.shape[1] // len(region.buffers))
        return flat.unflatten(1, shape)


def build_kv_cache_layout_v2(manager: Any) -> KvCacheLayout:
    """The layout of a V2 cache, from what this says of its pages."""
    pages, shared = manager.impl, {str(role) for role in manager.get_replicated_roles()}
    num_slots = {
        variant.layer_group_id: pool.num_slots
        for pool in pages.pool_group_descs
        for variant in pool.slot_desc.variants
    }

    def regions_of(group: int, layers: list[int], *, is_shared: bool) -> tuple[KvCacheRegion, ...]:
        wanted = [
            buffer
            for buffer in pages.all_buffer_ids
            if buffer.layer_id in layers and (str(buffer.role) in shared) == is_shared
        ]
        return tuple(
            KvCacheRegion(
                found.base,
                found.size,
                found.stride,
                num_slots[group],
                tuple(
                    KvCacheBufferRef(manager.pp_layers[buffer.id.layer_id], buffer.id.role, buffer.expansion)
                    for buffer in found.buffers
                ),
            )
            for found in pages.get_aggregated_pages(wanted)
        )

    groups = [
        KvCacheLayerGroupLayout(
            group,
            tuple(manager.pp_layers[layer] for layer in layers),
            pages.init_config.layers[layers[0]].window_size,
            regions_of(group, layers, is_shared=False),
            regions_of(group, layers, is_shared=True),
        )
        for group, layers in enumerate(pages.layer_grouping)
    ]
    return KvCacheLayout(manager.tokens_per_block, tuple(groups), manager.dtype)
