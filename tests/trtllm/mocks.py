"""A scripted connector for the tests of the double: it answers as told and brings right or wrong bytes."""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from tests.trtllm.double import Executor, ExecutorConfig
from tests.trtllm.double.contract import current

PYEXECUTOR = "tensorrt_llm._torch.pyexecutor"


@dataclass(frozen=True)
class Script:
    """What the connector does. ``matches``: request id -> (tokens, async); the rest is answered (0,
    False).
    """

    matches: dict[int, Any] = field(default_factory=dict)
    saves: Any = False
    polls_until_done: int = 0
    """So many polls after the one that announced it, a transfer is reported."""
    slow_rank: int | None = None
    """Only this rank is slow; None: all are."""
    raises: str = ""
    """The method that raises, if any; "callable" is the forward pass callable."""
    wrong_position: int | None = None
    """A position of which the load brings a wrong byte."""
    loads_nothing: bool = False
    loads_in_start: bool = True
    """Loads go out in ``start_load_kv``, else in ``bind_connector_meta``."""
    unknown_id: int | None = None
    repeats_ids: bool = False
    unpicklable: bool = False
    resets_position_to: int | None = None
    """The leader takes its offer back after the allocation: the prompt is to be computed from here."""
    has_callable: bool = True


def api() -> Any:
    """The module with the base classes of the installed version."""
    path = ".connectors" if current().has_connectors_package else ""
    return import_module(f"{PYEXECUTOR}{path}.kv_cache_connector")


def make_classes(script: Script) -> tuple[type, type]:
    """(leader class, worker class) for the installed version."""
    base: Any = api()

    class Leader(LeaderPart, base.KvCacheConnectorScheduler):
        pass

    class Worker(WorkerPart, base.KvCacheConnectorWorker):
        pass

    Leader.script = Worker.script = script
    if current().is_newest:
        Leader.update_state_after_alloc_by_layer_group = update_by_group
        Leader.request_finished_by_layer_group = finished_by_group
        Worker.register_kv_cache_layout = lambda self, layout: setattr(self, "memory", layout)
    return Leader, Worker


def make_executor(script: Script | None = None, **config: Any) -> Executor:
    """An executor with the scripted connector; the connector can reach the model, to bring the right
    bytes.
    """
    executor = Executor(*make_classes(script or Script()), ExecutorConfig(**config))
    executor.worker.executor = executor
    return executor


class LeaderPart:
    """The methods of the leader."""

    script: Script

    def __init__(self, llm_args: Any) -> None:
        super().__init__(llm_args)  # type: ignore[call-arg]
        self.loads: list[tuple[int, int, int]] = []
        self.matched: dict[int, tuple[int, bool]] = {}
        self.requests: list[Any] = []

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Any:
        self._may_raise("get_num_new_matched_tokens")
        self.requests.append(request)
        answer = self.script.matches.get(request.request_id, (0, False))
        if answer and answer[0]:
            self.matched[request.request_id] = (num_computed_tokens, answer[1])
        return answer

    def update_state_after_alloc(self, request: Any, block_ids: list[int]) -> None:
        self._may_raise("update_state_after_alloc")
        self.requests.append(request)
        if request.request_id in self.matched:
            start, _ = self.matched.pop(request.request_id)
            self.loads.append((request.request_id, start, request.context_current_position))
            if self.script.resets_position_to is not None:
                request.context_current_position = self.script.resets_position_to
                self.loads.pop()

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        self._may_raise("build_connector_meta")
        loads, self.loads = self.loads, []
        return (lambda: loads) if self.script.unpicklable else loads

    def request_finished(self, request: Any, cache_block_ids: list[int]) -> Any:
        self._may_raise("request_finished")
        self.requests.append(request)
        return self.script.saves

    def _may_raise(self, name: str) -> None:
        if self.script.raises == name:
            raise OSError(name)


def update_by_group(self: Any, request: Any, groups: list[list[int]]) -> None:
    """update_state_after_alloc_by_layer_group"""
    self.update_state_after_alloc(request, groups[0])


def finished_by_group(self: Any, request: Any, groups: list[list[int]]) -> Any:
    """request_finished_by_layer_group"""
    return self.request_finished(request, groups[0])


class WorkerPart:
    """The methods of the worker."""

    script: Script
    executor: Executor

    def __init__(self, llm_args: Any) -> None:
        super().__init__(llm_args)  # type: ignore[call-arg]
        self.memory: Any = None
        self.calls_before_memory = 0
        self.bound: list[tuple[int, int, int]] = []
        self._saving: dict[int, int] = {}
        self._loading: dict[int, int] = {}
        self._rank = llm_args.parallel_config.to_mapping().rank

    def register_forward_pass_callable(self) -> Any:
        return self._after_forward if self.script.has_callable else None

    def _after_forward(self) -> None:
        self._may_raise("callable")
        self.calls_before_memory += self.memory is None

    def register_kv_caches(self, kv_cache_tensor: Any) -> None:
        self.memory = kv_cache_tensor

    def bind_connector_meta(self, metadata: Any) -> None:
        self._may_raise("bind_connector_meta")
        self.bound = metadata
        if not self.script.loads_in_start:
            self._load()

    def start_load_kv(self, stream: Any) -> None:
        self._may_raise("start_load_kv")
        self._load()

    def _load(self) -> None:
        loads, self.bound = self.bound, []
        for request_id, start, end in loads:
            if end > start and not self.script.loads_nothing:
                self.executor.write_kv(request_id, start, end)
                wrong = self.script.wrong_position
                if wrong is not None and start <= wrong < end:
                    block, offset = divmod(wrong, self.executor.config.tokens_per_block)
                    slot = self.executor.slots_of(request_id)[0][block]
                    self.executor.memory.view(0, 0)[slot, 0, offset, 0] ^= 1

    def wait_for_layer_load(self, layer_idx: int, stream: Any) -> None:
        self._may_raise("wait_for_layer_load")

    def save_kv_layer(self, layer_idx: int, stream: Any) -> None:
        self._may_raise("save_kv_layer")

    def wait_for_save(self, stream: Any) -> None:
        self._may_raise("wait_for_save")

    def get_finished(self, finished_gen_req_ids: list[int], started_loading_req_ids: list[int]) -> Any:
        self._may_raise("get_finished")
        is_slow = self.script.slow_rank in {None, self._rank}
        polls = self.script.polls_until_done if is_slow else 0
        for open_ids, new in ((self._saving, finished_gen_req_ids), (self._loading, started_loading_req_ids)):
            for request_id in open_ids:
                open_ids[request_id] -= 1
            open_ids.update(dict.fromkeys(new, polls))
        saved, loaded = (_take_due(self._saving), _take_due(self._loading))
        if self.script.unknown_id is not None:
            loaded.append(self.script.unknown_id)
        return (saved * 2, loaded) if self.script.repeats_ids else (saved, loaded)

    def _may_raise(self, name: str) -> None:
        if self.script.raises == name and (name != "callable" or self.memory is not None):
            raise OSError(name)


def _take_due(open_ids: dict[int, int]) -> list[int]:
    due = [request_id for request_id, polls in open_ids.items() if polls <= 0]
    for request_id in due:
        del open_ids[request_id]
    return due
