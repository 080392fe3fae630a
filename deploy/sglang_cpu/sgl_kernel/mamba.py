"""The kernels of a gated delta net in plain torch, one token after the other, for tests: names and parameters
as SGLang 0.5.23 has them for a CPU. A state is [head, value, key].
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

_LIBRARY = torch.library.Library("sgl_kernel", "FRAGMENT")
_GATING = "fused_gdn_gating_cpu(Tensor A_log, Tensor a, Tensor b, Tensor dt_bias) -> (Tensor, Tensor)"
_UPDATE = (
    "fused_sigmoid_gating_delta_rule_update_cpu(Tensor A_log, Tensor dt_bias, Tensor q, Tensor k, Tensor v, "
    "Tensor a, Tensor b, Tensor(a!) initial_state_source, Tensor initial_state_indices, Tensor cu_seqlens, "
    "bool use_qk_l2norm_in_kernel=True, float softplus_beta=1.0, float softplus_threshold=20.0, "
    "bool is_kda=False) -> Tensor"
)


def causal_conv1d_fn_cpu(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    conv_states: torch.Tensor,
    has_initial_state: torch.Tensor,
    cache_indices: torch.Tensor,
    seq_lens_cpu: list[int],
    **_: Any,
) -> torch.Tensor:
    """Of several sequences, one behind the other in ``x`` [channel, token]; each state is written anew."""
    outputs, begin = [], 0
    for number, num_tokens in enumerate(seq_lens_cpu):
        slot = int(cache_indices[number])
        before = conv_states[slot] * bool(has_initial_state[number])
        piece = x[:, begin : begin + num_tokens]
        outputs.append(_convolved(before, piece, weight, bias, conv_states, slot))
        begin += num_tokens
    return torch.cat([*outputs, x[:, begin:]], dim=1)


def causal_conv1d_update_cpu(
    x: torch.Tensor,
    conv_states: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str,
    *,
    conv_state_indices: torch.Tensor,
    **_: Any,
) -> torch.Tensor:
    """Of one token of each sequence, ``x`` [sequence, channel]."""
    rows = zip(x, conv_state_indices.tolist(), strict=True)
    return torch.cat(
        [_convolved(conv_states[s], row[:, None], weight, bias, conv_states, s) for row, s in rows], 1
    ).T


def _convolved(
    before: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    states: torch.Tensor,
    slot: int,
) -> torch.Tensor:
    whole = torch.cat([before.to(x.dtype), x], dim=1)
    bias = None if bias is None else bias.float()
    output = functional.conv1d(whole.float()[None], weight.float()[:, None], bias, groups=len(whole))[0]
    states[slot] = whole[:, whole.shape[1] - states.shape[-1] :].to(states.dtype)
    return functional.silu(output).to(x.dtype)


def chunk_gated_delta_rule_cpu(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor,
    initial_state_indices: torch.Tensor,
    cu_seqlens: torch.Tensor,
    **_: Any,
) -> tuple[torch.Tensor, None, None]:
    """Of several sequences [1, token, head, ...]; each state is written anew."""
    return _run((q, k, v), (g, beta), initial_state, initial_state_indices, cu_seqlens), None, None


def _gating(
    A_log: torch.Tensor, a: torch.Tensor, b: torch.Tensor, dt_bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    decay = -A_log.float().exp() * functional.softplus(a.float() + dt_bias.float())
    return decay[None], b.float().sigmoid()[None]


def _update(
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    states: torch.Tensor,
    slots: torch.Tensor,
    cu_seqlens: torch.Tensor,
    *_: Any,
) -> torch.Tensor:
    heads = v.shape[2]
    gates = _gating(A_log, a.reshape(-1, heads), b.reshape(-1, heads), dt_bias)
    return _run((q, k, v), gates, states, slots, cu_seqlens)


def _run(
    qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    gates: tuple[torch.Tensor, torch.Tensor],
    states: torch.Tensor,
    slots: torch.Tensor,
    cu_seqlens: torch.Tensor,
) -> torch.Tensor:
    v = qkv[2][0].float()
    heads = v.shape[1]
    q, k = (
        functional.normalize(each[0].float(), dim=-1).repeat_interleave(heads // each.shape[2], dim=1)
        for each in qkv[:2]
    )
    q = q * q.shape[-1] ** -0.5
    decay, beta = (gate.reshape(-1, heads, 1) for gate in gates)
    output = torch.zeros_like(v)
    for number, slot in enumerate(slots.tolist()):
        state = states[slot].float()
        begin, end = cu_seqlens[number : number + 2].tolist()
        for at in range(begin, end):
            state = state * decay[at].exp()[..., None]
            change = (v[at] - (state * k[at][:, None]).sum(-1)) * beta[at]
            state = state + change[..., None] * k[at][:, None]
            output[at] = (state * q[at][:, None]).sum(-1)
        if end > begin:
            states[slot] = state.to(states.dtype)
    return output[None].to(qkv[2].dtype)


_LIBRARY.define(_GATING)
_LIBRARY.impl("fused_gdn_gating_cpu", _gating, "CPU")
_LIBRARY.define(_UPDATE)
_LIBRARY.impl("fused_sigmoid_gating_delta_rule_update_cpu", _update, "CPU")
