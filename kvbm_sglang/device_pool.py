"""SGLang's device pools -> device memory that the transfer engine understands, or a refusal. Nothing is
guessed.
"""

from __future__ import annotations

from itertools import chain
from typing import Any

import numpy as np

from kvbm_core.errors import LayoutError
from kvbm_core.layout.tensors import TensorInfo, memory_order, view_of_tensors
from kvbm_core.transfer.executor import DeviceMemory
from kvbm_core.transfer.torch_memory import describe_tensors

# Pools by their exact class, as a class derived from one of these keeps more, or keeps it otherwise; and
# where the tensors of their layers are.
_BUFFERS = {"MHATokenToKVPool": ("k_buffer", "v_buffer"), "MLATokenToKVPool": ("kv_buffer",)}
# What a pool of these classes has only if its pages are more than these tensors, or its indices are no rows
# of theirs.
_NOT_PLAIN = (
    "k_scale_buffer",
    "native_k_scale_buffer",
    "kv_scale_buffer",
    "is_quantized_kv_cache",
    "use_dsa",
    "layer_shard_enabled",
    "requires_physical_write_loc",
    "host_transfer_translate",
)
# What the meaning of a page's bytes depends on besides the tensors.
_FACTS = (
    "dtype",
    "kv_cache_layout",
    "layer_num",
    "start_layer",
    "end_layer",
    "kv_lora_rank",
    "qk_rope_head_dim",
)


class DevicePages:
    """The pages of a device pool, numbered from 0, as blocks of one group. LayoutError, one line, for unknown
    pools.

    ``layout``: all that the bytes of a page mean, as (name, value), the same for pools of other capacity.
    """

    def __init__(self, pool: Any, page_tokens: int) -> None:
        kind = type(pool).__name__
        if kind not in _BUFFERS:
            raise LayoutError(f"kvbm: pages of a {kind} are not known")
        _check_plain(pool, kind)
        num_tokens = int(pool.size) + page_tokens  # SGLang keeps a page for what is nobody's
        self.page_tokens = page_tokens
        self.num_pages = num_tokens // page_tokens
        buffers = [getattr(pool, name) for name in _BUFFERS[kind]]
        if len({len(layers) for layers in buffers}) != 1:
            raise LayoutError(f"kvbm: {kind} has not as many tensors of one kind as of the other")
        tensors = {
            f"{name} {number}": self._whole_pages(kind, tensor, num_tokens)
            for number, layer in enumerate(zip(*buffers, strict=True))
            for name, tensor in zip(_BUFFERS[kind], layer, strict=True)
        }
        infos, storages = describe_tensors(tensors, list(tensors))
        self.memory = DeviceMemory((view_of_tensors(infos, self.num_pages),), storages)
        facts = [(name, str(getattr(pool, name))) for name in _FACTS if getattr(pool, name, None) is not None]
        self.layout = (("class", kind), *facts, *(_meaning(info, self.num_pages) for info in infos))

    @property
    def page_bytes(self) -> int:
        """Of one page, all layers."""
        return self.memory.views[0].block_bytes

    def numbers(self, indices: Any) -> tuple[int, ...]:
        """The pages of ``indices`` (a tensor, one per token, in order). LayoutError if they are not whole
        pages.

        Waits for the device that the tensor is on.
        """
        tokens = indices.detach().cpu().numpy().astype(np.int64).ravel()
        if len(tokens) % self.page_tokens:
            raise LayoutError(f"kvbm: {len(tokens)} indices are not whole pages of {self.page_tokens}")
        rows = tokens.reshape(-1, self.page_tokens)
        firsts = rows[:, 0]
        if (firsts % self.page_tokens).any() or (rows != firsts[:, None] + np.arange(self.page_tokens)).any():
            raise LayoutError(f"kvbm: indices that are not aligned runs of {self.page_tokens}")
        pages = firsts // self.page_tokens
        if len(pages) and not 0 <= pages.min() <= pages.max() < self.num_pages:
            raise LayoutError(f"kvbm: pages {pages.min()}..{pages.max()} are not in 0..{self.num_pages - 1}")
        return tuple(pages.tolist())

    def _whole_pages(self, kind: str, tensor: Any, num_tokens: int) -> Any:
        """The tensor without an incomplete last page. Its rows are tokens or pages."""
        rows = int(tensor.shape[0])
        if rows == num_tokens:
            return tensor[: self.num_pages * self.page_tokens]
        if rows * self.page_tokens == num_tokens:
            return tensor
        raise LayoutError(f"kvbm: {kind} of {num_tokens} tokens has a tensor of {rows} rows")


def _check_plain(pool: Any, kind: str) -> None:
    for name in _NOT_PLAIN:
        value = getattr(pool, name, None)
        if value is not None and value is not False:
            raise LayoutError(f"kvbm: {kind} with {name} is not known")
    others = [
        name
        for name, value in vars(pool).items()
        if name not in _BUFFERS[kind]
        and isinstance(value, list | tuple)
        and any(map(_is_tensor, _flat(value)))
    ]
    if others:
        raise LayoutError(f"kvbm: {kind} has tensors that are not known: {', '.join(others)}")


def _flat(values: Any) -> Any:
    return chain.from_iterable(value if isinstance(value, list | tuple) else (value,) for value in values)


def _is_tensor(value: Any) -> bool:
    return hasattr(value, "untyped_storage")


def _meaning(info: TensorInfo, num_pages: int) -> tuple[str, str]:
    rows_per_page = info.shape[0] // num_pages
    return info.name, f"{info.dtype} {rows_per_page}x{info.shape[1:]} in order {memory_order(info)}"
