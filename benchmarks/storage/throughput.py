"""Blocks of one size written and read by everybody, in turns."""

from __future__ import annotations

import gc
import importlib.util
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from benchmarks.figures import Figure, Goal
from benchmarks.storage.aio_side import AioSide
from benchmarks.storage.blocks import Blocks
from benchmarks.storage.fio_side import ENGINES, FioSide
from benchmarks.storage.kvbm_side import KvbmSide, Order, WithoutChecksum, as_prompts, scattered
from benchmarks.storage.sides import Rates, Side
from benchmarks.timing import rotated
from kvbm_core.storage.disk.aio_io import make_file_io
from kvbm_core.storage.disk.block_file import BlockFile, Geometry
from kvbm_core.storage.disk.io import FileIo

PROMPTS, SCATTERED, AIO_ALONE = "as prompts are stored", "scattered", "AIO alone"
NO_CHECKSUM = "no checksum of the bytes"
BETTER_FIO = "better fio"
VLLM = "vLLM fs tier"
DIRECTIONS = ("write", "read")
FIO_SHARE, VLLM_TIMES, CHECKSUM_SHARE = 0.85, 2.0, 0.97

FIO_BLOCKS_BYTES = (64 << 10, 256 << 10, 1 << 20, 4 << 20)
VLLM_BLOCKS_BYTES = (64 << 10, 128 << 10)
VLLM_SHOWN_BYTES = 1 << 20
"""Where vLLM's tier is measured too, for orientation: it has no goal there."""
CHECKSUM_BLOCKS_BYTES = (64 << 10, 1 << 20)

FINGERPRINT = b"storage benchmark"[:16]


def fio_goal(direction: str, block_bytes: int, pattern: str) -> Goal:
    """Ours against the better of fio's engines."""
    return Goal(f"{direction}, {size_text(block_bytes)}, {pattern}", "GB/s", FIO_SHARE, "higher", BETTER_FIO)


def vllm_goal(direction: str, block_bytes: int) -> Goal:
    """Ours, as prompts are stored, against vLLM's fs tier."""
    return Goal(
        f"{direction}, {size_text(block_bytes)}, against a file per block", "GB/s", VLLM_TIMES, "higher", VLLM
    )


def checksum_goal(direction: str, block_bytes: int) -> Goal:
    """Ours against ours without the checksum of the blocks' bytes."""
    name = f"{direction}, {size_text(block_bytes)}, with checksums against without"
    return Goal(name, "GB/s", CHECKSUM_SHARE, "higher", NO_CHECKSUM)


def size_text(num_bytes: int) -> str:
    """In KiB or MiB."""
    return f"{num_bytes >> 10} KiB" if num_bytes < 1 << 20 else f"{num_bytes >> 20} MiB"


FIO_GOALS = [
    fio_goal(way, size, pattern)
    for size in FIO_BLOCKS_BYTES
    for way in DIRECTIONS
    for pattern in (PROMPTS, SCATTERED)
]
VLLM_GOALS = [vllm_goal(way, size) for size in VLLM_BLOCKS_BYTES for way in DIRECTIONS]
CHECKSUM_GOALS = [checksum_goal(way, size) for size in CHECKSUM_BLOCKS_BYTES for way in DIRECTIONS]


@dataclass(frozen=True)
class Scene:
    """What all sizes share. ``missing``: by the name of a peer, why it is left out."""

    folder: Path
    total_bytes: int
    rounds: int
    seed: int
    missing: Mapping[str, str]
    told: Callable[[str], None]
    facts: dict[str, str]


Samples = dict[str, list[Rates]]


def take_turns(sides: Sequence[Side], rounds: int, told: Callable[[str], None]) -> Samples:
    """The rates of each side, by its name; a round before the first warms everything up."""
    samples: Samples = {side.name: [] for side in sides}
    for number in range(rounds + 1):
        for side in rotated(sides, number):
            told(f"round {number} of {rounds}: {side.name}")
            rates = side.turn()
            if number:
                samples[side.name].append(rates)
    return samples


@dataclass(frozen=True)
class _Bench:
    """Blocks of one size and a file for them."""

    blocks: Blocks
    file: BlockFile
    scene: Scene
    stack: ExitStack

    def ours(self, kind: type[KvbmSide], name: str, order: Order) -> Side:
        """A side of ours."""
        return kind(name, self.file, self.blocks, self._best_io, order=order, seed=self.scene.seed)

    def alone(self) -> Side:
        """What the disk gives to as much memory as ours; in a file of its own."""
        path = self.scene.folder / "alone.blocks"
        self.stack.callback(path.unlink, missing_ok=True)
        file = BlockFile(path, self.file.geometry)
        self.stack.callback(file.close)
        return AioSide(AIO_ALONE, file.fd, self.blocks, self._best_io_of(file), seed=self.scene.seed)

    def _best_io(self) -> FileIo:
        return self._best_io_of(self.file)()

    def _best_io_of(self, file: BlockFile) -> Callable[[], FileIo]:
        def make() -> FileIo:
            io = make_file_io(file.fd, is_direct=file.is_direct)
            self.scene.facts["kvbm's I/O"] = (
                f"{type(io).__name__}; {AIO_ALONE}: the same, one block a request"
            )
            return io

        return make


def measure_beside_fio(block_bytes: int, scene: Scene) -> Samples:
    """Ours in both patterns, AIO with nothing around it, and fio's engines."""

    def sides(bench: _Bench) -> Iterator[Side]:
        yield bench.ours(KvbmSide, PROMPTS, as_prompts)
        yield bench.ours(KvbmSide, SCATTERED, scattered)
        yield bench.alone()
        for engine in ENGINES:
            if f"fio {engine}" not in scene.missing:
                yield FioSide(engine, scene.folder / "fio", scene.total_bytes, block_bytes)

    return _measure(block_bytes, scene, sides)


def measure_beside_vllm(block_bytes: int, scene: Scene) -> Samples:
    """Ours as prompts are stored, and vLLM's fs tier."""

    def sides(bench: _Bench) -> Iterator[Side]:
        yield bench.ours(KvbmSide, PROMPTS, as_prompts)
        yield _vllm_side(bench.blocks, scene)

    return _measure(block_bytes, scene, sides)


def measure_checksums(block_bytes: int, scene: Scene) -> Samples:
    """Ours with and without the checksum of the bytes."""

    def sides(bench: _Bench) -> Iterator[Side]:
        yield bench.ours(KvbmSide, PROMPTS, as_prompts)
        yield bench.ours(WithoutChecksum, NO_CHECKSUM, as_prompts)

    return _measure(block_bytes, scene, sides)


def _measure(block_bytes: int, scene: Scene, make_sides: Callable[[_Bench], Iterator[Side]]) -> Samples:
    with ExitStack() as stack:
        stack.callback(gc.collect)  # a side that has ended may still hold memory of the slab
        blocks = Blocks(scene.total_bytes // block_bytes, block_bytes, scene.seed)
        stack.callback(blocks.close)
        bench = _Bench(blocks, _open_file(stack, blocks, scene), scene, stack)
        sides = []
        for side in make_sides(bench):
            stack.callback(side.close)
            sides.append(side)
        return take_turns(
            sides, scene.rounds, lambda text: scene.told(f"storage: {size_text(block_bytes)}, {text}")
        )


def fio_figures(block_bytes: int, samples: Samples, missing: Mapping[str, str]) -> list[Figure]:
    """Both directions, both patterns; all other series are shown beside them."""
    figures = []
    for place, direction in enumerate(DIRECTIONS):
        series = {name: tuple(rates[place] for rates in taken) for name, taken in samples.items()}
        patterns = {pattern: series.pop(pattern) for pattern in (PROMPTS, SCATTERED)}
        engines = [series[name] for engine in ENGINES if (name := f"fio {engine}") in series]
        better = {BETTER_FIO: max(engines, key=median)} if engines else {}
        note = "; ".join(dict.fromkeys(why for name, why in missing.items() if name != VLLM))
        for pattern, ours in patterns.items():
            figures.append(
                Figure(fio_goal(direction, block_bytes, pattern), ours, {**better, **series}, note)
            )
    return figures


def pair_figures(
    make_goal: Callable[[str, int], Goal], block_bytes: int, samples: Samples, ours: str = PROMPTS
) -> list[Figure]:
    """Both directions, the side ``ours`` against the peer of the goal alone."""
    figures = []
    for place, direction in enumerate(DIRECTIONS):
        goal = make_goal(direction, block_bytes)
        series = {name: tuple(rates[place] for rates in taken) for name, taken in samples.items()}
        figures.append(Figure(goal, series[ours], {goal.against: series[goal.against]}))
    return figures


def shown_text(samples: Samples) -> str:
    """Medians of ours and vLLM's, for a size without a goal."""
    texts = []
    for place, direction in enumerate(DIRECTIONS):
        ours, theirs = (median(rates[place] for rates in samples[name]) for name in (PROMPTS, VLLM))
        texts.append(f"{direction} {ours:.2f} against {theirs:.2f} GB/s")
    return ", ".join(texts)


def _open_file(stack: ExitStack, blocks: Blocks, scene: Scene) -> BlockFile:
    path = scene.folder / "kvbm.blocks"
    stack.callback(path.unlink, missing_ok=True)
    file = BlockFile(path, Geometry(blocks.num_blocks, blocks.block_bytes, FINGERPRINT))
    stack.callback(file.close)
    scene.facts["kvbm's file"] = ", ".join(
        (
            "O_DIRECT" if file.is_direct else "through the page cache: this place has no O_DIRECT",
            "space reserved" if file.is_reserved else "sparse: space cannot be reserved here",
        )
    )
    return file


def _vllm_side(blocks: Blocks, scene: Scene) -> Side:
    from benchmarks.storage.vllm_side import JOB_BYTES, VllmFsSide

    folder = scene.folder / f"vllm-{blocks.block_bytes}"
    folder.mkdir()
    side = VllmFsSide(folder, blocks)
    scene.facts["vLLM's fs tier"] = (
        f"its FileSystemTierManager with its default threads, {'O_DIRECT' if side.is_direct else 'buffered'};"
        f" jobs of {JOB_BYTES >> 20} MiB, all submitted at once; its writes are not made durable, "
        "in its favor"
    )
    return side


def vllm_problem() -> str | None:
    """Why vLLM's tier cannot be measured; None if it can."""
    if importlib.util.find_spec("vllm") is None:
        return "vLLM is not installed"
    try:
        import benchmarks.storage.vllm_side  # noqa: F401
    except ImportError as error:
        return f"this vLLM has no fs tier that we know: {error}"
    return None
