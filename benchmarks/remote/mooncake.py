"""Blocks of 2 MiB in a Mooncake Store of our own (TCP), beside batches of its own client."""

from __future__ import annotations

import importlib
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.figures import Figure, Goal
from benchmarks.remote.turns import EXISTS, GET, PUT, Blocks, KvbmSide, Side, batches, figures, take_turns
from benchmarks.suite import CannotRun, Options, expect
from kvbm_core.storage.remote.mooncake_setup import set_timeouts
from kvbm_core.storage.stores import StoreSpec
from kvbm_core.types import BlockKey
from tests.engines.mooncake_pool import MooncakePool, find_mooncake
from tests.engines.ports import HOST

BLOCK_BYTES = 2 << 20
BATCH = 8
SEGMENT_BYTES = 1 << 30
PEER = "Mooncake alone"
GOALS = {
    PUT: Goal("Mooncake Store: write blocks of 2 MiB", "GB/s", 0.8, "higher"),
    GET: Goal("Mooncake Store: read blocks of 2 MiB", "GB/s", 0.8, "higher"),
    EXISTS: Goal("Mooncake Store: look for blocks", "names/s", 0.8, "higher"),
}


class MooncakeSide:
    """Its own batches, from and to memory that it knows: no header, no checksum."""

    name = PEER

    def __init__(self, pool: MooncakePool, blocks: Blocks) -> None:
        set_timeouts()
        self._client: Any = importlib.import_module("mooncake.store").MooncakeDistributedStore()
        code = self._client.setup(HOST, "P2PHANDSHAKE", 0, 0, "tcp", "", pool.address)
        expect(code == 0, f"{PEER}: it cannot join")
        self._client.register_buffer(blocks.slab.ctypes.data, blocks.slab.nbytes)
        self._blocks = blocks

    def put(self, keys: Sequence[BlockKey]) -> None:
        """See Side."""
        for part in batches(keys, BATCH):
            names, addresses = _names(keys[part]), _addresses(self._blocks.sources[part])
            codes = self._client.batch_put_from(names, addresses, [BLOCK_BYTES] * len(names))
            expect(not any(codes), f"{PEER}: {set(codes)}")

    def get(self, keys: Sequence[BlockKey]) -> None:
        """See Side."""
        for part in batches(keys, BATCH):
            names, addresses = _names(keys[part]), _addresses(self._blocks.targets[part])
            codes = self._client.batch_get_into(names, addresses, [BLOCK_BYTES] * len(names))
            expect(set(codes) == {BLOCK_BYTES}, f"{PEER}: {set(codes)}")

    def exists(self, keys: Sequence[BlockKey], absent: Sequence[BlockKey]) -> None:
        """See Side."""
        found = self._client.batch_is_exist(_names([*keys, *absent]))
        expect(sum(found) == len(keys), f"{PEER}: a block is missing, or is not")

    def remove(self, keys: Sequence[BlockKey]) -> None:
        """See Side."""
        self._client.batch_remove(_names(keys), True)

    def close(self) -> None:
        """See Side."""
        self._client.close()


def _names(keys: Sequence[BlockKey]) -> list[str]:
    return [bytes(key).hex() for key in keys]


def _addresses(blocks: npt.NDArray[np.uint8]) -> list[int]:
    return [block.ctypes.data for block in blocks]


def measure(options: Options) -> list[Figure]:
    """CannotRun without Mooncake."""
    if find_mooncake() is None:
        raise CannotRun("Mooncake is not installed, or misses libibverbs; make setup brings it")
    blocks = Blocks(options.choose(32, 64, 64), BLOCK_BYTES, options.seed)
    with (
        tempfile.TemporaryDirectory() as folder,
        MooncakePool(Path(folder), segment_bytes=SEGMENT_BYTES) as pool,
    ):
        spec = StoreSpec(f"mooncake://{pool.address}", BLOCK_BYTES, "benchmark", "0of1", "benchmark")
        sides: list[Side] = [KvbmSide(spec, blocks, BATCH), MooncakeSide(pool, blocks)]
        try:
            _warm(sides[0], blocks)
            return figures(GOALS, take_turns(sides, blocks, options.choose(3, 9, 15)))
        finally:
            for side in sides:
                side.close()


def _warm(side: Side, blocks: Blocks) -> None:
    """Writes to all of the pool's memory once: its first touch is five times slower."""
    for number in range(int(0.8 * SEGMENT_BYTES // blocks.num_bytes)):
        side.put(blocks.keys(1000 + number))
    for number in range(int(0.8 * SEGMENT_BYTES // blocks.num_bytes)):
        side.remove(blocks.keys(1000 + number))
