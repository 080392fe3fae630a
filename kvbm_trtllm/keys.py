"""TensorRT-LLM's arguments -> KeyNamespace: everything besides the tokens that the bytes of a block depend
on.
"""

from __future__ import annotations

import secrets
from dataclasses import replace
from typing import Any

from kvbm_core.tokens.namespace import KeyNamespace
from kvbm_core.tokens.weights import model_stamp
from kvbm_core.types import SequenceHash
from kvbm_trtllm.config import kv_dtype_of, world_size_of
from kvbm_trtllm.contract import Identity

MAX_KNOWN_ROOTS = 1024

# A LoRA is known by its number alone: another process may give the same number to other weights.
_PROCESS = secrets.token_hex(16)
# What else changes the numbers that a model computes from the same weights.
_SETTINGS = (
    "model_kwargs",
    "moe_config",
    "moe_expert_parallel_size",
    "attn_backend",
    "sparse_attention_config",
    "speculative_config",
    "checkpoint_format",
)
_CACHE_SETTINGS = ("max_attention_window", "sink_token_length")


def base_namespace(llm_args: Any, block_size_tokens: int) -> KeyNamespace:
    """What all requests of one engine share; ``layout`` is added when the KV cache is known."""
    quantization = getattr(getattr(llm_args, "quant_config", None), "quant_algo", None)
    model = str(getattr(llm_args, "model", ""))
    return KeyNamespace(
        model=model,
        revision=str(getattr(llm_args, "revision", None) or ""),
        kv_dtype=f"{kv_dtype_of(llm_args)}/{getattr(llm_args, 'dtype', 'auto')}",
        block_size_tokens=block_size_tokens,
        parallel=f"tp={world_size_of(llm_args)}",
        extra=(
            ("engine", "tensorrt-llm"),
            ("quantization", str(getattr(quantization, "value", quantization) or "")),
            ("settings", _shown(llm_args, _SETTINGS)),
            ("cache settings", _shown(llm_args.kv_cache_config, _CACHE_SETTINGS)),
            ("weights", _weights_of(llm_args, model)),
        ),
    )


def _shown(holder: Any, names: tuple[str, ...]) -> str:
    return "; ".join(f"{name}={getattr(holder, name, None)}" for name in names)


class Roots:
    """The first parent of a request's blocks, by its LoRA and salt: most requests share theirs with
    others.
    """

    def __init__(self, namespace: KeyNamespace) -> None:
        self._namespace = namespace
        self._known: dict[tuple[str, str | None], SequenceHash] = {}

    def of(self, identity: Identity, layout_fingerprint: str) -> SequenceHash:
        """A LoRA's blocks are found again by this process alone."""
        if self._namespace.layout != layout_fingerprint:
            self._namespace = replace(self._namespace, layout=layout_fingerprint)
            self._known.clear()
        which = (identity.adapter, identity.salt)
        root = self._known.get(which)
        if root is None:
            if len(self._known) >= MAX_KNOWN_ROOTS:
                self._known.clear()
            adapter = f"lora {identity.adapter} of {_PROCESS}" if identity.adapter else ""
            root = self._known[which] = self._namespace.with_request(
                adapter=adapter, salt=identity.salt
            ).root()
        return root


def _weights_of(llm_args: Any, model: str) -> str:
    load_format = str(getattr(llm_args, "load_format", "auto")).rpartition(".")[2].lower()
    return (
        _PROCESS
        if load_format == "dummy"
        else model_stamp(model, str(getattr(llm_args, "revision", None) or ""))
    )
