"""KvbmHiCache: SGLang's entry class, for ``--hicache-storage-backend dynamic``.

Interface: HiCacheStorage of SGLang 0.5.10 to 0.5.23. Selected by ``{"backend_name": "kvbm", "module_path":
"kvbm_sglang.hicache", "class_name": "KvbmHiCache", "interface_v1": 1}``.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, PoolTransferResult

from kvbm_core.config import KvbmSettings
from kvbm_core.errors import ConfigError, LayoutError, Outcome
from kvbm_core.observe.guard import GuardState, guarded
from kvbm_core.observe.labels import FailureKind
from kvbm_core.observe.metrics import Metrics
from kvbm_core.runtime.disk_folder import DiskFolder
from kvbm_core.storage.disk.allocate import DiskError, FileOptions
from kvbm_core.storage.disk.record import record_bytes
from kvbm_sglang.identity import KV, namespace_of
from kvbm_sglang.pages import Pages
from kvbm_sglang.store import PageStore

if TYPE_CHECKING:
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig, HiCacheStorageExtraInfo, PoolTransfer

log = logging.getLogger("kvbm")

# SGLang's own keys in the extra config, and those that choose this class.
_NOT_OURS = ("backend_name", "module_path", "class_name", "interface_v1", "allocator")
SIZE = "DYN_KVBM_DISK_CACHE_GB"


class KvbmHiCache(HiCacheStorage):
    """Pages of SGLang's host pools on a local disk, found again after a restart. Every hook is guarded."""

    def __init__(self, storage_config: HiCacheStorageConfig, extra: Mapping[str, Any] | None = None) -> None:
        config = storage_config.extra_config or {}
        if not config.get("interface_v1"):
            raise ConfigError("interface_v1", config.get("interface_v1"), "set it to 1 in the storage backend's config")
        given = {name: value for name, value in config.items() if name not in _NOT_OURS}
        self.guard_state = GuardState(Metrics())
        self._config = storage_config
        self._settings = KvbmSettings.from_env(given)
        if not self._settings.disk_cache_gb:
            raise ConfigError(SIZE, self._settings.disk_cache_gb, "set it to the size of the disk tier")
        self._stores: dict[str, PageStore] = {}
        self._folder: DiskFolder | None = None
        if storage_config.is_mla_model and storage_config.tp_size > 1:
            log.warning("kvbm: MLA with tp_size=%d is not cached yet", storage_config.tp_size)

    # ---------------------------------------------------------------- pools

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        super().register_mem_pool_host(mem_pool_host)
        self._register(mem_pool_host, KV)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        if str(host_pool_name) != KV:
            line = "kvbm: pool %s is not cached yet, and so no prompt of this model is: report model and SGLang version"
            log.warning(line, host_pool_name)
            self.guard_state.metrics.failure(FailureKind.LAYOUT)

    @guarded("register_mem_host_pool", lambda self, pool, name: None)
    def _register(self, pool: Any, name: str) -> None:
        if self._config.is_mla_model and self._config.tp_size > 1:
            return
        try:
            self._stores[name] = self._open(pool, name)
        except (ConfigError, DiskError, LayoutError) as error:
            log.error("%s; pages of pool %s are not cached", error, name)
            self.guard_state.metrics.failure(FailureKind.LAYOUT)

    def _open(self, pool: Any, name: str) -> PageStore:
        pages = Pages(pool)
        namespace = namespace_of(self._config, pool, name, pages.piece_bytes)
        settings = self._settings
        if self._folder is None:
            self._folder = DiskFolder(Path(settings.disk_cache_dir), namespace.root().hex())
        options = FileOptions(
            is_direct=not settings.disk_disable_o_direct,
            opens_direct=settings.disk_allocator_type == "open-direct",
            zero_fill=settings.disk_zerofill_fallback,
        )
        num_slots = round((settings.disk_cache_gb or 0.0) * 1e9) // record_bytes(pages.page_bytes)
        if not num_slots:
            raise ConfigError(SIZE, settings.disk_cache_gb, f"holds no page of {pages.page_bytes} bytes; set more")
        return PageStore(self._folder.path, pages, namespace, num_slots, options)

    # ---------------------------------------------------------------- pages of the KV pool

    def exists(self, key: str) -> bool:
        return self.batch_exists([key]) == 1

    @guarded("batch_exists", lambda self, keys, extra_info=None: 0)
    def batch_exists(self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None) -> int:
        return _leading(self._contains(KV, keys))

    def batch_get_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        return self._get(KV, keys, host_indices)

    def batch_set_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        return self._put(KV, keys, host_indices)

    # ---------------------------------------------------------------- all pools

    def batch_exists_v2(
        self,
        keys: list[str],
        pool_transfers: list[PoolTransfer] | None = None,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> PoolTransferResult:
        if pool_transfers:  # of other pools nothing is kept: in doubt, nothing is there
            return PoolTransferResult.empty()
        kv_pages = self.batch_exists(keys)
        return PoolTransferResult(kv_pages, {KV: kv_pages}, list(range(1, kv_pages + 1)))

    def batch_get_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        return {t.name: self._get(str(t.name), list(t.keys or []), t.host_indices) for t in transfers}

    def batch_set_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        return {t.name: self._put(str(t.name), list(t.keys or []), t.host_indices) for t in transfers}

    # ---------------------------------------------------------------- the rest

    # Abstract in SGLang. With interface_v1, without which this class refuses to start, it asks for pages in place.
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

    @guarded("clear", lambda self: None)
    def clear(self) -> None:
        for store in self._stores.values():
            store.clear()

    def get_stats(self) -> None:
        return None

    def close(self) -> None:
        for store in self._stores.values():
            store.close()
        if self._folder is not None:
            self._folder.close()

    def _contains(self, pool: str, keys: Sequence[str]) -> list[bool]:
        store = self._stores.get(pool)
        return [False] * len(keys) if store is None else store.contains(list(keys))

    @guarded("batch_get", lambda self, pool, keys, host_indices: [False] * len(keys))
    def _get(self, pool: str, keys: list[str], host_indices: torch.Tensor) -> list[bool]:
        store = self._stores.get(pool)
        if store is None or not keys:
            return [False] * len(keys)
        return [outcome is Outcome.OK for outcome in store.get(keys, host_indices)]

    @guarded("batch_set", lambda self, pool, keys, host_indices: [False] * len(keys))
    def _put(self, pool: str, keys: list[str], host_indices: torch.Tensor) -> list[bool]:
        store = self._stores.get(pool)
        if store is None or not keys:
            return [False] * len(keys)
        return [outcome is Outcome.OK for outcome in store.put(keys, host_indices)]


def _leading(found: Sequence[bool]) -> int:
    return found.index(False) if False in found else len(found)
