"""The connector's interface as in TensorRT-LLM's main of September 2026 (label N of the reference)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tests.trtllm.double import api_released
from tests.trtllm.double.api_layout import KvCacheLayout


@dataclass
class RequestData:
    """What changed of one scheduled request since it was last reported."""

    request_id: int
    new_tokens: list[int]
    new_block_ids: list[int]
    computed_position: int
    num_scheduled_tokens: int
    block_hashes: list[int] = field(default_factory=list)
    priorities: list[int] | None = None
    cache_salt: str | None = None
    new_block_ids_by_layer_group: list[list[int]] = field(default_factory=list)


@dataclass
class SchedulerOutput:
    """The requests of one iteration."""

    new_requests: list[RequestData] = field(default_factory=list)
    cached_requests: list[RequestData] = field(default_factory=list)
    attention_dp_rank: int | None = None


def _unavailable(name: str, grouped: str) -> Callable[..., Any]:
    def refuse(self: Any, *_: Any) -> Any:
        raise NotImplementedError(f"{type(self).__name__} implements {grouped}, not {name}")

    return refuse


def _let_grouped_stand_in(cls: type, base: type, pairs: dict[str, str]) -> None:
    """A class that has the form by layer group needs not have the flat one, which is abstract."""
    for flat, grouped in pairs.items():
        has_grouped = getattr(cls, grouped) is not getattr(base, grouped)
        if has_grouped and getattr(getattr(cls, flat), "__isabstractmethod__", False):
            setattr(cls, flat, _unavailable(flat, grouped))


class KvCacheConnectorWorker(api_released.KvCacheConnectorWorker):
    """Base of the side that runs on every rank."""

    supports_attention_dp: bool = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        _let_grouped_stand_in(cls, KvCacheConnectorWorker, {"register_kv_caches": "register_kv_cache_layout"})

    def register_kv_cache_layout(self, layout: KvCacheLayout) -> None:
        tensor = layout.as_single_pool_tensor()
        if tensor is None:
            raise NotImplementedError(f"{type(self).__name__} needs register_kv_cache_layout for this cache")
        self.register_kv_caches(tensor)


class KvCacheConnectorScheduler(api_released.KvCacheConnectorScheduler):
    """Base of the leader, which runs on rank 0."""

    supports_attention_dp: bool = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        pairs = {name: f"{name}_by_layer_group" for name in ("request_finished", "update_state_after_alloc")}
        _let_grouped_stand_in(cls, KvCacheConnectorScheduler, pairs)

    def request_finished_by_layer_group(
        self, request: Any, cache_block_ids_by_layer_group: list[list[int]]
    ) -> bool:
        if len(cache_block_ids_by_layer_group) != 1:
            raise NotImplementedError(f"{type(self).__name__} lacks request_finished_by_layer_group")
        return self.request_finished(request, cache_block_ids_by_layer_group[0])

    def update_state_after_alloc_by_layer_group(
        self, request: Any, block_ids_by_layer_group: list[list[int]]
    ) -> None:
        if len(block_ids_by_layer_group) != 1:
            raise NotImplementedError(f"{type(self).__name__} lacks update_state_after_alloc_by_layer_group")
        self.update_state_after_alloc(request, block_ids_by_layer_group[0])

    def wait_for_initialization(self) -> None:
        return
