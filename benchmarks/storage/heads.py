"""Blocks put into a shared store by heads and got back, beside the same blocks as they are.

The store is memory of this process: what is compared is what dividing and joining cost, beside copies and
checksums that both ways have.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

from benchmarks.figures import Figure, Goal
from benchmarks.storage.blocks import Blocks
from benchmarks.storage.sides import Rates
from benchmarks.storage.throughput import DIRECTIONS, Scene, take_turns
from benchmarks.suite import expect
from kvbm_core.errors import Outcome
from kvbm_core.layout.heads import HeadGroup, HeadShards, divide_heads, head_tensors
from kvbm_core.layout.tensors import TensorInfo
from kvbm_core.storage.base import Memory
from kvbm_core.storage.extents import Extent, extent_blocks
from kvbm_core.storage.stores import StoreSpec, record_store
from kvbm_core.testing.memory_engine import MemoryEngine

LAYERS, HEADS, TOKENS, HEAD_SIZE, ITEM_BYTES = 32, 8, 16, 128, 2
BLOCK_BYTES = LAYERS * HEADS * TOKENS * 2 * HEAD_SIZE * ITEM_BYTES
"""Of Llama 3.1 8B on one rank: 2 MiB."""
NUM_SHARDS = 4
SHARE = 0.5
AS_IT_IS = "as they are"
BY_HEADS = {"HND": (1, 2, 3), "NHD": (2, 1, 3)}
"""The engine's order of heads, tokens and content in memory."""
CALL_BLOCKS, THREADS = 8, 4
DEADLINE_S = 600.0


def goal(direction: str, order: str) -> Goal:
    """By heads against as they are."""
    return Goal(f"shared store, by heads: {direction}, {order}", "GB/s", SHARE, "higher", AS_IT_IS)


GOALS = [goal(way, order) for order in BY_HEADS for way in DIRECTIONS]


def heads_in(order: Sequence[int]) -> HeadShards:
    """Of one rank that has all heads."""
    shape = (CALL_BLOCKS, HEADS, TOKENS, 2 * HEAD_SIZE)
    strides, run = [0] * len(shape), 1
    for axis in reversed((0, *order)):
        strides[axis], run = run, run * shape[axis]
    size = run * ITEM_BYTES
    infos = [
        TensorInfo(f"{n}", shape, tuple(strides), ITEM_BYTES, "bfloat16", n, 0, size) for n in range(LAYERS)
    ]
    group = HeadGroup(TOKENS, head_tensors(infos, CALL_BLOCKS, 1))
    return divide_heads([group], HEADS, 0, 1, NUM_SHARDS)


class StoreSide:
    """As many threads as a rank has for a store, each with a call of some extents."""

    def __init__(self, name: str, heads: HeadShards | None, blocks: Blocks) -> None:
        self.name = name
        self._engine = MemoryEngine()
        spec = StoreSpec("memory://", BLOCK_BYTES, "", "0of1", heads=heads)
        self._store = record_store(self._engine, spec)
        self._blocks = blocks
        self._pool = ThreadPoolExecutor(THREADS)
        piece_bytes = BLOCK_BYTES if heads is None else heads.shard_bytes
        self._size = min(CALL_BLOCKS, extent_blocks(piece_bytes))

    def turn(self) -> Rates:
        """See Side. The store is empty at first."""
        blocks, store, objects = self._blocks, self._store, self._engine.objects
        for name in list(objects.objects):
            objects.pop(name)
        memory = blocks.slab.array.data
        views = [memory[at : at + BLOCK_BYTES] for at in range(0, 2 * blocks.total_bytes, BLOCK_BYTES)]
        sources, targets = views[: blocks.num_blocks], views[blocks.num_blocks :]

        def put(extents: Sequence[Extent], own: Sequence[Sequence[Memory]]) -> bool:
            return {*store.put_extents(extents, own, deadline_s=DEADLINE_S)} == {Outcome.OK}

        def get(extents: Sequence[Extent], own: Sequence[Sequence[Memory]]) -> bool:
            ends = store.get_extents(extents, own, deadline_s=DEADLINE_S)
            return {end for of_extent in ends for end in of_extent} == {Outcome.OK}

        return blocks.turn(self.name, lambda: self._all(put, sources), lambda: self._all(get, targets))

    def _all(self, move: Callable[..., bool], memory: Sequence[memoryview]) -> None:
        keys, size = self._blocks.keys, self._size

        def call(start: int) -> bool:
            begins = range(start, start + CALL_BLOCKS, size)
            extents = [Extent(size, tuple(keys[at : at + size])) for at in begins]
            return move(extents, [memory[at : at + size] for at in begins])

        done = self._pool.map(call, range(0, self._blocks.num_blocks, CALL_BLOCKS))
        expect(all(done), f"{self.name}: a block was not moved")

    def close(self) -> None:
        """See Side."""
        self._pool.shutdown()
        self._store.close()


def measure(scene: Scene) -> list[Figure]:
    """Both directions, in turns."""
    with ExitStack() as stack:
        num_blocks = scene.total_bytes // BLOCK_BYTES // CALL_BLOCKS * CALL_BLOCKS
        blocks = Blocks(num_blocks, BLOCK_BYTES, scene.seed)
        stack.callback(blocks.close)
        sides = [StoreSide(AS_IT_IS, None, blocks)]
        sides += [StoreSide(order, heads_in(axes), blocks) for order, axes in BY_HEADS.items()]
        for side in sides:
            stack.callback(side.close)
        samples = take_turns(sides, scene.rounds, lambda text: scene.told(f"storage: by heads, {text}"))
    figures = []
    for place, direction in enumerate(DIRECTIONS):
        series = {name: tuple(rates[place] for rates in taken) for name, taken in samples.items()}
        for order in BY_HEADS:
            figures.append(Figure(goal(direction, order), series[order], {AS_IT_IS: series[AS_IT_IS]}))
    return figures
