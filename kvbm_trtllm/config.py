"""TensorRT-LLM's arguments -> kvbm's settings and parallel shape, or a refusal in one line.

``kv_connector_config`` takes no keys of ours, so that all settings come from the environment.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

from kvbm_core.config import KvbmSettings
from kvbm_core.errors import UnsupportedError
from kvbm_core.identity.hub import folder_of
from kvbm_core.identity.layers import keeps_states
from kvbm_core.runtime.endpoint import Endpoint, endpoint_apart, engine_endpoint


def read_settings() -> KvbmSettings:
    """DYN_KVBM_* and KVBM_* from the environment. ConfigError on an unusable value."""
    return KvbmSettings.from_env()


def uses_attention_dp(llm_args: Any) -> bool:
    """Whether each rank is an engine of its own as far as KV blocks go, with a leader of its own."""
    return bool(getattr(llm_args, "enable_attention_dp", False))


def world_size_of(llm_args: Any) -> int:
    """Ranks that hold a shard of every block."""
    return 1 if uses_attention_dp(llm_args) else int(getattr(llm_args, "tensor_parallel_size", 1) or 1)


def tiers_here_of(llm_args: Any) -> float:
    """How many tiers of one leader's size the engine has in this machine's memory.

    A leader's is over all of its ranks, of which some may be on other machines; with attention DP each rank
    has a leader.
    """
    num_ranks = int(getattr(llm_args, "tensor_parallel_size", 1) or 1)
    num_here = min(num_ranks, int(getattr(llm_args, "gpus_per_node", None) or num_ranks))
    return num_here / world_size_of(llm_args)


def block_tokens_of(llm_args: Any) -> int:
    """Tokens of a block."""
    return int(getattr(llm_args.kv_cache_config, "tokens_per_block", 32) or 32)


def spare_tokens_of(llm_args: Any) -> int:
    """Room that a block table may have beyond a request's tokens: for draft tokens, and a few more."""
    speculative = getattr(llm_args, "speculative_config", None)
    if speculative is None:
        return 0
    names = ("max_total_draft_tokens", "max_draft_len")
    drafts = max(int(getattr(speculative, name, None) or 0) for name in names)
    return max(block_tokens_of(llm_args), 2 * drafts)


def pads_graphs(llm_args: Any) -> bool:
    """Whether batches are filled up to the size of a CUDA graph, with a request that TensorRT-LLM made up.

    It takes a free block, once, and tells nobody.
    """
    graphs = getattr(llm_args, "cuda_graph_config", None)
    return graphs is not None and getattr(graphs, "enable_padding", True) is not False


def check_supported(llm_args: Any, *, has_attention_dp: bool) -> None:
    """Refuses what would be cached wrongly, as newer TensorRT-LLM does itself. UnsupportedError, one line.

    ``has_attention_dp``: whether this TensorRT-LLM knows connectors with a leader on each rank.
    """
    pipeline = int(getattr(llm_args, "pipeline_parallel_size", 1) or 1)
    context = int(getattr(llm_args, "context_parallel_size", 1) or 1)
    beams = int(getattr(llm_args, "max_beam_width", 1) or 1)
    cache = llm_args.kv_cache_config
    wrong = {
        f"pipeline_parallel_size={pipeline}": pipeline > 1,
        f"context_parallel_size={context}": context > 1,
        f"max_beam_width={beams}": beams > 1,
        f"kv_cache_config.host_cache_size={getattr(cache, 'host_cache_size', None)}": bool(
            getattr(cache, "host_cache_size", None)
        ),
        "kv_cache_config.enable_block_reuse=false": getattr(cache, "enable_block_reuse", True) is False,
        # It drops tokens out of blocks that are stored already.
        "kv_cache_compression_config": getattr(llm_args, "kv_cache_compression_config", None) is not None,
        # Pages that a window has passed hold something else, and are named all the same.
        "kv_cache_config.enable_swa_scratch_reuse=true": bool(
            getattr(cache, "enable_swa_scratch_reuse", False)
        ),
    }
    for setting, is_wrong in wrong.items():
        if is_wrong:
            raise UnsupportedError(
                f"kvbm: {setting} is not supported with kvbm: remove it, or kv_connector_config"
            )
    model = _model_config_of(llm_args)
    if model is not None and keeps_states(model):
        # Newer TensorRT-LLM refuses it as well; 1.1 and 1.2 go on, and a hit would be without its states.
        raise UnsupportedError(
            f"kvbm: {llm_args.model} has layers with states (Mamba, gated delta net), which TensorRT-LLM does"
            " not hand to connectors: run it without kv_connector_config, or with vLLM"
        )
    if uses_attention_dp(llm_args) and not has_attention_dp:
        raise UnsupportedError(
            "kvbm: enable_attention_dp=true: this TensorRT-LLM gives connectors one leader for all "
            "ranks then: "
            "use a newer one, or run without kv_connector_config"
        )
    if kv_dtype_of(llm_args).lower() in {"nvfp4", "fp4"}:
        raise UnsupportedError(
            "kvbm: an NVFP4 KV cache keeps its scales in a pool that TensorRT-LLM does not hand to "
            "connectors: "
            "use kv_cache_config.dtype=fp8, or run without kv_connector_config"
        )


def kv_dtype_of(llm_args: Any) -> str:
    """Of the KV cache: as configured, or as the quantized checkpoint says; "auto" follows the model."""
    configured = str(getattr(llm_args.kv_cache_config, "dtype", "auto") or "auto")
    if configured != "auto":
        return configured
    algorithm = getattr(getattr(llm_args, "quant_config", None), "kv_cache_quant_algo", None)
    return str(getattr(algorithm, "value", algorithm) or "auto")


def index_cache_of(llm_args: Any, *, is_latent: bool) -> str | None:
    """Why the V1 manager's pool is not all that attention reads: a line's middle; None if it is.

    Sparse attention keeps keys of its own beside the pool (DSA: the indexer's). TensorRT-LLM also turns it on
    by the model's configuration alone.
    """
    algorithm = getattr(getattr(llm_args, "sparse_attention_config", None), "algorithm", None)
    if algorithm is not None and algorithm != "skip_softmax":  # which keeps nothing
        return f"sparse_attention_config.algorithm={algorithm}"
    if not is_latent:
        return None
    model = _model_config_of(llm_args)
    if model is None:
        return f"the configuration of {getattr(llm_args, 'model', '')} cannot be read, and it may say so"
    has_indexer = "index_topk" in model or "index_head_dim" in model
    return "the model's configuration has index_topk" if has_indexer else None


def _model_config_of(llm_args: Any) -> dict[str, Any] | None:
    """config.json of the model, with ``model_kwargs`` over it; None if it is not on this machine."""
    name, revision = str(getattr(llm_args, "model", "")), str(getattr(llm_args, "revision", None) or "")
    try:
        folder = folder_of(name, revision)
        found = None if folder is None else json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return {**found, **(getattr(llm_args, "model_kwargs", None) or {})} if isinstance(found, dict) else None


def endpoint_of(
    engine_id: str, settings: KvbmSettings, data_parallel_rank: int, *, is_spread: bool = False
) -> Endpoint:
    """Where this engine's leader and workers meet. The name, which is made anew for each engine and told to
    its ranks alone, is their secret too. ``is_spread``: ranks are on several machines.
    """
    name_apart = f"trtllm {hashlib.sha256(engine_id.encode()).hexdigest()[:32]}"  # which others may read
    apart = endpoint_apart(settings, name_apart, data_parallel_rank, is_spread=is_spread)
    if apart is not None:
        return apart
    return engine_endpoint(settings, engine_id, engine_id.encode(), data_parallel_rank)
