"""SGLang's host pools of one rank, each with a file of its own on the disk, and a place in what machines
share; opened when all of them are known.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from kvbm_core.blocks.slot_tier import BlockTier
from kvbm_core.clock import SystemClock
from kvbm_core.config import KvbmSettings
from kvbm_core.control.desk import AtOnce
from kvbm_core.errors import ConfigError, LayoutError, Outcome
from kvbm_core.identity.roots import Stamp
from kvbm_core.observe.labels import FailureKind
from kvbm_core.policy.named import make_policy
from kvbm_core.runtime.assembly import rank_options, remote_admission
from kvbm_core.storage.base import BlockStore
from kvbm_core.storage.disk.allocate import DirectoryBusyError, DiskError
from kvbm_core.storage.disk.folder import DiskFolder, claimed_folder
from kvbm_core.storage.disk.record import record_bytes
from kvbm_core.storage.stores import StoreSpec, limited_log, open_store
from kvbm_core.tokens.namespace import KeyNamespace
from kvbm_core.types import Direction, Tier
from kvbm_sglang.engine_settings import code_of, describe_engine, effective, find_server_args
from kvbm_sglang.events import EventFeed
from kvbm_sglang.identity import (
    KV,
    engine_claim,
    is_first_of,
    is_replicated,
    model_of,
    namespace_of,
    num_writers,
    reads_along,
    shard_of,
)
from kvbm_sglang.pages import Pages
from kvbm_sglang.side_pools import STATES, why_not_kept
from kvbm_sglang.stats import Stats
from kvbm_sglang.store import DEADLINE_S, FollowedFile, OwnFile, PagesOnDisk, PageStore, meaning_of
from kvbm_sglang.store_chain import Answers, StoreChain
from kvbm_sglang.weights import weights_identity

if TYPE_CHECKING:
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig

SIZE = "DYN_KVBM_DISK_CACHE_GB"
BUSY_RETRY_S = 1.0
"""How often a file is asked for that another process still has."""
STATE_EVERY_TOKENS = 2048
"""SGLang makes a state for each chunk of a prefill and for each finished request. It divides its host memory
as the device's, which has as many states as requests run; KV without a state behind it is dead memory.
"""

log = logging.getLogger("kvbm")


class Pools:
    """Pages by pool and by SGLang's keys. Safe to call from any thread.

    Pools that are registered before the first use share ``DYN_KVBM_DISK_CACHE_GB``, a size over all ranks of
    the engine, as they share host memory; one that comes later gets, on top, as much as it would have had. A
    number of blocks counts pages of the KV pool; the others get as much for their host memory. States get at
    least one for every STATE_EVERY_TOKENS of the KV pool's pages. If one of the pools cannot be kept, nothing
    is, which is said once: a prompt needs all of them. Nothing is kept or found while it is not known which
    weights these are, and never if the engine has a setting under which a page means nothing in another
    process.
    """

    def __init__(self, config: HiCacheStorageConfig, settings: KvbmSettings, stats: Stats) -> None:
        if not settings.has_disk_tier:
            raise ConfigError(
                SIZE, settings.disk_cache_gb, "set it to the size of the disk tier over all ranks"
            )
        self._options = rank_options(settings, deadline_s=_deadline_s(settings, "disk_deadline_s"))
        self._remote_deadline_s = _deadline_s(settings, "remote_deadline_s")
        self._config = config
        self._settings = settings
        self._stats = stats
        self._lock = threading.Lock()
        self._waiting: dict[str, Any] = {}
        self._busy: set[str] = set()
        self._refused: set[str] = set()
        self._next_try_s = 0.0
        self._pages: dict[str, Pages] = {}
        self._stores: dict[str, PageStore] = {}
        self._folder: DiskFolder | None = None
        self._followed = ""  # the writer's folder is called by its first pool
        self._bytes_per_counted_byte = 0.0
        self._events: EventFeed | None = None  # made with the KV pool
        self._told_generation = 0
        server_args = find_server_args()
        self._engine = describe_engine(server_args, config)
        self._engine.tell("SGLang", "nothing is cached")
        self._arguments = arguments = effective(server_args)
        self.model = model_of(config, arguments)
        self.namespace = ""
        """See About; "" until the KV pool is open."""
        self.control = AtOnce(self._tiers_there, self._reset)
        self._weights = weights_identity(arguments, self.model, code_of(server_args))
        if self._engine.is_lasting:
            self._weights.start()

    def wait_known(self, seconds: float) -> None:
        """Waits until it is known which weights these are, or that it cannot be known."""
        self._weights.wait(seconds)

    def register(self, pool: Any, name: str) -> None:
        """Tells of a pool; nothing is opened yet. The same name again: the pool has been made anew."""
        with self._lock:
            self._waiting[name] = pool
            self._refused.discard(name)
            self._next_try_s = 0.0

    def open(self) -> None:
        """Opens the files of all pools that have been registered, once the weights are known. One that
        another process still has (it was killed, and gives its memory back) is tried again with later calls.
        """
        is_due = self._waiting and time.monotonic() >= self._next_try_s
        if is_due and self._engine.is_lasting and (weights := self._weights.stamp()).is_lasting:
            with self._lock:
                self._open_waiting(weights)

    def page_tokens(self, name: str) -> int:
        """Tokens of a page; 0 for a pool that is not kept."""
        return self._pages[name].page_tokens if name in self._stores else 0

    def find(self, name: str, keys: list[str]) -> Sequence[Tier | None]:
        """Where each of the pages is. Without KV none is there."""
        store = self._store(name)
        return [None] * len(keys) if store is None else store.find(keys)

    def put(
        self, name: str, keys: list[str], host_indices: torch.Tensor, prefix: Sequence[str] | None = None
    ) -> list[bool]:
        """Keeps these pages. ``prefix``: see PageStore."""
        store = self._store(name)
        if store is None or not keys:
            return [False] * len(keys)
        started_s = time.perf_counter()
        answers = Answers(store.put(keys, host_indices, prefix), set())
        return self._ended(Direction.OFFLOAD, name, keys, answers, started_s)

    def get(
        self, name: str, keys: list[str], host_indices: torch.Tensor, prefix: Sequence[str] | None = None
    ) -> list[bool]:
        """Fills these pages; one that is not True holds garbage. ``prefix``: see PageStore."""
        store = self._store(name)
        if store is None or not keys:
            return [False] * len(keys)
        started_s = time.perf_counter()
        return self._ended(Direction.ONBOARD, name, keys, store.get(keys, host_indices, prefix), started_s)

    def _tiers_there(self) -> frozenset[Tier]:
        return frozenset({Tier.DISK}) if self._stores else frozenset()

    def _reset(self, tiers: frozenset[Tier]) -> bool:
        self.clear()
        self._tell_usage()
        return True

    def clear(self) -> None:
        """Forgets all pages of these pools, for good; nothing else in the directory is touched."""
        self.open()
        for store in list(self._stores.values()):
            store.clear()

    def close(self) -> None:
        """Idempotent; what is stored stays."""
        self._weights.close()
        with self._lock:
            stores, self._stores = self._stores, {}
            self._waiting.clear()
            folder, self._folder = self._folder, None
        for store in stores.values():
            store.close()
        if self._events is not None:
            self._events.close()
        if folder is not None:
            folder.close()

    # ---------------------------------------------------------------- inside

    def _is_lasting(self) -> bool:
        return self._engine.is_lasting and self._weights.stamp().is_lasting

    def _store(self, name: str) -> PageStore | None:
        if not self._is_lasting():
            if self._events is not None and self._weights.generation != self._told_generation:
                self._told_generation = self._weights.generation
                self._events.renamed()  # no page is asked for, at least for a while
            return None
        if self.control.is_draining:
            return None
        self.open()
        has_all = KV in self._stores and not self._refused and not self._busy
        return self._stores.get(name) if has_all else None

    def _ended(
        self, direction: Direction, name: str, keys: list[str], answers: Answers, started_s: float
    ) -> list[bool]:
        seconds = time.perf_counter() - started_s
        outcomes, page_bytes = answers.outcomes, self._pages[name].page_bytes
        are_ok = [outcome is Outcome.OK for outcome in outcomes]
        on_disk = [(name, keys[i]) for i, is_ok in enumerate(are_ok) if is_ok and i not in answers.remote]
        self._stats.moved(direction, outcomes, page_bytes, seconds, on_disk)
        self._tell_usage()
        return are_ok

    def _tell_usage(self) -> None:
        disks = [store.disk for store in list(self._stores.values())]
        used, capacity = sum(disk.resident_blocks for disk in disks), sum(disk.num_slots for disk in disks)
        self._stats.disk_tier(used, capacity, sum(disk.evicted_blocks_total for disk in disks))

    def _open_waiting(self, weights: Stamp) -> None:
        waiting, self._waiting = self._waiting, {}
        known = {
            name: pages for name, pool in waiting.items() if (pages := self._pages_of(name, pool)) is not None
        }
        if not self._bytes_per_counted_byte and known:
            self._bytes_per_counted_byte = self._share_of(known)
        for name, pages in known.items():
            replaced = self._stores.pop(name, None)
            if replaced is not None:
                replaced.close()
                if name == KV and self._events is not None and self._events.log is not None:
                    self._events.log.cleared(Tier.DISK, ())
            try:
                self._stores[name] = self._open(name, pages, waiting[name], known, weights)
                self._pages[name] = pages
                self._busy.discard(name)
            except DirectoryBusyError as error:
                if name not in self._busy:
                    log.warning("%s; pool %s is cached as soon as it is free", error.args[-1], name)
                self._busy.add(name)
                self._waiting[name] = waiting[name]
                self._next_try_s = time.monotonic() + BUSY_RETRY_S
            except (ConfigError, DiskError, LayoutError) as error:
                self._refuse(name, error)

    def _share_of(self, known: Mapping[str, Pages]) -> float:
        """Bytes on disk for each byte that counts of the pools (see ``_counted_bytes``), of all ranks."""
        num_pages = self._settings.disk_cache_override_num_blocks
        if num_pages is None:
            counted_bytes = sum(
                num_writers(self._config, name) * self._counted_bytes(name, pages, known)
                for name, pages in known.items()
            )
            return (self._settings.disk_cache_gb or 0.0) * 1e9 / counted_bytes
        counted = known.get(KV) or next(iter(known.values()))
        return num_pages * record_bytes(counted.page_bytes) / counted.pool_bytes

    def _counted_bytes(self, name: str, pages: Pages, known: Mapping[str, Pages]) -> float:
        """The host memory of a pool; of states as much as a state every STATE_EVERY_TOKENS takes at least."""
        kv = known.get(KV) or self._pages.get(KV)
        if name != STATES or kv is None:
            return pages.pool_bytes
        num_tokens = kv.pool_bytes / record_bytes(kv.page_bytes) * kv.page_tokens
        return max(pages.pool_bytes, num_tokens / STATE_EVERY_TOKENS * record_bytes(pages.page_bytes))

    def _num_slots(self, name: str, pages: Pages, known: Mapping[str, Pages]) -> int:
        num_pages = self._settings.disk_cache_override_num_blocks
        if name == KV and num_pages is not None:
            return num_pages
        disk_bytes = self._counted_bytes(name, pages, known) * self._bytes_per_counted_byte
        return int(disk_bytes) // record_bytes(pages.page_bytes)

    def _pages_of(self, name: str, pool: Any) -> Pages | None:
        config = self._config
        try:
            if reason := why_not_kept(
                name, pool, self._arguments, is_mla_model=bool(config.is_mla_model), tp_size=config.tp_size
            ):
                raise LayoutError(f"kvbm: {reason}")
            return Pages(pool)
        except LayoutError as error:
            self._refuse(name, error)
            return None

    def _refuse(self, name: str, error: Exception) -> None:
        self._refused.add(name)
        log.error("%s; pool %s: nothing is cached", error, name)
        self._stats.metrics.failure(FailureKind.LAYOUT)

    def _open(
        self, name: str, pages: Pages, pool: Any, known: Mapping[str, Pages], weights: Stamp
    ) -> PageStore:
        settings, config = self._settings, self._config
        namespace = namespace_of(
            config, pool, name, pages.piece_bytes, self.model, engine=self._engine, weights=weights
        )
        if name == KV:
            self.namespace = namespace.digest
        remote = self._open_remote(name, pages, namespace)
        try:
            disk = self._open_disk(name, pages, namespace, self._num_slots(name, pages, known))
        except BaseException:
            if remote is not None:
                remote.close()
            raise
        chain = None
        if remote is not None:
            chain = StoreChain(
                disk,
                remote,
                pages.page_bytes,
                remote_admission(settings, settings.store_urls[0], SystemClock()),
                self._stats.metrics,
                io_deadline_s=self._remote_deadline_s,
            )
        events = self._events if name == KV else None
        return PageStore(disk, chain, pages, namespace, self._options.disk.io_deadline_s, events=events)

    def _open_disk(self, name: str, pages: Pages, namespace: KeyNamespace, num_slots: int) -> PagesOnDisk:
        settings, config, options = self._settings, self._config, self._options.disk
        directory, claim = Path(settings.disk_cache_dir), engine_claim(config)
        fingerprint = namespace.without_weights().root().hex()
        if reads_along(config, name):
            self._followed = followed = self._followed or fingerprint
            return FollowedFile(
                lambda: claimed_folder(directory, followed, claim), namespace, pages.page_bytes, options
            )
        if self._folder is None:
            self._folder = DiskFolder(directory, fingerprint, claim)
        if not num_slots:
            raise ConfigError(
                SIZE, settings.disk_cache_gb, f"holds no page of {pages.page_bytes} bytes; set more"
            )
        shares = is_replicated(config, name) and config.tp_size > 1
        log.info(
            "kvbm: pool %s: %d pages of %d bytes in %s", name, num_slots, pages.page_bytes, self._folder.path
        )
        listener = None
        if name == KV:
            self._events = self._events or EventFeed(
                settings,
                self._stats.metrics,
                pages.page_tokens,
                int(getattr(config, "dp_rank", 0) or 0),
                is_first_of(config),
            )
            listener = self._events.log
        return OwnFile(
            self._folder.path,
            namespace,
            pages.page_bytes,
            num_slots,
            options,
            shares=shares,
            books=BlockTier(Tier.DISK, make_policy(settings.eviction_policy), SystemClock(), listener),
        )

    def _open_remote(self, name: str, pages: Pages, namespace: KeyNamespace) -> BlockStore | None:
        if not self._settings.store_urls:
            return None
        url, *others = self._settings.store_urls
        if others:
            line = "kvbm: KVBM_REMOTE_URL names %d stores: HiCache uses the first one alone, %s"
            limited_log.log(logging.WARNING, url, line, 1 + len(others), url)
        shard, meaning = shard_of(self._config, name), meaning_of(namespace).hex()
        try:
            return open_store(
                StoreSpec(url, pages.page_bytes, meaning, shard, self.model, self._options.store)
            )
        except (ConfigError, OSError) as error:
            log.error("%s; pool %s is kept on this machine alone", error.args[-1], name)
            self._stats.metrics.failure(FailureKind.OTHER)
            return None


def _deadline_s(settings: KvbmSettings, name: str) -> float:
    """A setting of seconds, as far as SGLang gives its threads time."""
    given_s = float(getattr(settings, name))
    if settings.is_set(name) and given_s > DEADLINE_S:
        line = "kvbm: %s=%g: SGLang gives its threads little time to end; %g is used"
        log.warning(line, settings.env_names()[name], given_s, DEADLINE_S)
    return min(given_s, DEADLINE_S)
