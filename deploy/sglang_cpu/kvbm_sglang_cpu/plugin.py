"""An SGLang plugin: HiCache's copies between device and host pools where both are plain memory. For tests
only.

The functions have the names and parameters of sgl_kernel.kvcacheio, as SGLang 0.5.23 calls them. ``lf``,
``pf`` and ``ph``: layer first, page first, page head. Tables of layers are tensors of addresses.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

Bytes = npt.NDArray[np.uint8]

HOST_RESERVE_BYTES = 1 << 30
"""Memory that HiCache leaves free: SGLang's own 10 GiB are for servers with GPUs. Here device and host pools
are some MB of the same memory, and a machine with 16 GB that runs another engine beside has no 10 GiB left.
"""


def _rows(address: int, indices: torch.Tensor, row_bytes: int, stride_bytes: int = 0) -> Bytes:
    """Memory from ``address`` on as rows, as many as ``indices`` may name."""
    stride_bytes = stride_bytes or row_bytes
    num_rows = int(indices.max()) + 1
    raw = (ctypes.c_uint8 * ((num_rows - 1) * stride_bytes + row_bytes)).from_address(address)
    return np.lib.stride_tricks.as_strided(
        np.frombuffer(memoryview(raw), np.uint8), (num_rows, row_bytes), (stride_bytes, 1)
    )


def _copy_rows(target: Bytes, to: torch.Tensor, source: Bytes, of: torch.Tensor) -> None:
    target[to.numpy()] = source[of.numpy()]


# ---------------------------------------------------------------- io backend "kernel", K and V


def transfer_kv_all_layer(
    src_k_layers: torch.Tensor,
    dst_k_layers: torch.Tensor,
    src_v_layers: torch.Tensor,
    dst_v_layers: torch.Tensor,
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    item_size: int,
    num_layers: int,
) -> None:
    """Device to host, both layer first."""
    transfer_kv_all_layer_mla(src_k_layers, dst_k_layers, src_indices, dst_indices, item_size, num_layers)
    transfer_kv_all_layer_mla(src_v_layers, dst_v_layers, src_indices, dst_indices, item_size, num_layers)


def transfer_kv_per_layer(
    src_k: torch.Tensor,
    dst_k: torch.Tensor,
    src_v: torch.Tensor,
    dst_v: torch.Tensor,
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    item_size: int,
) -> None:
    """Host to device, one layer, both layer first."""
    dst_k[dst_indices] = src_k[src_indices]
    dst_v[dst_indices] = src_v[src_indices]


def transfer_kv_all_layer_lf_pf(
    src_k_layers: torch.Tensor,
    dst_k: torch.Tensor,
    src_v_layers: torch.Tensor,
    dst_v: torch.Tensor,
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    item_size: int,
    dst_layout_dim: int,
    num_layers: int,
) -> None:
    """Device to a page-first host pool."""
    shape = (src_indices, dst_indices, item_size, dst_layout_dim, num_layers)
    transfer_kv_all_layer_mla_lf_pf(src_k_layers, dst_k, *shape)
    transfer_kv_all_layer_mla_lf_pf(src_v_layers, dst_v, *shape)


def transfer_kv_per_layer_pf_lf(
    src_k: torch.Tensor,
    dst_k: torch.Tensor,
    src_v: torch.Tensor,
    dst_v: torch.Tensor,
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    layer_id: int,
    item_size: int,
    src_layout_dim: int,
) -> None:
    """A page-first host pool to one layer of the device."""
    dst_k[dst_indices] = src_k[src_indices, layer_id]
    dst_v[dst_indices] = src_v[src_indices, layer_id]


def transfer_kv_all_layer_lf_ph(
    src_k_layers: torch.Tensor,
    dst_k: torch.Tensor,
    src_v_layers: torch.Tensor,
    dst_v: torch.Tensor,
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    item_size: int,
    dst_layout_dim: int,
    num_layers: int,
    page_size: int,
    head_num: int,
) -> None:
    """Device to a host pool [page, head, token of the page, layer, element]."""
    pages, places = dst_indices // page_size, dst_indices % page_size
    for layers, target in ((src_k_layers, dst_k), (src_v_layers, dst_v)):
        for layer, address in enumerate(layers.tolist()):
            rows = _rows(address, src_indices, item_size)[src_indices.numpy()]
            values = torch.from_numpy(rows).view(target.dtype).view(len(src_indices), head_num, -1)
            target[pages, :, places, layer] = values


def transfer_kv_per_layer_ph_lf(
    src_k: torch.Tensor,
    dst_k: torch.Tensor,
    src_v: torch.Tensor,
    dst_v: torch.Tensor,
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    layer_id: int,
    item_size: int,
    src_layout_dim: int,
    page_size: int,
    head_num: int,
) -> None:
    """The way back of ``transfer_kv_all_layer_lf_ph``, one layer."""
    pages, places = src_indices // page_size, src_indices % page_size
    dst_k[dst_indices] = src_k[pages, :, places, layer_id]
    dst_v[dst_indices] = src_v[pages, :, places, layer_id]


# ---------------------------------------------------------------- io backend "kernel", one buffer a layer
# (MLA)


def transfer_kv_all_layer_mla(
    src_layers: torch.Tensor,
    dst_layers: torch.Tensor,
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    item_size: int,
    num_layers: int,
    **_: Any,
) -> None:
    """Device to host, both layer first."""
    for source, target in zip(src_layers.tolist(), dst_layers.tolist(), strict=True):
        target_rows = _rows(target, dst_indices, item_size)
        _copy_rows(target_rows, dst_indices, _rows(source, src_indices, item_size), src_indices)


def transfer_kv_per_layer_mla(
    src: torch.Tensor,
    dst: torch.Tensor,
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    item_size: int,
    **_: Any,
) -> None:
    """Host to device, one layer, both layer first."""
    dst[dst_indices] = src[src_indices]


def transfer_kv_all_layer_mla_lf_pf(
    src_layers: torch.Tensor,
    dst: torch.Tensor,
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    item_size: int,
    dst_layout_dim: int,
    num_layers: int,
    **_: Any,
) -> None:
    """Device to a page-first host pool."""
    for layer, source in enumerate(src_layers.tolist()):
        target_rows = _rows(dst.data_ptr() + layer * item_size, dst_indices, item_size, dst_layout_dim)
        _copy_rows(target_rows, dst_indices, _rows(source, src_indices, item_size), src_indices)


def transfer_kv_per_layer_mla_pf_lf(
    src: torch.Tensor,
    dst: torch.Tensor,
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    layer_id: int,
    item_size: int,
    src_layout_dim: int,
    **_: Any,
) -> None:
    """A page-first host pool to one layer of the device."""
    dst[dst_indices] = src[src_indices, layer_id]


# ---------------------------------------------------------------- io backend "kernel", states (Mamba)


def transfer_kv_mamba_lf_pf(
    src_ptrs: torch.Tensor,
    dst: torch.Tensor,
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    item_size: int,
    dst_layout_dim: int,
    num_layers: int,
) -> None:
    """Device to a host pool [state, layer, 1, ...]."""
    shape = (src_indices, dst_indices, item_size, dst_layout_dim, num_layers)
    transfer_kv_all_layer_mla_lf_pf(src_ptrs, dst, *shape)


def transfer_kv_mamba_pf_lf(
    src: torch.Tensor,
    dst: torch.Tensor,
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    layer_id: int,
    item_size: int,
    src_layout_dim: int,
) -> None:
    """The way back, one layer."""
    dst[dst_indices] = src[src_indices, layer_id, 0]


# ---------------------------------------------------------------- io backend "direct"


def transfer_kv_direct(
    src_layers: Sequence[torch.Tensor],
    dst_layers: Sequence[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    page_size: int,
) -> None:
    """Either way, both layer first."""
    for source, target in zip(src_layers, dst_layers, strict=True):
        target[dst_indices] = source[src_indices]


def transfer_kv_all_layer_direct_lf_pf(
    src_ptrs: Sequence[torch.Tensor],
    dst_ptrs: Sequence[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    page_size: int,
) -> None:
    """Device to host pools [page, layer, token of the page, ...]; the layers of each pool follow one
    another.
    """
    pages, places = dst_indices // page_size, dst_indices % page_size
    num_layers = len(src_ptrs) // len(dst_ptrs)
    for number, source in enumerate(src_ptrs):
        pool, layer = divmod(number, num_layers)
        dst_ptrs[pool][pages, layer, places] = source[src_indices]


def transfer_kv_per_layer_direct_pf_lf(
    src_ptrs: Sequence[torch.Tensor],
    dst_ptrs: Sequence[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    layer_id: int,
    page_size: int,
) -> None:
    """The way back, one layer."""
    pages, places = src_indices // page_size, src_indices % page_size
    for source, target in zip(src_ptrs, dst_ptrs, strict=True):
        target[dst_indices] = source[pages, layer_id, places]


# ---------------------------------------------------------------- into SGLang


def activate() -> None:
    """SGLang calls it in each of its processes."""
    if os.environ.get("SGLANG_USE_CPU_ENGINE") != "1":
        return
    from sglang.srt.mem_cache.pool_host import base, mamba

    base.HICACHE_HOST_MEMORY_RESERVE_BYTES = HOST_RESERVE_BYTES
    for kind in (base.HostKVCache, mamba.MambaPoolHost):  # the latter does not call the former's
        _lock_no_pages(kind)
    copies = {name: value for name, value in globals().items() if name.startswith("transfer_kv_")}
    for name in ("mha", "mla", "unified", "mamba"):
        module = importlib.import_module(f"sglang.srt.mem_cache.pool_host.{name}")
        for copy, function in copies.items():
            if not hasattr(module, copy):
                setattr(module, copy, function)
    _attend_to_latents()
    _gate_in_torch()


def _lock_no_pages(kind: type) -> None:
    """Host pools of this kind are not registered with CUDA."""
    made: Any = kind.__init__  # type: ignore[misc]
    if hasattr(made, "__wrapped__"):
        return

    @functools.wraps(made)
    def without_page_locks(self: Any, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **{**kwargs, "pin_memory": False})

    kind.__init__ = without_page_locks  # type: ignore[misc]


def _attend_to_latents() -> None:
    """DeepSeek's models take the way that reads latents, which torch's own attention can do, in all of their
    steps.
    """
    handlers = importlib.import_module("sglang.srt.models.deepseek_common.attention_backend_handler")
    handlers.AttentionBackendRegistry.register("torch_native", lambda *_: handlers.AttnForwardMethod.MLA)


def _gate_in_torch() -> None:
    """Two functions of models with gated delta nets that have no other way than Triton's."""
    norms: Any = importlib.import_module("sglang.kernels.ops.attention.fla.fused_norm_gate")
    norms.rms_norm_gated = _rms_norm_gated
    elementwise: Any = importlib.import_module("sglang.kernels.ops.elementwise.elementwise")
    elementwise._launch_fused_gate_sigmoid_mul = _gate_sigmoid_mul


def _rms_norm_gated(
    x: torch.Tensor, g: torch.Tensor, weight: torch.Tensor, *_: Any, eps: float = 1e-6, **__: Any
) -> torch.Tensor:
    normed = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps) * weight.float()
    return (normed * torch.nn.functional.silu(g.float())).to(x.dtype)


def _gate_sigmoid_mul(
    hidden_states: torch.Tensor,
    gate_weight: torch.Tensor,
    shared_output: torch.Tensor,
    output: torch.Tensor,
    *,
    do_add: bool,
) -> None:
    gate = (hidden_states.float() * gate_weight.float()).sum(-1, keepdim=True).sigmoid()
    output.copy_(gate * shared_output.float() + (output.float() if do_add else 0.0))
