"""The double's own checks can fail: each mistake that a connector can make is made once."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest

from tests.trtllm.double import NEWEST, RELEASED, DoubleFailure, Executor, ExecutorConfig, World
from tests.trtllm.mocks import Script, make_executor


@pytest.fixture(params=[RELEASED, NEWEST])
def version(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each contract in turn, installed."""
    with World(request.param):
        yield request.param


def run(script: Script, num_prompt_tokens: int = 12, **config: Any) -> Executor:
    """One request through a scripted connector."""
    executor = make_executor(script, **config)
    executor.submit(range(num_prompt_tokens), 4)
    executor.run_until_idle()
    return executor


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("position", [0, 3, 5, 7])
def test_every_wrong_byte_is_found(version: str, position: int, is_async: bool) -> None:
    run(Script(matches={1: (8, is_async)}))
    where = rf"wrong KV: request 1, block {position // 4} .*position {position}, layer 0, kv 0"
    with pytest.raises(DoubleFailure, match=where):
        # An async load is written before its request is parked, so only the later forward can notice.
        run(Script(matches={1: (8, is_async)}, wrong_position=position))


def test_a_load_that_does_not_happen_is_found(version: str) -> None:
    with pytest.raises(DoubleFailure, match="never written KV: request 1, block 0"):
        run(Script(matches={1: (8, False)}, loads_nothing=True))


@pytest.mark.parametrize("position", [6, 12, 13])
def test_a_block_that_is_overwritten_later_is_found(version: str, position: int) -> None:
    executor = make_executor()
    executor.submit(range(12), 8)
    for _ in range(3):
        executor.step()
    block, offset = divmod(position, 4)
    executor.memory.view(1, 1)[executor.slots_of(1)[0][block], 0, offset, 7] ^= 1
    with pytest.raises(DoubleFailure, match=rf"block {block} .*position {position}, layer 1, kv 1"):
        executor.step()


def test_a_load_lost_with_a_dropped_batch_is_found() -> None:
    with World(NEWEST):
        executor = make_executor(Script(matches={1: (4, False)}))
        executor.submit(range(9), 2)
        executor.drop_next_batch()
        with pytest.raises(DoubleFailure, match="never written"):
            executor.run_until_idle()


@pytest.mark.parametrize(
    ("script", "message"),
    [
        (Script(unknown_id=77), "returned id 77 in loading"),
        (Script(saves=True, repeats_ids=True), "returned id 1 in saving"),
        (Script(unpicklable=True), "cannot be pickled"),
        (Script(saves=None), "returned None where a bool is due"),
        (Script(matches={1: None}), "returned None"),
        (Script(matches={1: (4, None)}), "returned None where a bool is due"),
        (Script(matches={1: (4, 0)}), "returned 0 where a bool is due"),
        (Script(matches={1: (-4, False)}), "returned -4 tokens"),
        (Script(matches={1: (0, True)}), "load_kv_async must be False"),
        (Script(matches={1: (12, False)}), ">= promptLen 12"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_answers_that_end_the_loop(version: str, script: Script, message: str) -> None:
    with pytest.raises(DoubleFailure, match=message):
        run(script)


@pytest.mark.parametrize(
    "name",
    [
        "get_num_new_matched_tokens",
        "update_state_after_alloc",
        "build_connector_meta",
        "bind_connector_meta",
        "start_load_kv",
        "get_finished",
        "request_finished",
    ],
)
def test_exceptions_that_end_the_loop(version: str, name: str) -> None:
    with pytest.raises(DoubleFailure, match=f"{name} raised OSError"):
        run(Script(raises=name))


def test_a_load_that_never_ends_is_a_hang(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.trtllm.double.executor.PATIENCE_S", 0.0)
    with pytest.raises(DoubleFailure, match=r"not idle.*\{1: 'loading'\}"):
        run(Script(matches={1: (8, True)}, polls_until_done=1 << 60))


def test_identity_decides_what_is_found_on_the_device(version: str, rng: random.Random) -> None:
    prompt = [rng.randrange(1000) for _ in range(12)]
    executor = make_executor()
    identities: list[dict[str, Any]] = [{}, {"lora_task_id": 1}, {"cache_salt": "a"}, {"multimodal": [[1]]}]
    for identity in (*identities, *identities):
        executor.submit(prompt, 3, **identity)
        executor.run_until_idle()
    hits = [call.values["num_computed_tokens"] for call in executor.calls.named("get_num_new_matched_tokens")]
    assert hits == [0] * 4 + [8] * 4
    assert len({tuple(tokens) for tokens in executor.outputs.values()}) == 4
    executor.drop_device_cache()
    executor.submit(prompt, 3)
    executor.run_until_idle()
    assert executor.calls.named("get_num_new_matched_tokens")[-1].values["num_computed_tokens"] == 0


def test_partial_reuse_is_not_aligned(version: str) -> None:
    executor = make_executor(enable_partial_reuse=True)
    for tail in (1, 2):
        executor.submit([*range(10), *[tail] * 4], 3)
        executor.run_until_idle()
    assert executor.calls.named("get_num_new_matched_tokens")[1].values["num_computed_tokens"] == 10


def test_impossible_configurations() -> None:
    with World(RELEASED):
        with pytest.raises(ValueError, match="no V2"):
            Executor(None, None, ExecutorConfig(manager="v2"))
        executor = Executor(None, None)
        for call in (executor.drop_next_batch, lambda: executor.preempt(1)):
            with pytest.raises(ValueError):
                call()
        with pytest.raises(ValueError, match="fit"):
            executor.submit(range(1000), 2)
    with pytest.raises(ValueError, match="windows"):
        ExecutorConfig(attention_windows=(8,))
