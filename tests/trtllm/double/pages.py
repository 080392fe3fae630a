"""What a V2 cache says of its pages: what the builder of layouts reads of ``KVCacheManagerV2``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
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

    def run_of(self, first: int, buffers: tuple[tuple[int, str], ...]) -> Region:
        """Neighbors in this region: ``buffers``, of which the first is its buffer ``first``."""
        buffer_bytes = self.size // len(self.buffers)
        size = len(buffers) * buffer_bytes
        return Region(self.group, self.base + first * buffer_bytes, size, self.stride, buffers)


class Pages:
    """A ``KVCacheManagerV2`` with its ``impl``, as far as it is described here."""

    def __init__(self, config: ExecutorConfig, regions: list[Region]) -> None:
        self.tokens_per_block = config.tokens_per_block
        self.dtype = config.torch_dtype
        self.pp_layers = list(range(config.num_layers))
        self._regions = regions
        self._replicated_roles = config.replicated_roles
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
            get_aggregated_pages=self._aggregated_pages,
        )

    def get_replicated_roles(self) -> tuple[str, ...]:
        """The roles whose bytes are the same on all ranks."""
        return self._replicated_roles

    def _aggregated_pages(self, wanted: Sequence[Any]) -> list[Any]:
        """The bytes of these buffers; what is next to each other in memory is one."""
        names = {(buffer.layer_id, buffer.role) for buffer in wanted}
        found = []
        for region in self._regions:
            for is_wanted, run in groupby(enumerate(region.buffers), lambda item: item[1] in names):
                if is_wanted:
                    numbers, buffers = zip(*run, strict=True)
                    found.append(self._aggregated(region.run_of(numbers[0], buffers)))
        return found

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
