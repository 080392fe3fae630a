"""Stands in for SGLang's kernel package, which has no CPU build to install. For tests only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__version__ = "0.0.0+kvbm.cpu"


def assign_req_to_token_pool_cpu(
    requests: torch.Tensor,
    token_pool: torch.Tensor,
    starts: torch.Tensor,
    ends: torch.Tensor,
    locations: torch.Tensor,
    *_: Any,
) -> None:
    """Row ``requests[i]`` of the pool gets the next of ``locations``, from ``starts[i]`` up to
    ``ends[i]``.
    """
    taken = 0
    for request, start, end in zip(requests.tolist(), starts.tolist(), ends.tolist(), strict=True):
        count = end - start
        token_pool[request, start:end] = locations[taken : taken + count].to(token_pool.dtype)
        taken += count


def _absent(name: str) -> Callable[..., Any]:
    def call(*_: Any, **__: Any) -> Any:
        raise NotImplementedError(f"sgl_kernel.{name}: this stand-in for tests on a CPU does not have it")

    return call


copy_all_layer_kv_cache_cpu = _absent("copy_all_layer_kv_cache_cpu")
rotate_input_ids_cpu = _absent("rotate_input_ids_cpu")
fill_accept_out_cache_loc_cpu = _absent("fill_accept_out_cache_loc_cpu")
fill_bonus_tokens_cpu = _absent("fill_bonus_tokens_cpu")
assign_draft_cache_locs_contiguous_cpu = _absent("assign_draft_cache_locs_contiguous_cpu")
assign_extend_cache_locs_cpu = _absent("assign_extend_cache_locs_cpu")
build_tree_kernel_efficient_cpu = _absent("build_tree_kernel_efficient_cpu")
verify_tree_greedy_cpu = _absent("verify_tree_greedy_cpu")
