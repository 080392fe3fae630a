"""The executor double against what NVIDIA's own tests of the connector assert, and its own checks against
failure.
"""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest

from tests.trtllm.double import NEWEST, RELEASED, Executor, ExecutorConfig, World
from tests.trtllm.mocks import Script, make_executor

OVERLAP = pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlap"])
BIG: dict[str, Any] = {"tokens_per_block": 32, "num_blocks": 64}


@pytest.fixture(params=[RELEASED, NEWEST])
def version(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each contract in turn, installed."""
    with World(request.param):
        yield request.param


@pytest.fixture(params=["v1-released", "v1-newest", "v2-newest"])
def manager(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each manager of each contract in turn, installed."""
    name, version = request.param.split("-")
    with World(version):
        yield name


def outputs_of(executor: Executor) -> list[Any]:
    """Every SchedulerOutput so far."""
    return [call.values["output"] for call in executor.calls.named("build_connector_meta")]


def polls_of(executor: Executor) -> list[tuple[list[int], list[int]]]:
    """The two arguments of every get_finished so far."""
    calls = executor.calls.named("get_finished")
    return [(call.values["finished_gen_req_ids"], call.values["started_loading_req_ids"]) for call in calls]


def finish_name(executor: Executor) -> str:
    """request_finished in the form that this cache calls."""
    return "request_finished" + ("_by_layer_group" if executor.config.manager == "v2" else "")


def alloc_name(executor: Executor) -> str:
    """update_state_after_alloc in the form that this cache calls."""
    return "update_state_after_alloc" + ("_by_layer_group" if executor.config.manager == "v2" else "")


def ids_of(call: Any) -> list[int]:
    """The block ids of an alloc or finish call, of the first layer group."""
    values = call.values
    found: list[int] = values["block_ids"] if "block_ids" in values else values["block_ids_by_layer_group"][0]
    return found


@OVERLAP
def test_simple(manager: str, overlap: bool) -> None:
    executor = make_executor(manager=manager, overlap=overlap, **BIG)
    executor.submit([1, 2, 3, 4], 8)
    executor.run_until_idle()
    calls = executor.calls
    (alloc,) = calls.named(alloc_name(executor))
    assert len(ids_of(alloc)) == 1
    for name in ("build_connector_meta", "bind_connector_meta", "start_load_kv", "wait_for_save"):
        assert calls.count(name) == 8, name
    assert calls.count("forward_pass_callable") == 8
    for name in ("wait_for_layer_load", "save_kv_layer"):
        assert [call.values["layer_idx"] for call in calls.named(name)] == [0, 1] * 8
    assert calls.count("get_num_new_matched_tokens") == 1
    (finish,) = calls.named(finish_name(executor))
    assert len(ids_of(finish)) == 1
    assert calls.count("get_finished") == 8 + overlap
    for i, output in enumerate(outputs_of(executor)):
        assert (len(output.new_requests), len(output.cached_requests)) == ((1, 0) if i == 0 else (0, 1))
        if i:
            assert len(output.cached_requests[0].new_tokens) == (0 if i == 1 and overlap else 1)
    order = [name for name in calls.names() if name.startswith(("request_finished", "get_finished"))]
    assert order[-2].startswith("request_finished") and order[-1] == "get_finished"


@OVERLAP
def test_async_onboard(manager: str, overlap: bool) -> None:
    executor = make_executor(Script(matches={1: (16, True)}), manager=manager, overlap=overlap)
    executor.submit(range(30), 8)
    executor.run_until_idle()
    outputs = outputs_of(executor)
    assert len(outputs) == 9
    assert not outputs[0].new_requests and not outputs[0].cached_requests
    (data,) = outputs[1].new_requests
    assert (len(data.new_tokens), data.computed_position, data.num_scheduled_tokens) == (30, 16, 14)
    assert len(polls_of(executor)) == 9 + overlap
    assert polls_of(executor)[0] == ([], [1])
    assert all(poll == ([], []) for poll in polls_of(executor)[1:])
    assert (
        executor.calls.count("get_num_new_matched_tokens") == executor.calls.count(alloc_name(executor)) == 1
    )


@OVERLAP
def test_async_save(manager: str, overlap: bool) -> None:
    executor = make_executor(Script(saves=True), manager=manager, overlap=overlap, **BIG)
    executor.submit([1, 2, 3, 4], 8)
    executor.run_until_idle()
    assert executor.calls.count(finish_name(executor)) == 1
    polls = polls_of(executor)
    assert len(polls) == 8 + overlap
    assert all(poll == ([], []) for poll in polls[:-1]) and polls[-1] == ([1], [])
    assert executor.blocks_in_use == 0


@OVERLAP
def test_scheduler_output(manager: str, overlap: bool) -> None:
    executor = make_executor(Script(matches={2: (8, False)}), manager=manager, overlap=overlap, **BIG)
    executor.submit([0] * 48, 32)
    executor.run_until_idle()
    outputs = outputs_of(executor)
    assert len(outputs) == 32
    (first,) = outputs[0].new_requests
    assert (len(first.new_tokens), len(first.new_block_ids)) == (48, 2)
    assert (first.computed_position, first.num_scheduled_tokens) == (0, 48)
    for i, output in enumerate(outputs[1:], 1):
        (data,) = output.cached_requests
        assert data.num_scheduled_tokens == 1
        assert len(data.new_tokens) == (0 if i == 1 and overlap else 1)
        assert len(data.new_block_ids) == int((data.computed_position + overlap) % 32 == 0)
    (finish,) = executor.calls.named(finish_name(executor))
    assert len(ids_of(finish)) == math.ceil(80 / 32)
    executor.submit([1] * 48, 32)
    executor.run_until_idle()
    (data,) = outputs_of(executor)[32].new_requests
    assert (data.computed_position, data.num_scheduled_tokens, len(data.new_tokens)) == (0, 40, 48)
    assert executor.calls.named(alloc_name(executor))[1].values["context_current_position"] == 8


@OVERLAP
def test_chunked_context(version: str, overlap: bool) -> None:
    executor = make_executor(overlap=overlap, chunk_tokens=128, **BIG)
    executor.submit([0] * 256, 32)
    executor.run_until_idle()
    (alloc,) = executor.calls.named("update_state_after_alloc")
    assert len(ids_of(alloc)) == 8
    outputs = outputs_of(executor)
    (first,), (second,) = outputs[0].new_requests, outputs[1].cached_requests
    assert (first.computed_position, len(first.new_tokens), len(first.new_block_ids)) == (0, 256, 8)
    assert (second.computed_position, second.new_tokens, second.new_block_ids) == (128, [], [])
    assert first.num_scheduled_tokens == second.num_scheduled_tokens == 128
    assert [len(output.cached_requests[0].new_tokens) for output in outputs[2:]] == [int(not overlap)] + [
        1
    ] * 30
    (finish,) = executor.calls.named("request_finished")
    assert len(ids_of(finish)) == math.ceil(288 / 32)


def test_chunks_end_at_block_boundaries_after_an_offer_that_does_not(version: str) -> None:
    executor = make_executor(Script(matches={1: (5, False)}), chunk_tokens=8)
    executor.submit(range(30), 2)
    executor.run_until_idle()
    outputs = outputs_of(executor)
    data = [*outputs[0].new_requests, *(output.cached_requests[0] for output in outputs[1:])]
    assert [d.num_scheduled_tokens for d in data] == [7, 8, 8, 2, 1]
    assert [d.computed_position for d in data] == [0, 12, 20, 28, 30]


@OVERLAP
def test_v2_reports_chunks_as_deltas(overlap: bool) -> None:
    with World(NEWEST):
        executor = make_executor(manager="v2", overlap=overlap, chunk_tokens=8)
        executor.submit(range(30), 2)
        executor.run_until_idle()
        outputs = outputs_of(executor)
        data = [*outputs[0].new_requests, *(output.cached_requests[0] for output in outputs[1:])]
        assert [len(d.new_block_ids_by_layer_group[0]) for d in data] == [2, 2, 2, 2, 0]
        assert [d.computed_position for d in data[:4]] == [0, 8, 16, 24]
        assert [
            len(call.values["block_ids_by_layer_group"][0])
            for call in executor.calls.named(alloc_name(executor))
        ] == [2]


def test_async_saves_of_two_requests_leave_room_for_a_third(version: str) -> None:
    executor = make_executor(Script(saves=True), tokens_per_block=32, num_blocks=4)
    executor.submit([0] * 48, 4)
    executor.submit([1] * 48, 3)
    executor.run_until_idle()
    third = executor.submit([2] * 110, 4)
    executor.run_until_idle()
    assert len(executor.outputs[third]) == 4


def test_blocks_of_an_async_save_are_kept(manager: str) -> None:
    executor = make_executor(Script(saves=True, polls_until_done=3), manager=manager)
    ids = [executor.submit(range(8 * i, 8 * i + 8), 2) for i in range(2)]
    while not executor.calls.count(finish_name(executor)):
        executor.step()
    assert polls_of(executor)[-1] == (ids, [])
    for _ in range(2):
        executor.step()
        assert executor.blocks_in_use == 6
    executor.run_until_idle()
    assert executor.blocks_in_use == 0
    assert polls_of(executor)[-3:] == [([], [])] * 3


def test_end_of_sequence_under_overlap_runs_one_step_more(manager: str) -> None:
    executor = make_executor(Script(saves=True), manager=manager, overlap=True)
    executor.submit(range(5), 8, stop_after=4)
    executor.run_until_idle()
    assert len(executor.outputs[1]) == 4 and executor.finish_reasons[1] == "eos"
    assert executor.calls.count("build_connector_meta") == 5
    assert executor.calls.count(finish_name(executor)) == 1


@pytest.mark.parametrize("polls_until_done", [0, 4])
def test_end_of_sequence_reported_twice(manager: str, polls_until_done: int) -> None:
    script = Script(saves=True, polls_until_done=polls_until_done)
    executor = make_executor(script, manager=manager, overlap=True, double_finish=True)
    executor.submit(range(5), 8, stop_after=4)
    executor.run_until_idle()
    finishes = executor.calls.named(finish_name(executor))
    if polls_until_done:
        assert ids_of(finishes[0]) == ids_of(finishes[1]) and len(finishes) == 2
    else:  # the blocks are gone: V1 cannot name them and V2 names none
        assert [len(ids_of(call)) for call in finishes[1:]] == ([0] if manager == "v2" else [])
    assert executor.blocks_in_use == 0


@OVERLAP
def test_order_of_queries_and_allocations(version: str, overlap: bool) -> None:
    executor = make_executor(Script(matches={2: (4, True)}), overlap=overlap)
    first, second = executor.submit(range(9), 2), executor.submit(range(20, 29), 2)
    executor.step()
    expected = ["get_num_new_matched_tokens", "update_state_after_alloc"]
    both = [expected[0]] * 2 + [expected[1]] * 2 if version == NEWEST else expected * 2
    assert [name for name in executor.calls.names() if name in expected] == both
    (output,) = outputs_of(executor)
    assert [data.request_id for data in output.new_requests] == [first]
    assert executor.state_of(second) == "context" and polls_of(executor) == [([], [second])]
    executor.run_until_idle()


def test_views_of_a_request(version: str) -> None:
    executor = make_executor()
    executor.submit(range(9), 2, cache_salt="tenant", lora_task_id=7, multimodal=[[1, 2]], priority=80)
    executor.run_until_idle()
    bound, python, last = executor.leader.requests
    assert bound is not python and last is python
    assert not hasattr(bound, "py_request_id") and python.py_request_id == bound.request_id == 1
    assert bound.is_generation_only_request is False and python.is_generation_only_request() is False
    assert (bound.lora_task_id, bound.multimodal_hashes, bound.prompt_len) == (7, [[1, 2]], 9)
    assert isinstance(bound.cache_salt_id if version == RELEASED else None, int | None)
    assert hasattr(bound, "cache_salt") == (version == NEWEST) and hasattr(bound, "cache_salt_id") != (
        version == NEWEST
    )
    data = outputs_of(executor)[0].new_requests[0]
    if version == NEWEST:
        assert (data.cache_salt, data.priorities, len(data.block_hashes)) == ("tenant", [80, 80, 80], 2)
    else:
        assert not hasattr(data, "block_hashes")


def test_import_side_is_clean_before_and_after() -> None:
    sys.modules["kvbm_trtllm.stale"] = sys
    with World(NEWEST):
        assert find_spec("tensorrt_llm") is not None
        import tensorrt_llm._torch.pyexecutor.connectors.kv_cache_layout as layout

        assert "tokens_per_block" in layout.KvCacheLayout.__dataclass_fields__
        assert "kvbm_trtllm.stale" not in sys.modules
        assert "tensorrt_llm._torch.pyexecutor.kv_cache_connector" not in sys.modules
        import kvbm_trtllm.connector  # noqa: F401

    assert not [name for name in sys.modules if name.startswith(("tensorrt_llm", "kvbm_trtllm"))]
    with World(RELEASED):
        from tensorrt_llm import mpi_rank, mpi_world_size
        from tensorrt_llm._torch.pyexecutor.kv_cache_connector import KvCacheConnectorScheduler

        assert not hasattr(KvCacheConnectorScheduler, "wait_for_initialization")
        assert (mpi_rank(), mpi_world_size()) == (0, 1)
        with pytest.raises(ModuleNotFoundError):
            import tensorrt_llm._torch.pyexecutor.connectors.kv_cache_connector  # noqa: F401


def workload(rng: random.Random, shared: int = 30) -> list[dict[str, Any]]:
    """Requests with common prefixes of many lengths, adapters, salts and early ends."""
    base = [rng.randrange(1000) for _ in range(shared)]
    return [
        {
            "prompt_tokens": base[: rng.randrange(1, shared)]
            + [rng.randrange(1000) for _ in range(rng.randrange(20))],
            "max_new_tokens": rng.randrange(1, 12),
            "stop_after": rng.choice([None, 3]),
            "lora_task_id": rng.choice([None, 1]),
            "cache_salt": rng.choice([None, "tenant"]),
        }
        for _ in range(30)
    ]


def test_outputs_do_not_depend_on_how_they_are_computed(rng: random.Random) -> None:
    requests = workload(rng)
    windows: dict[str, Any] = {"manager": "v2", "num_blocks": 18, "chunk_tokens": 8}
    configs: list[dict[str, Any]] = [
        {},
        {"overlap": True},
        {"overlap": True, "chunk_tokens": 8, "num_blocks": 20},
        {"enable_partial_reuse": True, "chunk_tokens": 8},
        {"enable_block_reuse": False, "kv_factor": 1},
        {"manager": "v2"},
        {"manager": "v2", "overlap": True, "num_blocks": 16},
        {**windows, "attention_windows": (None, 8), "split_kv_regions": True, "slot_padding_bytes": 16},
        {**windows, "attention_windows": (8,), "overlap": True, "num_layers": 3},
    ]
    results = []
    computed = []
    with World(NEWEST):
        for config in configs:
            executor = Executor(None, None, ExecutorConfig(**config))
            for request in requests:
                executor.submit(**request)
            results.append(executor.run_until_idle())
            computed.append(executor.num_computed_tokens)
            assert executor.blocks_in_use == 0
    assert all(result == results[0] for result in results)
    assert computed[0] < computed[4], "blocks are found again"
    assert computed[3] < computed[2], "parts of blocks, too"
    assert len({tuple(tokens) for tokens in results[0].values()}) > 5
