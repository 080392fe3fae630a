"""LMCache's two indexes: the L1 manager of its MP server, and the storage manager of its in-process engine.

Both also keep a memory object per block, which has 64 bytes here. Blocks have 16 tokens, as with everybody
else.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from lmcache.utils import CacheEngineKey
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
from lmcache.v1.distributed.config import EvictionConfig, L1ManagerConfig, L1MemoryManagerConfig
from lmcache.v1.distributed.error import L1Error
from lmcache.v1.distributed.eviction import L1EvictionPolicy
from lmcache.v1.distributed.eviction_policy import CreateEvictionPolicy
from lmcache.v1.distributed.l1_manager import L1Manager
from lmcache.v1.event_manager import EventManager
from lmcache.v1.metadata import LMCacheMetadata
from lmcache.v1.pin_monitor import PinMonitor
from lmcache.v1.storage_backend.storage_manager import StorageManager

BLOCK_BYTES = 64
BLOCK_TOKENS = 16
MODEL = "model"


class L1Side:
    """The MP server's core without its server. Evicts what a batch needs; its own thread evicts a fifth at
    once.
    """

    name = "LMCache MP L1"

    def __init__(self, capacity_blocks: int) -> None:
        memory = L1MemoryManagerConfig(
            size_in_bytes=capacity_blocks * BLOCK_BYTES, use_lazy=False, align_bytes=BLOCK_BYTES, shm_name=""
        )
        self._manager = L1Manager(L1ManagerConfig(memory_config=memory))
        self._policy = CreateEvictionPolicy(EvictionConfig(eviction_policy="LRU"))
        self._manager.register_listener(L1EvictionPolicy(self._policy))
        self._layout = MemoryLayoutDesc([torch.Size([BLOCK_BYTES])], [torch.uint8])
        self._capacity_blocks = capacity_blocks

    def keys(self, hashes: Sequence[bytes]) -> list[Any]:
        """See Side."""
        return [ObjectKey(bytes(bytearray(each)), MODEL, 0) for each in hashes]

    def store(self, keys: list[Any]) -> int:
        """See Side."""
        resident = self.resident()
        missing = resident + len(keys) - self._capacity_blocks
        if missing > 0:
            # Half a block more, as the policy rounds down.
            share = (missing + 0.5) / resident
            for action in self._policy.get_eviction_actions(
                share, key_eligible_filter=self._manager.is_key_evictable
            ):
                self._manager.delete(action.keys)
        reserved = self._manager.reserve_write(keys, [False] * len(keys), self._layout)
        written = [key for key, (error, _) in reserved.items() if error is L1Error.SUCCESS]
        self._manager.finish_write(written)
        return len(written)

    def lookup(self, keys: list[Any]) -> int | None:
        """See Side. There is none that does not lock as well."""
        return None

    def read(self, keys: list[Any]) -> int:
        """See Side."""
        reserved = self._manager.reserve_read(keys)
        found = [key for key in keys if reserved[key][0] is L1Error.SUCCESS]
        self._manager.touch_keys(found)
        self._manager.finish_read(found)
        return len(found)

    def resident(self) -> int:
        """See Side."""
        used_bytes, _ = self._manager.get_memory_usage()
        return int(used_bytes) // BLOCK_BYTES

    def close(self) -> None:
        """See Side."""
        self._manager.close()


class InProcessSide:
    """The storage manager with its local CPU backend and LRU."""

    name = "LMCache in-process"

    def __init__(self, capacity_blocks: int) -> None:
        config = LMCacheEngineConfig.from_defaults(
            chunk_size=BLOCK_TOKENS,
            local_cpu=True,
            max_local_cpu_size=capacity_blocks * BLOCK_BYTES / 2**30,
            extra_config={"local_cpu.pinned_align_bytes": BLOCK_BYTES},
        )
        PinMonitor.GetOrCreate(config)
        metadata = LMCacheMetadata(
            model_name=MODEL,
            world_size=1,
            local_world_size=1,
            worker_id=0,
            local_worker_id=0,
            kv_dtype=torch.uint8,
            kv_shape=(1, 2, BLOCK_TOKENS, 1, 1),
        )
        self._storage = StorageManager(config, metadata, EventManager())
        self._shape = torch.Size([2, 1, BLOCK_TOKENS, 1])

    def keys(self, hashes: Sequence[bytes]) -> list[Any]:
        """See Side."""
        return [CacheEngineKey(MODEL, 1, 0, int.from_bytes(each[:8], "big"), torch.uint8) for each in hashes]

    def store(self, keys: list[Any]) -> int:
        """See Side. One block after the other: with a batch it gives up when it is full."""
        for place, key in enumerate(keys):
            memory = self._storage.allocate(self._shape, torch.uint8, busy_loop=False)
            if memory is None:
                return place
            self._storage.batched_put([key], [memory])
        return len(keys)

    def lookup(self, keys: list[Any]) -> int:
        """See Side."""
        return int(self._storage.batched_contains(keys)[0])

    def read(self, keys: list[Any]) -> int:
        """See Side."""
        count = int(self._storage.batched_contains(keys, pin=True)[0])
        self._storage.touch_cache()
        self._storage.batched_unpin(keys[:count])
        return count

    def resident(self) -> int:
        """See Side."""
        return len(self._storage.local_cpu_backend.hot_cache)

    def close(self) -> None:
        """See Side."""
        self._storage.close()
