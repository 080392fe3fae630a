"""What stands between the executor and one rank's connector.

The executor's batches and requests become what ``KvCacheConnectorManager`` takes: the double's own
(own_manager.py), or TensorRT-LLM's (source.py). What it raises is DoubleFailure, as the real loop ends on it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from tests.trtllm.double import host, source
from tests.trtllm.double.config import ExecutorConfig
from tests.trtllm.double.contract import Contract
from tests.trtllm.double.failure import DoubleFailure
from tests.trtllm.double.requests import Core
from tests.trtllm.double.watch import Watch


class Batch:
    """The requests of one iteration."""

    def __init__(self, context: list[Core], generation: list[Core]) -> None:
        self.context = context
        self.generation = generation
        self.padding: Core | None = None
        """Attention DP: the dummy request of a rank that has no other."""

    @property
    def all(self) -> list[Core]:
        """Context requests first."""
        return self.context + self.generation + ([self.padding] if self.padding is not None else [])


class KvCacheManager:
    """What the connector's manager asks the V1 cache."""

    def __init__(self, tokens_per_block: int) -> None:
        self._size = tokens_per_block
        self._priorities: dict[int, int | None] = {}

    def get_cache_indices(self, request: Any) -> list[int]:
        """The blocks of a request."""
        (table,) = request._core.slots
        self._priorities.update(dict.fromkeys(table, request._core.priority))
        return list(table)

    def get_priority_by_block_id(self, block: int) -> int | None:
        """The retention priority of a block of a request that has one."""
        return self._priorities[block]

    def commit_and_get_block_hashes(self, request: Any) -> list[int]:
        """The hashes of the full blocks."""
        core = request._core
        return [core.sequence.block_key(block, self._size) for block in range(len(core.tokens) // self._size)]


class KvCacheManagerV2(source.KVCacheManagerV2):
    """What the connector's manager asks the V2 cache."""

    def get_page_indices_by_layer_group(self, request: Any) -> list[list[int]]:
        """The pages of a request, by layer group."""
        return [list(table) for table in request._core.slots]


class ConnectorManager:
    """One rank's connector, seen from the executor. ``leader`` is None where this rank has none."""

    def __init__(
        self, leader: Any, worker: Any, agreed: Contract, watch: Watch, config: ExecutorConfig
    ) -> None:
        self.leader = leader
        self.worker = worker
        self._watch = watch
        self._contract = agreed
        self._is_v2 = config.manager == "v2"
        self._num_groups = len(config.windows)
        self._scheduled: Any = None
        self._cache = KvCacheManagerV2() if self._is_v2 else KvCacheManager(config.tokens_per_block)
        options = {"enable_attention_dp": True} if config.attention_dp else {}
        with _ends_the_loop("KvCacheConnectorManager"):
            self._manager = agreed.module().KvCacheConnectorManager(worker, leader, **options)

    @property
    def step(self) -> int:
        """The executor's step, for what is noted of calls."""
        return self._watch.step

    @step.setter
    def step(self, step: int) -> None:
        self._watch.step = step

    # Leader callbacks

    def query(self, core: Core, num_computed: int) -> tuple[int, bool]:
        """get_num_new_matched_tokens, the same answer on all ranks."""
        with _ends_the_loop("get_num_new_matched_tokens"):
            if self._is_v2:
                answer: tuple[int, bool] = self._manager.query_num_new_matched_tokens(
                    core.python, num_computed
                )
                return answer
            request = self._contract.bound_request(core)
            num_tokens = self._manager.get_num_new_matched_tokens(request, num_computed)
            return num_tokens, core.request_id in self._manager.new_async_requests.loading

    def commit(self, core: Core, num_tokens: int, is_async: bool) -> None:
        """What of the answer will be used; V1 uses all of it."""
        core.matched = num_tokens
        if self._is_v2:
            with _ends_the_loop("commit_new_matched_tokens"):
                self._manager.commit_new_matched_tokens(core.python, num_tokens, is_async)

    def update_after_alloc(self, core: Core) -> None:
        """update_state_after_alloc or its form by layer group; on the leader only, no broadcast."""
        with _ends_the_loop("update_state_after_alloc"):
            self._manager.update_state_after_alloc(core.python, *self._blocks_of(core))

    def request_finished(self, core: Core) -> bool:
        """Whether the blocks are to be kept; asked on the leader."""
        with _ends_the_loop("request_finished"):
            return bool(self._manager.request_finished(core.python, *self._blocks_of(core)))

    def _blocks_of(self, core: Core) -> list[Any]:
        groups = [list(table) for table in core.slots] or [[] for _ in range(self._num_groups)]
        flat = groups[0] if len(groups) == 1 else []
        return [flat, groups] if self._is_v2 else [flat]

    # One iteration

    def build_output(self, batch: Batch) -> None:
        """Makes the SchedulerOutput."""
        padding = [] if batch.padding is None else [batch.padding]
        generation = [self._request_of(core) for core in batch.generation + padding]
        kind = SplitRequests if self._contract.has_connectors_package else ScheduledRequests
        self._scheduled = kind([self._request_of(core) for core in batch.context], generation)
        with _ends_the_loop("build_scheduler_output"):
            self._manager.build_scheduler_output(self._scheduled, self._cache)

    def _request_of(self, core: Core) -> Any:
        return self._contract.python_request(core) if core.python is None else core.python

    def take_pending_loads(self, batch: Batch) -> list[Core]:
        """Requests that were answered async leave the batch; those."""
        with _ends_the_loop("take_scheduled_requests_pending_load"):
            self._manager.take_scheduled_requests_pending_load(self._scheduled)
        staying = {request.request_id for request in self._scheduled.context_requests}
        parked = [core for core in batch.context if core.request_id not in staying]
        batch.context = [core for core in batch.context if core.request_id in staying]
        return parked

    def bind(self) -> None:
        """build_connector_meta on the leader, bind_connector_meta everywhere."""
        with _ends_the_loop("handle_metadata"):
            self._manager.handle_metadata()

    def start_load(self) -> None:
        """start_load_kv"""
        self.worker.start_load_kv(host.STREAM)

    def before_layer(self, layer: int) -> None:
        """wait_for_layer_load; what it raises goes through as it is."""
        self._manager.layer_pre_hook(SimpleNamespace(layer_idx=layer))

    def behind_layer(self, layer: int) -> None:
        """save_kv_layer; what it raises goes through as it is."""
        self._manager.layer_post_hook(SimpleNamespace(layer_idx=layer))

    def wait_for_save(self) -> None:
        """wait_for_save; what it raises goes through as it is."""
        self.worker.wait_for_save(host.STREAM)

    def poll(self) -> list[Core]:
        """get_finished, every iteration; returns the requests whose save ended on all ranks."""
        with _ends_the_loop("get_finished"):
            return [request._core for request in self._manager.get_finished()]

    # Questions of the executor

    def should_add(self, core: Core) -> bool:
        """False for a request that comes back after its load: it has its blocks."""
        return bool(self._manager.should_add_sequence(core.python))

    def has_pending(self, request_id: int) -> bool:
        """Whether a transfer of this request is open on some rank."""
        return bool(self._manager.has_pending_transfers(request_id))

    @property
    def has_transfers(self) -> bool:
        """Whether any transfer is open."""
        manager = self._manager
        places = (
            manager.new_async_requests,
            manager.pending_async_requests,
            manager.local_finished_async_requests,
        )
        return any(place.saving or place.loading for place in places)

    def forget(self, core: Core) -> None:
        """V2: the allocation is gone, and the request will be reported as new."""
        self._manager.reset_request_state(core.python)

    def refuse_flat_leader(self) -> None:
        """Several layer groups need a leader that has the callbacks by layer group."""
        with _ends_the_loop("reject_flat_only_scheduler"):
            self._manager.reject_flat_only_scheduler(self._num_groups)


class ScheduledRequests:
    """A batch as 1.2 has it."""

    def __init__(self, context: list[Any], generation: list[Any]) -> None:
        self.context_requests = context
        self.generation_requests = generation


class SplitRequests:
    """A batch since 1.3: prompts that end in this iteration come behind those that do not."""

    def __init__(self, context: list[Any], generation: list[Any]) -> None:
        self.context_requests_chunking = [request for request in context if not _ends(request)]
        self.context_requests_last_chunk = [request for request in context if _ends(request)]
        self.generation_requests = generation

    @property
    def context_requests(self) -> list[Any]:
        """All of them."""
        return self.context_requests_chunking + self.context_requests_last_chunk


def _ends(request: Any) -> bool:
    return bool(request.context_chunk_size >= request.context_remaining_length)


@contextmanager
def _ends_the_loop(name: str) -> Iterator[None]:
    try:
        yield
    except DoubleFailure:
        raise
    except Exception as error:
        raise DoubleFailure(f"{name}: {error!r}, which ends the executor's loop") from error
