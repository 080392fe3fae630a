"""The double's own ``KvCacheConnectorManager``: order, broadcasts, and which transfers are open.

It has the interface of TensorRT-LLM's, which takes its place where KVBM_TRTLLM_SOURCE is set (see source.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any

from tests.trtllm.double import comm, host
from tests.trtllm.double.requests import LlmRequestState

GROUPED = ("update_state_after_alloc_by_layer_group", "request_finished_by_layer_group")
IN_PROMPT = (LlmRequestState.CONTEXT_INIT, LlmRequestState.DISAGG_GENERATION_TRANS_IN_PROGRESS)


@dataclass
class Transfers:
    """Requests whose blocks are being saved or loaded, by id."""

    saving: dict[int, Any] = field(default_factory=dict)
    loading: dict[int, Any] = field(default_factory=dict)

    def take(self, other: Transfers) -> None:
        """All that ``other`` has comes here."""
        for mine, theirs in ((self.saving, other.saving), (self.loading, other.loading)):
            mine.update(theirs)
            theirs.clear()


class KvCacheConnectorManager:
    """One rank's. ``scheduler`` is None on all ranks but 0; with attention DP each rank has one, and ranks
    say nothing to each other.
    """

    api: Any
    """The module of the version's classes."""

    def __init__(self, worker: Any, scheduler: Any, *, enable_attention_dp: bool = False) -> None:
        self.worker = worker
        self.scheduler = scheduler
        self.new_async_requests = Transfers()
        self.pending_async_requests = Transfers()
        self.local_finished_async_requests = Transfers()
        self._fields = {item.name for item in fields(self.api.RequestData)}
        self._is_alone = enable_attention_dp
        self._output: Any = None
        # Per request, how many tokens and block ids (per group) were reported.
        self._reported: dict[int, tuple[int, list[int]]] = {}
        self._external: dict[int, int] = {}
        self._loaded: set[int] = set()

    @staticmethod
    def validate_attention_dp(worker_class: Any, leader_class: Any) -> None:
        """Both have to say that they support it."""
        for cls in (worker_class, leader_class):
            if getattr(cls, "supports_attention_dp", False) is not True:
                raise NotImplementedError(f"{cls} does not declare supports_attention_dp=True")

    def reject_flat_only_scheduler(self, num_layer_groups: int) -> None:
        """A leader without the grouped callbacks cannot serve several layer groups."""
        if num_layer_groups > 1:
            base = self.api.KvCacheConnectorScheduler
            missing = self._on_leader(
                lambda: [
                    name
                    for name in GROUPED
                    if getattr(type(self.scheduler), name, None) is getattr(base, name)
                ]
            )
            if missing:
                raise NotImplementedError(f"several layer groups need {' and '.join(missing)} on the leader")

    # Leader callbacks

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> int:
        """V1: asks, and takes the whole answer."""
        if request.is_generation_only_request:
            raise RuntimeError("a connector cannot serve generation-only requests")
        num_tokens, is_async = self.query_num_new_matched_tokens(request, num_computed_tokens)
        self.commit_new_matched_tokens(request, num_tokens, is_async)
        return num_tokens

    def query_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """The same answer on all ranks."""
        if self._is_hidden(request):
            return 0, False
        num_tokens, is_async = self._on_leader(
            lambda: self.scheduler.get_num_new_matched_tokens(request, num_computed_tokens)
        )
        if num_tokens == 0 and is_async:
            raise RuntimeError("load_kv_async must be False when num_tokens is 0")
        return num_tokens, is_async

    def commit_new_matched_tokens(self, request: Any, num_tokens: int, load_kv_async: bool) -> None:
        """What of the answer will be used."""
        if self._is_hidden(request):
            return
        request.py_num_connector_matched_tokens = num_tokens
        self._external[request.request_id] = num_tokens
        if load_kv_async:
            self.new_async_requests.loading[request.request_id] = request

    def update_state_after_alloc(self, request: Any, block_ids: Any, by_layer_group: Any = None) -> None:
        """On the leader only, no broadcast."""
        if self.scheduler is None or self._is_hidden(request):
            return
        if by_layer_group:
            self.scheduler.update_state_after_alloc_by_layer_group(request, by_layer_group)
        else:
            self.scheduler.update_state_after_alloc(request, block_ids)

    def request_finished(self, request: Any, block_ids: Any, by_layer_group: Any = None) -> bool:
        """Whether the blocks are to be kept."""
        if self._is_hidden(request):
            return False
        self._loaded.discard(request.request_id)

        def ask() -> Any:
            if by_layer_group:
                return self.scheduler.request_finished_by_layer_group(request, by_layer_group)
            return self.scheduler.request_finished(request, block_ids)

        keeps = self._on_leader(ask)
        if keeps:
            self.new_async_requests.saving[request.request_id] = request
            request.state = LlmRequestState.DISAGG_CONTEXT_TRANS_IN_PROGRESS
        if self._is_alone:
            self.reset_request_state(request)
        return bool(keeps)

    # One iteration

    def build_scheduler_output(self, batch: Any, kv_cache_manager: Any) -> None:
        """Only what is new since the last report, without requests that are loading."""
        output = self.api.SchedulerOutput()
        for request in batch.context_requests:
            if self._is_hidden(request) or request.request_id in self.new_async_requests.loading:
                continue
            is_new = request.request_id not in self._reported
            data = self._data_of(request, kv_cache_manager)
            data.computed_position -= self._external.get(request.request_id, 0)
            (output.new_requests if is_new else output.cached_requests).append(data)
        for request in batch.generation_requests:
            if not self._is_hidden(request):
                output.cached_requests.append(self._data_of(request, kv_cache_manager))
        if self._is_alone:
            output.attention_dp_rank = comm.mpi_rank()
        self._external = {}
        self._output = output

    def _is_hidden(self, request: Any) -> bool:
        """Whether the connector hears nothing of it: a dummy request, with attention DP."""
        return self._is_alone and bool(request.is_dummy_request)

    def _data_of(self, request: Any, kv_cache_manager: Any) -> Any:
        is_v2 = hasattr(kv_cache_manager, "get_page_indices_by_layer_group")
        if is_v2:
            tables = kv_cache_manager.get_page_indices_by_layer_group(request)
        else:
            tables = [kv_cache_manager.get_cache_indices(request)]
        tokens = request.get_tokens(0)
        num_tokens, num_ids = self._reported.get(request.request_id, (0, [0] * len(tables)))
        ids = [table[seen:] for table, seen in zip(tables, num_ids, strict=True)]
        longest = [max(len(table), seen) for table, seen in zip(tables, num_ids, strict=True)]
        self._reported[request.request_id] = (len(tokens), longest)
        if request.state in IN_PROMPT:
            computed = request.context_current_position
            scheduled = min(request.context_remaining_length, request.context_chunk_size)
        else:
            computed, scheduled = len(tokens) - 1, 1
        flat = ids[0] if len(ids) == 1 else []
        values: dict[str, Any] = {"num_scheduled_tokens": scheduled, "new_block_ids_by_layer_group": []}
        if "priorities" in self._fields and request.kv_cache_retention_config is not None and not is_v2:
            values["priorities"] = [kv_cache_manager.get_priority_by_block_id(block) for block in flat]
        for salt in self._fields & {"cache_salt", "cache_salt_id"}:
            values[salt] = getattr(request, salt)
        if is_v2:
            values["new_block_ids_by_layer_group"] = ids
        elif "block_hashes" in self._fields:
            values["block_hashes"] = kv_cache_manager.commit_and_get_block_hashes(request)
        known = {name: value for name, value in values.items() if name in self._fields}
        return self.api.RequestData(request.request_id, tokens[num_tokens:], flat, computed, **known)

    def take_scheduled_requests_pending_load(self, batch: Any) -> None:
        """Requests that were answered async leave the batch."""
        split = ("context_requests_chunking", "context_requests_last_chunk")
        for name in split if hasattr(batch, split[0]) else ("context_requests",):
            staying = []
            for request in getattr(batch, name):
                if request.request_id in self.new_async_requests.loading:
                    request.state = LlmRequestState.DISAGG_GENERATION_TRANS_IN_PROGRESS
                    self.new_async_requests.loading[request.request_id] = request
                else:
                    staying.append(request)
            setattr(batch, name, staying)

    def handle_metadata(self) -> None:
        """build_connector_meta on the leader, bind_connector_meta everywhere; ranks above 0 get an unpickled
        copy.
        """
        output, self._output = self._output, None
        self.worker.bind_connector_meta(self._on_leader(lambda: self.scheduler.build_connector_meta(output)))

    def layer_pre_hook(self, module: Any, *_: Any) -> None:
        """Before a layer's work."""
        self.worker.wait_for_layer_load(module.layer_idx, host.STREAM)

    def layer_post_hook(self, module: Any, *_: Any) -> None:
        """Behind a layer's work."""
        self.worker.save_kv_layer(module.layer_idx, host.STREAM)

    def get_finished(self) -> list[Any]:
        """The requests whose save has ended on all ranks."""
        new, pending, done = (
            self.new_async_requests,
            self.pending_async_requests,
            self.local_finished_async_requests,
        )
        saving, loading = [*new.saving], [*new.loading]
        pending.take(new)
        saved, loaded = self.worker.get_finished(saving, loading)
        done.saving.update({request_id: pending.saving.pop(request_id) for request_id in saved})
        done.loading.update({request_id: pending.loading.pop(request_id) for request_id in loaded})
        mine = ([*done.saving], [*done.loading])
        everywhere = [mine] if self._is_alone else comm.mpi_allgather(mine)
        for request_id in set.intersection(*(set(theirs[1]) for theirs in everywhere)):
            done.loading.pop(request_id).state = LlmRequestState.CONTEXT_INIT
            self._loaded.add(request_id)
        ended = sorted(set.intersection(*(set(theirs[0]) for theirs in everywhere)))
        return [done.saving.pop(request_id) for request_id in ended]

    # Questions of the executor

    def should_add_sequence(self, request: Any) -> bool:
        """False for a request that comes back after its load."""
        return request.request_id not in self._loaded

    def has_pending_transfers(self, request_id: int) -> bool:
        """Whether a transfer of this request is open on some rank."""
        places = (self.new_async_requests, self.pending_async_requests, self.local_finished_async_requests)
        return any(request_id in place.saving or request_id in place.loading for place in places)

    def reset_request_state(self, request: Any) -> None:
        """The allocation is gone: the request will be reported as new. It is still one that was loaded."""
        self._reported.pop(request.request_id, None)
        self._external.pop(request.request_id, None)

    def _on_leader(self, ask: Callable[[], Any]) -> Any:
        result = ask() if self.scheduler is not None else None
        return result if self._is_alone else comm.mpi_broadcast(result)
