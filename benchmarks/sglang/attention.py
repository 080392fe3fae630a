"""Attention of a prompt's new tokens alone, on a CPU. Runs in SGLang's environment.

SGLang's backend for a CPU ("torch_native") computes the rows of all of a prompt's tokens, also of those whose keys and
values come from a cache, and throws these rows away. No GPU backend of SGLang's does so, and here it would be most of
the time of a hit, wherever it comes from. A prompt of which nothing is cached takes SGLang's own way.
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
    backend: Any,
    query: torch.Tensor,
    output: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    req_to_token: torch.Tensor,
    requests: torch.Tensor,
    lengths: torch.Tensor,
    cached: torch.Tensor,
    new: torch.Tensor,
    encoder_lengths: torch.Tensor | None = None,
    **how: Any,
) -> torch.Tensor:
    """Into ``output``, both [new tokens of all requests, heads, elements]; ``keys``, ``values``: [places, heads, ...].

    The others have an entry for each request: its row in ``req_to_token``, its tokens, and how many are cached or new.
    """
    is_plain = how["causal"] and not how["is_cross_attn"] and (how["sliding_window_size"] or -1) < 0
    if encoder_lengths is not None or not is_plain or not cached.any():
        shape = (keys, values, req_to_token, requests, lengths, cached, new, encoder_lengths)
        result: torch.Tensor = _all_rows(backend, query, output, *shape, **how)
        return result
    start = 0
    for request, length, num_cached, num_new in zip(*map(torch.Tensor.tolist, (requests, lengths, cached, new))):
        rows = slice(start, start := start + num_new)
        places = req_to_token[request, :length]
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
