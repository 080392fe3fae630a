"""Prefill servers, decode servers and the proxy; each of them is killed, and comes back.

A request fails or is computed, those after it work, and what was on the prefill server's disk is found again:
what was asked twice.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.engines import REPOSITORY
from tests.engines.client import parse_metrics
from tests.engines.disaggregated import (
    ANSWER_TOKENS,
    DEVICE_BLOCKS,
    HOST_CACHE_GB,
    PROMPT_TOKENS,
    Proxy,
    kvbm_and_nixl,
    nixl_environment,
    wait_for,
)
from tests.engines.vllm_server import ONE_THREAD, ServerOptions, VllmServer

BLOCK_TOKENS = 32
FULL_BLOCKS = PROMPT_TOKENS // BLOCK_TOKENS
TURN_TOKENS = 200
LIMIT_S = 120.0

pytestmark = [
    pytest.mark.timeout(2400),
    pytest.mark.nightly("starts thirteen engines; tests/vllm/test_pd.py has loads that fail"),
]


class Servers:
    """The proxy, and ``each`` prefill servers and as many decode servers."""

    def __init__(self, model: Path, folder: Path, each: int) -> None:
        def server(name: str, role: str, **env: str) -> VllmServer:
            options = ServerOptions(
                model,
                DEVICE_BLOCKS,
                HOST_CACHE_GB,
                kv_transfer_config=kvbm_and_nixl(role),
                max_model_len_tokens=4096,
                env={**ONE_THREAD, **nixl_environment(), **env},
            )
            return VllmServer(options, folder / f"{name}.log")

        def prefill(number: int) -> VllmServer:
            return server(
                f"prefill-{number}",
                "kv_producer",
                DYN_KVBM_DISK_CACHE_GB="0.2",
                DYN_KVBM_DISK_CACHE_DIR=str(folder / f"disk-{number}"),
            )

        self.prefills = [prefill(number) for number in range(each)]
        self.decodes = [server(f"decode-{number}", "kv_consumer") for number in range(each)]
        self.proxy = Proxy(
            folder / "proxy.log",
            [one.base_url for one in self.prefills],
            [one.base_url for one in self.decodes],
        )
        self.http = httpx.Client(timeout=LIMIT_S, trust_env=False)

    @property
    def prefill(self) -> VllmServer:
        """The only one."""
        (one,) = self.prefills
        return one

    @property
    def decode(self) -> VllmServer:
        """The only one."""
        (one,) = self.decodes
        return one

    @property
    def workers(self) -> list[VllmServer]:
        """All but the proxy."""
        return [*self.prefills, *self.decodes]

    def body(self, prompt: list[int], **more: Any) -> dict[str, Any]:
        """Of a request."""
        return {
            "model": str(self.prefills[0].options.model),
            "prompt": prompt,
            "max_tokens": ANSWER_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            **more,
        }

    def post(self, url: str, prompt: list[int], session: str = "", **more: Any) -> Any:
        """What the server says; HTTPError if it fails."""
        headers = {"X-Session-ID": session} if session else {}
        response = self.http.post(f"{url}/v1/completions", json=self.body(prompt, **more), headers=headers)
        return response.raise_for_status().json()

    def ask(self, prompt: list[int], url: str = "", **more: Any) -> list[int]:
        """The tokens of the answer."""
        answer = self.post(url or self.proxy.base_url, prompt, **more)
        return [int(token) for token in answer["choices"][0]["token_ids"]]

    def forget_devices(self) -> None:
        """Empties their prefix caches, which may still be held for a moment, and nothing of kvbm's."""
        for server in self.workers:
            reset = partial(self.http.post, f"{server.base_url}/reset_prefix_cache")
            wait_for(lambda reset=reset: reset().json().get("success", True))  # type: ignore[misc]

    def compute(self, prompt: list[int]) -> list[int]:
        """The answer of a decode server alone."""
        self.forget_devices()
        return self.ask(prompt, self.decodes[0].base_url, kv_transfer_params={"kvbm": {"skip": True}})

    def step(self) -> None:
        """Makes the prefill servers' engines work: an idle one does not hear that its disk has written."""
        for server in self.prefills:
            self.post(server.base_url, [40], max_tokens=1, kv_transfer_params={"kvbm": {"skip": True}})

    def metric(self, name: str, server: VllmServer) -> float:
        """Of kvbm's."""
        return parse_metrics(self.http.get(server.metrics_url).raise_for_status().text)[name]


@contextmanager
def serving(model: Path, folder: Path, each: int) -> Iterator[Servers]:
    """All of them run."""
    servers = Servers(model, folder, each)
    with ExitStack() as stack, pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(REPOSITORY), prepend=os.pathsep)
        for server in (*servers.workers, servers.proxy):
            stack.callback(server.stop)
        stack.enter_context(servers.http)
        with ThreadPoolExecutor(2) as pool:  # as many as start in time on two cores
            list(pool.map(VllmServer.start, servers.workers))
        servers.proxy.start()
        yield servers
    assert not [one for server in (*servers.workers, servers.proxy) for one in server.processes()]


def again(server: VllmServer | Proxy) -> None:
    """Killed, as an out-of-memory killer would, and started at the same address."""
    server.kill()
    server.stop()
    server.start()


def test_each_of_them_may_be_killed(tiny_model: Path, tmp_path: Path) -> None:
    with serving(tiny_model, tmp_path, 1) as three:
        kill_each(three)


def kill_each(three: Servers) -> None:
    draw = random.Random(11)
    prompts = [[draw.randint(36, 129) for _ in range(PROMPT_TOKENS)] for _ in range(4)]
    answers = [three.compute(prompt) for prompt in prompts]
    assert three.ask(prompts[0]) == three.ask(prompts[0]) == answers[0]
    wait_for(
        lambda: three.step() is None and three.metric("kvbm_offload_blocks_h2d", three.prefill) >= FULL_BLOCKS
    )

    # The prefill server dies when it has computed a prompt, before the decode server has fetched it.
    handed = three.post(
        three.prefill.base_url,
        prompts[1],
        max_tokens=1,
        kv_transfer_params={"do_remote_decode": True, "do_remote_prefill": False},
    )
    three.prefill.kill()
    params = handed["kv_transfer_params"]
    assert three.ask(prompts[1], three.decode.base_url, kv_transfer_params=params) == answers[1]
    assert three.ask(prompts[2]) == answers[2], "the decode server computes while there is no other"
    three.prefill.stop()
    three.prefill.start()
    assert three.ask(prompts[3]) == answers[3]
    assert three.ask([*prompts[0], *answers[0]]) == three.compute([*prompts[0], *answers[0]])
    from_disk = three.metric("kvbm_onboard_blocks_d2d", three.prefill)
    assert from_disk >= FULL_BLOCKS, "what was stored before the restart has not been found"

    # The decode server dies in the middle of an answer.
    with (
        pytest.raises(httpx.HTTPError),
        three.http.stream(
            "POST",
            f"{three.proxy.base_url}/v1/completions",
            json=three.body(prompts[0], max_tokens=2000, stream=True),
        ) as stream,
    ):
        for _ in stream.iter_bytes():
            three.decode.kill()
    with pytest.raises(httpx.HTTPStatusError, match="503"):
        three.ask(prompts[1])
    three.decode.stop()
    three.decode.start()
    assert [three.ask(prompt) for prompt in prompts] == answers

    again(three.proxy)
    assert three.ask(prompts[2]) == answers[2]
    for server in (three.prefill, three.decode):
        assert three.metric("kvbm_guarded_errors_total", server) == 0


def test_two_of_each_and_all_are_restarted_between_turns(tiny_model: Path, tmp_path: Path) -> None:
    """A second turn finds the first one's prompt on the prefill side, be it on that server's disk."""
    draw = random.Random(17)
    prompts = {
        f"session {number}": [draw.randint(36, 129) for _ in range(PROMPT_TOKENS)] for number in range(4)
    }
    with serving(tiny_model, tmp_path, 2) as servers:
        a_turn(servers, prompts, draw, is_first=True)
        for victim in (*servers.prefills, *servers.decodes):
            again(victim)
            a_turn(servers, prompts, draw)
        for server in servers.workers:
            assert servers.metric("kvbm_guarded_errors_total", server) == 0


def a_turn(
    servers: Servers, prompts: dict[str, list[int]], draw: random.Random, *, is_first: bool = False
) -> None:
    """Of each conversation."""

    def total(name: str) -> float:
        return sum(servers.metric(name, server) for server in servers.prefills)

    used = set()
    for session, prompt in prompts.items():
        servers.forget_devices()
        known_blocks = 0 if is_first else (len(prompt) - TURN_TOKENS - ANSWER_TOKENS) // BLOCK_TOKENS
        stored = [servers.metric("kvbm_offload_blocks_h2d", server) for server in servers.prefills]
        matched_tokens = total("kvbm_matched_tokens")
        answer = servers.ask(prompt, session=session)
        assert total("kvbm_matched_tokens") - matched_tokens == known_blocks * BLOCK_TOKENS
        assert servers.ask(prompt, session=session) == answer
        num_stored = sum(stored) + len(prompt) // BLOCK_TOKENS - known_blocks
        wait_for(lambda: servers.step() is None and total("kvbm_offload_blocks_h2d") >= num_stored)  # noqa: B023
        used |= {
            number
            for number, server in enumerate(servers.prefills)
            if servers.metric("kvbm_offload_blocks_h2d", server) > stored[number]
        }
        assert servers.compute(prompt) == answer
        prompt += [*answer, *(draw.randint(36, 129) for _ in range(TURN_TOKENS))]
    assert len(used) == len(servers.prefills), "one prefill server has had all sessions"
