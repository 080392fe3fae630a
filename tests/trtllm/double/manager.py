"""What stands between the executor and the connector on one rank: order, broadcasts, and which transfers are
open.

Every call goes through ``_call``, which records it and turns an exception into DoubleFailure, as the real
loop ends on it. Calls inside a forward pass are the exception: see ``in_forward``.
"""

from __future__ import annotations

from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from typing import Any

from tests.trtllm.double import comm
from tests.trtllm.double.calls import Call, Calls
from tests.trtllm.double.config import ExecutorConfig
from tests.trtllm.double.contract import Contract
from tests.trtllm.double.failure import DoubleFailure
from tests.trtllm.double.requests import Core, State


class HostStream:
    """Stands for a CUDA stream where everything is done when it was called."""

    cuda_stream = 0

    def synchronize(self) -> None:
        """Nothing is ever pending."""


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


class ConnectorManager:
    """One rank's connector, seen from the executor.

    ``leader`` is None on all ranks but 0. With attention DP each rank has one, and ranks say nothing to each
    other.
    """

    def __init__(
        self, leader: Any, worker: Any, contract: Contract, calls: Calls, config: ExecutorConfig
    ) -> None:
        self.leader = leader
        self.worker = worker
        self.step = 0
        self._contract = contract
        self._calls = calls
        self._is_v2 = config.manager == "v2"
        self._attention_dp = config.attention_dp
        self._num_groups = len(config.windows)
        self._tokens_per_block = config.tokens_per_block
        self._stream = HostStream()
        self._output: Any = None
        # Per request, how many tokens and block ids (per group) were reported.
        self._reported: dict[int, tuple[int, list[int]]] = {}
        self._external: dict[int, int] = {}
        self._new_saving: dict[int, Core] = {}
        self._new_loading: dict[int, Core] = {}
        self._saving: dict[int, Core] = {}
        self._loading: dict[int, Core] = {}
        self._done_saving: dict[int, Core] = {}
        self._done_loading: dict[int, Core] = {}
        self._loaded: set[int] = set()

    # Leader callbacks

    def query(self, core: Core, num_computed: int) -> tuple[int, bool]:
        """get_num_new_matched_tokens, the same answer on all ranks."""
        request = core.python if self._is_v2 else self._contract.bound_request(core)
        answer = self._on_leader(
            "get_num_new_matched_tokens",
            lambda: self.leader.get_num_new_matched_tokens(request, num_computed),
            request_id=core.request_id,
            num_computed_tokens=num_computed,
        )
        try:
            num_tokens, is_async = answer
        except (TypeError, ValueError) as error:
            raise DoubleFailure(f"get_num_new_matched_tokens returned {answer!r}") from error
        if isinstance(num_tokens, bool) or not isinstance(num_tokens, int) or num_tokens < 0:
            raise DoubleFailure(f"get_num_new_matched_tokens returned {num_tokens!r} tokens")
        _must_be_bool("get_num_new_matched_tokens", is_async)
        if num_tokens == 0 and is_async:
            raise DoubleFailure("load_kv_async must be False when num_tokens is 0")
        if not self._is_v2 and num_computed + num_tokens >= core.prompt_len:
            raise DoubleFailure(
                f"prepopulatedPromptLen {num_computed} + {num_tokens} >= promptLen "
                f"{core.prompt_len} aborts V1"
            )
        return num_tokens, is_async

    def commit(self, core: Core, num_tokens: int, is_async: bool) -> None:
        """What of the answer will be used."""
        core.matched = num_tokens
        self._external[core.request_id] = num_tokens
        if is_async:
            self._new_loading[core.request_id] = core

    def update_after_alloc(self, core: Core) -> None:
        """update_state_after_alloc or its form by layer group; on the leader only, no broadcast."""
        if self.leader is None:
            return
        values = {"request_id": core.request_id, "context_current_position": core.position}
        self._flat_or_grouped("update_state_after_alloc", core, values)

    def request_finished(self, core: Core) -> bool:
        """Whether the blocks are to be kept; asked on the leader."""
        self._loaded.discard(core.request_id)
        values = {"request_id": core.request_id}
        keeps = self._from_leader(
            self._flat_or_grouped("request_finished", core, values) if self.leader is not None else None
        )
        if self._attention_dp:
            self.forget(core)
        _must_be_bool("request_finished", keeps)
        if keeps:
            self._new_saving[core.request_id] = core
        return bool(keeps)

    def _flat_or_grouped(self, name: str, core: Core, values: dict[str, Any]) -> Any:
        groups = [list(table) for table in core.slots] or [[] for _ in range(self._num_groups)]
        if self._is_v2:
            name = f"{name}_by_layer_group"
            method = getattr(self.leader, name)
            return self._call(
                name, lambda: method(core.python, groups), **values, block_ids_by_layer_group=groups
            )
        method = getattr(self.leader, name)
        return self._call(name, lambda: method(core.python, groups[0]), **values, block_ids=list(groups[0]))

    # One iteration

    def build_output(self, batch: Batch) -> None:
        """Makes the SchedulerOutput: only what is new since the last report, without requests that are
        loading.
        """
        output = self._contract.api.SchedulerOutput()
        for core in batch.context:
            if core.request_id not in self._new_loading:
                is_new = core.request_id not in self._reported
                data = self._request_data(core)
                data.computed_position -= self._external.get(core.request_id, 0)
                (output.new_requests if is_new else output.cached_requests).append(data)
        output.cached_requests.extend(self._request_data(core) for core in batch.generation)
        if self._attention_dp:
            output.attention_dp_rank = comm.mpi_rank()
        self._external = {}
        self._output = output

    def _request_data(self, core: Core) -> Any:
        num_tokens, num_ids = self._reported.get(core.request_id, (0, [0] * len(core.slots)))
        ids = [table[seen:] for table, seen in zip(core.slots, num_ids, strict=True)]
        new_tokens = core.tokens[num_tokens:]
        seen_ids = [max(len(table), seen) for table, seen in zip(core.slots, num_ids, strict=True)]
        self._reported[core.request_id] = (len(core.tokens), seen_ids)
        if core.state is State.CONTEXT:
            computed, scheduled = core.position, min(core.remaining, core.chunk_tokens)
        else:
            computed, scheduled = len(core.tokens) - 1, 1
        flat = ids[0] if len(ids) == 1 else []
        fields: dict[str, Any] = {"num_scheduled_tokens": scheduled} if self._contract.counts_tokens else {}
        if self._contract.has_priorities:
            is_ranked = core.priority is not None and not self._is_v2
            fields["priorities"] = [core.priority] * len(flat) if is_ranked else None
            salt = "cache_salt" if self._contract.is_newest else "cache_salt_id"
            fields[salt] = getattr(core.python, salt)
        if self._contract.is_newest:
            size = self._tokens_per_block
            hashes = [core.sequence.block_key(block, size) for block in range(len(core.tokens) // size)]
            fields["block_hashes"] = [] if self._is_v2 else hashes
            fields["new_block_ids_by_layer_group"] = ids if self._is_v2 else []
        return self._contract.api.RequestData(core.request_id, new_tokens, flat, computed, **fields)

    def take_pending_loads(self, batch: Batch) -> list[Core]:
        """Requests that were answered async leave the batch; those."""
        parked = [core for core in batch.context if core.request_id in self._new_loading]
        for core in parked:
            core.state = State.LOADING
        batch.context = [core for core in batch.context if core.state is State.CONTEXT]
        return parked

    def bind(self) -> None:
        """build_connector_meta on the leader, bind_connector_meta everywhere; ranks above 0 get an unpickled
        copy.
        """
        output, self._output = self._output, None
        metadata = self._on_leader(
            "build_connector_meta",
            lambda: self.leader.build_connector_meta(output),
            must_pickle=True,
            output=output,
        )
        self._call("bind_connector_meta", lambda: self.worker.bind_connector_meta(metadata))

    def start_load(self) -> None:
        """start_load_kv"""
        self._call("start_load_kv", lambda: self.worker.start_load_kv(self._stream))

    def in_forward(self, name: str, *layer: int) -> None:
        """A worker's hook inside the forward pass; what it raises goes through as it is."""
        self._calls.add(Call(self.step, name, {"layer_idx": layer[0]} if layer else {}))
        getattr(self.worker, name)(*layer, self._stream)

    def poll(self) -> list[Core]:
        """get_finished, every iteration; returns the requests whose save ended on all ranks."""
        saving, loading = list(self._new_saving), list(self._new_loading)
        self._saving.update(self._new_saving)
        self._loading.update(self._new_loading)
        self._new_saving, self._new_loading = {}, {}
        answer = self._call(
            "get_finished",
            lambda: self.worker.get_finished(list(saving), list(loading)),
            finished_gen_req_ids=saving,
            started_loading_req_ids=loading,
        )
        try:
            saved, loaded = (list(ids) for ids in answer)
        except (TypeError, ValueError) as error:
            raise DoubleFailure(f"get_finished returned {answer!r}") from error
        _move("saving", saved, self._saving, self._done_saving)
        _move("loading", loaded, self._loading, self._done_loading)
        done = (list(self._done_saving), list(self._done_loading))
        everywhere = [done] if self._attention_dp else comm.mpi_allgather(done)
        for request_id in set.intersection(*(set(theirs[1]) for theirs in everywhere)):
            core = self._done_loading.pop(request_id)
            self._loaded.add(request_id)
            if core.state is State.LOADING:
                core.state = State.CONTEXT
                core.computed = core.position
        ended = sorted(set.intersection(*(set(theirs[0]) for theirs in everywhere)))
        return [self._done_saving.pop(request_id) for request_id in ended]

    # Questions of the executor

    def should_add(self, core: Core) -> bool:
        """False for a request that comes back after its load: it has its blocks."""
        return core.request_id not in self._loaded

    def has_pending(self, request_id: int) -> bool:
        """Whether a transfer of this request is open on some rank."""
        places = (self._new_saving, self._new_loading, self._saving, self._loading)
        return any(request_id in place for place in (*places, self._done_saving, self._done_loading))

    @property
    def has_transfers(self) -> bool:
        """Whether any transfer is open."""
        places = (self._new_saving, self._new_loading, self._saving, self._loading)
        return any((*places, self._done_saving, self._done_loading))

    def forget(self, core: Core) -> None:
        """The allocation is gone: the request will be reported as new."""
        self._reported.pop(core.request_id, None)
        self._external.pop(core.request_id, None)
        self._loaded.discard(core.request_id)

    # Calls

    def _on_leader(
        self, name: str, call: Callable[[], Any], *, must_pickle: bool = False, **values: Any
    ) -> Any:
        result = None
        if self.leader is not None:
            result = self._call(name, call, **values)
            if must_pickle:
                try:
                    ForkingPickler.dumps(result)
                except Exception as error:
                    raise DoubleFailure(f"{name} returned what cannot be pickled: {result!r}") from error
        return self._from_leader(result)

    def _from_leader(self, result: Any) -> Any:
        return result if self._attention_dp else comm.mpi_broadcast(result)

    def _call(self, name: str, call: Callable[[], Any], **values: Any) -> Any:
        try:
            result = call()
        except Exception as error:
            self._calls.add(Call(self.step, name, values, repr(error)))
            raise DoubleFailure(f"{name} raised {error!r}, which ends the executor's loop") from error
        self._calls.add(Call(self.step, name, values, result))
        return result


def _must_be_bool(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise DoubleFailure(f"{name} returned {value!r} where a bool is due")


def _move(what: str, ids: list[int], pending: dict[int, Core], done: dict[int, Core]) -> None:
    for request_id in ids:
        if request_id not in pending:
            raise DoubleFailure(
                f"get_finished returned id {request_id!r} in {what}: not open there, or twice (KeyError)"
            )
        done[request_id] = pending.pop(request_id)
