"""The part of the suite about copies."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from benchmarks.figures import Figure, Goal
from benchmarks.suite import CannotRun, Findings, Options
from benchmarks.timing import rotated, timed
from kvbm_core.types import Direction

if TYPE_CHECKING:
    from benchmarks.transfer.memory import Choice, CopyBench

MOVED_BYTES = 128 << 20
PAGES_BYTES = (8 << 10, 16 << 10, 64 << 10, 256 << 10, 2 << 20)
OURS, MEMCPY, PER_PAGE, INDEXED = "kvbm", "memcpy", "torch copy_ per page", "torch index_copy_"


def _goal(direction: Direction, page_bytes: int) -> Goal:
    size = f"{page_bytes >> 10} KiB" if page_bytes < 1 << 20 else f"{page_bytes >> 20} MiB"
    return Goal(f"{direction.value}, pages of {size} a layer", "GB/s", 0.7, "higher", MEMCPY)


class TransferPart:
    """CPU tensors, scattered blocks and slots, one copy at a time."""

    name = "transfer"
    help = "offload and onboard on CPU tensors, as a share of memcpy"
    goals: Sequence[Goal] = tuple(_goal(direction, page) for page in PAGES_BYTES for direction in Direction)

    def run(self, options: Options) -> Findings:
        """See Part."""
        if importlib.util.find_spec("torch") is None:
            raise CannotRun("torch is not installed")
        from benchmarks.transfer.memory import LAYERS, CopyBench

        figures = []
        for page_bytes in PAGES_BYTES:
            options.told(f"transfer: pages of {page_bytes >> 10} KiB")
            bench = CopyBench(page_bytes, MOVED_BYTES // (LAYERS * page_bytes), options.seed)
            try:
                for direction in Direction:
                    figures.append(_measure(bench, direction, options.choose(3, 11, 60)))
                bench.check_outcomes()
            finally:
                bench.close()
        settings = {
            "a copy": f"{MOVED_BYTES >> 20} MiB in {LAYERS} layers, device blocks and slots scattered",
            "time": "from submitting a plan to its end; bytes compared after each copy",
            "memcpy": "as many bytes in one piece, one thread",
        }
        return Findings(figures, (), settings)


def _measure(bench: CopyBench, direction: Direction, rounds: int) -> Figure:
    samples: dict[str, list[float]] = {name: [] for name in (OURS, MEMCPY, PER_PAGE, INDEXED)}
    for number in range(rounds + 1):
        for name in rotated(list(samples), number):
            choice = bench.choose()
            work = _work(bench, name, direction, choice)
            if name == MEMCPY:
                seconds, _ = timed(work)
            else:
                bench.wipe(direction, choice)
                seconds, _ = timed(work)
                bench.check(name, choice)
            if number:
                samples[name].append(bench.moved_bytes / seconds / 1e9)
    goal = _goal(direction, bench.page_bytes)
    return Figure(goal, tuple(samples.pop(OURS)), {name: tuple(values) for name, values in samples.items()})


def _work(bench: CopyBench, name: str, direction: Direction, choice: Choice) -> Callable[[], None]:
    plan = bench.plan(direction, choice)
    return {
        OURS: lambda: bench.execute(plan),
        MEMCPY: bench.memcpy,
        PER_PAGE: lambda: bench.torch_per_page(direction, choice),
        INDEXED: lambda: bench.torch_indexed(direction, choice),
    }[name]
