"""kvbm behind NVIDIA Dynamo's frontend, as deploy/launch/dynamo starts it: a router with two workers, and
prefill and decode workers with NIXL between them.
"""

from __future__ import annotations

import itertools
import os
import random
import re
import signal
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.conftest import DYNAMO_PYTHON
from tests.engines.client import parse_metrics
from tests.engines.disaggregated import DEVICE_BLOCKS, HOST_CACHE_GB, PROMPT_TOKENS, wait_for
from tests.engines.etcd_server import EtcdServer, find_etcd
from tests.engines.launched import LAUNCH, Launched
from tests.engines.vllm_server import ONE_THREAD, ServerOptions

BLOCK_TOKENS = 32
MODEL_NAME = "tiny"
FULL_BLOCKS = PROMPT_TOKENS // BLOCK_TOKENS
ANSWER_TOKENS = 16
FILLERS = DEVICE_BLOCKS * BLOCK_TOKENS // PROMPT_TOKENS + 1  # prompts that make the device forget

FRESH = itertools.count(1000)

pytestmark = pytest.mark.timeout(900)
in_full = pytest.mark.nightly("starts five engines and more; one worker and test_router.py run always")


def text_of(number: int) -> str:
    """A prompt of PROMPT_TOKENS printable characters, each a token of the tiny model."""
    draw = random.Random(number)
    return "".join(chr(draw.randint(97, 122)) for _ in range(PROMPT_TOKENS))


def conversation(client: Client, number: int) -> tuple[str, str]:
    """A prompt with its answer and more, and the answer to all of it."""
    prompt = text_of(number)
    asked = prompt + client.complete(prompt, ANSWER_TOKENS) + text_of(number + 1)
    return asked, client.complete(asked, ANSWER_TOKENS)


def forget_devices(client: Client, workers: Sequence[int], worker: str = "backend_instance_id") -> None:
    """With prompts that nobody has asked for; what was there is in kvbm. ``worker``: the name by which a
    request says which one.
    """
    wanted_blocks = client.kvbm("kvbm_offload_blocks_d2h") + len(workers) * FILLERS * FULL_BLOCKS
    for each in workers:
        for _ in range(FILLERS):
            client.complete(text_of(next(FRESH)), 1, **{worker: each})
    wait_for(lambda: client.kvbm("kvbm_offload_blocks_d2h") >= wanted_blocks)


class Client:
    """Asks the frontend; Dynamo takes fewer parameters than vLLM's own server."""

    def __init__(self, launched: Launched) -> None:
        self.launched = launched
        self.http = httpx.Client(base_url=launched.base_url, timeout=60.0, trust_env=False)

    def wait_for_workers(self, *components: str) -> None:
        """Until the frontend has found one worker for each of ``components``, and the model."""
        wait_for(lambda: sorted(self._components()) == sorted(components))
        wait_for(lambda: self.http.get("/v1/models").raise_for_status().json()["data"])

    def _components(self) -> list[str]:
        return [each["component"] for each in self.instances()]

    def instances(self) -> list[dict[str, Any]]:
        """The workers that the frontend knows."""
        found = self.http.get("/health").json().get("instances", [])
        return [each for each in found if each["endpoint"] == "generate"]

    def complete(self, prompt: str, max_tokens: int, **nvext: Any) -> str:
        """The answer's text."""
        return self.ask(prompt, max_tokens, **nvext)[0]

    def ask(self, prompt: str, max_tokens: int, **nvext: Any) -> tuple[str, int]:
        """The answer's text, and the worker that gave it."""
        body = {
            "model": MODEL_NAME,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "nvext": {"extra_fields": ["worker_id"], **nvext},
        }
        response = self.http.post("/v1/completions", json=body)
        assert response.status_code == httpx.codes.OK, response.text
        answer = response.json()
        return str(answer["choices"][0]["text"]), int(answer["nvext"]["worker_id"]["decode_worker_id"])

    def kvbm(self, name: str, worker: int | None = None) -> float:
        """A metric of kvbm's, of one worker or of all that have kvbm."""
        workers = self.launched.workers if worker is None else [worker]
        pages = [self.http.get(self.launched.metrics_url_of(each)).raise_for_status() for each in workers]
        return sum(parse_metrics(page.text)[name] for page in pages)

    def assert_no_errors(self) -> None:
        """Of kvbm's."""
        assert self.kvbm("kvbm_failures_total") == self.kvbm("kvbm_guarded_errors_total") == 0


def launch(
    script: str, model: Path, log: Path, workers: int, *components: str, **env: str
) -> Iterator[Client]:
    """Dynamo, as a user starts it; ``workers``: how many have kvbm."""
    options = ServerOptions(
        model,
        DEVICE_BLOCKS,
        HOST_CACHE_GB,
        max_model_len_tokens=4096,
        arguments=("--served-model-name", MODEL_NAME),
        env={**ONE_THREAD, **env},
    )
    name = f"dynamo/{script}"
    with Launched(options, log, name, workers=max(workers, len(components)), python=DYNAMO_PYTHON) as running:
        running.workers = range(workers)
        client = Client(running)
        with client.http:
            client.wait_for_workers(*components)
            yield client
        running.tell(signal.SIGINT)
        wait_for(lambda: running.processes() == [])  # Ctrl-C ends all of it


# ---------------------------------------------------------------- aggregated


def test_what_a_workers_device_has_forgotten_comes_back(tiny_model: Path, tmp_path: Path) -> None:
    for one in launch("agg_kvbm.sh", tiny_model, tmp_path / "log", 1, "backend"):
        prompts = [text_of(number) for number in range(3)]
        answers = [one.complete(prompt, ANSWER_TOKENS) for prompt in prompts]
        forget_devices(one, [each["instance_id"] for each in one.instances()])
        before_tokens = one.kvbm("kvbm_matched_tokens")
        assert [one.complete(prompt, ANSWER_TOKENS) for prompt in prompts] == answers
        matched_tokens = one.kvbm("kvbm_matched_tokens") - before_tokens
        assert matched_tokens >= len(prompts) * FULL_BLOCKS * BLOCK_TOKENS
        one.assert_no_errors()


@in_full
def test_two_workers_behind_the_router(tiny_model: Path, tmp_path: Path) -> None:
    for two in launch("agg_kvbm.sh", tiny_model, tmp_path / "log", 2, "backend", "backend", WORKERS="2"):
        a_request_goes_to_the_worker_that_has_its_prefix_in_host_memory(two)
        clear_kv_blocks_clears_kvbm_too(two)


def a_request_goes_to_the_worker_that_has_its_prefix_in_host_memory(two: Client) -> None:
    """The device has forgotten it: kvbm's events alone can tell."""
    instances = [each["instance_id"] for each in two.instances()]
    prompts = [text_of(number) for number in range(6)]
    owners = [instances[number % 2] for number in range(6)]
    answers = [
        two.ask(prompt, ANSWER_TOKENS, backend_instance_id=owner)
        for prompt, owner in zip(prompts, owners, strict=True)
    ]
    assert [worker for _, worker in answers] == owners
    forget_devices(two, instances)
    matched_tokens = two.kvbm("kvbm_matched_tokens")
    again = [two.ask(prompt, ANSWER_TOKENS) for prompt in prompts]
    assert again == answers
    matched_tokens = two.kvbm("kvbm_matched_tokens") - matched_tokens
    assert matched_tokens >= len(prompts) * FULL_BLOCKS * BLOCK_TOKENS, "the device still had them"
    text = two.launched.log_path.read_text(errors="replace")
    streams = set(re.findall(r"subscribing to consolidator at (tcp://\S+)", text))
    assert len(streams) == 2, (
        "Dynamo reads other events than the consolidator's, or one worker's for another's"
    )
    two.assert_no_errors()


def clear_kv_blocks_clears_kvbm_too(two: Client) -> None:
    """Dynamo's order, by our script."""
    (first, _) = (each["instance_id"] for each in two.instances())
    answer = two.complete(text_of(50), ANSWER_TOKENS, backend_instance_id=first)
    before_tokens = two.kvbm("kvbm_matched_tokens")
    assert two.http.post("/clear_kv_blocks").status_code == httpx.codes.NOT_FOUND, "say so in docs/dynamo.md"
    command = [str(DYNAMO_PYTHON), str(LAUNCH / "dynamo" / "clear_kv_blocks.py")]
    environment = {**os.environ, "DYN_FILE_KV": str(two.launched.log_path.parent / "discovery")}
    said = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert said.returncode == 0, said.stderr
    assert said.stdout.count("success") == 2, said.stdout
    assert two.complete(text_of(50), ANSWER_TOKENS, backend_instance_id=first) == answer
    assert two.kvbm("kvbm_matched_tokens") == before_tokens
    two.assert_no_errors()


# ---------------------------------------------------------------- prefill and decode workers


@pytest.fixture(scope="module")
def computed(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[tuple[str, str]]:
    """Two conversations with one worker that does all."""
    log = tmp_path_factory.mktemp("computed") / "log"
    found = []
    for client in launch("agg_kvbm.sh", tiny_model, log, 1, "backend"):
        found += [conversation(client, number) for number in (1, 3)]
    return found


def two_turns(client: Client, expected: Sequence[tuple[str, str]]) -> None:
    """Conversations as one worker has them; then the prefill workers' devices forget, and kvbm does not."""
    assert [conversation(client, number) for number in (1, 3)[: len(expected)]] == list(expected)
    prefills = [each["instance_id"] for each in client.instances() if each["component"] == "prefill"]
    forget_devices(client, prefills, "prefill_worker_id")
    for asked, answer in expected:
        before_tokens = client.kvbm("kvbm_matched_tokens")
        assert client.complete(asked, ANSWER_TOKENS) == answer
        matched_tokens = client.kvbm("kvbm_matched_tokens") - before_tokens
        assert matched_tokens >= 2 * FULL_BLOCKS * BLOCK_TOKENS
    client.assert_no_errors()


@in_full
def test_one_prefill_and_one_decode_worker(
    tiny_model: Path, tmp_path: Path, computed: list[tuple[str, str]]
) -> None:
    if find_etcd() is None:
        pytest.skip("NOT RUN: Dynamo's workers with etcd; etcd is missing")
    log = tmp_path / "log"
    with EtcdServer(tmp_path) as etcd:
        components = ("prefill", "backend")
        for client in launch("disagg_kvbm.sh", tiny_model, log, 1, *components, ETCD_ENDPOINTS=etcd.url):
            two_turns(client, computed[:1])
            assert not (tmp_path / "discovery").exists()
            text = client.launched.log_path.read_text(errors="replace")
            assert "NIXL compatibility check passed" in text, "the decode worker has fetched nothing"


@in_full
def test_two_of_each(tiny_model: Path, tmp_path: Path, computed: list[tuple[str, str]]) -> None:
    components = ["prefill", "prefill", "backend", "backend"]
    for client in launch("disagg_kvbm_2p2d.sh", tiny_model, tmp_path / "log", 2, *components):
        two_turns(client, computed)
