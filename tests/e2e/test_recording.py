"""A real server under several users at once finds what kvbm plan makes of its recording."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from kvbm_core.replay.machine import FILTER, Sizes, replay
from kvbm_core.replay.trace import read_trace
from kvbm_core.sizing.model import read_model
from kvbm_core.sizing.reuse import Reuse
from tests.engines.client import CacheCounts, EngineClient
from tests.engines.vllm_server import ServerOptions, VllmServer

BLOCK_TOKENS = 32
DEVICE_BLOCKS, HOST_BLOCKS = 90, 250
"""vLLM's own cache has one block less: its null block."""
USERS, TALKS, TURNS = 6, 6, 4
MOST_OFF = 0.02
SYSTEM = range(3, 259)


async def talk(client: EngineClient, rng: random.Random) -> int:
    """One user; answers the tokens of all prompts."""
    asked = 0
    for _ in range(TALKS):
        prompt = [*SYSTEM, *(rng.randrange(3, 450) for _ in range(300))]
        for _ in range(TURNS):
            await client.complete(prompt, 16)
            asked += len(prompt)
            prompt += [rng.randrange(3, 450) for _ in range(180)]
            await asyncio.sleep(0.6 * rng.random())  # thinks, so that users come in another order
    return asked


async def talk_all(server: VllmServer, model: Path, seed: int) -> tuple[int, CacheCounts]:
    async with EngineClient(server.base_url, str(model), server.metrics_url) as client:
        users = (talk(client, random.Random(seed + number)) for number in range(USERS))
        return sum(await asyncio.gather(*users)), await client.cache_counts()


@pytest.mark.nightly("a real server for a minute")
def test_a_real_server_finds_what_is_predicted(tiny_model: Path, tmp_path: Path, rng: random.Random) -> None:
    block_bytes = read_model(str(tiny_model)).kv(1, "float32").stored_bytes * BLOCK_TOKENS
    options = ServerOptions(
        model=tiny_model,
        device_blocks=DEVICE_BLOCKS,
        host_cache_gb=(HOST_BLOCKS + 0.5) * block_bytes / 1e9,
        block_size_tokens=BLOCK_TOKENS,
        max_model_len_tokens=2048,
        max_batched_tokens=2048,
        env={"DYN_KVBM_ENABLE_RECORD": "1", "KVBM_RECORD_DIR": str(tmp_path / "recorded")},
    )
    with VllmServer(options, tmp_path / "vllm.log") as server:
        asked, counts = asyncio.run(talk_all(server, tiny_model, rng.randrange(1000)))
    (folder,) = (tmp_path / "recorded").iterdir()
    trace = read_trace(folder)
    assert len(trace.requests) == USERS * TALKS * TURNS and trace.prompt_tokens == asked
    reuse, sizes = Reuse(trace), Sizes(DEVICE_BLOCKS - 1, HOST_BLOCKS, 0)
    predicted = reuse.hit_rate(reuse.found(sizes, FILTER))
    assert predicted == pytest.approx(replay(trace, sizes, FILTER).hit_rate)
    reached = (counts.device_tokens + counts.kvbm_tokens) / asked
    assert counts.kvbm_tokens > 0.1 * asked, "without hits in the host nothing is shown"
    assert abs(predicted - reached) <= MOST_OFF
