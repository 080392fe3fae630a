"""vLLM's CPUOffloadingManager, called as its offloading scheduler calls it.

What that scheduler does besides (positions of keys, ``on_request_finished``) is left out, in vLLM's favour.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm.v1.kv_offload.base import LookupResult, ReqContext, make_offload_key
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager


class VllmSide:
    """``policy``: lru or arc."""

    def __init__(self, capacity_blocks: int, policy: str) -> None:
        self.name = f"vLLM {policy.upper()}"
        self._manager = CPUOffloadingManager(capacity_blocks, policy)
        self._resident = 0

    def keys(self, hashes: Sequence[bytes]) -> list[Any]:
        """See Side."""
        return [make_offload_key(each, 0) for each in hashes]

    def store(self, keys: list[Any]) -> int:
        """See Side."""
        context = ReqContext("store")
        prepared = self._manager.prepare_store(keys, context)
        if prepared is None:
            return 0
        self._manager.complete_store(prepared.keys_to_store, context)
        self._resident += len(prepared.keys_to_store) - len(prepared.evicted_keys)
        return len(prepared.keys_to_store)

    def lookup(self, keys: list[Any]) -> int | None:
        """See Side."""
        return self._lookup(keys, ReqContext("lookup"))

    def _lookup(self, keys: list[Any], context: ReqContext) -> int:
        lookup, hit = self._manager.lookup, LookupResult.HIT
        for place, key in enumerate(keys):
            if lookup(key, context) is not hit:
                return place
        return len(keys)

    def read(self, keys: list[Any]) -> int:
        """See Side."""
        context = ReqContext("read")
        found = keys[: self._lookup(keys, context)]
        spec = self._manager.prepare_load(found, context)
        self._manager.touch(found, context)
        self._manager.complete_load(found, context)
        return len(spec.block_ids)

    def resident(self) -> int:
        """See Side."""
        return self._resident

    def close(self) -> None:
        """See Side."""
