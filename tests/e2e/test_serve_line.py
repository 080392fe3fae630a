"""The guides' own ``vllm serve`` command line, as a user types it, against a real server, and an operator's
orders to it: over its private socket by the command, over HTTP with the token.
"""

from __future__ import annotations

import asyncio
import json
import random
import socket
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner

from kvbm_core.cli.main import app
from tests.engines.client import EngineClient, parse_metrics
from tests.engines.ports import HOST, free_port
from tests.engines.process import ServerError
from tests.engines.vllm_server import ServerOptions, VllmServer

DEVICE_BLOCKS = 129  # of 32 tokens
HOST_CACHE_GB = 0.2
HOST_BLOCKS, BLOCK_TOKENS = 128, 32
PROMPT_TOKENS = 1000
FULL_BLOCKS = PROMPT_TOKENS // BLOCK_TOKENS
ANSWER_TOKENS = 16
PINNED_TOKENS, FLOOD_TOKENS = 320, 1024
TOKEN = "a token that nobody else has"
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


def prompt_ids(seed: int, length: int = PROMPT_TOKENS) -> list[int]:
    """Printable tokens of the tiny model."""
    draw = random.Random(seed)
    return [draw.randint(36, 129) for _ in range(length)]


@pytest.fixture(scope="module")
def orders_address() -> str:
    """Where the server takes orders over HTTP."""
    return f"{HOST}:{free_port()}"


@pytest.fixture(scope="module")
def here() -> Iterator[Path]:
    """The private sockets of this module's server, and of no other."""
    with tempfile.TemporaryDirectory(prefix="kvbm-") as folder:
        yield Path(folder)


@pytest.fixture(scope="module")
def options(tiny_model: Path) -> ServerOptions:
    """A server with kvbm and a small device cache."""
    return ServerOptions(tiny_model, DEVICE_BLOCKS, HOST_CACHE_GB, max_model_len_tokens=4096)


@pytest.fixture(scope="module")
def server(
    options: ServerOptions, here: Path, orders_address: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[VllmServer]:
    """One server by the guides' line, with a small host cache, for all tests that only ask it things."""
    token = here / "token"
    token.write_text(TOKEN, encoding="ascii")
    token.chmod(0o600)
    env = {
        "KVBM_CONTROL": "socket,http",
        "KVBM_CONTROL_HTTP": orders_address,
        "KVBM_CONTROL_TOKEN_FILE": str(token),
        "DYN_KVBM_CPU_CACHE_OVERRIDE_NUM_BLOCKS": str(HOST_BLOCKS),
        "TMPDIR": str(here),
    }
    running = VllmServer(replace(options, env=env), tmp_path_factory.mktemp("serve") / "vllm.log")
    with running:
        yield running
    assert running.processes() == []
    assert not list(here.glob("kvbm-*/*")), "a socket, a lock or a secret is there after SIGTERM"


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
            assert loaded["kvbm_matched_tokens"] - stored["kvbm_matched_tokens"] == FULL_BLOCKS * BLOCK_TOKENS
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
            assert matched == [0, 0, FULL_BLOCKS * BLOCK_TOKENS]

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


def test_a_pin_and_a_reset_of_a_salt_hold_on_a_real_server(
    server: VllmServer, here: Path, orders_address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(here))
    system = prompt_ids(5, PINNED_TOKENS)
    tokens = tmp_path / "tokens.json"
    tokens.write_text(json.dumps(system), encoding="ascii")
    pinned = CliRunner().invoke(app, ["pin", "system", "--all", "--tokens", str(tokens), "--json"])
    assert pinned.exit_code == 0, pinned.output
    asyncio.run(_serve_a_pinned_prompt(server, f"http://{orders_address}/v1/orders", system))


async def _serve_a_pinned_prompt(server: VllmServer, url: str, system: list[int]) -> None:
    async with client_of(server) as client, httpx.AsyncClient(trust_env=False, timeout=60) as http:

        async def hits(**how: str) -> int:
            assert await client.reset_prefix_cache()
            before = await client.cache_counts()
            await client.complete(system, ANSWER_TOKENS, **how)
            return (await client.cache_counts()).since(before).kvbm_tokens

        async def order(**what: object) -> httpx.Response:
            return await http.post(url, json=what, headers={"Authorization": f"Bearer {TOKEN}"})

        await client.complete(system, ANSWER_TOKENS)
        for number in range(4 * HOST_BLOCKS * BLOCK_TOKENS // FLOOD_TOKENS):
            await client.complete(prompt_ids(1000 + number, FLOOD_TOKENS), 1)
        assert await hits() >= PINNED_TOKENS - BLOCK_TOKENS
        await client.complete(system, ANSWER_TOKENS, cache_salt="a")
        await client.complete(system, ANSWER_TOKENS, cache_salt="b")
        assert (await http.post(url, json={"verb": "reset", "salt": "a"})).status_code == 401
        assert await hits(cache_salt="a") > 0
        assert (await order(verb="reset", salt="a", wait_s=0)).status_code in {200, 202}
        assert await hits(cache_salt="a") == 0
        assert await hits(cache_salt="b") > 0 and await hits() > 0
        found = (await order(verb="lookup", tokens=system)).json()["found"]
        assert found["host_blocks"] == found["num_blocks"] == PINNED_TOKENS // BLOCK_TOKENS


def test_weights_that_are_loaded_again_by_an_order_are_noticed(server: VllmServer) -> None:
    """vLLM's core is a process of its own here, which was begun before kvbm was loaded."""

    async def scenario() -> None:
        async with client_of(server) as client, httpx.AsyncClient(trust_env=False, timeout=60) as http:
            prompt = prompt_ids(9)

            async def hit_tokens() -> float:
                assert await client.reset_prefix_cache()
                before = await client.cache_counts()
                await client.complete(prompt, ANSWER_TOKENS)
                return (await client.cache_counts()).since(before).kvbm_tokens

            await client.complete(prompt, ANSWER_TOKENS)
            assert await hit_tokens() == FULL_BLOCKS * BLOCK_TOKENS
            order = {"method": "reload_weights"}
            (await http.post(f"{server.base_url}/collective_rpc", json=order)).raise_for_status()
            assert await hit_tokens() == 0

    asyncio.run(scenario())


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
        assert metrics["vllm:external_prefix_cache_hits_total"] == FULL_BLOCKS * BLOCK_TOKENS
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
    # Python's resource tracker may say two lines after us.
    assert reason[reason.index("kvbm: ") :] in server.log_path.read_text().splitlines()[-3:]
    assert server.processes() == []
