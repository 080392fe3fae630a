"""The KV memory of one rank: one tensor for V1, regions for V2, and the same bytes as the model sees them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tests.trtllm.double import host
from tests.trtllm.double.config import ExecutorConfig
from tests.trtllm.double.pages import Pages, Region

ROLES = ("key", "value")


class Memory:
    """Blocks of [heads, tokens_per_block, head_bytes] per layer and kv, at home in real tensors."""

    POISON = 0xEE
    """What a block holds from the moment it is handed out until someone writes it."""

    def __init__(self, config: ExecutorConfig) -> None:
        self.config = config
        self.tokens_per_block = config.tokens_per_block
        self.num_layers, self.kv_factor = config.num_layers, config.kv_factor
        self.block_shape = (config.num_kv_heads, config.tokens_per_block, config.head_bytes)
        self.windows = config.windows
        self.group_of_layer = [config.group_of_layer(layer) for layer in range(config.num_layers)]
        self.tensor: torch.Tensor | None = None
        self._storages: list[torch.Tensor] = []
        self.pages: Pages | None = None
        self._views: dict[tuple[int, int], npt.NDArray[np.uint8]] = {}
        self._whole: list[list[npt.NDArray[np.uint8]]] = [[] for _ in self.windows]
        if config.manager == "v1":
            self._make_v1()
        else:
            self._make_v2()

    def view(self, layer: int, kv: int) -> npt.NDArray[np.uint8]:
        """[slots, heads, tokens_per_block, head_bytes], writable."""
        return self._views[layer, kv]

    def poison(self, group: int, slots: list[int]) -> None:
        """Makes sure that nobody gets by with what a block happened to hold before."""
        for whole in self._whole[group]:
            whole[slots] = self.POISON

    def register(self, worker: Any, layout_of: Callable[[Pages], Any]) -> str:
        """Hands the memory to a worker; returns the name of the method. ``layout_of`` makes V2's layout."""
        if self.pages is None:
            worker.register_kv_caches(self.tensor)
            return "register_kv_caches"
        worker.register_kv_cache_layout(layout_of(self.pages))
        return "register_kv_cache_layout"

    def _make_v1(self) -> None:
        config = self.config
        heads, tokens, head_bytes = self.block_shape
        shape = (config.num_blocks, self.num_layers, self.kv_factor, heads * tokens * config.head_dim)
        self.tensor = torch.zeros(shape, dtype=config.torch_dtype)
        raw = self.tensor.view(torch.uint8).numpy()
        self._whole[0].append(raw.reshape(config.num_blocks, -1))
        split = raw.reshape(*shape[:3], heads, tokens, head_bytes)
        for layer in range(self.num_layers):
            for kv in range(self.kv_factor):
                self._views[layer, kv] = split[:, layer, kv]

    def _make_v2(self) -> None:
        regions = []
        for group in range(len(self.windows)):
            layers = tuple(layer for layer in range(self.num_layers) if self.group_of_layer[layer] == group)
            kvs = list(range(self.kv_factor))
            parts = [[kv] for kv in kvs] if self.config.split_kv_regions else [kvs]
            regions += [self._make_region(group, layers, part) for part in parts]
        self.pages = Pages(self.config, regions)

    def _make_region(self, group: int, layers: tuple[int, ...], kvs: list[int]) -> Region:
        heads, tokens, head_bytes = self.block_shape
        buffer_bytes = heads * tokens * head_bytes
        size = len(layers) * len(kvs) * buffer_bytes
        stride, slots = size + self.config.slot_padding_bytes, self.config.num_blocks
        storage = torch.zeros((slots, stride), dtype=torch.uint8)
        raw = storage.numpy()
        self._whole[group].append(raw)
        for index, (layer, kv) in enumerate((layer, kv) for layer in layers for kv in kvs):
            # Strided by hand: the padding makes the rows of a slice incontiguous, and a reshape would copy.
            self._views[layer, kv] = np.lib.stride_tricks.as_strided(
                raw[:, index * buffer_bytes :],
                shape=(slots, *self.block_shape),
                strides=(stride, tokens * head_bytes, head_bytes, 1),
                writeable=True,
            )
        self._storages.append(storage)
        buffers = tuple((layer, ROLES[kv]) for layer in layers for kv in kvs)
        return Region(group, host.share(storage), size, stride, buffers)
