"""The connector's interface as in TensorRT-LLM's main of mid-2026 (label M of the reference)."""

from __future__ import annotations

from dataclasses import dataclass, field

from tests.trtllm.double import api_released


@dataclass
class RequestData:
    """What changed of one scheduled request since it was last reported."""

    request_id: int
    new_tokens: list[int]
    new_block_ids: list[int]
    computed_position: int
    num_scheduled_tokens: int
    priorities: list[int] | None = None
    cache_salt_id: int | None = None


@dataclass
class SchedulerOutput:
    """The requests of one iteration."""

    new_requests: list[RequestData] = field(default_factory=list)
    cached_requests: list[RequestData] = field(default_factory=list)


class KvCacheConnectorWorker(api_released.KvCacheConnectorWorker):
    """Base of the side that runs on every rank; as in 1.2."""


class KvCacheConnectorScheduler(api_released.KvCacheConnectorScheduler):
    """Base of the leader, which runs on rank 0."""

    def wait_for_initialization(self) -> None:
        return
