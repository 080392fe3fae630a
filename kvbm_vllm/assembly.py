"""Puts the parts together for one process's role: settings, channel, leader or worker, hooks, metrics."""

from __future__ import annotations

import logging
import multiprocessing
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from kvbm_core.config import Adapter, KvbmSettings
from kvbm_core.control.desk import About
from kvbm_core.events.log import EventLog
from kvbm_core.events.service import EventService, media_of
from kvbm_core.identity.fields import NOT_ON_DISK, Description
from kvbm_core.identity.roots import Roots
from kvbm_core.observe.guard import GuardState
from kvbm_core.observe.log import setup_logging
from kvbm_core.observe.metrics import Metrics
from kvbm_core.runtime.assembly import (
    LeaderProcess,
    announce,
    leader_options,
    metrics_of,
    peer_options,
    rank_options,
)
from kvbm_core.runtime.leader import Leader
from kvbm_core.runtime.replicas import NOT_ALIKE
from kvbm_core.runtime.worker import Worker
from kvbm_core.storage.memory_room import available_memory
from kvbm_core.tiers.groups import GroupSpec, base_block_tokens
from kvbm_core.tiers.lower import PEERS
from kvbm_vllm import engine_calls
from kvbm_vllm.adapters import AdapterIdentities
from kvbm_vllm.changes import EngineChanges
from kvbm_vllm.config import (
    check_supported,
    data_parallel_rank_of,
    endpoint_of,
    group_specs,
    has_replicas,
    num_nodes_of,
    rank_of,
    read_settings,
    shard_of,
    tell_sleep,
    tell_states,
    world_size_of,
)
from kvbm_vllm.consolidator_config import consolidated_ends
from kvbm_vllm.events import EngineOutlet, EventFeed, attention_of, hash_maker
from kvbm_vllm.heads import heads_of
from kvbm_vllm.identity import HOW_MANY_REPLICAS, WHERE_HEADS_LIE, describe_engine, namespace_of
from kvbm_vllm.layout import audited_of
from kvbm_vllm.scheduler import SchedulerSide
from kvbm_vllm.stats import StatsReporter
from kvbm_vllm.versions import probe
from kvbm_vllm.weights import weights_identity
from kvbm_vllm.worker import WorkerSide

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

LOSSY = "kvbm: KVBM_REMOTE_CODEC=fp8: KV from the shared store is rounded to float8; answers may differ"

log = logging.getLogger("kvbm")


@dataclass(frozen=True)
class SchedulerAssembly:
    """Everything of the scheduler's role."""

    settings: KvbmSettings
    hooks: SchedulerSide
    stats: StatsReporter
    process: LeaderProcess
    changes: EngineChanges
    publishing: EventService | None

    def close(self) -> None:
        """Ends threads and sockets. May be called twice."""
        self.changes.close()
        self.process.close()
        if self.publishing is not None:
            self.publishing.close()


def build_scheduler_side(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> SchedulerAssembly:
    """The scheduler's role. ConfigError or UnsupportedError, one line, when it cannot serve as configured."""
    check_supported(vllm_config, probe())
    settings = read_settings(vllm_config)
    announce(settings, Adapter.VLLM)
    groups = group_specs(vllm_config, kv_cache_config, probe())
    world_size = world_size_of(vllm_config)
    tell_sleep(vllm_config, probe())
    tell_states(vllm_config, kv_cache_config)
    description = _describe(vllm_config, kv_cache_config, settings)
    if settings.has_lower_tier:
        description.tell("vLLM", NOT_ON_DISK)
    if settings.is_lossy:
        log.info(LOSSY)
    changes = _changes(vllm_config, has_disk=settings.has_lower_tier)
    _check_memory(vllm_config, kv_cache_config, settings)
    set_failure_policy(vllm_config, settings)
    metrics = metrics_of(settings, SchedulerSide)
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
        audit_rate=0.0 if settings.is_lossy else settings.audit_rate,
        state_every_tokens=settings.state_every_tokens,
    )
    events, publishing = _events(vllm_config, kv_cache_config, settings, groups, metrics)
    leader = process.make_leader(groups, options, listener=events.log, on_offload_end=events.on_end)
    if num_nodes_of(vllm_config) > 1:
        _turn_off_peers(leader)
    if settings.has_lower_tier and description.is_lasting:
        changes.weights.start()
    process.wait(changes.weights)
    leader.catch_up()
    namespace = namespace_of(description, base_block_tokens(groups))
    hooks = SchedulerSide(
        leader,
        Roots(namespace, changes.weights.stamp, is_lasting=description.is_lasting),
        events,
        changes=changes,
        hold_back_tokens=_hold_back_tokens(vllm_config, groups),
        decode_run_tokens=settings.decode_run_tokens,
        guard_state=GuardState(metrics),
    )
    rank = data_parallel_rank_of(vllm_config)
    about = About("vLLM", str(vllm_config.model_config.model), rank, lambda: namespace.digest)
    process.compare(leader, about, description)
    process.serve_metrics(about, leader.readiness)
    process.poll_with(hooks.poll_if_quiet)
    process.take_orders(about, leader.readiness)
    stats = StatsReporter(metrics, process.clock)
    return SchedulerAssembly(settings, hooks, stats, process, changes, publishing)


def _turn_off_peers(leader: Leader) -> None:
    peers = leader.chain.named(PEERS)
    if peers is not None:
        peers.turn_off("KVBM_PEERS: a hint names one machine, and the ranks of this engine are on several")


def _describe(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, settings: KvbmSettings) -> Description:
    """What names of blocks say of this engine."""
    description = describe_engine(vllm_config)
    if settings.remote_head_shards:  # the layout says it for blocks that are not divided by heads
        description = description.without(WHERE_HEADS_LIE)
    elif settings.nccl_mla_mode and has_replicas(vllm_config, kv_cache_config):
        description = description.without(HOW_MANY_REPLICAS)
    return description


def build_worker_side(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> WorkerSide:
    """One rank's role. ConfigError or UnsupportedError, one line, when it cannot serve as configured."""
    settings = read_settings(vllm_config)
    setup_logging(settings.log_level)
    worker = Worker(
        rank_of(vllm_config),
        world_size_of(vllm_config),
        endpoint_of(vllm_config, settings),
        rank_options(settings),
        engine_carries_acks=True,
        max_ctas=settings.nccl_max_ctas,
    )
    _meet_peers(worker, vllm_config, kv_cache_config, settings)
    return WorkerSide(
        worker,
        kv_cache_config,
        audited_of(vllm_config),
        shard_of(vllm_config, kv_cache_config, settings),
        GuardState(metrics_of(settings, WorkerSide)),
        submits_without_save=not probe().wait_for_save_always,
        heads_of=lambda kv_caches: heads_of(kv_caches, kv_cache_config, vllm_config, settings),
    )


def _meet_peers(
    worker: Worker, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, settings: KvbmSettings
) -> None:
    if not settings.has_peers or num_nodes_of(vllm_config) > 1:
        return
    block_tokens = base_block_tokens(group_specs(vllm_config, kv_cache_config, probe()))
    namespace = namespace_of(_describe(vllm_config, kv_cache_config, settings), block_tokens).root().hex()
    first_rank = data_parallel_rank_of(vllm_config) * world_size_of(vllm_config)
    options = peer_options(settings, namespace, first_rank)
    if options is not None:
        worker.meet_peers(options)


def _changes(vllm_config: VllmConfig, *, has_disk: bool) -> EngineChanges:
    sees_orders = engine_calls.watch()
    if not sees_orders:
        log.warning(
            "kvbm: this vLLM does not say when it changes weights or loads adapters: requests with adapters "
            "are not cached; after a change of weights reset the cache (reset_connector=true)"
        )
    adapters = AdapterIdentities(sees_loads=sees_orders, digests=has_disk)
    changes = EngineChanges(
        weights_identity(vllm_config, *engine_calls.loading_began(vllm_config)),
        adapters,
        partial(engine_calls.ask, vllm_config),
        heeds_resets=not multiprocessing.current_process().name.startswith("EngineCore"),
    )
    engine_calls.find_executor(vllm_config)
    engine_calls.follow(vllm_config, changes)
    changes.look()
    return changes


def _num_shards(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, settings: KvbmSettings) -> int:
    """Into how many a block is divided; a line if DYN_KVBM_NCCL_MLA_MODE makes nothing of it."""
    world_size = world_size_of(vllm_config)
    if not settings.nccl_mla_mode or world_size == 1:
        return world_size
    if has_replicas(vllm_config, kv_cache_config):  # each machine has its own
        return max(int(vllm_config.parallel_config.pipeline_parallel_size), num_nodes_of(vllm_config))
    log.warning(NOT_ALIKE)
    return world_size


def _check_memory(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, settings: KvbmSettings) -> None:
    pages = [
        sum(_page_bytes(group.kv_cache_spec, name) for name in group.layer_names)
        for group in kv_cache_config.kv_cache_groups
    ]
    block_bytes = max(pages) * _num_shards(vllm_config, kv_cache_config, settings)
    needed_bytes = settings.host_tier_slots(block_bytes) * block_bytes // num_nodes_of(vllm_config)
    available_memory().check(*settings.host_size, needed_bytes)


def _page_bytes(spec: object, layer_name: str) -> int:
    specs = getattr(spec, "kv_cache_specs", None)
    return int(getattr(specs[layer_name] if specs else spec, "page_size_bytes", 0))


def set_failure_policy(vllm_config: VllmConfig, settings: KvbmSettings) -> None:
    """What vLLM does with a request whose load failed. Its default fails it; for a cache that is a miss.

    vLLM reads the policy after it has made the connector (0.26 to 0.33).
    """
    transfer = vllm_config.kv_transfer_config
    if transfer is not None and settings.load_failure_policy == "recompute":
        transfer.kv_load_failure_policy = "recompute"


def _events(
    vllm_config: VllmConfig,
    kv_cache_config: KVCacheConfig,
    settings: KvbmSettings,
    groups: tuple[GroupSpec, ...],
    metrics: Metrics,
) -> tuple[EventFeed, EventService | None]:
    """Nothing but an idle feed, if nobody wants events."""
    kv_events, cache = vllm_config.kv_events_config, vllm_config.cache_config
    is_published = kv_events is not None and bool(kv_events.enable_kv_cache_events)
    hash_block_tokens = _hash_block_tokens(cache, kv_cache_config, groups)
    if not is_published and not settings.event_ways:
        return EventFeed(None, hash_block_tokens=hash_block_tokens), None
    event_log = EventLog(media_of(settings), hash_maker(), attention_of(kv_cache_config))
    consolidated = consolidated_ends(vllm_config) if is_published else None
    service = None
    if settings.event_ways or consolidated is not None:
        rank = data_parallel_rank_of(vllm_config)
        service = EventService(settings, event_log, rank, metrics, consolidated)
    outlet = EngineOutlet(probe()) if is_published and consolidated is None else None
    if outlet is not None:
        event_log.connect(outlet.put)
    return EventFeed(event_log, hash_block_tokens=hash_block_tokens, outlet=outlet), service


def _hash_block_tokens(cache: object, kv_cache_config: KVCacheConfig, groups: tuple[GroupSpec, ...]) -> int:
    """How many tokens each of a request's hashes is of; fewer than a block has with --prefix-match-unit."""
    found = getattr(kv_cache_config, "hash_block_size", None) or getattr(cache, "hash_block_size", None)
    return int(found or getattr(cache, "prefix_match_unit", None) or base_block_tokens(groups))


def _hold_back_tokens(vllm_config: VllmConfig, groups: tuple[GroupSpec, ...]) -> int:
    # No case is known that needs it: the KV of tokens that are known, a draft layer's too, is not written
    # again, and blocks are read behind the drafter. vLLM's own connector keeps the newest block back as well.
    speculative = vllm_config.speculative_config
    return max(group.block_size_tokens for group in groups) if speculative is not None else 0
