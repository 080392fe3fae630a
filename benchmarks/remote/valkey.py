"""Blocks of 128 KiB in a Valkey server of our own, beside pipelines of redis-py."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.figures import Figure, Goal
from benchmarks.remote.turns import EXISTS, GET, PUT, Blocks, KvbmSide, Side, batches, figures, take_turns
from benchmarks.suite import CannotRun, Options, expect
from kvbm_core.storage.stores import StoreOptions, StoreSpec
from kvbm_core.types import BlockKey
from tests.engines.ports import HOST
from tests.engines.valkey_server import ValkeyServer, find_server

BLOCK_BYTES = 128 << 10
BATCH = 32
PEER = "redis-py"
GOALS = {
    PUT: Goal("Valkey: write blocks of 128 KiB", "GB/s", 0.8, "higher"),
    GET: Goal("Valkey: read blocks of 128 KiB", "GB/s", 0.8, "higher"),
    EXISTS: Goal("Valkey: look for blocks", "names/s", 0.8, "higher"),
}


class RedisSide:
    """Its own pipelines: no header, no checksum, values as it returns them."""

    name = PEER

    def __init__(self, server: ValkeyServer, blocks: Blocks) -> None:
        import redis

        self._client = redis.Redis(HOST, server.port, password=server.password)
        self._blocks = blocks

    def put(self, keys: Sequence[BlockKey]) -> None:
        """See Side."""
        for part in batches(keys, BATCH):
            pipeline = self._client.pipeline(transaction=False)
            for key, block in zip(keys[part], self._blocks.sources[part], strict=True):
                pipeline.set(bytes(key), block.data)
            expect(all(pipeline.execute()), f"{PEER}: a block is not kept")

    def get(self, keys: Sequence[BlockKey]) -> None:
        """See Side."""
        for part in batches(keys, BATCH):
            pipeline = self._client.pipeline(transaction=False)
            for key in keys[part]:
                pipeline.get(bytes(key))
            for target, value in zip(self._blocks.targets[part], pipeline.execute(), strict=True):
                target.data[:] = value

    def exists(self, keys: Sequence[BlockKey], absent: Sequence[BlockKey]) -> None:
        """See Side."""
        pipeline = self._client.pipeline(transaction=False)
        for key in (*keys, *absent):
            pipeline.exists(bytes(key))
        expect(sum(pipeline.execute()) == len(keys), f"{PEER}: a block is missing, or is not")

    def remove(self, keys: Sequence[BlockKey]) -> None:
        """See Side."""
        self._client.delete(*map(bytes, keys))

    def close(self) -> None:
        """See Side."""
        self._client.close()


def measure(options: Options) -> list[Figure]:
    """CannotRun without a server or redis-py."""
    if find_server() is None:
        raise CannotRun("no Valkey or Redis server is installed; make setup brings one")
    try:
        import redis  # noqa: F401
    except ImportError:
        raise CannotRun("redis is not installed; make setup brings it") from None
    blocks = Blocks(options.choose(128, 512, 512), BLOCK_BYTES, options.seed)
    with tempfile.TemporaryDirectory() as folder, ValkeyServer(Path(folder)) as server:
        store = StoreOptions(login=server.login())
        spec = StoreSpec(server.url, BLOCK_BYTES, "benchmark", "0of1", "benchmark", store)
        sides: list[Side] = [KvbmSide(spec, blocks, BATCH), RedisSide(server, blocks)]
        try:
            return figures(GOALS, take_turns(sides, blocks, options.choose(3, 9, 15)))
        finally:
            for side in sides:
                side.close()
