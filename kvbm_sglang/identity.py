"""What the bytes of a page depend on besides its tokens: all of it is in the page's key and in its file's
fingerprint.

SGLang's own key names the tokens, the cache salt and an adapter's name (0.5.21 and newer), and nothing else.
``TABLES`` classifies every argument of every supported version; docs/identity-fields.md is made from it.
"""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvbm_core.identity.fields import Description
from kvbm_core.identity.roots import Stamp
from kvbm_core.tokens.namespace import KeyNamespace
from kvbm_core.types import BlockKey, SequenceHash, block_key
from kvbm_sglang.config_tables import (
    ENVIRONMENT_WORDS,
    IRRELEVANT_ENVIRONMENT,
    PROCESS_ONLY_ENVIRONMENT,
    TABLES,
)
from kvbm_sglang.side_pools import STATES

if TYPE_CHECKING:
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig

__all__ = [
    "ENVIRONMENT_WORDS",
    "IRRELEVANT_ENVIRONMENT",
    "KV",
    "PROCESS_ONLY_ENVIRONMENT",
    "TABLES",
    "TP_RANKS",
    "device_namespace_of",
    "engine_claim",
    "is_first_of",
    "is_replicated",
    "model_of",
    "namespace_of",
    "page_keys",
    "rank_of",
    "reads_along",
    "shard_of",
]

KV = "kv"
# What a host pool says of the meaning of its bytes; a pool has some of them.
_LAYOUT = (
    "layout",
    "dtype",
    "page_size",
    "layer_num",
    "start_layer",
    "end_layer",
    "head_num",
    "head_dim",
    "v_head_dim",
    "kv_cache_dim",
    "kv_lora_rank",
    "qk_rope_head_dim",
    "size_per_token",
    "num_mamba_layers",
    "temporal_dtype",
    "temporal_state_elem_size",
    "temporal_state_shape",
    "conv_dtype",
    "conv_state_shapes",
    "indexer_dtype",
    "index_head_dim",
)
_RANKS = ("pp_rank", "pp_size", "attn_cp_rank", "attn_cp_size", "dcp_rank", "dcp_size")
TP_RANKS = ("tp_rank", "tp_size")


def namespace_of(
    config: HiCacheStorageConfig,
    pool: Any,
    name: str,
    piece_bytes: tuple[int, ...],
    model: str,
    *,
    engine: Description,
    weights: Stamp,
) -> KeyNamespace:
    """The namespace of one host pool. ``piece_bytes``: the sizes of a page's pieces, in SGLang's order.
    ``engine``, ``weights``: lasting.
    """
    ranks = _RANKS if is_replicated(config, name) else (*_RANKS, *TP_RANKS)
    layout = [
        (field, str(getattr(pool, field))) for field in _LAYOUT if getattr(pool, field, None) is not None
    ]
    layout += [("class", type(pool).__name__), ("pieces", ",".join(map(str, piece_bytes)))]
    return KeyNamespace(
        model=model,
        kv_dtype=str(getattr(pool, "dtype", "")),
        layout=hashlib.sha256(repr(sorted(layout)).encode()).hexdigest(),
        block_size_tokens=int(pool.page_size),
        parallel=",".join(f"{field}={getattr(config, field, 0)}" for field in ranks),
        extra=(
            ("engine", "sglang"),
            ("pool", name),
            ("settings", engine.digest),
            ("weights", weights.text),
        ),
    )


def model_of(config: HiCacheStorageConfig, server_args: Any) -> str:
    """Where its weights are, or its name."""
    return str(getattr(server_args, "model_path", None) or config.model_name or "")


def is_replicated(config: HiCacheStorageConfig, name: str) -> bool:
    """Whether all TP ranks hold the same bytes, of which SGLang lets one write: latents of MLA and what goes
    with them; states are sharded even then.
    """
    return bool(config.is_mla_model) and name != STATES


def reads_along(config: HiCacheStorageConfig, name: str) -> bool:
    """Whether another rank writes this one's pages."""
    is_writer = getattr(config, "is_storage_writer", config.tp_rank == 0)
    return is_replicated(config, name) and config.tp_size > 1 and not is_writer


def num_writers(config: HiCacheStorageConfig, name: str) -> int:
    """The number of an engine's ranks that write pages of a pool, each a file of its own."""
    return int(config.pp_size) * (1 if is_replicated(config, name) else int(config.tp_size))


def engine_claim(config: HiCacheStorageConfig) -> str:
    """The same text in all ranks of one engine's attention group, and in no other process of this machine."""
    return f"{_parent()} dp {getattr(config, 'dp_rank', 0)}"


def _parent() -> str:
    """Who started this rank: number, start and machine's run, so that a number used again is another one."""
    parent = os.getppid()
    try:
        started = Path(f"/proc/{parent}/stat").read_text().rpartition(")")[2].split()[19]
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except (OSError, IndexError):
        return f"{parent} {secrets.token_hex(16)}"
    return f"{parent} {started} {boot}"


def is_first_of(config: HiCacheStorageConfig) -> bool:
    """Whether this rank is the first of those that hold one KV cache together."""
    return not any(int(getattr(config, f"{what}_rank", 0) or 0) for what in ("pp", "attn_cp", "tp"))


def rank_of(config: HiCacheStorageConfig) -> int:
    """This rank's number among all of its engine."""
    rank = 0
    for what in ("dp", "pp", "attn_cp", "tp"):
        rank = rank * int(getattr(config, f"{what}_size", 1) or 1) + int(
            getattr(config, f"{what}_rank", 0) or 0
        )
    return rank


def shard_of(config: HiCacheStorageConfig, name: str) -> str:
    """Which part of a pool's pages this rank has, as "0of2". Replicas of an engine have the same parts."""
    rank, size = 0, 1
    for what in ("pp", "attn_cp", *(() if is_replicated(config, name) else ("tp",))):
        width = int(getattr(config, f"{what}_size", 1) or 1)
        rank, size = rank * width + int(getattr(config, f"{what}_rank", 0) or 0), size * width
    return f"{rank}of{size}"


def device_namespace_of(
    model: str,
    layout: Sequence[tuple[str, str]],
    page_tokens: int,
    ranks: Mapping[str, int],
    engine: Description,
) -> KeyNamespace:
    """The namespace of the pages of one rank's device pool, but for the weights.

    ``layout``: what their bytes mean (``DevicePages.layout``). ``engine``: what changes what
    a model computes from the same weights.
    """
    facts = dict(layout)
    return KeyNamespace(
        model=model,
        kv_dtype=facts.get("dtype", ""),
        layout=hashlib.sha256(repr(sorted(facts.items())).encode()).hexdigest(),
        block_size_tokens=page_tokens,
        parallel=",".join(f"{name}={number}" for name, number in sorted(ranks.items())),
        extra=(
            ("engine", "sglang"),
            ("pool", "device"),
            ("settings", engine.digest),
        ),
    )


def page_keys(root: SequenceHash, keys: list[str]) -> list[BlockKey]:
    """Our keys of SGLang's page keys, in one namespace."""
    return [block_key(SequenceHash(hashlib.sha256(root + key.encode()).digest()), 0) for key in keys]
