"""The double with attention DP, against what NVIDIA's own tests of it assert; what an idle rank's connector
sees.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.trtllm.double import NEWEST, RELEASED, DoubleFailure, Executor, ExecutorConfig, World, installed
from tests.trtllm.mocks import Script, make_classes
from tests.trtllm.test_double import outputs_of, polls_of

IDLE = [
    "build_connector_meta",
    "bind_connector_meta",
    "start_load_kv",
    *["wait_for_layer_load", "save_kv_layer"] * 2,
    "forward_pass_callable",
    "wait_for_save",
    "get_finished",
]


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    """Two ranks."""
    with World(NEWEST, 2) as world:
        yield world


def make(script: Script | None = None, **config: Any) -> Executor:
    """An executor with attention DP and a scripted connector that supports it."""
    classes = make_classes(script or Script())
    for cls in classes:
        cls.supports_attention_dp = True  # type: ignore[attr-defined]
    executor = Executor(*classes, ExecutorConfig(attention_dp=True, **config))
    executor.worker.executor = executor
    return executor


def one_is_idle(rank: int, name: str, overlap: bool) -> dict[str, Any]:
    """Rank 1 has a request with a load, an end with a save; rank 0 has none."""
    script = Script(matches={2: (8, True)}, saves=True, polls_until_done=3)
    executor = make(script, manager=name, overlap=overlap)
    executor.calls.clear()
    requests = [executor.submit(range(12), 4)] if rank else []
    executor.run_until_idle()
    return {
        "requests": requests,
        "names": executor.calls.names(),
        "outputs": [(output.attention_dp_rank, len(output.new_requests)) for output in outputs_of(executor)],
        "scheduled": sum(
            len(output.new_requests + output.cached_requests) for output in outputs_of(executor)
        ),
        "polls": polls_of(executor),
        "answer": executor.outputs,
        "in_use": executor.blocks_in_use,
    }


def waits_in_an_iteration(rank: int, name: str) -> list[str]:
    """Rank 0's two requests are both loaded, and it has no room for a dummy; rank 1 computes."""
    script = Script(matches={1: (4, True), 3: (4, True)}, polls_until_done=2)
    executor = make(script, manager=name, dummies_fit=False)
    for _ in range(2 - rank):
        executor.submit(range(100 * rank, 100 * rank + 8), 2)
    executor.calls.clear()
    executor.step()
    outputs = outputs_of(executor)
    if rank:
        assert len(outputs) == 1
    else:
        assert [len(output.new_requests) for output in outputs] == [0, 2]
        data = outputs[1].new_requests[0]
        assert (data.request_id, data.computed_position, len(data.new_tokens)) == (1, 4, 8)
    names = executor.calls.names()
    executor.run_until_idle()
    assert set(executor.finish_reasons.values()) == {"length"}
    return names


def cancels_while_loading(rank: int, name: str) -> None:
    """A cancel waits for the load."""
    executor = make(Script(matches={1: (4, True)}, polls_until_done=3), manager=name)
    request = executor.submit(range(8), 4)
    executor.step()
    if rank == 0:
        executor.cancel(request)
    executor.step()
    assert rank or (executor.state_of(request), bool(executor.slots_of(request))) == ("loading", True)
    executor.run_until_idle()
    assert executor.finish_reasons[request] == ("length" if rank else "cancelled")


def fails_alone(rank: int) -> None:
    """An error inside the forward pass of one rank."""
    executor = make(Script(raises="save_kv_layer" if rank else ""))
    executor.submit(range(8), 4)
    executor.run_until_idle()


@pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlap"])
@pytest.mark.parametrize("name", ["v1", "v2"])
def test_an_idle_rank_runs_dummies_that_its_connector_does_not_see(
    world: World, name: str, overlap: bool
) -> None:
    idle, busy = world.run(one_is_idle, name, overlap)
    assert busy["requests"] == [2], "ids are of the whole engine"
    assert idle["scheduled"] == 0 and idle["outputs"] == [(0, 0)] * len(idle["outputs"])
    while_forward = idle["names"][: idle["names"].index("get_finished") + 1]
    assert while_forward == IDLE
    # Dummies of rank 1 too, while its only request is parked: as many iterations on both.
    assert len(busy["outputs"]) == len(idle["outputs"]) and {rank for rank, _ in busy["outputs"]} == {1}
    assert sum(count for _, count in busy["outputs"]) == 1 and busy["outputs"][0] == (1, 0)
    assert len(busy["polls"]) == len(idle["polls"]) and not any(any(poll) for poll in idle["polls"])
    assert [poll for poll in busy["polls"] if any(poll)] == [([], [2]), ([2], [])]
    assert idle["in_use"] == busy["in_use"] == 0
    with installed(NEWEST):
        plain = Executor(None, None)
        plain.submit(range(12), 4)
        assert list(plain.run_until_idle().values()) == list(busy["answer"].values())


@pytest.mark.parametrize("name", ["v1", "v2"])
def test_without_room_for_a_dummy_a_rank_waits_for_its_first_load(world: World, name: str) -> None:
    waiting, ready = world.run(waits_in_an_iteration, name)
    start = ["build_connector_meta", "bind_connector_meta", "start_load_kv"]
    polls = ["get_finished"] * 3
    first = waiting.index("build_connector_meta")
    assert waiting[first:] == [*start, *polls, *start, *IDLE[3:]]
    assert ready.count("start_load_kv") == ready.count("get_finished") == 1


@pytest.mark.parametrize("name", ["v1", "v2"])
def test_a_cancel_waits_for_the_load(world: World, name: str) -> None:
    world.run(cancels_while_loading, name)


def test_a_forward_pass_that_fails_on_one_rank_is_found() -> None:
    with World(NEWEST, 2) as world, pytest.raises(DoubleFailure, match="the others wait"):
        world.run(fails_alone)


def test_classes_have_to_opt_in() -> None:
    with World(NEWEST), pytest.raises(DoubleFailure, match="supports_attention_dp"):
        Executor(*make_classes(Script()), ExecutorConfig(attention_dp=True))
    with World(RELEASED), pytest.raises(ValueError, match="no connectors with attention DP"):
        Executor(*make_classes(Script()), ExecutorConfig(attention_dp=True))
