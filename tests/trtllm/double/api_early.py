"""The connector's interface as in TensorRT-LLM 1.1.0rc5 to 1.2.0rc1 (label E of the reference).

Not there: what an iteration schedules, and the callable at the end of a forward pass; CUDA graphs are
refused.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any

from tests.trtllm.double import api_released


@dataclass
class RequestData:
    """What changed of one scheduled request since it was last reported."""

    request_id: int
    new_tokens: list[int]
    new_block_ids: list[int]
    computed_position: int


@dataclass
class SchedulerOutput:
    """The requests of one iteration."""

    new_requests: list[RequestData] = field(default_factory=list)
    cached_requests: list[RequestData] = field(default_factory=list)


class KvCacheConnectorWorker(ABC):
    """Base of the side that runs on every rank."""

    def __init__(self, llm_args: Any) -> None:
        self._llm_args = llm_args
        self._metadata: object = None
        super().__init__()

    def bind_connector_meta(self, metadata: object) -> None:
        self._metadata = metadata

    def get_connector_meta(self) -> object:
        return self._metadata

    def _clear_connector_meta(self) -> None:
        self._metadata = None

    @abstractmethod
    def register_kv_caches(self, kv_cache_tensor: Any) -> None: ...

    @abstractmethod
    def start_load_kv(self, stream: Any) -> None: ...

    @abstractmethod
    def wait_for_layer_load(self, layer_idx: int, stream: Any) -> None: ...

    @abstractmethod
    def save_kv_layer(self, layer_idx: int, stream: Any) -> None: ...

    @abstractmethod
    def wait_for_save(self, stream: Any) -> None: ...

    @abstractmethod
    def get_finished(
        self, finished_gen_req_ids: list[int], started_loading_req_ids: list[int]
    ) -> tuple[list[int], list[int]]: ...


class KvCacheConnectorScheduler(api_released.KvCacheConnectorScheduler):
    """Base of the leader, which runs on rank 0; as in 1.2."""
