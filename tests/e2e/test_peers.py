"""Two real vLLM servers and a router's hint: what the first one has computed comes from its memory, and from
its disk, to the second one, over an encrypted wire.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvbm_core.fleet.keys import new_keys
from tests.engines import PATIENCE_S, REPOSITORY
from tests.engines.client import parse_metrics
from tests.engines.ports import HOST, free_port
from tests.engines.vllm_server import ONE_THREAD, ServerOptions, VllmServer

BLOCK_TOKENS = 32
PROMPT_BLOCKS = 30
PROMPT_TOKENS = PROMPT_BLOCKS * BLOCK_TOKENS + 5
ANSWER_TOKENS = 16
SHORT_PROMPT = [3, 4, 5]
"""Less than a block."""

pytestmark = [
    pytest.mark.nightly(
        "two servers at once; tests/vllm/test_scheduler_peers.py says the same of one process"
    ),
    pytest.mark.timeout(600),
]


class Peers:
    """The servers, and what a router says."""

    def __init__(self, first: VllmServer, second: VllmServer, port: int) -> None:
        self.first, self.second = first, second
        self.hint = {"router_hint": {"source_control_endpoint": f"tcp://{HOST}:{port}", "block_hashes": []}}
        self.http = httpx.Client(timeout=240.0, trust_env=False)

    def ask(self, server: VllmServer, prompt: list[int], **params: Any) -> list[int]:
        body = {
            "model": str(server.options.model),
            "prompt": prompt,
            "max_tokens": ANSWER_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        if params:
            body["kv_transfer_params"] = params
        answer = self.http.post(f"{server.base_url}/v1/completions", json=body).raise_for_status().json()
        return [int(token) for token in answer["choices"][0]["token_ids"]]

    def metric(self, server: VllmServer, name: str) -> float:
        return parse_metrics(self.http.get(server.metrics_url).raise_for_status().text)[name]

    def metric_once(self, server: VllmServer, name: str, at_least: float) -> float:
        """A vLLM that has nothing to do makes no step, and takes in no results."""
        deadline_s = time.monotonic() + PATIENCE_S
        while (value := self.metric(server, name)) < at_least:
            assert time.monotonic() < deadline_s, f"{name} is {value}"
            self.ask(server, SHORT_PROMPT)
        return value

    def forget(self, server: VllmServer) -> None:
        """The device and all tiers."""
        reset = f"{server.base_url}/reset_prefix_cache?reset_external=true"
        deadline_s = time.monotonic() + PATIENCE_S
        while not self.http.post(reset).json().get("success", True):
            assert time.monotonic() < deadline_s


@pytest.fixture(scope="module")
def peers(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Peers]:
    folder = tmp_path_factory.mktemp("peers")
    new_keys(folder / "keys", HOST)  # the key of them all
    port = free_port()
    common = {
        "KVBM_PEERS": "zmq",
        "KVBM_CURVE_KEY_FILE": str(folder / "keys" / f"{HOST}.key_secret"),
        "KVBM_CURVE_ALLOWED": str(folder / "keys"),
        "KVBM_REMOTE_LOAD": "always",
        "KVBM_REMOTE_WAIT_S": "20",
        "KVBM_PEER_DEADLINE_S": "10",
        "DYN_KVBM_CPU_CACHE_OVERRIDE_NUM_BLOCKS": str(4 * PROMPT_BLOCKS),
        **ONE_THREAD,
    }
    disk = {
        "KVBM_PEER_BIND": f"{HOST}:{port}",
        "DYN_KVBM_CPU_CACHE_OVERRIDE_NUM_BLOCKS": str(PROMPT_BLOCKS + 8),
        "DYN_KVBM_DISK_CACHE_OVERRIDE_NUM_BLOCKS": str(8 * PROMPT_BLOCKS),
        "DYN_KVBM_DISK_CACHE_DIR": str(folder / "disk"),
    }

    def server(name: str, **env: str) -> VllmServer:
        options = ServerOptions(
            tiny_model, 3 * PROMPT_BLOCKS, 0.2, max_model_len_tokens=2048, env={**common, **env}
        )
        return VllmServer(options, folder / f"{name}.log")

    first, second = server("first", **disk), server("second", KVBM_PEER_BIND=f"{HOST}:{free_port()}")
    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor() as pool:
        patch.setenv("PYTHONPATH", str(REPOSITORY), prepend=os.pathsep)
        try:
            list(pool.map(VllmServer.start, (first, second)))
            asking = Peers(first, second, port)
            with asking.http:
                yield asking
        finally:
            list(pool.map(VllmServer.stop, (first, second)))
    assert first.processes() == second.processes() == []


def prompts_of(rng: random.Random, count: int) -> list[list[int]]:
    return [[rng.randrange(3, 500) for _ in range(PROMPT_TOKENS)] for _ in range(count)]


def test_what_the_first_has_in_memory_and_on_disk_comes_from_there(peers: Peers, rng: random.Random) -> None:
    prompts = prompts_of(rng, 4)
    expected = list[list[int]]()
    for number, prompt in enumerate(prompts, 1):
        expected.append(peers.ask(peers.first, prompt))
        assert peers.ask(peers.first, prompt) == expected[-1]  # what is used again goes to the disk
        # Before the next one takes its place in memory: in the end only the last one is there.
        peers.metric_once(peers.first, "kvbm_offload_blocks_h2d", number * PROMPT_BLOCKS)
    before = peers.metric(peers.second, "kvbm_peer_fetched_blocks_total")
    for prompt, answer in zip(prompts, expected, strict=True):
        assert peers.ask(peers.second, prompt, **peers.hint) == answer
    fetched = peers.metric(peers.second, "kvbm_peer_fetched_blocks_total") - before
    assert fetched >= 4 * (PROMPT_BLOCKS - 1)
    assert peers.metric(peers.first, "kvbm_peer_lent_blocks_total") >= fetched
    assert peers.metric(peers.second, "kvbm_object_read_failures") == 0
    peers.forget(peers.second)
    for prompt, answer in zip(prompts, expected, strict=True):  # without a hint, computed
        assert peers.ask(peers.second, prompt) == answer
    assert peers.metric(peers.second, "kvbm_peer_fetched_blocks_total") - before == fetched


def test_the_first_ends_and_the_second_serves(peers: Peers, rng: random.Random) -> None:
    (prompt,) = prompts_of(rng, 1)
    expected = peers.ask(peers.first, prompt)
    peers.first.stop()
    started_s = time.monotonic()
    assert peers.ask(peers.second, prompt, **peers.hint) == expected
    assert time.monotonic() - started_s < PATIENCE_S
    assert peers.metric(peers.second, "kvbm_guarded_errors_total") == 0
