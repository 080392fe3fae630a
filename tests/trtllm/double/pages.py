"""What a V2 cache says of its pages: what the builder of layouts reads of ``KVCacheManagerV2``."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from tests.trtllm.double.config import ExecutorConfig


@dataclass(frozen=True)
class Region:
    """Bytes that repeat once per page of a layer group. ``buffers``: (layer, role) in the memory's order."""

    group: int
    base: int
    size: int
    stride: int
    buffers: tuple[tuple[int, str], ...]


class Pages:
    """A ``KVCacheManagerV2`` with its ``impl``, as far as it is described here."""

    def __init__(self, config: ExecutorConfig, regions: list[Region]) -> None:
        self.tokens_per_block = config.tokens_per_block
        self.dtype = config.torch_dtype
        self.pp_layers = list(range(config.num_layers))
        layers = self.pp_layers
        groups = range(len(config.windows))
        self.impl = SimpleNamespace(
            init_config=SimpleNamespace(
                layers=[SimpleNamespace(window_size=config.window_of_layer(layer)) for layer in layers]
            ),
            layer_grouping=[[layer for layer in layers if config.group_of_layer(layer) == g] for g in groups],
            all_buffer_ids=[
                SimpleNamespace(layer_id=layer, role=role)
                for region in regions
                for layer, role in region.buffers
            ],
            pool_group_descs=[
                SimpleNamespace(
                    num_slots=config.num_blocks,
                    slot_desc=SimpleNamespace(variants=[SimpleNamespace(layer_group_id=group)]),
                )
                for group in groups
            ],
            get_aggregated_pages=lambda wanted: [
                self._aggregated(region)
                for region in regions
                if {(buffer.layer_id, buffer.role) for buffer in wanted} >= {*region.buffers}
            ],
        )

    @staticmethod
    def _aggregated(region: Region) -> Any:
        return SimpleNamespace(
            layer_group_id=region.group,
            base=region.base,
            size=region.size,
            stride=region.stride,
            buffers=[
                SimpleNamespace(id=SimpleNamespace(layer_id=layer, role=role), expansion=1)
                for layer, role in region.buffers
            ],
        )
