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
from kvbm_core.types import MAX_GROUPS

# Pools by their exact class, as a class derived from one of these keeps more, or keeps it otherwise; and
# where the tensors of their layers are.
_BUFFERS = {"MHATokenToKVPool": ("k_buffer", "v_buffer"), "MLATokenToKVPool": ("kv_buffer",)}
SERVED_POOLS = frozenset(_BUFFERS)
HYBRID_POOL = "HybridLinearKVPool"
"""Has one of these in it, and its states elsewhere."""
LATENT_POOLS = frozenset({"MLATokenToKVPool"})
"""Of these every tensor-parallel rank has the same bytes."""
_STATES = ("HybridReqToTokenPool", "MambaPool", "State")
_OF_STATES = ("temporal", "conv")
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
    """The pages of a device pool, numbered from 0, as blocks of group 0; the states of a hybrid model in
    parts, as blocks of a group for each part. LayoutError, one line, for unknown pools.

    ``states``: what SGLang keeps states in; None for other models. ``layout``: all that the bytes of a page
    and of a state mean, as (name, value), the same for pools of other capacity.
    """

    def __init__(self, pool: Any, page_tokens: int, states: Any = None) -> None:
        kind = type(pool).__name__
        if kind not in SERVED_POOLS:
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
        page_bytes = (
            sum(_row_bytes(tensor) * tensor.shape[0] for tensor in tensors.values()) // self.num_pages
        )
        parts = [] if states is None else _state_parts(states, page_bytes)
        self.num_parts = len(parts)
        self.num_states = int(states.mamba_pool.size) + 1 if parts else 0  # one is nobody's
        if self.num_parts >= MAX_GROUPS:
            raise LayoutError(
                f"kvbm: states of {self.num_parts} pages are not known; set a larger --page-size"
            )
        of_states = {name: tensor for part in parts for name, tensor in part.items()}
        infos, storages = describe_tensors({**tensors, **of_states}, [*tensors, *of_states])
        by_name = {info.name: info for info in infos}
        views = [view_of_tensors(infos[: len(tensors)], self.num_pages)]
        views += [view_of_tensors([by_name[name] for name in part], self.num_states) for part in parts]
        self.memory = DeviceMemory(tuple(views), storages)
        facts = [(name, str(getattr(pool, name))) for name in _FACTS if getattr(pool, name, None) is not None]
        if parts:
            facts += [("states", type(states.mamba_pool).__name__)]
            facts += [("state layers", str(list(states.mamba_pool.mamba_layer_ids)))]
        meanings = [_meaning(info, self.num_pages) for info in infos[: len(tensors)]]
        meanings += [_meaning(info, self.num_states) for info in infos[len(tensors) :]]
        self.layout = (("class", kind), *facts, *meanings)

    @property
    def page_bytes(self) -> int:
        """Of one page, all layers."""
        return self.memory.views[0].block_bytes

    @property
    def place_bytes(self) -> int:
        """What a page, or a part of a state, takes at most."""
        return max(view.block_bytes for view in self.memory.views)

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

    def state_number(self, indices: Any) -> int:
        """The slot of a state (a tensor of one). LayoutError if it is none; waits as ``numbers``."""
        (number,) = indices.detach().cpu().numpy().astype(np.int64).ravel().tolist() or (-1,)
        if not 0 <= number < self.num_states:
            raise LayoutError(f"kvbm: state {number} is not in 0..{self.num_states - 1}")
        return int(number)

    def _whole_pages(self, kind: str, tensor: Any, num_tokens: int) -> Any:
        """The tensor without an incomplete last page. Its rows are tokens or pages."""
        rows = int(tensor.shape[0])
        if rows == num_tokens:
            return tensor[: self.num_pages * self.page_tokens]
        if rows * self.page_tokens == num_tokens:
            return tensor
        raise LayoutError(f"kvbm: {kind} of {num_tokens} tokens has a tensor of {rows} rows")


def _state_parts(states: Any, page_bytes: int) -> list[dict[str, Any]]:
    """The tensors of each part of a state, layer by layer. A state is as large as many pages; its parts are
    no larger than one, where heads can be parted so, and share the places of pages.
    """
    pool = states.mamba_pool
    _check_states(states, pool)
    parts: list[dict[str, Any]] = []
    left_bytes = 0
    cache = pool.mamba_cache
    for kind, tensor in (("temporal", cache.temporal), *((f"conv {i}", t) for i, t in enumerate(cache.conv))):
        for layer in range(int(tensor.shape[0]) if tensor.numel() else 0):
            row = tensor[layer]
            num_pieces = min(int(row.shape[1]), -(-_row_bytes(row) // page_bytes))
            for number, piece in enumerate(row.chunk(num_pieces, dim=1)):
                if _row_bytes(piece) > left_bytes:
                    parts.append({})
                    left_bytes = max(page_bytes, _row_bytes(piece))
                parts[-1][f"{kind} {layer} {number}"] = piece
                left_bytes -= _row_bytes(piece)
    return parts


def _check_states(states: Any, pool: Any) -> None:
    kind = type(pool).__name__
    if (type(states).__name__, kind, type(pool.mamba_cache).__name__) != _STATES:
        raise LayoutError(f"kvbm: states of a {type(states).__name__} with a {kind} are not known")
    beside = [
        name for name, value in vars(pool.mamba_cache).items() if name not in _OF_STATES and value is not None
    ]
    if getattr(states, "mamba_ckpt_pool", None) is not None:
        beside.append("mamba_ckpt_pool")
    beside += [type(sibling).__name__ for sibling in getattr(pool, "_slot_siblings", ())]
    if beside:
        raise LayoutError(f"kvbm: states with {', '.join(beside)} are not known")


def _row_bytes(tensor: Any) -> int:
    return int(tensor[0].numel() * tensor.element_size())


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
