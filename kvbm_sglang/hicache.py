"""KvbmHiCache: SGLang's entry class, for ``--hicache-storage-backend dynamic``.

Interface: HiCacheStorage of SGLang 0.5.10 to 0.5.23. Selected by ``{"backend_name": "kvbm", "module_path":
"kvbm_sglang.hicache", "class_name": "KvbmHiCache", "interface_v1": 1}``.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, PoolTransferResult

from kvbm_core.config import Adapter, KvbmSettings
from kvbm_core.control.desk import About
from kvbm_core.errors import ConfigError
from kvbm_core.identity.weights import WEIGHTS_WAIT_S
from kvbm_core.observe.guard import GuardState, guarded, seams_of
from kvbm_core.observe.metrics import Metrics
from kvbm_core.runtime.assembly import announce, control_service, metrics_server, traces_of
from kvbm_core.types import Tier
from kvbm_sglang.hits import leading, lengths_with_all, lengths_with_tail, pages_of_groups
from kvbm_sglang.identity import KV, rank_of
from kvbm_sglang.pools import Pools
from kvbm_sglang.stats import Stats
from kvbm_sglang.storage_metrics import filled, find_storage_metrics

if TYPE_CHECKING:
    from sglang.srt.mem_cache.hicache_storage import (
        HiCacheStorageConfig,
        HiCacheStorageExtraInfo,
        PoolTransfer,
    )

log = logging.getLogger("kvbm")

# SGLang's own keys in the extra config, and those that choose this class.
_NOT_OURS = (
    "backend_name",
    "module_path",
    "class_name",
    "interface_v1",
    "allocator",
    "prefetch_threshold",
    "prefetch_timeout_base",
    "prefetch_timeout_per_ki_token",
    "hicache_storage_pass_prefix_keys",
    "tp_lcm_size",
)


NO_REASONS = (
    "under HiCache SGLang's own tree decides what is asked for, and names no request to kvbm: "
    "nothing is known of what each has missed"
)
"""For ``kvbm why``."""
NO_PREFIX = (
    "kvbm: SGLang does not say which pages come before those that it stores: the shared store may get some "
    "that are of no use. Set hicache_storage_pass_prefix_keys to true in the storage backend's config"
)


class KvbmHiCache(HiCacheStorage):
    """Pages of SGLang's host pools on a local disk, found again after a restart, and in a store that machines
    share. Every hook is guarded.

    SGLang calls it from four threads at once. ConfigError, one line, for settings that cannot be used.
    """

    def __init__(self, storage_config: HiCacheStorageConfig, extra: Mapping[str, Any] | None = None) -> None:
        config = storage_config.extra_config or {}
        if not config.get("interface_v1"):
            raise ConfigError(
                "interface_v1", config.get("interface_v1"), "set it to 1 in the storage backend's config"
            )
        settings = KvbmSettings.from_env(
            {name: value for name, value in config.items() if name not in _NOT_OURS}
        )
        announce(settings, Adapter.HICACHE, needs_tier=False)
        metrics = Metrics(settings.cache_stats_max_requests, seams=seams_of(type(self)))
        self.guard_state = GuardState(metrics)
        is_asked = getattr(storage_config, "enable_storage_metrics", False)
        self._storage_metrics = find_storage_metrics() if is_asked else None
        self._stats = Stats(metrics, keeps_batches=self._storage_metrics is not None)
        self._wants_prefix = bool(settings.store_urls)
        self._pools = Pools(storage_config, settings, self._stats)
        rank = rank_of(storage_config)
        metrics.traces = self._traces = traces_of(settings, self._pools.model)
        about = About("SGLang, HiCache", self._pools.model, rank, lambda: self._pools.namespace, NO_REASONS)
        self._server = metrics_server(settings, metrics, about)
        self._control = control_service(settings, about, self._pools.control, metrics, served=self._server)

    # ---------------------------------------------------------------- pools

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        super().register_mem_pool_host(mem_pool_host)
        self._register(mem_pool_host, KV)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        if _name_of(host_pool_name) != KV:  # that one came by the other way
            self._register(host_pool, _name_of(host_pool_name))

    @guarded("register_mem_host_pool", lambda self: None)
    def on_host_pools_registered(self) -> None:
        self._pools.wait_known(WEIGHTS_WAIT_S)
        self._pools.open()

    @guarded("register_mem_host_pool", lambda self, pool, name: None)
    def _register(self, pool: Any, name: str) -> None:
        self._pools.register(pool, name)

    # ---------------------------------------------------------------- pages of the KV pool

    def exists(self, key: str) -> bool:
        return self.batch_exists([key]) == 1

    @guarded("batch_exists", lambda self, keys, extra_info=None: 0)
    def batch_exists(self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None) -> int:
        found = self._pools.find(KV, keys)
        hits = leading(_is_there(found))
        self._stats.queried(self._pools.page_tokens(KV), found[:hits], len(keys))
        return hits

    def batch_get_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        return self._get(KV, keys, host_indices, self._prefix_of(extra_info))

    def batch_set_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        return self._put(KV, keys, host_indices, self._prefix_of(extra_info))

    # ---------------------------------------------------------------- all pools

    @guarded(
        "batch_exists", lambda self, keys, pool_transfers=None, extra_info=None: PoolTransferResult.empty()
    )
    def batch_exists_v2(
        self,
        keys: list[str],
        pool_transfers: list[PoolTransfer] | None = None,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> PoolTransferResult:
        found = self._pools.find(KV, keys)
        lengths = lengths_with_all(_is_there(found))
        hits = {KV: len(lengths)}
        for transfer in pool_transfers or []:
            name = _name_of(transfer.name)
            own = self._lengths_of(name, keys[: hits[KV]], transfer)
            if isinstance(own, int):
                hits[name] = own
                continue
            hits[name] = max(own, default=0)
            lengths = sorted(set(lengths).intersection(own))
        result = PoolTransferResult(
            max(lengths, default=0), {name: pages for name, pages in hits.items() if pages}
        )
        if hasattr(result, "restorable_prefix_pages"):  # 0.5.19 and newer
            result.restorable_prefix_pages = lengths
        self._stats.queried(self._pools.page_tokens(KV), found[: result.kv_hit_pages], len(keys))
        return result

    def batch_get_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        return {t.name: self._get(_name_of(t.name), list(t.keys or []), t.host_indices) for t in transfers}

    def batch_set_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        return {t.name: self._put(_name_of(t.name), list(t.keys or []), t.host_indices) for t in transfers}

    # ---------------------------------------------------------------- the rest

    # Abstract in SGLang. With interface_v1, without which this class refuses to start, it asks for pages in
    # place.
    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> torch.Tensor | None:
        return None

    def batch_get(self, keys: list[str], target_locations: Any = None, target_sizes: Any = None) -> list[Any]:
        return [None] * len(keys)

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        return False

    def batch_set(
        self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        return False

    @guarded("clear", lambda self: False)
    def clear(self) -> bool:
        self._pools.clear()
        return True

    @guarded("get_stats", lambda self: None)
    def get_stats(self) -> Any:
        batches = self._stats.take()
        return None if batches is None else filled(self._storage_metrics, batches)

    @guarded("shutdown", lambda self: None)
    def close(self) -> None:
        if self._control is not None:
            self._control.close()
        self._pools.close()
        if self._server is not None:
            self._server.close()
        if self._traces is not None:
            self._traces.close()

    # ---------------------------------------------------------------- inside

    def _prefix_of(self, extra_info: HiCacheStorageExtraInfo | None) -> Sequence[str]:
        """The pages before those of a call; none, if SGLang does not say."""
        prefix = getattr(extra_info, "prefix_keys", None)
        if isinstance(prefix, list):  # where it is not set 0.5.10 has a tuple of None
            return prefix
        if self._wants_prefix:
            self._wants_prefix = False
            log.warning("%s", NO_PREFIX)
        return ()

    def _lengths_of(self, name: str, keys: list[str], transfer: PoolTransfer) -> Sequence[int] | int:
        """Prefix lengths that this pool allows; a number, its own verdict, where it does not limit them."""
        policy = _name_of(transfer.hit_policy)
        if policy == "all_pages":
            return lengths_with_all(_is_there(self._pools.find(name, keys)))
        if policy == "trailing_pages":
            return lengths_with_tail(_is_there(self._pools.find(name, keys)), len(transfer.keys or ()))
        if policy == "block_groups":
            found = _is_there(self._pools.find(name, list(transfer.keys or [])))
            return pages_of_groups(found, transfer.group_pages, transfer.block_pages)
        log.warning(
            "kvbm: pool %s has a hit policy that is not known: %s; its prompts are not served", name, policy
        )
        return []

    @guarded("batch_get", lambda self, pool, keys, host_indices, prefix=None: [False] * len(keys))
    def _get(
        self, pool: str, keys: list[str], host_indices: torch.Tensor, prefix: Sequence[str] | None = None
    ) -> list[bool]:
        return self._pools.get(pool, keys, host_indices, prefix)

    @guarded("batch_set", lambda self, pool, keys, host_indices, prefix=None: [False] * len(keys))
    def _put(
        self, pool: str, keys: list[str], host_indices: torch.Tensor, prefix: Sequence[str] | None = None
    ) -> list[bool]:
        return self._pools.put(pool, keys, host_indices, prefix)


def _is_there(found: Sequence[Tier | None]) -> list[bool]:
    return [tier is not None for tier in found]


def _name_of(value: Any) -> str:
    """Of a pool or a policy: an enum that does not print as its value everywhere (0.5.10), or a text."""
    return str(getattr(value, "value", value))
