"""One prefill and one decode server by the guides' own lines, with the real NixlConnector between them.

The prefill server's PdConnector has kvbm first and NIXL second; the decode server has no kvbm and is asked
for the right answers too, from its first token on.
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

from tests.engines import REPOSITORY
from tests.engines.client import parse_metrics
from tests.engines.disaggregated import DECODE, PREFILL, nixl_environment
from tests.engines.vllm_server import ServerOptions, VllmServer

BLOCK_TOKENS = 32
DEVICE_BLOCKS = 129
PROMPT_TOKENS = 1000
TURN_TOKENS = 200
ANSWER_TOKENS = 24
PATIENCE_S = 30.0
REMOTE_DECODE = {"do_remote_decode": True, "do_remote_prefill": False}

pytestmark = pytest.mark.timeout(600)


class PrefillAndDecode:
    """What a proxy in front of the two servers does."""

    def __init__(self, prefill: VllmServer, decode: VllmServer) -> None:
        self.prefill, self.decode = prefill, decode
        self.http = httpx.Client(timeout=240.0, trust_env=False)

    def ask(self, prompt: list[int]) -> list[int]:
        """The answer, whose prompt one server computes or finds and whose tokens the other one makes."""
        handed = self._complete(self.prefill, prompt, 1, kv_transfer_params=REMOTE_DECODE)
        assert handed["kv_transfer_params"]["do_remote_prefill"]
        return self._tokens(
            self._complete(
                self.decode, prompt, ANSWER_TOKENS, kv_transfer_params=handed["kv_transfer_params"]
            )
        )

    def ask_without_kvbm(self, prompt: list[int]) -> list[int]:
        """The answer of the decode server alone, which computes everything."""
        self.forget_device(self.decode)
        return self._tokens(self._complete(self.decode, prompt, ANSWER_TOKENS))

    def forget_device(self, server: VllmServer) -> None:
        """Empties the device's prefix cache, which may still be held for a moment, and nothing of kvbm's."""
        deadline_s = time.monotonic() + PATIENCE_S
        while not self.http.post(f"{server.base_url}/reset_prefix_cache").json().get("success", True):
            assert time.monotonic() < deadline_s

    def metrics(self, url: str) -> dict[str, float]:
        """All samples of one page."""
        return parse_metrics(self.http.get(url).raise_for_status().text)

    def metric_once(self, name: str, at_least: float) -> float:
        """kvbm's metric when it has got there."""
        deadline_s = time.monotonic() + PATIENCE_S
        while (value := self.metrics(self.prefill.metrics_url)[name]) < at_least:
            assert time.monotonic() < deadline_s, f"{name} is {value}"
        return value

    def _complete(self, server: VllmServer, prompt: list[int], max_tokens: int, **more: Any) -> Any:
        body = {
            "model": str(server.options.model),
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            **more,
        }
        return self.http.post(f"{server.base_url}/v1/completions", json=body).raise_for_status().json()

    def _tokens(self, answer: Any) -> list[int]:
        return [int(token) for token in answer["choices"][0]["token_ids"]]


@pytest.fixture(scope="module")
def pair(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PrefillAndDecode]:
    """Both servers, started side by side."""
    logs = tmp_path_factory.mktemp("disaggregated")

    def server(name: str, host_cache_gb: float | None, config: dict[str, Any]) -> VllmServer:
        options = ServerOptions(
            tiny_model,
            DEVICE_BLOCKS,
            host_cache_gb,
            kv_transfer_config=config,
            max_model_len_tokens=4096,
            env=nixl_environment(),
        )
        return VllmServer(options, logs / f"{name}.log")

    prefill, decode = server("prefill", 0.2, PREFILL), server("decode", None, DECODE)
    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor() as pool:
        patch.setenv("PYTHONPATH", str(REPOSITORY), prepend=os.pathsep)
        try:
            list(pool.map(VllmServer.start, (prefill, decode)))
            asking = PrefillAndDecode(prefill, decode)
            with asking.http:
                yield asking
        finally:
            list(pool.map(VllmServer.stop, (prefill, decode)))
    assert prefill.processes() == decode.processes() == []


def test_two_turns(pair: PrefillAndDecode) -> None:
    """The second turn finds the first one's prompt in kvbm; both answers are those of a server without it."""
    draw = random.Random(7)
    prompt = [draw.randint(36, 129) for _ in range(PROMPT_TOKENS)]
    for turn in range(2):
        before = pair.metrics(pair.prefill.metrics_url)
        pair.forget_device(pair.prefill)
        pair.forget_device(pair.decode)
        answer = pair.ask(prompt)
        full_blocks = len(prompt) // BLOCK_TOKENS
        pair.metric_once("kvbm_offload_blocks_d2h", full_blocks)
        matched = (
            pair.metrics(pair.prefill.metrics_url)["kvbm_matched_tokens"] - before["kvbm_matched_tokens"]
        )
        assert matched == turn * (PROMPT_TOKENS // BLOCK_TOKENS) * BLOCK_TOKENS
        handed = pair.metrics(f"{pair.decode.base_url}/metrics")["vllm:external_prefix_cache_hits_total"]
        assert handed > 0
        assert pair.ask_without_kvbm(prompt) == answer
        prompt += [*answer, *(draw.randint(36, 129) for _ in range(TURN_TOKENS))]
