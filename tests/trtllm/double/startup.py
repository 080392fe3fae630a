"""Start-up (S0): constructors in pool threads, the forward pass callable, warm-up, registration."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

from tests.trtllm.double import comm
from tests.trtllm.double.calls import Call, Calls
from tests.trtllm.double.config import ExecutorConfig
from tests.trtllm.double.contract import Contract, current
from tests.trtllm.double.failure import DoubleFailure
from tests.trtllm.double.manager import ConnectorManager
from tests.trtllm.double.memory import Memory
from tests.trtllm.double.requests import Core
from tests.trtllm.double.watch import Watch


def construct(
    leader_class: Callable[[Any], Any], worker_class: Callable[[Any], Any], llm_args: Any
) -> tuple[Any, Any]:
    """(leader or None, worker), made at the same time in two threads: they may wait for each other."""
    leads = comm.mpi_rank() == 0 or llm_args.enable_attention_dp
    with ThreadPoolExecutor(max_workers=2) as pool:
        worker = pool.submit(worker_class, llm_args)
        leader = pool.submit(leader_class, llm_args) if leads else None
        return (leader.result() if leader else None), worker.result()


def start(
    classes: tuple[Callable[[Any], Any], Callable[[Any], Any]],
    llm_args: Any,
    memory: Memory,
    *,
    calls: Calls,
    config: ExecutorConfig,
) -> tuple[ConnectorManager, Callable[[], None] | None]:
    """The connector of these classes (leader, worker), registered, and its forward pass callable if it has
    one.
    """
    contract = current()
    if config.attention_dp:
        _refuse_without_attention_dp(classes, contract)
    leader, worker = construct(*classes, llm_args)
    manager = ConnectorManager(leader, worker, contract, Watch(calls, leader, worker), config)
    function = None
    if contract.has_callable:
        function = worker.register_forward_pass_callable()
        calls.add(Call(0, "register_forward_pass_callable", {}))
    if function:
        # The estimation of the cache's size runs the model before there is a cache.
        for _ in range(config.warmup_forwards):
            function()
    if contract.queries_in_warm_up:
        _query_dummy(manager)
    if config.manager == "v2":
        manager.refuse_flat_leader()
    calls.add(Call(0, memory.register(worker, contract.layout_of), {}))
    if contract.waits_at_start and leader is not None:
        leader.wait_for_initialization()
        calls.add(Call(0, "wait_for_initialization", {}))
    return manager, function


def _refuse_without_attention_dp(
    classes: tuple[Callable[[Any], Any], Callable[[Any], Any]], contract: Contract
) -> None:
    leader_class, worker_class = classes
    try:
        contract.module().KvCacheConnectorManager.validate_attention_dp(worker_class, leader_class)
    except NotImplementedError as error:
        raise DoubleFailure(str(error)) from error


def _query_dummy(manager: ConnectorManager) -> None:
    """The warm-up before there is a cache takes blocks for requests that TensorRT-LLM made up."""
    prompt, nothing = [1] * 8, cast("Any", None)  # it never runs
    dummy = Core(0, prompt, len(prompt), len(prompt), 1, nothing, is_dummy=True)
    if manager.query(dummy, 0) != (0, False):
        raise DoubleFailure("a dummy request was promised something")
