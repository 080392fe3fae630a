"""Random lives of random executors under a connector that makes no mistake: the double must find none."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.effort import tries
from tests.trtllm.double import NEWEST, RELEASED, Executor, ExecutorConfig, World
from tests.trtllm.double.contract import current
from tests.trtllm.mocks import Script, make_classes

NUM_REQUESTS = 30


def random_config(rng: random.Random) -> dict[str, Any]:
    """An executor that this contract allows."""
    is_v2 = current().is_newest and rng.random() < 0.6
    config: dict[str, Any] = {
        "manager": "v2" if is_v2 else "v1",
        "overlap": rng.random() < 0.5,
        "chunk_tokens": rng.choice([None, 4, 8, 16]),
        "max_batch_size": rng.choice([1, 4, 16]),
        "num_blocks": rng.choice([16, 24, 40]),
        "double_finish": rng.random() < 0.5,
        "cuda_graphs": rng.random() < 0.3,
        "enable_block_reuse": rng.random() < 0.8,
    }
    if is_v2:
        config["attention_windows"] = rng.choice([(None,), (None, 8), (6,), (None, 5, 9)])
        config["num_layers"] = 3
        config["split_kv_regions"] = rng.random() < 0.3
        config["refuse_growth"] = rng.random() < 0.3
    elif config["enable_block_reuse"]:
        config["enable_partial_reuse"] = rng.random() < 0.3
    return config


def random_requests(rng: random.Random) -> list[dict[str, Any]]:
    """Requests with common prefixes, adapters and early ends."""
    base = [rng.randrange(1000) for _ in range(30)]
    return [
        {
            "prompt_tokens": base[: rng.randrange(1, 30)]
            + [rng.randrange(1000) for _ in range(rng.randrange(20))],
            "max_new_tokens": rng.randrange(1, 12),
            "stop_after": rng.choice([None, 3]),
            "lora_task_id": rng.choice([None, 1]),
        }
        for _ in range(NUM_REQUESTS)
    ]


def make_offering(rng: random.Random, config: dict[str, Any]) -> Executor:
    """An executor whose connector offers at random and brings what it offered."""
    leader_class, worker_class = make_classes(
        Script(saves=rng.random() < 0.5, polls_until_done=rng.randrange(4))
    )
    base: Any = leader_class
    offers = random.Random(rng.random())

    class Leader(base):
        def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
            num_tokens = offers.choice([0, 4, 8, 12, 16])
            if num_computed_tokens + num_tokens >= request.prompt_len or not num_tokens:
                self.matched.pop(request.request_id, None)
                return 0, False
            is_async = offers.random() < 0.5
            self.matched[request.request_id] = (num_computed_tokens, is_async)
            return num_tokens, is_async

    executor = Executor(Leader, worker_class, ExecutorConfig(**config))
    executor.worker.executor = executor
    return executor


def disturb(executor: Executor, rng: random.Random) -> None:
    """What clients and a bad day do to an executor."""
    if rng.random() < 0.05:
        executor.cancel(rng.randrange(1, NUM_REQUESTS + 1))
    if executor.config.manager == "v2" and rng.random() < 0.1:
        executor.preempt(rng.randrange(1, NUM_REQUESTS + 1))
    if rng.random() < 0.01:
        executor.fail_next_forward()
    if rng.random() < 0.05:
        executor.drop_device_cache()


def live(rank: int, seed: int) -> dict[int, list[int]]:
    """One life; what ended by itself is right, and what was broken off is right as far as it goes."""
    rng = random.Random(seed)
    config, requests = random_config(rng), random_requests(rng)
    plain = Executor(None, None)
    for request in requests:
        plain.submit(**request)
    expected = plain.run_until_idle()
    executor = make_offering(rng, config)
    while requests or not executor.is_idle:
        for _ in range(min(rng.randrange(4), len(requests))):
            executor.submit(**requests.pop(0))
        disturb(executor, rng)
        executor.step()
        assert executor.num_steps < 10_000, "the double hangs"
    for request_id, tokens in executor.outputs.items():
        if executor.finish_reasons[request_id] in {"length", "eos"}:
            assert tokens == expected[request_id]
        assert tokens == expected[request_id][: len(tokens)]
    assert len(executor.outputs) == NUM_REQUESTS and executor.blocks_in_use == executor.blocks_lost
    return executor.outputs


@pytest.mark.parametrize("version", [RELEASED, NEWEST])
def test_random_lives(version: str, rng: random.Random) -> None:
    with World(version) as world:
        for _ in range(tries(8, nightly=60)):
            world.run(live, rng.randrange(2**32))
