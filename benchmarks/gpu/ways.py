"""Ways to move scattered blocks, side by side: the table from which the executor's choice is made."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from benchmarks.gpu.copies import Limit, make_pool
from benchmarks.gpu.device import CopyWay, Device, finish, open_device
from benchmarks.gpu.memory import CROSS_LAYER, PER_LAYER_NHD, Cache, Choice, Pool, size_text
from benchmarks.gpu.rows import Cell, Goal, Result, Row
from benchmarks.gpu.stages import Options, now_s, told_by
from kvbm_core.types import Direction

PAGES_BYTES = (4 << 10, 8 << 10, 16 << 10, 64 << 10, 256 << 10, 2 << 20)
MOVED_BYTES = 256 << 20
PROGRAMS = (4, 16, 64, 132)
LAYOUTS = (PER_LAYER_NHD, CROSS_LAYER)
TABLE = "ways to copy"
WRONG = Goal("ways to copy that failed or copied wrong bytes", "of all measured", bound=0)
MATMUL_ROUNDS = 3

Queue = Callable[[Choice, Direction, Any], object]
"""Queues a copy on a stream; what it returns must live until the copy has ended."""


@dataclass(frozen=True)
class Sample:
    """Seconds until everything was queued, and until everything had arrived."""

    queue_s: float
    total_s: float


class WaysStage:
    """See the module."""

    name = "ways"
    help = "batched DMA, one DMA per piece and a Triton kernel, by page size, layout and direction"
    share = 0.2

    def goals(self, options: Options) -> Sequence[Goal]:
        """See Stage."""
        return (WRONG,)

    def run(self, options: Options) -> Iterator[Result]:
        """See Stage."""
        if options.is_dry:
            os.environ["TRITON_INTERPRET"] = "1"  # Triton's own interpreter, where there is no GPU
        device = open_device(options.is_dry)
        wrong: list[str] = []
        measured = 0
        try:
            limit = Limit.of(device, options.choose(1 << 20, MOVED_BYTES))
            for page_bytes in PAGES_BYTES[: options.choose(1, len(PAGES_BYTES))]:
                pool = make_pool(device, page_bytes, options, MOVED_BYTES)
                try:
                    for cell in _table(pool, limit, options):
                        measured += 1
                        wrong += [cell.values["way"]] if "failed" in cell.values else []
                        yield cell
                finally:
                    pool.close()
        finally:
            device.close()
        yield Row(WRONG, ours=(float(len(wrong)),), failure="" if measured else "nothing was measured")


def _table(pool: Pool, limit: Limit, options: Options) -> Iterator[Cell]:
    for layout in LAYOUTS:
        cache = Cache(pool, layout)
        try:
            for name, queue in ways_of(cache, PROGRAMS[: options.choose(1, len(PROGRAMS))]).items():
                for direction in (Direction.OFFLOAD, Direction.ONBOARD):
                    head = {
                        "layout": layout,
                        "page": size_text(pool.page_bytes),
                        "direction": direction.value,
                        "way": name,
                    }
                    try:
                        yield Cell(TABLE, head | _figures(cache, queue, direction, limit, options))
                    except Exception as error:  # the others are still worth knowing
                        yield Cell(TABLE, head | {"failed": told_by(error)})
        finally:
            cache.close()


def ways_of(cache: Cache, programs: Sequence[int]) -> dict[str, Queue]:
    """All that there are on this machine, by name."""

    def dma(way: CopyWay) -> Queue:
        return lambda choice, direction, stream: way(cache.copies(choice, direction), stream)

    ways = {name: dma(way) for name, way in cache.pool.device.copy_ways().items()}
    ways["batch by ctypes, NumPy addresses"] = _by_arrays(cache)
    if importlib.util.find_spec("triton") is not None:
        ways |= {f"triton, {number} programs": _triton(cache, number) for number in programs}
    return ways


def _by_arrays(cache: Cache) -> Queue:
    def queue(choice: Choice, direction: Direction, stream: Any) -> None:
        arrays = cache.table.arrays(choice.blocks, choice.slots, to_host=direction is Direction.OFFLOAD)
        cache.pool.device.copy_arrays(arrays, stream)

    return queue


def _triton(cache: Cache, programs: int) -> Queue:
    from benchmarks.gpu.triton_kernel import TritonCopier

    device = cache.pool.device
    copier = TritonCopier(list(cache.pairs), cache.bases, cache.pool.slab.address, device.torch_device)

    def queue(choice: Choice, direction: Direction, stream: Any) -> object:
        with device.on_stream(stream):
            numbers = [device.upload(choice.blocks), device.upload(choice.slots)]
            copier.queue(*numbers, to_host=direction is Direction.OFFLOAD, programs=programs)
        return numbers

    return queue


def _figures(
    cache: Cache, queue: Queue, direction: Direction, limit: Limit, options: Options
) -> dict[str, str]:
    pool, stream = cache.pool, limit.streams[0]
    samples, limits = [], []
    for number in range(options.choose(1, 5) + 1):
        choice, _ = pool.choose()
        if direction is Direction.ONBOARD:
            cache.finish(cache.submit([(choice, Direction.OFFLOAD)]))
        limit_s = limit.seconds(pool.moved_bytes, direction)
        pool.change()
        sample = _timed(pool.device, queue, choice, direction, stream)
        cache.check("a way to copy", choice)
        if number:
            samples.append(sample)
            limits.append(limit_s)
    total_s = median(sample.total_s for sample in samples)
    return {
        "GB/s": f"{pool.moved_bytes / total_s / 1e9:.1f}",
        "share of contiguous": f"{median(a / b.total_s for a, b in zip(limits, samples, strict=True)):.2f}",
        "CPU us per block": f"{1e6 * median(s.queue_s for s in samples) / len(choice.blocks):.2f}",
        "matrix product": _slow_down(cache, queue, direction, stream, total_s),
    }


def _timed(device: Device, queue: Queue, choice: Choice, direction: Direction, stream: Any) -> Sample:
    started_s = now_s()
    kept = queue(choice, direction, stream)
    queued_s = now_s()
    finish(device, [stream])
    del kept
    return Sample(queued_s - started_s, now_s() - started_s)


def _slow_down(cache: Cache, queue: Queue, direction: Direction, stream: Any, total_s: float) -> str:
    """Time of matrix products while copies run, over their time alone; "-" where the CPU queues copies too
    slowly.
    """
    device = cache.pool.device
    choice, _ = cache.pool.choose()
    one_s = device.matmul_s(4) / 4
    count = max(1, int(0.4 * total_s / one_s))
    copies = 2 + int((count + 1) * one_s / total_s)  # matmul_s runs one more than it counts
    ratios = []
    for _ in range(MATMUL_ROUNDS):
        kept = [queue(choice, direction, stream) for _ in range(copies)]
        end = device.api.record(stream)
        beside_s = device.matmul_s(count)
        was_busy = not device.api.is_done(end)
        finish(device, [stream])
        del kept
        ratios += [beside_s / device.matmul_s(count)] if was_busy else []
    return f"{median(ratios):.3f}" if ratios else "-"
