"""Loading before the forward pass against loading one layer ahead of it: what layer-wise loading would save.

What it saves, only the request that waits for the load gets; what it costs, all requests of the batch pay,
because their step then lasts as long as the load. The table shows both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from benchmarks.gpu.copies import make_pool
from benchmarks.gpu.device import Device, finish, open_device
from benchmarks.gpu.memory import PER_LAYER_NHD, Cache, Choice, Pool
from benchmarks.gpu.rows import Cell, Goal, Result, Row
from benchmarks.gpu.stages import Options, median_of, now_s, told_by
from kvbm_core.transfer.pieces import PieceTable
from kvbm_core.types import Direction

PAGE_BYTES = 64 << 10  # a layer of 16 tokens of Qwen3-8B in bfloat16
BLOCK_TOKENS = 16
HIT_TOKENS = (1024, 4096, 8192)
SUFFIX_TOKENS = (16, 256, 2048)
LAYERS = 36
TABLE = "loading by layers"
SHAPES = Goal("hits and suffixes measured", "shapes")


@dataclass(frozen=True)
class _Scene:
    device: Device
    cache: Cache
    tables: list[PieceTable]
    load_stream: Any
    compute_stream: Any
    rounds: int

    def seconds(self, work: Callable[[], None]) -> float:
        """Median until both streams have done what ``work`` gave them."""

        def once() -> float:
            self.device.synchronize()
            started_s = now_s()
            work()
            finish(self.device, [self.load_stream, self.compute_stream])
            return now_s() - started_s

        return median(median_of(once, self.rounds))


class LayersStage:
    """See the module."""

    name = "layers"
    help = "a load as a whole before the forward pass, and one layer ahead of it"
    share = 0.03

    def goals(self, options: Options) -> Sequence[Goal]:
        """See Stage."""
        return (SHAPES,)

    def run(self, options: Options) -> Iterator[Result]:
        """See Stage."""
        device = open_device(options.is_dry)
        measured = 0
        try:
            hits = HIT_TOKENS[: options.choose(1, len(HIT_TOKENS))]
            pool = make_pool(device, PAGE_BYTES, options, max(hits) // BLOCK_TOKENS * LAYERS * PAGE_BYTES)
            cache = Cache(pool, PER_LAYER_NHD)
            try:
                scene = _scene(device, cache, options)
                for hit_tokens in hits:
                    for suffix_tokens in SUFFIX_TOKENS:
                        measured += 1
                        yield _cell(scene, hit_tokens, suffix_tokens)
            finally:
                cache.close()
                pool.close()
        finally:
            device.close()
        yield Row(SHAPES, ours=(float(measured),))


def _scene(device: Device, cache: Cache, options: Options) -> _Scene:
    pool: Pool = cache.pool
    tables = [
        PieceTable([pair], cache.bases, pool.slab.address, pool.slab.chunk_bytes) for pair in cache.pairs
    ]
    load_stream = device.api.create_stream(high_priority=False)
    return _Scene(device, cache, tables, load_stream, device.compute_stream(), options.choose(1, 5))


def _cell(scene: _Scene, hit_tokens: int, suffix_tokens: int) -> Cell:
    head = {"hit": f"{hit_tokens} tokens", "suffix": f"{suffix_tokens} tokens"}
    try:
        return Cell(TABLE, head | _figures(scene, hit_tokens, suffix_tokens))
    except Exception as error:  # the other shapes are still worth knowing
        return Cell(TABLE, head | {"failed": told_by(error)})


def _figures(scene: _Scene, hit_tokens: int, suffix_tokens: int) -> dict[str, str]:
    device, cache = scene.device, scene.cache
    choice, _ = cache.pool.choose()
    choice = Choice(*(numbers[: hit_tokens // BLOCK_TOKENS] for numbers in (choice.blocks, choice.slots)))
    cache.finish(cache.submit([(choice, Direction.OFFLOAD)]))
    compute = device.layer(suffix_tokens)
    api = device.api

    def load(table: PieceTable) -> object:
        device.copy_arrays(table.arrays(choice.blocks, choice.slots, to_host=False), scene.load_stream)
        return api.record(scene.load_stream)

    def load_all() -> None:
        for table in scene.tables:
            load(table)

    def compute_all() -> None:
        for _ in scene.tables:
            compute()

    def whole_first() -> None:
        load_all()
        api.wait_event(scene.compute_stream, api.record(scene.load_stream))
        compute_all()

    def layer_ahead() -> None:
        for table in scene.tables:
            api.wait_event(scene.compute_stream, load(table))
            compute()

    load_s, compute_s, whole_s, layers_s = map(
        scene.seconds, (load_all, compute_all, whole_first, layer_ahead)
    )
    cache.check("loading by layers", choice)
    return {
        "load ms": f"{1e3 * load_s:.2f}",
        "compute ms": f"{1e3 * compute_s:.2f}",
        "whole, then compute ms": f"{1e3 * whole_s:.2f}",
        "by layers ms": f"{1e3 * layers_s:.2f}",
        "the request saves": f"{1 - layers_s / whole_s:.0%}",
        "its batch waits ms": f"{1e3 * max(0.0, layers_s - compute_s):.2f}",
    }
