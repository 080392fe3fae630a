"""vLLM's configuration -> kvbm's settings and groups, or a refusal in one line."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from kvbm_core.config import KvbmSettings
from kvbm_core.errors import UnsupportedError
from kvbm_core.runtime.endpoint import Endpoint, SecretFile, engine_endpoint
from kvbm_core.tiers.groups import GroupSpec
from kvbm_core.types import MAX_GROUPS
from kvbm_vllm.versions import Capabilities

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, KVCacheSpec

_UUID = re.compile("[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_FULL = frozenset({"FullAttentionSpec", "MLAAttentionSpec"})
# With tensor parallelism every rank computes and keeps the whole latent.
_REPLICATED = frozenset({"MLAAttentionSpec"})
_WINDOWED = frozenset({"SlidingWindowSpec"})


def read_settings(vllm_config: VllmConfig) -> KvbmSettings:
    """DYN_KVBM_* from the environment, ``kv_connector_extra_config`` on top. ConfigError on an unusable
    value.
    """
    transfer = vllm_config.kv_transfer_config
    extra = transfer.kv_connector_extra_config if transfer is not None else {}
    return KvbmSettings.from_env(extra)


def endpoint_of(vllm_config: VllmConfig, settings: KvbmSettings) -> Endpoint:
    """Where this engine's leader and workers meet. They are made apart and know of each other what is in the
    configuration alone: it names the file with their secret.
    """
    name = _name_of(vllm_config)
    holder = SecretFile(name)
    return engine_endpoint(settings, name, holder.secret, data_parallel_rank_of(vllm_config), holder)


def _name_of(vllm_config: VllmConfig) -> str:
    """What the processes of one engine share, and no second engine has."""
    transfer = vllm_config.kv_transfer_config
    engine_id = (transfer.engine_id if transfer is not None else None) or ""
    if _UUID.search(engine_id):  # vLLM's own
        return engine_id
    # A user's, who may have given it twice. vLLM's own too: the nanosecond at which it was configured.
    return f"{engine_id} {getattr(vllm_config, 'instance_id', '')}"


def data_parallel_rank_of(vllm_config: VllmConfig) -> int:
    """Which engine of its data-parallel group this is; 0 if there is no group."""
    return int(getattr(vllm_config.parallel_config, "data_parallel_index", 0) or 0)


def world_size_of(vllm_config: VllmConfig) -> int:
    """Ranks of one engine, each of which holds a shard of every block."""
    parallel = vllm_config.parallel_config
    return int(parallel.tensor_parallel_size * parallel.pipeline_parallel_size)


def rank_of(vllm_config: VllmConfig) -> int:
    """This worker's rank within its engine."""
    return int(vllm_config.parallel_config.rank) % world_size_of(vllm_config)


def check_supported(vllm_config: VllmConfig) -> None:
    """Refuses parallel shapes whose blocks kvbm does not know how to cut. UnsupportedError, one line."""
    parallel = vllm_config.parallel_config
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        size = getattr(parallel, name, 1)
        if size > 1:
            raise UnsupportedError(f"kvbm: {name}={size} is not supported: set it to 1 or run without kvbm")


def group_specs(kv_cache_config: KVCacheConfig, capabilities: Capabilities) -> tuple[GroupSpec, ...]:
    """The engine's KV cache groups. UnsupportedError, one line, for a kind that kvbm would not serve
    correctly.
    """
    groups = kv_cache_config.kv_cache_groups
    if not fails_by_block(kv_cache_config) and not capabilities.hybrid_load_failures:
        raise UnsupportedError(
            "kvbm: this vLLM cannot recover a failed load of a model with several KV cache groups "
            "or a window; "
            "use vLLM 0.31 or newer, or --disable-hybrid-kv-cache-manager"
        )
    if not 1 <= len(groups) <= MAX_GROUPS:
        raise UnsupportedError(f"kvbm: {len(groups)} KV cache groups: only 1 to {MAX_GROUPS} are supported")
    return tuple(_group_spec(index, group) for index, group in enumerate(groups))


def replicates(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, settings: KvbmSettings) -> bool:
    """Whether rank 0 alone stores, and sends what it loads to the others (DYN_KVBM_NCCL_MLA_MODE).

    So it is where every rank has the same KV: tensor parallel MLA. Elsewhere each rank keeps its own.
    """
    parallel = vllm_config.parallel_config
    return (
        settings.nccl_mla_mode
        and parallel.tensor_parallel_size > 1
        and parallel.pipeline_parallel_size == 1
        and all(
            type(spec).__name__ in _REPLICATED
            for group in kv_cache_config.kv_cache_groups
            for spec in layer_specs(group)
        )
    )


def fails_by_block(kv_cache_config: KVCacheConfig) -> bool:
    """Whether vLLM can recompute from the first block that a load failed to bring.

    Not with several groups (block ids are not unique), nor with a window (what lies before that block was not
    loaded either): there the whole request starts anew.
    """
    groups = kv_cache_config.kv_cache_groups
    return len(groups) == 1 and all(type(spec).__name__ not in _WINDOWED for spec in layer_specs(groups[0]))


def layer_specs(group: KVCacheGroupSpec) -> list[KVCacheSpec]:
    """Of its layers, each kind once at least."""
    spec = group.kv_cache_spec
    return list(getattr(spec, "kv_cache_specs", {}).values()) or [spec]


def _group_spec(index: int, group: KVCacheGroupSpec) -> GroupSpec:
    if not getattr(group, "enable_kv_transfer", True) or getattr(group, "host_resident", False):
        raise UnsupportedError(
            f"kvbm: KV cache group {index} is not meant for transfer; run this model without kvbm"
        )
    spec = group.kv_cache_spec
    windows = {_window_of(index, layer_spec) for layer_spec in layer_specs(group)}
    if len(windows) != 1:
        raise UnsupportedError(
            f"kvbm: KV cache group {index} mixes windows {windows}; run this model without kvbm"
        )
    return GroupSpec(index, int(spec.block_size), windows.pop())


def _window_of(index: int, spec: KVCacheSpec) -> int | None:
    kind = type(spec).__name__
    if kind in _FULL:
        return None
    if kind in _WINDOWED:
        return int(spec.sliding_window) + int(getattr(spec, "extra_retained_tokens", 0))
    raise UnsupportedError(
        f"kvbm: KV cache group {index} is a {kind}; supported are {', '.join(sorted(_FULL | _WINDOWED))}: "
        "run this model without kvbm"
    )
