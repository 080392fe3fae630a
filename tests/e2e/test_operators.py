"""Operators' orders to a real server: over its private socket by the command, over HTTP with the token."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner

from kvbm_core.cli.main import app
from tests.engines.client import EngineClient
from tests.engines.ports import free_port
from tests.engines.vllm_server import ServerOptions, VllmServer
from tests.unit.control_bench import here

__all__ = ["here"]

HOST_BLOCKS, BLOCK_TOKENS = 64, 32
PROMPT_TOKENS, ANSWER_TOKENS = 320, 4
FLOOD_TOKENS = 1024
TOKEN = "a token that nobody else has"

pytestmark = pytest.mark.timeout(600)


def prompt_ids(seed: int, length: int) -> list[int]:
    """Printable tokens of the tiny model."""
    draw = random.Random(seed)
    return [draw.randint(36, 129) for _ in range(length)]


def test_a_pin_and_a_reset_of_a_salt_hold_on_a_real_server(
    tiny_model: Path, here: Path, tmp_path: Path
) -> None:
    token = tmp_path / "token"
    token.write_text(TOKEN, encoding="ascii")
    token.chmod(0o600)
    url = f"http://127.0.0.1:{free_port()}/v1/orders"
    env = {
        "KVBM_CONTROL": "socket,http",
        "KVBM_CONTROL_HTTP": url.split("/")[2],
        "KVBM_CONTROL_TOKEN_FILE": str(token),
        "DYN_KVBM_CPU_CACHE_OVERRIDE_NUM_BLOCKS": str(HOST_BLOCKS),
        "TMPDIR": str(here),
    }
    options = ServerOptions(tiny_model, 129, 0.2, max_model_len_tokens=4096, env=env)
    system = prompt_ids(1, PROMPT_TOKENS)
    tokens = tmp_path / "tokens.json"
    tokens.write_text(json.dumps(system), encoding="ascii")
    with VllmServer(options, tmp_path / "vllm.log") as server:
        pinned = CliRunner().invoke(app, ["pin", "system", "--all", "--tokens", str(tokens), "--json"])
        assert pinned.exit_code == 0, pinned.output
        asyncio.run(_serve(server, url, system))


async def _serve(server: VllmServer, url: str, system: list[int]) -> None:
    client = EngineClient(server.base_url, str(server.options.model), server.metrics_url)
    async with client, httpx.AsyncClient(trust_env=False, timeout=60) as http:

        async def hits(**how: str) -> int:
            assert await client.reset_prefix_cache()
            before = await client.cache_counts()
            await client.complete(system, ANSWER_TOKENS, **how)
            return (await client.cache_counts()).since(before).kvbm_tokens

        async def order(**what: object) -> httpx.Response:
            return await http.post(url, json=what, headers={"Authorization": f"Bearer {TOKEN}"})

        await client.complete(system, ANSWER_TOKENS)
        for number in range(10 * HOST_BLOCKS * BLOCK_TOKENS // FLOOD_TOKENS):
            await client.complete(prompt_ids(1000 + number, FLOOD_TOKENS), 1)
        assert await hits() >= PROMPT_TOKENS - BLOCK_TOKENS
        await client.complete(system, ANSWER_TOKENS, cache_salt="a")
        await client.complete(system, ANSWER_TOKENS, cache_salt="b")
        assert (await http.post(url, json={"verb": "reset", "salt": "a"})).status_code == 401
        assert await hits(cache_salt="a") > 0
        assert (await order(verb="reset", salt="a", wait_s=0)).status_code in {200, 202}
        assert await hits(cache_salt="a") == 0
        assert await hits(cache_salt="b") > 0 and await hits() > 0
        found = (await order(verb="lookup", tokens=system)).json()["found"]
        assert found["host_blocks"] == found["num_blocks"] == PROMPT_TOKENS // BLOCK_TOKENS
