"""Puts the parts together for one process's role: settings, channel, leader or worker, hooks, metrics."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvbm_core.config import Adapter, KvbmSettings
from kvbm_core.identity.adapters import AdapterIdentities
from kvbm_core.identity.fields import NOT_ON_DISK
from kvbm_core.identity.roots import Roots
from kvbm_core.observe.guard import GuardState
from kvbm_core.observe.log import setup_logging
from kvbm_core.runtime.assembly import (
    LeaderProcess,
    announce,
    leader_options,
    metrics_of,
    rank_options,
)
from kvbm_core.runtime.worker import Worker
from kvbm_core.storage.host_slab import available_memory_bytes
from kvbm_core.tiers.groups import GroupSpec, base_block_tokens
from kvbm_vllm import engine_calls
from kvbm_vllm.changes import EngineChanges
from kvbm_vllm.config import (
    check_supported,
    data_parallel_rank_of,
    endpoint_of,
    group_specs,
    rank_of,
    read_settings,
    replicates,
    world_size_of,
)
from kvbm_vllm.events import EventFeed
from kvbm_vllm.heads import heads_of
from kvbm_vllm.identity import WHERE_HEADS_LIE, describe_engine, namespace_of
from kvbm_vllm.scheduler import SchedulerSide
from kvbm_vllm.stats import StatsReporter
from kvbm_vllm.versions import Capabilities, probe
from kvbm_vllm.weights import weights_identity
from kvbm_vllm.worker import WorkerSide

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

log = logging.getLogger("kvbm")


@dataclass(frozen=True)
class SchedulerAssembly:
    """Everything of the scheduler's role."""

    hooks: SchedulerSide
    stats: StatsReporter
    process: LeaderProcess
    changes: EngineChanges

    def close(self) -> None:
        """Ends threads and sockets. May be called twice."""
        self.changes.close()
        self.process.close()


def build_scheduler_side(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> SchedulerAssembly:
    """The scheduler's role. ConfigError or UnsupportedError, one line, when it cannot serve as configured."""
    check_supported(vllm_config)
    settings = read_settings(vllm_config)
    announce(settings, Adapter.VLLM)
    capabilities = probe()
    groups = group_specs(kv_cache_config, capabilities)
    world_size = world_size_of(vllm_config)
    description = describe_engine(vllm_config)
    if settings.remote_head_shards:  # the layout says it for blocks that are not divided by heads
        description = description.without(WHERE_HEADS_LIE)
    if settings.has_lower_tier:
        description.tell("vLLM", NOT_ON_DISK)
    changes = _changes(vllm_config, has_disk=settings.has_lower_tier)
    is_replicated = _tell_if_replicated(vllm_config, kv_cache_config, settings)
    _check_memory(settings, kv_cache_config, 1 if is_replicated else world_size)
    _set_failure_policy(vllm_config, settings)
    metrics = metrics_of(settings, SchedulerSide)
    events = _event_feed(vllm_config, settings, groups, capabilities)
    transfer = vllm_config.kv_transfer_config
    process = LeaderProcess(
        settings,
        metrics,
        endpoint_of(vllm_config, settings),
        world_size=world_size,
        model=str(vllm_config.model_config.model),
        engine_name=str(transfer.engine_id)[:8] if transfer else "0",
    )
    options = leader_options(
        settings,
        share_loads=bool(vllm_config.cache_config.enable_prefix_caching),
        fetch_wait_s=settings.remote_wait_s,
        audit_rate=settings.audit_rate,
    )
    leader = process.make_leader(groups, options, on_evict=events.on_evict, on_offload_end=events.on_end)
    if settings.has_lower_tier and description.is_lasting:
        changes.weights.start()
    process.wait(changes.weights)
    leader.catch_up()
    hooks = SchedulerSide(
        leader,
        Roots(
            namespace_of(description, base_block_tokens(groups)),
            changes.weights.stamp,
            is_lasting=description.is_lasting,
        ),
        events,
        changes=changes,
        hold_back_tokens=_hold_back_tokens(vllm_config, groups),
        decode_run_tokens=settings.decode_run_tokens,
        guard_state=GuardState(metrics),
    )
    process.serve_metrics(data_parallel_rank_of(vllm_config), leader.readiness)
    return SchedulerAssembly(hooks, StatsReporter(metrics, process.clock), process, changes)


def build_worker_side(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> WorkerSide:
    """One rank's role. ConfigError or UnsupportedError, one line, when it cannot serve as configured."""
    settings = read_settings(vllm_config)
    setup_logging(settings.log_level)
    is_replicated = replicates(vllm_config, kv_cache_config, settings)
    rank, world_size = rank_of(vllm_config), world_size_of(vllm_config)
    worker = Worker(
        rank,
        world_size,
        endpoint_of(vllm_config, settings),
        rank_options(settings),
        engine_carries_acks=True,
        replicates=is_replicated,
        max_ctas=settings.nccl_max_ctas,
    )
    return WorkerSide(
        worker,
        kv_cache_config,
        str(vllm_config.cache_config.cache_dtype),
        (0, 1) if is_replicated else (rank, world_size),
        GuardState(metrics_of(settings, WorkerSide)),
        submits_without_save=not probe().wait_for_save_always,
        heads_of=lambda kv_caches: heads_of(kv_caches, kv_cache_config, vllm_config, settings),
    )


def _changes(vllm_config: VllmConfig, *, has_disk: bool) -> EngineChanges:
    sees_orders = engine_calls.watch()
    if not sees_orders:
        log.warning(
            "kvbm: this vLLM does not say when it changes weights or loads adapters: requests with adapters "
            "are not cached; after a change of weights reset the cache (reset_connector=true)"
        )
    adapters = AdapterIdentities(sees_loads=sees_orders, digests=has_disk)
    changes = EngineChanges(weights_identity(vllm_config, *engine_calls.loading_began(vllm_config)), adapters)
    engine_calls.follow(vllm_config, changes)
    return changes


def _tell_if_replicated(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, settings: KvbmSettings
) -> bool:
    is_replicated = replicates(vllm_config, kv_cache_config, settings)
    if settings.nccl_mla_mode and not is_replicated and world_size_of(vllm_config) > 1:
        log.warning(
            "kvbm: DYN_KVBM_NCCL_MLA_MODE is set, but it is for MLA models with tensor parallelism, whose "
            "ranks have the same KV: here each rank stores and loads its own"
        )
    return is_replicated


def _check_memory(settings: KvbmSettings, kv_cache_config: KVCacheConfig, world_size: int) -> None:
    pages = [
        sum(_page_bytes(group.kv_cache_spec, name) for name in group.layer_names)
        for group in kv_cache_config.kv_cache_groups
    ]
    block_bytes = max(pages) * world_size
    settings.check_memory(settings.host_tier_slots(block_bytes) * block_bytes, available_memory_bytes())


def _page_bytes(spec: object, layer_name: str) -> int:
    specs = getattr(spec, "kv_cache_specs", None)
    return int(getattr(specs[layer_name] if specs else spec, "page_size_bytes", 0))


def _set_failure_policy(vllm_config: VllmConfig, settings: KvbmSettings) -> None:
    # vLLM reads the policy after it has made the connector (0.26 to 0.33). Its default would fail a request
    # whose load failed; for a cache that is a miss.
    transfer = vllm_config.kv_transfer_config
    if transfer is not None and settings.load_failure_policy == "recompute":
        transfer.kv_load_failure_policy = "recompute"


def _event_feed(
    vllm_config: VllmConfig, settings: KvbmSettings, groups: tuple[GroupSpec, ...], capabilities: Capabilities
) -> EventFeed:
    kv_events = vllm_config.kv_events_config
    cache = vllm_config.cache_config
    return EventFeed(
        groups,
        settings.events_medium,
        capabilities,
        hash_block_tokens=int(getattr(cache, "hash_block_size", None) or base_block_tokens(groups)),
        enabled=kv_events is not None and bool(kv_events.enable_kv_cache_events),
    )


def _hold_back_tokens(vllm_config: VllmConfig, groups: tuple[GroupSpec, ...]) -> int:
    # A draft layer's KV of the newest tokens may still be rewritten after a rejected draft.
    speculative = vllm_config.speculative_config
    return max(group.block_size_tokens for group in groups) if speculative is not None else 0
