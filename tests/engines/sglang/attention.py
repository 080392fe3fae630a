"""Attention of a prompt's new tokens alone, on a CPU. Runs in SGLang's environment.

SGLang's backend for a CPU ("torch_native") computes the rows of all of a prompt's tokens, also of those whose
keys and values come from a cache, and throws these rows away. No GPU backend of SGLang's does so, and here it
would be most of the time of a hit, wherever it comes from. A prompt of which nothing is cached takes SGLang's
own way.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.managers.scheduler import run_scheduler_process
from torch.nn.functional import scaled_dot_product_attention

_all_rows = TorchNativeAttnBackend._run_sdpa_forward_extend


def run_scheduler(*args: Any, **kwargs: Any) -> Any:
    """The scheduler's process: what ``Engine.run_scheduler_process_func`` may be replaced by."""
    TorchNativeAttnBackend._run_sdpa_forward_extend = _new_rows
    return run_scheduler_process(*args, **kwargs)


def _new_rows(
    backend: Any, query: torch.Tensor, output: torch.Tensor, *memory: Any, **how: Any
) -> torch.Tensor:
    """Into ``output``; it and ``query`` are [new tokens of all requests, heads, elements].

    ``memory``: keys and values [places, heads, elements], the places of each request's tokens, and for each
    request its row there, its tokens, how many of them are cached and how many new; then the encoder's
    lengths, or None.
    """
    keys, values, places_of, requests, lengths, cached, new, encoder_lengths = memory
    is_plain = how["causal"] and not how["is_cross_attn"] and how["sliding_window_size"] in (None, -1)
    if encoder_lengths is not None or not is_plain or not cached.any():
        result: torch.Tensor = _all_rows(backend, query, output, *memory, **how)
        return result
    start = 0
    for request, length, num_cached, num_new in torch.stack((requests, lengths, cached, new), 1).tolist():
        rows = slice(start, start := start + num_new)
        places = places_of[request, :length]
        attended = scaled_dot_product_attention(
            *(_heads_first(tensor) for tensor in (query[rows], keys[places], values[places])),
            attn_mask=torch.ones(num_new, length, dtype=torch.bool).tril(num_cached),
            enable_gqa=how["enable_gqa"],
            scale=how["scaling"],
        )
        output[rows] = attended.squeeze(0).movedim(1, 0)
    return output


def _heads_first(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.movedim(0, 1).unsqueeze(0)
