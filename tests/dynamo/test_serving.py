"""kvbm behind NVIDIA Dynamo's frontend, by the line of docs/vllm.md: aggregated, and 1P1D with NIXL."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.dynamo.processes import BLOCK_TOKENS, DEVICE_BLOCKS, MODEL_NAME, Dynamo, dynamo
from tests.engines.client import parse_metrics
from tests.engines.disaggregated import CACHE, DECODE, PREFILL

PROMPT_TOKENS = 1000
FULL_BLOCKS = PROMPT_TOKENS // BLOCK_TOKENS
ANSWER_TOKENS = 16
FILLERS = DEVICE_BLOCKS * BLOCK_TOKENS // PROMPT_TOKENS + 1  # prompts that make the device forget
HOST_CACHE_GB = 0.2
PATIENCE_S = 60.0
POLL_S = 0.1

pytestmark = pytest.mark.timeout(900)


def text_of(number: int) -> str:
    """A prompt of PROMPT_TOKENS printable characters, each a token of the tiny model."""
    draw = random.Random(number)
    return "".join(chr(draw.randint(97, 122)) for _ in range(PROMPT_TOKENS))


class Client:
    """Asks the frontend; Dynamo takes fewer parameters than vLLM's own server."""

    def __init__(self, serving: Dynamo) -> None:
        self._serving = serving
        self.http = httpx.Client(base_url=serving.frontend.base_url, timeout=60.0, trust_env=False)

    def wait_for_the_model(self) -> None:
        """Until the frontend has found the workers."""
        wait_for(lambda: self.http.get("/v1/models").raise_for_status().json()["data"])

    def complete(self, prompt: str, max_tokens: int) -> str:
        """The answer's text."""
        body = {"model": MODEL_NAME, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
        response = self.http.post("/v1/completions", json=body)
        assert response.status_code == httpx.codes.OK, response.text
        return str(response.json()["choices"][0]["text"])

    def kvbm(self) -> dict[str, float]:
        """Metrics of the worker that has kvbm."""
        return parse_metrics(self.http.get(self._serving.workers[0].metrics_url).raise_for_status().text)


def wait_for(condition: Callable[[], Any]) -> None:
    """Patiently."""
    deadline_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(POLL_S)


def two_turns(serving: Dynamo) -> None:
    """A prompt, then it with its answer and more; others until the device has forgotten both; then again."""
    client = Client(serving)
    with client.http:
        client.wait_for_the_model()
        conversation = text_of(1) + client.complete(text_of(1), ANSWER_TOKENS) + text_of(2)
        computed = client.complete(conversation, ANSWER_TOKENS)
        for number in range(FILLERS):
            client.complete(text_of(100 + number), 1)
        wait_for(lambda: client.kvbm()["kvbm_offload_blocks_d2h"] >= (FILLERS + 2) * FULL_BLOCKS)
        before = client.kvbm()
        again = client.complete(conversation, ANSWER_TOKENS)
        after = client.kvbm()
    assert len(computed) == ANSWER_TOKENS
    assert again == computed
    matched_tokens = after["kvbm_matched_tokens"] - before["kvbm_matched_tokens"]
    assert matched_tokens >= 2 * FULL_BLOCKS * BLOCK_TOKENS
    assert after["kvbm_failures_total"] == after["kvbm_guarded_errors_total"] == 0


def test_aggregated(tiny_model: Path, tmp_path: Path) -> None:
    with dynamo(tiny_model, tmp_path, [(HOST_CACHE_GB, CACHE, ())]) as serving:
        two_turns(serving)


@pytest.mark.nightly("two engines more; tests/e2e/test_disaggregated.py has a pair without Dynamo")
def test_one_prefill_and_one_decode_worker(tiny_model: Path, tmp_path: Path) -> None:
    workers = [
        (HOST_CACHE_GB, PREFILL, ("--disaggregation-mode", "prefill")),
        (None, DECODE, ("--disaggregation-mode", "decode")),
    ]
    with dynamo(tiny_model, tmp_path, workers) as serving:
        two_turns(serving)
        log = serving.workers[1].log_path.read_text(errors="replace")
    assert "NIXL compatibility check passed" in log, "the decode worker has fetched nothing"
