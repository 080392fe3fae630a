"""What changes in a running engine: weights, adapters, and what its own prefix cache is worth then."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvbm_core.identity.roots import NO_ADAPTER, Stamp
from kvbm_core.identity.weights import WeightsIdentity
from kvbm_vllm.adapters import AdapterIdentities

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest
    from vllm.v1.core.block_pool import BlockPool


class EngineChanges:
    """Hears of the engine's orders (engine_calls) and tells the scheduler's part, which asks at each hook."""

    def __init__(self, weights: WeightsIdentity, adapters: AdapterIdentities) -> None:
        self.weights = weights
        self._adapters = adapters
        self._changed_adapters: set[int] = set()

    def weights_change(self, why: str) -> None:
        """See Follower."""
        self.weights.changed(why)

    def adapter_changes(self, number: int, path: str | None) -> None:
        """See Follower."""
        self._adapters.changes(number, path)
        self._changed_adapters.add(number)

    def take_adapters(self) -> set[int]:
        """Numbers of adapters that were loaded or removed since the last call."""
        if not self._changed_adapters:
            return set()
        changed, self._changed_adapters = self._changed_adapters, set()
        return changed

    def adapter_of(self, lora: LoRARequest | None) -> Stamp | None:
        """What tells this adapter, as it is in memory now, from others; None if nobody can."""
        if lora is None:
            return NO_ADAPTER
        if getattr(lora, "load_inplace", False):
            if self._adapters.reloads(lora.lora_int_id, str(lora.lora_path)):
                self._changed_adapters.add(lora.lora_int_id)  # also for requests that run with it now
            return None
        if getattr(lora, "tensorizer_config_dict", None):
            return None  # vLLM reads its weights from another place than its path
        stamp = self._adapters.stamp_of(lora.lora_int_id, str(lora.lora_path))
        if stamp is None:
            return None
        # The same file is read in one of two ways.
        return stamp._replace(text=f"3d={getattr(lora, 'is_3d_lora_weight', False)} {stamp.text}")

    def close(self) -> None:
        """Ends the threads. May be called twice."""
        self.weights.close()
        self._adapters.close()


class DeviceCache:
    """vLLM's own prefix cache. It keeps the blocks of old weights until somebody resets it, which replaces
    its map of blocks.
    """

    def __init__(self) -> None:
        self._pool: BlockPool | None = None
        self._map_of_old: Any = None
        self._has_old = False

    def bind(self, pool: BlockPool) -> None:
        """vLLM's pool, once it exists."""
        self._pool = pool

    def weights_changed(self) -> None:
        """What is in it now was computed with other weights."""
        self._has_old = True
        self._map_of_old = getattr(self._pool, "cached_block_hash_to_block", None)

    @property
    def has_old(self) -> bool:
        """Whether a hit in it may be a block of old weights."""
        if self._has_old and self._map_of_old is not None:
            self._has_old = getattr(self._pool, "cached_block_hash_to_block", None) is self._map_of_old
        return self._has_old
