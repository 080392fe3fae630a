"""The guides' own ``vllm serve`` command line, as a user types it, against a real server."""

from __future__ import annotations

import asyncio
import random
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from tests.engines.client import EngineClient, parse_metrics
from tests.engines.ports import HOST
from tests.engines.process import ServerError
from tests.engines.vllm_server import ServerOptions, VllmServer

DEVICE_BLOCKS = 129  # of 32 tokens
HOST_CACHE_GB = 0.2
PROMPT_TOKENS = 1000
FULL_BLOCKS = PROMPT_TOKENS // 32
ANSWER_TOKENS = 16
OLDER_MODULE = "dynamo.llm.vllm_integration.connector"
GUIDE_METRICS = {
    "kvbm_matched_tokens",
    "kvbm_offload_blocks_d2h",
    "kvbm_offload_blocks_h2d",
    "kvbm_offload_blocks_d2d",
    "kvbm_onboard_blocks_h2d",
    "kvbm_onboard_blocks_d2d",
    "kvbm_host_cache_hit_rate",
    "kvbm_disk_cache_hit_rate",
}
START_TIMEOUT_S = 240.0

pytestmark = pytest.mark.timeout(600)


def prompt_ids(seed: int) -> list[int]:
    """Printable tokens of the tiny model."""
    draw = random.Random(seed)
    return [draw.randint(36, 129) for _ in range(PROMPT_TOKENS)]


@pytest.fixture(scope="module")
def options(tiny_model: Path) -> ServerOptions:
    """A server with kvbm and a small device cache."""
    return ServerOptions(tiny_model, DEVICE_BLOCKS, HOST_CACHE_GB, max_model_len_tokens=4096)


@pytest.fixture(scope="module")
def server(options: ServerOptions, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    """One server by the guides' line, for all tests that only ask it things."""
    running = VllmServer(options, tmp_path_factory.mktemp("serve") / "vllm.log")
    with running:
        yield running
    assert running.processes() == []


def client_of(server: VllmServer) -> EngineClient:
    """A client of this server."""
    return EngineClient(server.base_url, str(server.options.model), server.metrics_url)


def test_prompt_comes_back_after_the_device_cache_is_reset(server: VllmServer) -> None:
    """KVBM's own acceptance: offload > 0 and onboard == 0 first; after a reset onboard > 0 and the same
    text.
    """

    async def scenario() -> None:
        async with client_of(server) as client:
            prompt = prompt_ids(1)
            start = await client.kvbm_metrics()
            first = await client.complete(prompt, ANSWER_TOKENS)
            wanted = start["kvbm_offload_blocks_d2h"] + FULL_BLOCKS
            stored = await client.kvbm_metrics_once(lambda now: now["kvbm_offload_blocks_d2h"] >= wanted)
            assert stored["kvbm_offload_blocks_d2h"] >= wanted
            assert stored["kvbm_onboard_blocks_h2d"] == start["kvbm_onboard_blocks_h2d"]
            assert stored["kvbm_matched_tokens"] == start["kvbm_matched_tokens"]

            assert await client.reset_prefix_cache()
            again = await client.complete(prompt, ANSWER_TOKENS)
            loaded = await client.kvbm_metrics()
            assert loaded["kvbm_onboard_blocks_h2d"] - stored["kvbm_onboard_blocks_h2d"] == FULL_BLOCKS
            assert loaded["kvbm_matched_tokens"] - stored["kvbm_matched_tokens"] == FULL_BLOCKS * 32
            assert (again.text, again.token_ids) == (first.text, first.token_ids)

    asyncio.run(scenario())


def test_resetting_kvbm_too_forgets_the_prompt(server: VllmServer) -> None:
    """/reset_prefix_cache?reset_external=true empties kvbm's tiers as well: the prompt is computed again."""

    async def scenario() -> None:
        async with client_of(server) as client:
            prompt = prompt_ids(2)
            first = await client.complete(prompt, ANSWER_TOKENS)
            assert await client.reset_prefix_cache(with_kvbm=True)
            before = await client.cache_counts()
            again = await client.complete(prompt, ANSWER_TOKENS)
            found = (await client.cache_counts()).since(before)
            assert (found.kvbm_tokens, found.device_tokens) == (0, 0)
            assert again.token_ids == first.token_ids

    asyncio.run(scenario())


def test_another_salt_is_another_cache(server: VllmServer) -> None:
    """A prompt stored under one cache_salt is not found under another, nor without one."""

    async def scenario() -> None:
        async with client_of(server) as client:
            prompt = prompt_ids(3)
            await client.complete(prompt, ANSWER_TOKENS, cache_salt="tenant a")
            assert await client.reset_prefix_cache()
            matched: list[int] = []
            for salt in ({"cache_salt": "tenant b"}, {}, {"cache_salt": "tenant a"}):
                before = await client.cache_counts()
                await client.complete(prompt, ANSWER_TOKENS, **salt)
                matched.append((await client.cache_counts()).since(before).kvbm_tokens)
            assert matched == [0, 0, FULL_BLOCKS * 32]

    asyncio.run(scenario())


def test_metrics_endpoint_has_the_guides_names(server: VllmServer) -> None:
    """The eight names of the guides, without suffixes, on DYN_KVBM_METRICS_PORT."""
    text = httpx.get(server.metrics_url, trust_env=False).raise_for_status().text
    assert set(parse_metrics(text)) >= GUIDE_METRICS
    types = {line.split()[2]: line.split()[3] for line in text.splitlines() if line.startswith("# TYPE")}
    assert {name: types[name] for name in GUIDE_METRICS if name.endswith("rate")} == {
        "kvbm_host_cache_hit_rate": "gauge",
        "kvbm_disk_cache_hit_rate": "gauge",
    }
    assert all(types[name] == "counter" for name in GUIDE_METRICS if not name.endswith("rate"))


@pytest.mark.nightly("one more start; tests/vllm/test_startup.py, test_names.py have the line, the path")
def test_older_module_path_and_a_metrics_port_in_use(options: ServerOptions, tmp_path: Path) -> None:
    """The 0.6.0 guide's module path serves just as well; a taken metrics port is a warning that names it."""
    with socket.socket() as taken:
        taken.bind((HOST, 0))
        taken.listen()
        port = taken.getsockname()[1]
        wanted = replace(options, connector_module=OLDER_MODULE, metrics_port=port)
        with VllmServer(wanted, tmp_path / "vllm.log") as server:
            log = server.log_path.read_text(errors="replace")
            warnings = [
                line for line in log.splitlines() if str(port) in line and "DYN_KVBM_METRICS_PORT" in line
            ]
            assert len(warnings) == 1, log[-3000:]
            assert "WARNING" in warnings[0]
            asyncio.run(_host_hit_without_metrics(server))
    assert server.processes() == []


async def _host_hit_without_metrics(server: VllmServer) -> None:
    async with EngineClient(server.base_url, str(server.options.model)) as client:
        prompt = prompt_ids(4)
        first = await client.complete(prompt, ANSWER_TOKENS)
        assert await client.reset_prefix_cache()
        again = await client.complete(prompt, ANSWER_TOKENS)
        metrics = await client.engine_metrics()
        assert metrics["vllm:external_prefix_cache_hits_total"] == FULL_BLOCKS * 32
        assert again.token_ids == first.token_ids


@pytest.mark.nightly("a start more of each; tests/vllm/test_startup.py has every line")
@pytest.mark.parametrize(
    ("host_cache_gb", "words"),
    [
        pytest.param("lots", ("DYN_KVBM_CPU_CACHE_GB=lots",), id="unreadable"),
        pytest.param("900000", ("DYN_KVBM_CPU_CACHE_GB", "GB"), id="more memory than there is"),
        pytest.param("", ("DYN_KVBM_CPU_CACHE_GB",), id="no tier configured"),
    ],
)
def test_bad_host_cache_is_refused_in_one_line(
    options: ServerOptions, tmp_path: Path, host_cache_gb: str, words: tuple[str, ...]
) -> None:
    """The engine does not start, and the reason is one line that names the variable and the value."""
    server = VllmServer(replace(options, host_cache_gb=host_cache_gb), tmp_path / "vllm.log")
    with pytest.raises(ServerError) as refused:
        server.start(START_TIMEOUT_S)
    reason = str(refused.value).splitlines()[0]
    assert "kvbm: " in reason
    assert all(word in reason for word in words), reason
    assert server.processes() == []
