"""Blocks put into a shared directory and got back, beside plain files written and read by as many threads."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

from benchmarks.figures import Figure, Goal
from benchmarks.storage.blocks import Blocks
from benchmarks.storage.kvbm_side import BATCH_BYTES
from benchmarks.storage.sides import Rates
from benchmarks.storage.throughput import DIRECTIONS, Samples, Scene, pair_figures, size_text, take_turns
from benchmarks.suite import expect
from kvbm_core.errors import Outcome
from kvbm_core.storage.directory.names import TOP, file_name
from kvbm_core.storage.directory.store import DirectoryOptions, DirectoryStore
from kvbm_core.storage.names import FAN_DIGITS, Meaning
from kvbm_core.types import BlockKey

SHARES = {128 << 10: 0.5, 2 << 20: 0.8}
"""Bounds by the size of a block: of small ones each name that is made, renamed and looked up counts."""
PLAIN = "plain files"
OURS = "shared directory"
DEADLINE_S = 600.0
THREADS = DirectoryOptions().num_threads
MEANING = Meaning("benchmark", b"benchmark", b"storage benchmark"[:16])


def goal(direction: str, block_bytes: int) -> Goal:
    """Ours against plain files."""
    name = f"shared directory: {direction}, {size_text(block_bytes)}"
    return Goal(name, "GB/s", SHARES[block_bytes], "higher", PLAIN)


GOALS = [goal(way, size) for size in SHARES for way in DIRECTIONS]


class _Folders:
    """A new folder a turn, as a block that is there is not written again; the last one is removed."""

    def __init__(self, parent: Path) -> None:
        self._parent = parent
        self.path = parent
        self._turns = 0

    def begin(self) -> Path:
        """Not timed."""
        self.end()
        self.path = self._parent / str(self._turns)
        self._turns += 1
        self.path.mkdir(parents=True)
        return self.path

    def fan_out(self, folder: Path, blocks: Blocks) -> Path:
        """Makes the folders below, which a directory that has been in use has."""
        for name in {file_name(key)[:FAN_DIGITS] for key in blocks.keys}:
            (folder / name).mkdir(parents=True)
        return folder

    def end(self) -> None:
        """Removes the last one."""
        if self.path != self._parent:
            shutil.rmtree(self.path)
            self.path = self._parent


class DirectorySide:
    """DirectoryStore, in batches."""

    name = OURS

    def __init__(self, folder: Path, blocks: Blocks) -> None:
        self._folders = _Folders(folder)
        self._blocks = blocks

    def turn(self) -> Rates:
        """See Side."""
        blocks = self._blocks
        path = self._folders.begin()
        store = DirectoryStore(path, MEANING, blocks.block_bytes)
        sources, targets = _views(blocks)
        try:
            store.contains_many(blocks.keys[:1], deadline_s=DEADLINE_S)  # makes the folders above
            self._folders.fan_out(path / TOP / MEANING.namespace_folder / MEANING.shard_folder, blocks)
            return blocks.turn(
                self.name,
                lambda: _all_ok(blocks, store.put_many, sources),
                lambda: _all_ok(blocks, store.get_many, targets),
            )
        finally:
            store.close()

    def close(self) -> None:
        """See Side."""
        self._folders.end()


class PlainSide:
    """A file per block in folders like ours, as many threads, O_DIRECT too; nothing is checked or renamed."""

    name = PLAIN

    def __init__(self, folder: Path, blocks: Blocks) -> None:
        self._folders = _Folders(folder)
        self._blocks = blocks
        self._pool = ThreadPoolExecutor(THREADS)
        self._direct = _direct_flag(folder)

    def turn(self) -> Rates:
        """See Side."""
        path, (sources, targets) = self._folders.begin(), _views(self._blocks)
        self._folders.fan_out(path, self._blocks)
        names = [file_name(key) for key in self._blocks.keys]

        def write(index: int) -> int:
            file = path / names[index][:FAN_DIGITS] / names[index]
            return _moved(file, os.O_WRONLY | os.O_CREAT | self._direct, os.pwritev, sources[index])

        def read(index: int) -> int:
            file = path / names[index][:FAN_DIGITS] / names[index]
            return _moved(file, os.O_RDONLY | self._direct, os.preadv, targets[index])

        return self._blocks.turn(self.name, lambda: self._all(write), lambda: self._all(read))

    def _all(self, move: Callable[[int], int]) -> None:
        moved_bytes = sum(self._pool.map(move, range(self._blocks.num_blocks)))
        expect(moved_bytes == self._blocks.total_bytes, f"{self.name}: {moved_bytes} bytes were moved")

    def close(self) -> None:
        """See Side."""
        self._pool.shutdown()
        self._folders.end()


def measure(scene: Scene) -> list[Figure]:
    """Both sizes, both directions, in turns."""
    figures: list[Figure] = []
    for block_bytes in SHARES:
        figures += pair_figures(goal, block_bytes, _measure(block_bytes, scene), OURS)
    return figures


def _measure(block_bytes: int, scene: Scene) -> Samples:
    with ExitStack() as stack:
        blocks = Blocks(scene.total_bytes // block_bytes, block_bytes, scene.seed)
        stack.callback(blocks.close)
        folder = scene.folder / f"directory-{block_bytes}"
        sides = []
        for side in (DirectorySide(folder / "ours", blocks), PlainSide(folder / "plain", blocks)):
            stack.callback(side.close)
            sides.append(side)
        return take_turns(sides, scene.rounds, lambda text: scene.told(f"storage: {OURS}, {text}"))


def _views(blocks: Blocks) -> tuple[list[memoryview], list[memoryview]]:
    memory, size = blocks.slab.array.data, blocks.block_bytes
    views = [memory[start : start + size] for start in range(0, 2 * blocks.total_bytes, size)]
    return views[: blocks.num_blocks], views[blocks.num_blocks :]


def _all_ok(blocks: Blocks, move: Callable[..., list[Outcome]], memory: Sequence[memoryview]) -> None:
    step = max(1, BATCH_BYTES // blocks.block_bytes)
    for start in range(0, blocks.num_blocks, step):
        keys: Sequence[BlockKey] = blocks.keys[start : start + step]
        outcomes = move(keys, memory[start : start + step], deadline_s=DEADLINE_S)
        expect(outcomes == [Outcome.OK] * len(keys), f"{OURS}: {set(outcomes)}")


def _moved(path: Path, flags: int, move: Callable[..., int], memory: memoryview) -> int:
    fd = os.open(path, flags, 0o600)
    try:
        return move(fd, [memory], 0)
    finally:
        os.close(fd)


def _direct_flag(folder: Path) -> int:
    folder.mkdir(parents=True, exist_ok=True)
    probe = folder / "probe"
    try:
        os.close(os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_DIRECT))
    except OSError:
        return 0
    finally:
        probe.unlink(missing_ok=True)
    return os.O_DIRECT
