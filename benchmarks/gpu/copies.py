"""Offload and onboard by the real executor, as a share of one contiguous cudaMemcpyAsync of as many pinned
bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from benchmarks.gpu.device import Device, finish, open_device
from benchmarks.gpu.memory import LAYOUTS, PER_LAYER_NHD, Cache, Choice, Pool, size_text
from benchmarks.gpu.rows import Goal, Result, Row
from benchmarks.gpu.stages import Options, now_s
from kvbm_core.types import Direction

PAGES_BYTES = tuple(4096 << n for n in range(10))  # 4 KiB to 2 MiB
DRY_PAGES_BYTES = (4096, 65536)
BOTH_PAGES_BYTES = (16 << 10, 64 << 10, 2 << 20)
MATMUL_PAGE_BYTES = 64 << 10
GOAL_FROM_BYTES = 16 << 10
LIMIT = "pinned contiguous cudaMemcpyAsync"
LAYERS, MOVED_BYTES, MAX_PIECES = 36, 1 << 30, 1 << 16
JOBS_BESIDE_MATMUL = 3


def copy_goal(layout: str, page_bytes: int, direction: Direction) -> Goal:
    """One direction alone."""
    bound = 0.9 if page_bytes >= GOAL_FROM_BYTES else None
    return Goal(
        f"{direction.value}, {layout}, pages of {size_text(page_bytes)}", "GB/s", LIMIT, bound, "higher"
    )


def both_goal(layout: str, page_bytes: int) -> Goal:
    """Both directions at once."""
    return Goal(
        f"both at once, {layout}, pages of {size_text(page_bytes)}", "GB/s", f"two {LIMIT}", 0.85, "higher"
    )


MATMUL = Goal(
    f"matrix products beside copies, pages of {size_text(MATMUL_PAGE_BYTES)}",
    "ms",
    "the same alone",
    1.02,
    "lower",
)


@dataclass(frozen=True)
class Limit:
    """One piece on each side, and the streams that the limit's copies run on."""

    device: Device
    on_device: torch.Tensor
    on_host: torch.Tensor
    streams: tuple[object, object]

    @staticmethod
    def of(device: Device, nbytes: int) -> Limit:
        """With two pieces of ``nbytes`` on each side, a pair for each direction."""
        on_device = torch.ones(2, nbytes, dtype=torch.uint8, device=device.torch_device)
        streams = (
            device.api.create_stream(high_priority=False),
            device.api.create_stream(high_priority=False),
        )
        return Limit(device, on_device, device.pinned(2 * nbytes).view(2, nbytes).fill_(2), streams)

    def seconds(self, nbytes: int, *directions: Direction) -> float:
        """Of one copy a direction, all at once."""
        self.device.synchronize()
        started_s = now_s()
        for direction in directions:
            is_offload = direction is Direction.OFFLOAD
            ends = (
                (self.on_host[0], self.on_device[0]) if is_offload else (self.on_device[1], self.on_host[1])
            )
            target, source = (tensor.data_ptr() for tensor in ends)
            self.device.one_copy(target, source, nbytes, self.streams[is_offload])
        finish(self.device, list(self.streams))
        return now_s() - started_s


class CopiesStage:
    """See the module."""

    name = "copies"
    help = (
        "offload and onboard by the executor, by page size and layout; both at once; beside a matrix product"
    )
    share = 0.2

    def goals(self, options: Options) -> Sequence[Goal]:
        """See Stage."""
        rows = []
        for page_bytes in _pages(options):
            for layout in LAYOUTS:
                rows += [copy_goal(layout, page_bytes, direction) for direction in Direction]
                rows += [both_goal(layout, page_bytes)] if page_bytes in BOTH_PAGES_BYTES else []
        return (*rows, MATMUL)

    def run(self, options: Options) -> Iterator[Result]:
        """See Stage."""
        device = open_device(options.is_dry)
        try:
            limit = Limit.of(device, options.choose(1 << 20, MOVED_BYTES))
            for page_bytes in _pages(options):
                pool = make_pool(device, page_bytes, options)
                try:
                    for layout in LAYOUTS:
                        yield from _measure(pool, layout, limit, options)
                finally:
                    pool.close()
        finally:
            device.close()


def make_pool(device: Device, page_bytes: int, options: Options, moved_bytes: int = MOVED_BYTES) -> Pool:
    """Room for twice as many blocks as move."""
    layers = options.choose(2, LAYERS)
    moved_bytes = min(options.choose(1 << 20, moved_bytes), MAX_PIECES * page_bytes)
    return Pool(device, page_bytes, layers, 2 * max(1, moved_bytes // (layers * page_bytes)), options.seed)


def _pages(options: Options) -> tuple[int, ...]:
    return DRY_PAGES_BYTES if options.is_dry else PAGES_BYTES


def _measure(pool: Pool, layout: str, limit: Limit, options: Options) -> Iterator[Result]:
    rounds = options.choose(1, 7)
    cache = Cache(pool, layout)
    try:
        samples: dict[Direction, list[tuple[float, float]]] = {direction: [] for direction in Direction}
        for number in range(rounds + 1):
            choice, _ = pool.choose()
            for direction in (Direction.OFFLOAD, Direction.ONBOARD):  # what is offloaded is what comes back
                pair = _pair(cache, limit, [(choice, direction)], limit_first=bool(number % 2))
                samples[direction] += [pair] if number else []
        for direction, pairs in samples.items():
            yield _row(copy_goal(layout, pool.page_bytes, direction), pool.moved_bytes, pairs)
        if pool.page_bytes in BOTH_PAGES_BYTES:
            yield _row(both_goal(layout, pool.page_bytes), 2 * pool.moved_bytes, _both(cache, limit, rounds))
        if (layout, pool.page_bytes) == (PER_LAYER_NHD, MATMUL_PAGE_BYTES):
            yield _beside_matmul(cache, options)
    finally:
        cache.close()


def _row(goal: Goal, nbytes: int, pairs: Sequence[tuple[float, float]]) -> Row:
    rates = [(nbytes / ours_s / 1e9, nbytes / limit_s / 1e9) for ours_s, limit_s in pairs]
    return Row(goal, tuple(ours for ours, _ in rates), tuple(theirs for _, theirs in rates))


def _pair(
    cache: Cache, limit: Limit, jobs: Sequence[tuple[Choice, Direction]], *, limit_first: bool
) -> tuple[float, float]:
    """Seconds of the jobs, from submission to their end, and of the limit; the bytes are compared
    afterwards.
    """
    moved_bytes, directions = cache.pool.moved_bytes, [direction for _, direction in jobs]
    limit_s = limit.seconds(moved_bytes, *directions) if limit_first else 0.0
    cache.pool.change()
    started_s = now_s()
    cache.finish(cache.submit(jobs))
    ours_s = now_s() - started_s
    cache.check("+".join(direction.value for direction in directions), *(choice for choice, _ in jobs))
    return ours_s, limit_s or limit.seconds(moved_bytes, *directions)


def _both(cache: Cache, limit: Limit, rounds: int) -> list[tuple[float, float]]:
    pairs = []
    for number in range(rounds + 1):
        down, up = cache.pool.choose()
        cache.finish(cache.submit([(up, Direction.OFFLOAD)]))  # something to bring up
        jobs = [(up, Direction.ONBOARD), (down, Direction.OFFLOAD)]
        pairs.append(_pair(cache, limit, jobs, limit_first=bool(number % 2)))
    return pairs[1:]


def _beside_matmul(cache: Cache, options: Options) -> Row:
    """Both directions are kept busy while matrix products run; a sample where they were not is none."""
    device = cache.pool.device
    down, up = cache.pool.choose()
    jobs = [(up, Direction.ONBOARD), (down, Direction.OFFLOAD)] * JOBS_BESIDE_MATMUL
    cache.finish(cache.submit([(up, Direction.OFFLOAD)]))
    started_s = now_s()
    cache.finish(cache.submit(jobs))
    copying_s = now_s() - started_s
    count = max(2, int(0.4 * copying_s / (device.matmul_s(4) / 4)))
    beside, alone = [], []
    for _ in range(options.choose(1, 9)):
        job_ids = cache.submit(jobs)
        seconds = device.matmul_s(count)
        was_busy = options.is_dry or not cache.executor.wait(job_ids, 0.0)
        cache.finish(job_ids)
        without = device.matmul_s(count)
        if was_busy:
            beside.append(1e3 * seconds)
            alone.append(1e3 * without)
    failure = "" if beside else "the copies always ended before the matrix products"
    return Row(MATMUL, tuple(beside), tuple(alone), failure)
