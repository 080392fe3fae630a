"""vLLM's configuration -> kvbm's settings and groups, or a refusal in one line."""

from __future__ import annotations

import logging
import re
from typing import TYPE_CHECKING, NamedTuple

from kvbm_core.config import KvbmSettings
from kvbm_core.errors import UnsupportedError
from kvbm_core.runtime.endpoint import Endpoint, SecretFile, endpoint_apart, engine_endpoint
from kvbm_core.tiers.groups import GroupSpec
from kvbm_core.types import MAX_GROUPS
from kvbm_vllm.kinds import FULL, REPLICATED, STATES, check_kind, layer_specs
from kvbm_vllm.versions import Capabilities

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, KVCacheSpec

log = logging.getLogger("kvbm")

_UUID = re.compile("[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
# Ranks of these have different tokens of a block.
_BY_TOKENS = ("decode_context_parallel_size", "prefill_context_parallel_size")


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
    is_spread = num_nodes_of(vllm_config) > 1
    data_parallel_rank = data_parallel_rank_of(vllm_config)
    name_apart = _name_on_all_nodes(vllm_config) if is_spread else _name_of(vllm_config)
    apart = endpoint_apart(settings, name_apart, data_parallel_rank, is_spread=is_spread)
    if apart is not None:
        return apart
    name = _name_of(vllm_config)
    holder = SecretFile(name)
    return engine_endpoint(settings, name, holder.secret, data_parallel_rank, holder)


def num_nodes_of(vllm_config: VllmConfig) -> int:
    """Machines that one engine's ranks are on (--nnodes)."""
    return int(vllm_config.parallel_config.nnodes_within_dp)


def _name_on_all_nodes(vllm_config: VllmConfig) -> str:
    """Each node is started by itself and makes up ids of its own: what their command lines share."""
    transfer, parallel = vllm_config.kv_transfer_config, vllm_config.parallel_config
    engine_id = (transfer.engine_id if transfer is not None else None) or ""
    if engine_id and not _UUID.search(engine_id):
        return engine_id
    return f"{parallel.master_addr}:{parallel.master_port}"


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


def check_supported(vllm_config: VllmConfig, capabilities: Capabilities) -> None:
    """Refuses parallel shapes whose blocks kvbm does not know how to cut, and what needs more of a hit than
    KV. UnsupportedError, one line.
    """
    parallel = vllm_config.parallel_config
    for name in _BY_TOKENS:
        size = getattr(parallel, name, 1)
        if size > 1:
            raise UnsupportedError(f"kvbm: {name}={size} is not supported: set it to 1 or run without kvbm")
    model = vllm_config.model_config
    outputs = getattr(vllm_config, "aux_output_config", model)  # vLLM < 0.31 has it in the model's
    if outputs.enable_return_routed_experts and not capabilities.limits_hits_to_rows:
        raise UnsupportedError(
            "kvbm: --enable-return-routed-experts: this vLLM keeps what it returns for device blocks alone; "
            "blocks that come back have none of it: use vLLM 0.33 or newer, or run without kvbm"
        )
    if model.pooler_config is not None and not model.is_prefix_caching_supported:
        raise UnsupportedError(
            "kvbm: this model's pooling needs the hidden states of every token, and blocks that come back "
            "have none: run it without kvbm"
        )


def group_specs(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, capabilities: Capabilities
) -> tuple[GroupSpec, ...]:
    """The engine's KV cache groups. UnsupportedError, one line with the model, for a kind that kvbm would not
    serve correctly.
    """
    try:
        return _group_specs(kv_cache_config, capabilities)
    except UnsupportedError as error:
        model = vllm_config.model_config
        line = str(error).removeprefix("kvbm: ")
        raise UnsupportedError(f"kvbm: {model.model} ({model.architecture}): {line}") from None


def _group_specs(kv_cache_config: KVCacheConfig, capabilities: Capabilities) -> tuple[GroupSpec, ...]:
    groups = kv_cache_config.kv_cache_groups
    for index, group in enumerate(groups):
        check_kind(index, group)
    if not fails_by_block(kv_cache_config) and not capabilities.hybrid_load_failures:
        raise UnsupportedError(
            "kvbm: this vLLM cannot recover a failed load of a model with several KV cache groups, "
            "a window or states; "
            "use vLLM 0.31 or newer, or --disable-hybrid-kv-cache-manager"
        )
    if len(groups) > MAX_GROUPS:
        raise UnsupportedError(f"kvbm: {len(groups)} KV cache groups: at most {MAX_GROUPS} are supported")
    return tuple(_group_spec(index, group, capabilities) for index, group in enumerate(groups))


class KvShard(NamedTuple):
    """Which shard of every block a rank has: ``number`` of ``num_shards``. ``part``: see Worker.register."""

    number: int
    num_shards: int
    part: str = ""


def shard_of(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, settings: KvbmSettings) -> KvShard:
    """This worker's. Ranks of a stage have the same one of MLA's latents."""
    if not has_replicas(vllm_config, kv_cache_config):
        return KvShard(rank_of(vllm_config), world_size_of(vllm_config))
    parallel = vllm_config.parallel_config
    stage = rank_of(vllm_config) // int(parallel.tensor_parallel_size)  # vLLM counts stage by stage
    part = f"stage {stage}" if settings.nccl_mla_mode and parallel.tensor_parallel_size > 1 else ""
    return KvShard(stage, int(parallel.pipeline_parallel_size), part)


def has_replicas(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> bool:
    """Whether all tensor-parallel ranks have the same KV, if there are several: MLA's, unless it is divided
    by tokens among them.
    """
    return not _is_divided_by_tokens(vllm_config) and all(
        type(spec).__name__ in REPLICATED
        for group in kv_cache_config.kv_cache_groups
        for spec in layer_specs(group)
    )


def _is_divided_by_tokens(vllm_config: VllmConfig) -> bool:
    return any(getattr(vllm_config.parallel_config, name, 1) > 1 for name in _BY_TOKENS)


def fails_by_block(kv_cache_config: KVCacheConfig) -> bool:
    """Whether vLLM can recompute from the first block that a load failed to bring.

    Not with several groups (block ids are not unique), nor with a window or states (what lies before that
    block was not loaded either): there the whole request starts anew.
    """
    groups = kv_cache_config.kv_cache_groups
    return len(groups) == 1 and all(type(spec).__name__ in FULL for spec in layer_specs(groups[0]))


def _group_spec(index: int, group: KVCacheGroupSpec, capabilities: Capabilities) -> GroupSpec:
    spec = group.kv_cache_spec
    if all(type(layer_spec).__name__ in STATES for layer_spec in layer_specs(group)):
        _check_states(layer_specs(group), capabilities)
        return GroupSpec(index, int(spec.block_size), is_state=True)
    windows = {_window_of(layer_spec) for layer_spec in layer_specs(group)}
    if len(windows) != 1:
        raise UnsupportedError(
            f"kvbm: KV cache group {index} mixes windows {windows}; run this model without kvbm"
        )
    return GroupSpec(index, int(spec.block_size), windows.pop())


def _check_states(specs: list[KVCacheSpec], capabilities: Capabilities) -> None:
    modes = {str(getattr(spec, "mamba_cache_mode", "none")) for spec in specs}
    if modes != {"align"}:
        raise UnsupportedError(
            f"kvbm: mamba_cache_mode={'+'.join(sorted(modes))} keeps no state that could be stored: "
            "use --enable-prefix-caching --mamba-cache-mode align, or run this model without kvbm"
        )
    if not capabilities.hands_off_states:
        raise UnsupportedError(
            "kvbm: this vLLM does not say where the states of Mamba layers are: use vLLM 0.31 or newer, "
            "or run this model without kvbm"
        )


def tell_sleep(vllm_config: VllmConfig, capabilities: Capabilities) -> None:
    """A line if vLLM may unmap memory that kvbm still copies."""
    if vllm_config.model_config.enable_sleep_mode and not capabilities.tells_of_sleep:
        log.warning(
            "kvbm: sleep mode is on, and this vLLM does not say when it gives KV memory back (0.33 does): "
            "a copy that is under way then may end the engine; let it be idle for some seconds first"
        )


def tell_states(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
    """A line on what a state costs and when there is one, if the model has any."""
    state_bytes, token_bytes, block_tokens = 0, 0.0, 0
    for group in kv_cache_config.kv_cache_groups:
        specs = getattr(group.kv_cache_spec, "kv_cache_specs", {})
        for name in group.layer_names:
            spec = specs.get(name, group.kv_cache_spec)
            content_bytes = int(getattr(spec, "real_page_size_bytes", 0)) * world_size_of(vllm_config)
            if type(spec).__name__ in STATES:
                state_bytes, block_tokens = state_bytes + content_bytes, int(spec.block_size)
            elif type(spec).__name__ in FULL:
                token_bytes += content_bytes / int(spec.block_size)
    if state_bytes:
        log.info(
            "kvbm: this model has layers with a state of %.1f MB%s; hits end where one is stored: after a "
            "multiple of %d tokens; vLLM hands off %s",
            state_bytes / 1e6,
            f", as much as the KV of {int(state_bytes / token_bytes)} tokens" if token_bytes else "",
            block_tokens,
            _handed_off(getattr(vllm_config.cache_config, "prefix_cache_retention_interval", None)),
        )


def _handed_off(interval_tokens: int | None) -> str:
    if interval_tokens is None:
        return "each that it has"
    last = "the last one of each prompt"
    if interval_tokens:
        return f"{last} and one every {interval_tokens} tokens"
    return f"{last}, and of answers none (--prefix-cache-retention-interval)"


def _window_of(spec: KVCacheSpec) -> int | None:
    if type(spec).__name__ in FULL:
        return None
    return int(spec.sliding_window) + int(getattr(spec, "extra_retained_tokens", 0))
