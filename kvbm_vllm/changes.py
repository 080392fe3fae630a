"""What changes in a running engine: weights, adapters, and what its own prefix cache is worth then."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any, cast

from kvbm_core.identity.roots import NO_ADAPTER, Stamp
from kvbm_core.identity.tensors import Seen
from kvbm_core.identity.weights import WeightsIdentity
from kvbm_vllm.adapters import AdapterIdentities
from kvbm_vllm.tensors import look, rest

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest
    from vllm.v1.core.block_pool import BlockPool


ASK_AGAIN_S = 1.0
"""Between two questions to workers that are still looking at a large model."""


class EngineChanges:
    """Hears of the engine's orders (engine_calls) and tells the scheduler's part, which asks at each hook."""

    def __init__(
        self,
        weights: WeightsIdentity,
        adapters: AdapterIdentities,
        ask: Callable[..., list[Any]] = lambda question, *args: [],
        *,
        heeds_resets: bool = False,
    ) -> None:
        self.weights = weights
        self.heeds_resets = heeds_resets
        """Who can reach the model object may have changed it before any reset of vLLM's prefix cache."""
        self._adapters = adapters
        self._changed_adapters: set[int] = set()
        self._ask = ask
        self._is_model_loaded = False
        self._begun = -1
        self._ask_again_s = 0.0

    def weights_change(self, why: str) -> None:
        """See Follower."""
        self.weights.changed(why)

    def model_loads(self) -> None:
        """See Follower."""
        self._is_model_loaded = True

    def memory_goes(self) -> None:
        """See Follower."""
        self._ask(rest)

    def take_model_loads(self) -> None:
        """What was loaded into the model object since the last call is a change of weights."""
        if self._is_model_loaded:
            self._is_model_loaded = False
            self.weights.changed("load_weights of the model was called")

    def look(self) -> None:
        """Ends a doubt if it can, and begins a generation. Weights must be in memory: a model is about to
        run.
        """
        weights = self.weights
        doubted = weights.doubted_generation
        if doubted is not None and time.monotonic() >= self._ask_again_s:
            seen = set(self._ask(look, doubted, weights.generation))
            if seen <= {Seen.SAME, Seen.LATER} and Seen.LATER in seen:
                self._ask_again_s = time.monotonic() + ASK_AGAIN_S
            else:
                weights.end_doubt(are_same=seen == {Seen.SAME})
        if weights.doubted_generation is None and self._begun != weights.generation:
            self._begun = weights.generation
            self._ask(look, self._begun, self._begun)

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
        self._map: Any = None
        self._map_of_old: Any = None
        self._has_old = False

    def bind(self, pool: BlockPool, held: Callable[[], set[int]]) -> None:
        """vLLM's pool, once it exists. A reset is not refused for blocks that are ``held`` for our copies
        alone: a trainer that does not look at the answer would meet blocks of old weights.
        """
        self._pool = pool
        self.was_reset()
        reset, patched = pool.reset_prefix_cache, cast("Any", pool)

        @wraps(reset)
        def reset_prefix_cache() -> bool:
            blocks, used = held(), pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()
            if not blocks or used != len(blocks):
                return bool(reset())
            patched.get_num_free_blocks = lambda: pool.num_gpu_blocks - 1
            try:
                return bool(reset())
            finally:
                del patched.get_num_free_blocks

        patched.reset_prefix_cache = reset_prefix_cache

    def was_reset(self) -> bool:
        """Whether it has been emptied since the last call."""
        before, self._map = self._map, getattr(self._pool, "cached_block_hash_to_block", None)
        return before is not self._map

    def weights_changed(self) -> None:
        """What is in it now was computed with other weights."""
        self._has_old = True
        self._map_of_old = self._map

    @property
    def has_old(self) -> bool:
        """Whether a hit in it may be a block of old weights."""
        if self._has_old and self._map_of_old is not None:
            self._has_old = getattr(self._pool, "cached_block_hash_to_block", None) is self._map_of_old
        return self._has_old
