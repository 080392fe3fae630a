"""Replicas of one model on one machine: what one has computed is a hit in the other, by way of a directory in
memory (tmpfs).
"""

from __future__ import annotations

import asyncio
import random
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engines.client import EngineClient
from tests.engines.ports import HOST
from tests.engines.vllm_server import ServerOptions, VllmServer

TMPFS = Path("/dev/shm")
REPLICAS = 2
BLOCK = 32
PROMPT_TOKENS = 640
PROMPT_BLOCKS = PROMPT_TOKENS // BLOCK
ANSWER_TOKENS = 8

pytestmark = pytest.mark.timeout(600)


@pytest.fixture
def share() -> Iterator[Path]:
    """A directory in memory."""
    folder = Path(tempfile.mkdtemp(prefix="kvbm-test-", dir=TMPFS))
    yield folder
    shutil.rmtree(folder)


def client_of(server: VllmServer, replica: int) -> EngineClient:
    """Whose requests one replica gets."""
    metrics_url = f"http://{HOST}:{server.metrics_port + replica}/metrics"
    headers = {"X-data-parallel-rank": str(replica)}
    return EngineClient(server.base_url, str(server.options.model), metrics_url, headers)


@pytest.mark.nightly("a server of two engines: two minutes; tests/vllm has directory and ports")
def test_a_replica_finds_what_another_has_computed(
    tiny_model: Path, tmp_path: Path, share: Path, rng: random.Random
) -> None:
    settings = {
        "KVBM_REMOTE_URL": f"file://{share}",
        "KVBM_REMOTE_LOAD": "always",  # models this small are computed sooner
        "KVBM_REMOTE_WAIT_S": "20",
    }
    arguments = ("--data-parallel-size", str(REPLICAS))
    options = ServerOptions(
        tiny_model, 129, 0.1, max_model_len_tokens=1024, env=settings, arguments=arguments
    )
    prompt = [rng.randint(36, 129) for _ in range(PROMPT_TOKENS)]

    async def scenario(server: VllmServer) -> None:
        async with client_of(server, 0) as first, client_of(server, 1) as second:
            computed = await first.complete(prompt, ANSWER_TOKENS)
            stored = await first.kvbm_metrics_once(
                lambda now: now["kvbm_offload_blocks_d2o"] >= PROMPT_BLOCKS
            )
            assert stored["kvbm_offload_blocks_d2o"] >= PROMPT_BLOCKS
            before = await second.kvbm_metrics()
            assert before["kvbm_offload_blocks_d2h"] == 0, "the other replica has computed nothing yet"
            found = await second.complete(prompt, ANSWER_TOKENS)
            after = await second.kvbm_metrics()
            assert found.token_ids == computed.token_ids
            assert after["kvbm_onboard_blocks_o2d"] >= PROMPT_BLOCKS - 1
            assert after["kvbm_object_read_failures"] == 0

    with VllmServer(options, tmp_path / "vllm.log") as server:
        asyncio.run(scenario(server))
    assert server.processes() == []
