"""Doubles of SGLang's device pools, by the names and tensors that the real ones have; and of its
transfers.
"""

from __future__ import annotations

from typing import Any

import torch

PAGE_TOKENS, NUM_PAGES = 4, 8  # and one page that is nobody's, the first
LAYERS, HEADS, HEAD_DIM = 3, 2, 8


class MHATokenToKVPool:
    """K and V of a layer in one tensor, as SGLang has them; ``layout`` hnd: pages of heads, not rows of
    tokens.
    """

    def __init__(self, num_pages: int = NUM_PAGES, layers: int = LAYERS, layout: str = "nhd") -> None:
        self.size, self.page_size, self.layer_num = num_pages * PAGE_TOKENS, PAGE_TOKENS, layers
        self.start_layer, self.end_layer = 0, layers - 1
        self.dtype, self.kv_cache_layout = torch.bfloat16, layout
        self.k_scale_buffer = self.host_transfer_translate = None
        self.is_quantized_kv_cache = self.requires_physical_write_loc = False
        shape = (num_pages + 1, HEADS, PAGE_TOKENS, HEAD_DIM)
        if layout == "nhd":
            shape = ((num_pages + 1) * PAGE_TOKENS, HEADS, HEAD_DIM)  # type: ignore[assignment]
        fused = [torch.zeros((2, *shape), dtype=torch.bfloat16) for _ in range(layers)]
        self.k_buffer = [layer[0] for layer in fused]
        self.v_buffer = [layer[1] for layer in fused]
        self.data_ptrs = torch.zeros(2)


class MLATokenToKVPool:
    """One tensor per layer, of one latent head."""

    def __init__(self) -> None:
        self.size, self.page_size, self.layer_num = NUM_PAGES * PAGE_TOKENS, PAGE_TOKENS, LAYERS
        self.start_layer, self.end_layer = 0, LAYERS - 1
        self.dtype, self.kv_lora_rank, self.qk_rope_head_dim = torch.bfloat16, 16, 8
        self.kv_scale_buffer = None
        self.use_dsa = False
        rows = (NUM_PAGES + 1) * PAGE_TOKENS
        self.kv_buffer = [torch.zeros((rows, 1, 24), dtype=torch.bfloat16) for _ in range(LAYERS)]


def tensors_of(pool: Any) -> list[torch.Tensor]:
    """All of its KV."""
    return [*pool.k_buffer, *pool.v_buffer] if hasattr(pool, "k_buffer") else list(pool.kv_buffer)


def rows_of(pool: Any, page: int) -> slice:
    """A page's rows in each tensor."""
    if getattr(pool, "kv_cache_layout", "nhd") == "hnd":
        return slice(page, page + 1)
    return slice(page * PAGE_TOKENS, (page + 1) * PAGE_TOKENS)


def fill(pool: Any, page: int, key: str) -> None:
    """What the page of ``key`` holds: other numbers in every tensor, row and element."""
    for number, tensor in enumerate(tensors_of(pool)):
        part = tensor[rows_of(pool, page)]
        generator = torch.Generator().manual_seed(hash_of(key) * 100 + number)
        part.copy_(torch.rand(part.shape, generator=generator).to(part.dtype))


def holds(pool: Any, page: int, key: str) -> bool:
    """Whether the page has what ``fill`` gives it."""
    other = type(pool)() if not hasattr(pool, "kv_cache_layout") else type(pool)(layout=pool.kv_cache_layout)
    fill(other, 1, key)
    return all(
        torch.equal(mine[rows_of(pool, page)], theirs[rows_of(other, 1)])
        for mine, theirs in zip(tensors_of(pool), tensors_of(other), strict=True)
    )


def hash_of(key: str) -> int:
    """A small number for a key, the same in every process."""
    return int.from_bytes(key.encode()[:4], "big") % 9973


def indices_of(*pages: int) -> torch.Tensor:
    """One index per token, as SGLang gives them."""
    starts = torch.tensor(pages, dtype=torch.int64)[:, None] * PAGE_TOKENS
    return (starts + torch.arange(PAGE_TOKENS)).flatten()
