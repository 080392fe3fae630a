"""The kinds of vLLM's KV caches: which of them kvbm serves, and what it says of the others.

By the exact name of the class: one that is derived from a kind that kvbm knows keeps more, or needs more.
``tests/contract/test_vllm_kinds.py`` fails on a kind, a field or a quantization that nobody has looked at.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from kvbm_core.errors import UnsupportedError

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheGroupSpec, KVCacheSpec

FULL = frozenset({"FullAttentionSpec", "MLAAttentionSpec"})
"""A prefix needs the KV of all of its tokens. The keys of DeepSeek V3.2's indexer are an MLAAttentionSpec."""
# With tensor parallelism every rank computes and keeps the whole latent.
REPLICATED = frozenset({"MLAAttentionSpec", "SlidingWindowMLASpec"})
WINDOWED = frozenset({"SlidingWindowSpec", "SlidingWindowMLASpec"})
STATES = frozenset({"MambaSpec"})
SERVED = FULL | WINDOWED | STATES
WITHOUT_KVBM = "run this model without kvbm"
_WHOLE = "use --disable-hybrid-kv-cache-manager, which keeps the KV of all tokens, or " + WITHOUT_KVBM


class Refusal(NamedTuple):
    """``why``: what blocks of this kind are, so that kvbm would not restore them; ``remedy``: what to do."""

    why: str
    remedy: str = WITHOUT_KVBM


REFUSED = {
    "ChunkedLocalAttentionSpec": Refusal("whose tokens see their own chunk alone", _WHOLE),
    "CircularBufferSpec": Refusal("a ring that the next token overwrites"),
    "CrossAttentionSpec": Refusal("which holds what an encoder made of sound or images, not of the tokens"),
    "EncoderOnlyAttentionSpec": Refusal("which keeps nothing from one request to the next"),
    "HiddenStateCacheSpec": Refusal(
        "which hands hidden states to another connector", "run without extract_hidden_states, or without kvbm"
    ),
    "HiSparseHotSpec": Refusal("a copy of what lies in host memory", "turn HiSparse off, or kvbm"),
    "HiSparseResidentSpec": Refusal("a copy of what lies in host memory", "turn HiSparse off, or kvbm"),
    "KpoolTailSpec": Refusal("a ring that the next token overwrites"),
    "RSWASpec": Refusal("where an answer's KV is not what the same tokens have in a prompt"),
    "SinkFullAttentionSpec": Refusal("with blocks that belong to no request"),
    "TQFullAttentionSpec": Refusal(
        "whose quantized blocks were never tried", "use vLLM 0.28 or newer, or another --kv-cache-dtype"
    ),
}

# vLLM's first forward pass sets their scales to 1, in all blocks, also in those that were loaded before it.
_RESET = "whose scales vLLM's first step resets"
QUANT_REFUSED = {
    "INT8_PER_TOKEN_HEAD": _RESET,
    "FP8_PER_TOKEN_HEAD": _RESET,
    "INT4_PER_TOKEN_HEAD": _RESET,
    "TURBOQUANT": "which was never tried",
    "OCTAVE_K3V4": "which was never tried",
    "OCTAVE_K3V3": "which was never tried",
    "OCTAVE_K3V3_COMPACT": "which was never tried",
    "CUSTOM": "by a platform's own code",
}
QUANT_SERVED = frozenset(
    {
        "NONE",
        "FP8_PER_TENSOR",
        "NVFP4",
        "NVFP4_DS_MLA",
        "TURBOQUANT_K8V4",
        "TURBOQUANT_4BIT_NC",
        "TURBOQUANT_K3V4_NC",
        "TURBOQUANT_3BIT_NC",
        "ULTRAQUANT_4BIT",
    }
)
"""Everything that a token's KV is read with lies in its block, or in the weights."""


def layer_specs(group: KVCacheGroupSpec) -> list[KVCacheSpec]:
    """Of its layers, each kind once at least."""
    spec = group.kv_cache_spec
    return list(getattr(spec, "kv_cache_specs", {}).values()) or [spec]


def check_kind(index: int, group: KVCacheGroupSpec) -> None:
    """UnsupportedError, one line, for a group that kvbm would not restore as it was."""
    if not getattr(group, "enable_kv_transfer", True) or getattr(group, "host_resident", False):
        raise UnsupportedError(
            f"kvbm: KV cache group {index} is not meant for transfer (HiSparse): turn it off, or kvbm"
        )
    kinds = {type(spec).__name__ for spec in layer_specs(group)}
    if kinds & STATES and kinds - STATES:
        raise UnsupportedError(
            f"kvbm: KV cache group {index} mixes states and KV ({', '.join(sorted(kinds))}): {WITHOUT_KVBM}"
        )
    for spec in layer_specs(group):
        refusal = _refusal_of(spec)
        if refusal is not None:
            raise UnsupportedError(
                f"kvbm: KV cache group {index} is a {type(spec).__name__}, {refusal.why}: {refusal.remedy}"
            )


def _refusal_of(spec: Any) -> Refusal | None:
    kind = type(spec).__name__
    if kind not in SERVED:
        return REFUSED.get(kind, Refusal(f"which kvbm does not know (known are {', '.join(sorted(SERVED))})"))
    if getattr(spec, "non_causal", False):
        return Refusal("whose tokens see later ones, so that no prefix is like another")
    if getattr(spec, "bounded_replay", False):
        return Refusal("whose last tokens vLLM computes anew after each hit")
    mode = getattr(getattr(spec, "kv_quant_mode", None), "name", "NONE")
    if mode in QUANT_SERVED:
        return None
    why = QUANT_REFUSED.get(mode, "which kvbm does not know")
    return Refusal(f"quantized as {mode}, {why}", "use another --kv-cache-dtype")
