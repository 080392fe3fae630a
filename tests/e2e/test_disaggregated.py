"""Prefill and decode servers as deploy/launch starts them, with the real NixlConnector and the proxy between.

Answers are compared with those of one server that computes everything itself.
"""

from __future__ import annotations

import random
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.engines.client import parse_metrics
from tests.engines.disaggregated import ANSWER_TOKENS, DEVICE_BLOCKS, HOST_CACHE_GB, PROMPT_TOKENS, wait_for
from tests.engines.launched import Launched
from tests.engines.vllm_server import ONE_THREAD, ServerOptions

BLOCK_TOKENS = 32
TURN_TOKENS = 200

pytestmark = pytest.mark.timeout(600)


class Client:
    """Asks the proxy, or one of the servers behind it."""

    def __init__(self, launched: Launched, prefills: Sequence[str], decodes: Sequence[str]) -> None:
        self.launched, self.prefills, self.decodes = launched, prefills, decodes
        self.http = httpx.Client(timeout=240.0, trust_env=False)

    def wait_for_all(self) -> None:
        """Until every server answers."""
        url = f"{self.launched.base_url}/health"
        wait_for(lambda: all(self.http.get(url).json().values()))

    def ask(self, prompt: list[int], session: str = "", url: str | None = None, **more: Any) -> list[int]:
        """The tokens of the answer."""
        body = {
            "model": str(self.launched.options.model),
            "prompt": prompt,
            "max_tokens": ANSWER_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            **more,
        }
        headers = {"X-Session-ID": session} if session else {}
        where = url or self.launched.base_url
        response = self.http.post(f"{where}/v1/completions", json=body, headers=headers)
        return [int(token) for token in response.raise_for_status().json()["choices"][0]["token_ids"]]

    def compute(self, prompt: list[int]) -> list[int]:
        """The answer of one server alone, which has forgotten everything."""
        self.forget_devices()
        return self.ask(prompt, url=self.decodes[0], kv_transfer_params={"kvbm": {"skip": True}})

    def forget_devices(self) -> None:
        """Empties the devices' prefix caches, which may still be held for a moment, and nothing of kvbm's."""
        for url in (*self.prefills, *self.decodes):
            reset = f"{url}/reset_prefix_cache"
            wait_for(lambda reset=reset: self.http.post(reset).json().get("success", True))

    def kvbm(self, name: str, workers: Sequence[int]) -> float:
        """A metric of kvbm's, over these workers."""
        return sum(self._metrics(self.launched.metrics_url_of(worker))[name] for worker in workers)

    def wait_until_stored(self, workers: Sequence[int], num_blocks: float) -> None:
        """No answer waits for it."""
        wait_for(lambda: self.kvbm("kvbm_offload_blocks_d2h", workers) >= num_blocks)

    def from_nixl_tokens(self) -> float:
        """What the decode servers were brought."""
        pages = [self._metrics(f"{url}/metrics") for url in self.decodes]
        return sum(page["vllm:external_prefix_cache_hits_total"] for page in pages)

    def _metrics(self, url: str) -> dict[str, float]:
        return parse_metrics(self.http.get(url).raise_for_status().text)


def launch(script: str, model: Path, log: Path, each: int, **env: str) -> Iterator[Client]:
    """``each`` prefill servers and as many decode servers."""
    options = ServerOptions(
        model, DEVICE_BLOCKS, HOST_CACHE_GB, max_model_len_tokens=4096, env={**ONE_THREAD, **env}
    )
    with Launched(options, log, script, workers=2 * each) as launched:
        prefills = [launched.url_of("PREFILL_PORT", i) for i in range(each)]
        decodes = [launched.url_of("DECODE_PORT", i) for i in range(each)]
        client = Client(launched, prefills, decodes)
        with client.http:
            client.wait_for_all()
            yield client
        launched.tell(signal.SIGINT)
        wait_for(lambda: launched.processes() == [])  # Ctrl-C ends engines, and what they have started
    assert launched.left == []


@pytest.fixture(scope="module")
def pair(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    """1P1D. The decode server has kvbm, too."""
    log = tmp_path_factory.mktemp("disaggregated") / "log"
    yield from launch("disagg_kvbm.sh", tiny_model, log, 1, DECODE_CPU_CACHE_GB=str(HOST_CACHE_GB))


def two_turns(client: Client, draw: random.Random, session: str) -> list[int]:
    """The second one finds the first one's prompt in kvbm. Returns the conversation."""
    prompt = [draw.randint(36, 129) for _ in range(PROMPT_TOKENS)]
    prefills = range(len(client.prefills))
    for turn in range(2):
        client.forget_devices()
        stored_blocks = client.kvbm("kvbm_offload_blocks_d2h", prefills)
        matched_tokens = client.kvbm("kvbm_matched_tokens", prefills)
        brought_tokens = client.from_nixl_tokens()
        answer = client.ask(prompt, session)
        new_blocks = len(prompt) // BLOCK_TOKENS - turn * (PROMPT_TOKENS // BLOCK_TOKENS)
        client.wait_until_stored(prefills, stored_blocks + new_blocks)
        matched_tokens = client.kvbm("kvbm_matched_tokens", prefills) - matched_tokens
        assert matched_tokens == turn * (PROMPT_TOKENS // BLOCK_TOKENS) * BLOCK_TOKENS
        assert client.from_nixl_tokens() - brought_tokens == len(prompt)
        assert client.compute(prompt) == answer
        prompt += [*answer, *(draw.randint(36, 129) for _ in range(TURN_TOKENS))]
    return prompt


def test_two_turns(pair: Client) -> None:
    conversation = two_turns(pair, random.Random(7), "")
    # The decode server has kept what NIXL brought and what it computed: answers, too.
    decode = (len(pair.prefills),)
    pair.forget_devices()
    before_tokens = pair.kvbm("kvbm_matched_tokens", decode)
    answer = pair.ask(conversation, url=pair.decodes[0])
    second_turn_tokens = len(conversation) - TURN_TOKENS - 1
    matched_tokens = pair.kvbm("kvbm_matched_tokens", decode) - before_tokens
    assert matched_tokens == second_turn_tokens // BLOCK_TOKENS * BLOCK_TOKENS
    assert pair.compute(conversation) == answer


@pytest.mark.nightly("starts four engines; a pair runs always")
def test_two_of_each(tiny_model: Path, tmp_path: Path) -> None:
    for client in launch("disagg_kvbm_2p2d.sh", tiny_model, tmp_path / "log", 2):
        for session in range(4):
            two_turns(client, random.Random(session), f"session {session}")
        used = [client.kvbm("kvbm_matched_tokens", [worker]) for worker in range(2)]
        assert all(used), f"one prefill server has had all sessions: {used}"
