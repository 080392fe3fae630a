"""Records of extents, encrypted, beside the same as they are, on a store in memory that costs a copy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack

from benchmarks.figures import Figure, Goal
from benchmarks.storage.blocks import Blocks
from benchmarks.storage.sides import Rates
from benchmarks.storage.throughput import DIRECTIONS, Samples, Scene, pair_figures, size_text, take_turns
from benchmarks.suite import expect
from kvbm_core.errors import Outcome
from kvbm_core.storage.base import Memory
from kvbm_core.storage.extents import EXTENT_BYTES, Extent, extent_blocks
from kvbm_core.storage.names import Meaning
from kvbm_core.storage.remote.encoding import Encoding
from kvbm_core.storage.remote.names import RecordNames
from kvbm_core.storage.remote.record_store import RecordStore
from kvbm_core.storage.remote.secret import Secret
from kvbm_core.testing.memory_engine import MemoryEngine

BLOCKS_BYTES = (64 << 10, 2 << 20)
SHARE = 0.6
PLAIN = "as they are"
OURS = "encrypted records"
MOST_BYTES = 256 << 20
CALL_EXTENTS = 4
DEADLINE_S = 600.0
MEANING = Meaning("benchmark", b"benchmark", b"storage benchmark"[:16])
SECRET = Secret(b"of a benchmark, known to all")


def goal(direction: str, block_bytes: int) -> Goal:
    """Encrypted against plain."""
    name = f"{OURS}: {direction}, extents of {size_text(EXTENT_BYTES)}, blocks of {size_text(block_bytes)}"
    return Goal(name, "GB/s", SHARE, "higher", PLAIN)


GOALS = [goal(way, size) for size in BLOCKS_BYTES for way in DIRECTIONS]


class RecordSide:
    """RecordStore, a new one a turn, in one thread."""

    def __init__(self, name: str, blocks: Blocks, secret: Secret | None) -> None:
        self.name = name
        self._blocks = blocks
        self._secret = secret
        size = extent_blocks(blocks.block_bytes)
        self._extents = [
            Extent(size, tuple(blocks.keys[start : start + size]))
            for start in range(0, blocks.num_blocks, size)
        ]

    def turn(self) -> Rates:
        """See Side."""
        blocks, names = self._blocks, RecordNames(MEANING, self._secret)
        store = RecordStore(MemoryEngine(), names, blocks.block_bytes, Encoding(secret=self._secret))
        memory, size = blocks.slab.array.data, blocks.block_bytes
        views = [memory[start : start + size] for start in range(0, 2 * blocks.total_bytes, size)]
        try:
            return blocks.turn(
                self.name,
                lambda: self._all_ok(store.put_extents, views[: blocks.num_blocks]),
                lambda: self._all_ok(store.get_extents, views[blocks.num_blocks :]),
            )
        finally:
            store.close()

    def _all_ok(self, move: Callable[..., Sequence[object]], views: Sequence[memoryview]) -> None:
        size = self._extents[0].num_blocks
        for start in range(0, len(self._extents), CALL_EXTENTS):
            extents = self._extents[start : start + CALL_EXTENTS]
            first = start * size
            memory: list[Sequence[Memory]] = [
                views[first + i * size : first + (i + 1) * size] for i in range(len(extents))
            ]
            ends = move(extents, memory, deadline_s=DEADLINE_S)
            expect(all(end in (Outcome.OK, [Outcome.OK] * size) for end in ends), f"{self.name}: {ends}")

    def close(self) -> None:
        """See Side."""


def measure(scene: Scene) -> list[Figure]:
    """Both sizes, both directions, in turns."""
    figures: list[Figure] = []
    for block_bytes in BLOCKS_BYTES:
        figures += pair_figures(goal, block_bytes, _measure(block_bytes, scene), OURS)
    return figures


def _measure(block_bytes: int, scene: Scene) -> Samples:
    with ExitStack() as stack:
        blocks = Blocks(min(scene.total_bytes, MOST_BYTES) // block_bytes, block_bytes, scene.seed)
        stack.callback(blocks.close)
        sides = [RecordSide(OURS, blocks, SECRET), RecordSide(PLAIN, blocks, None)]
        return take_turns(sides, scene.rounds, lambda text: scene.told(f"storage: {OURS}, {text}"))
