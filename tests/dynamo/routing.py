"""Run by Dynamo's own Python: its router before workers that have nothing of a worker but their KV events.

``python routing.py BLOCK_TOKENS ENDPOINT...``: one worker for each endpoint, whose events Dynamo's publisher
reads there, as ``dynamo.vllm`` sets it up. Reads lines of JSON, lists of tokens; writes for each what the
router knows, and chooses.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Sequence

from dynamo.runtime import DistributedRuntime

from dynamo.llm import (
    KvEventPublisher,
    KvRouter,
    KvRouterConfig,
    ModelInput,
    ModelRuntimeConfig,
    ModelType,
    WorkerType,
    register_model,
)

PATH = "routing.backend.generate"


class Worker:
    """Registers; ``events``: where its KV events are."""

    def __init__(self, runtime: DistributedRuntime, block_tokens: int, events: str) -> None:
        self.runtime, self.endpoint = runtime, runtime.endpoint(PATH)
        self._block_tokens, self._events = block_tokens, events

    async def start(self) -> int:
        """Returns its id."""
        await self.endpoint.register_endpoint_instance()
        runtime_config = ModelRuntimeConfig()
        runtime_config.kv_event_publishing_enabled = True
        # So the card needs no model.
        tensors = ModelInput.Tensor, ModelType.TensorBased, self.endpoint, "routing"
        await register_model(*tensors, worker_type=WorkerType.Aggregated, runtime_config=runtime_config)
        self.publisher = KvEventPublisher(
            self.endpoint,
            kv_block_size=self._block_tokens,
            enable_local_indexer=True,
            zmq_endpoint=self._events,
            zmq_topic="",
        )
        return int(self.endpoint.connection_id())


async def main(block_tokens: int, endpoints: Sequence[str]) -> None:
    loop = asyncio.get_running_loop()
    runtimes = [
        DistributedRuntime(loop, os.environ["DYN_DISCOVERY_BACKEND"], "tcp") for _ in (None, *endpoints)
    ]
    workers = [
        Worker(runtime, block_tokens, events) for runtime, events in zip(runtimes[1:], endpoints, strict=True)
    ]
    numbers = {await worker.start(): number for number, worker in enumerate(workers)}
    endpoint = runtimes[0].endpoint(PATH)
    client = await endpoint.client()
    while len(client.instance_ids()) < len(workers):
        await asyncio.sleep(0.01)
    router = KvRouter(endpoint, block_tokens, KvRouterConfig())
    print(json.dumps("ready"), flush=True)
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        tokens = json.loads(line)
        scores = await router.get_overlap_scores(tokens, include_shared=False)
        known = {numbers[row["worker_id"]]: row for row in scores["workers"]}
        best, _, _ = await router.best_worker(tokens)
        print(json.dumps({"known": known, "best": numbers[best]}), flush=True)
    for worker in workers:
        worker.publisher.shutdown()
    for runtime in runtimes:
        runtime.shutdown()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), sys.argv[2:]))
