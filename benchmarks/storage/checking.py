"""Reading and checking all that an earlier process left in a block file, as a start under TensorRT-LLM
does.
"""

from __future__ import annotations

import mmap
import os
import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from statistics import median

from benchmarks.figures import Figure, Goal
from benchmarks.suite import expect
from benchmarks.timing import timed
from kvbm_core.errors import Outcome
from kvbm_core.storage.disk.allocate import FileOptions
from kvbm_core.storage.disk.block_file import BlockFile, Geometry
from kvbm_core.storage.disk.record import (
    SECTOR_BYTES,
    payload_digest,
    record_bytes,
    slot_offset_bytes,
    unpack_record,
)
from kvbm_core.storage.disk.recovery import Found, Recovery
from kvbm_core.storage.disk.store import DiskStore
from kvbm_core.types import BlockKey

BLOCKS_BYTES = (256 << 10, 2 << 20)
PLAIN = "plain reads, four threads"
PLAIN_THREADS = 4
READ_BYTES = 4 << 20
ALONE = "alone"
LOAD_BYTES = 16 << 20
FINGERPRINT = b"benchmark of a c"
CHECKED = FileOptions(check_at_start=True)
DEADLINE_S = 600.0
LEAST_BYTES = 4 * LOAD_BYTES
"""In a file."""
LOADS = 20
"""At least, for a median."""


def _goal(block_bytes: int) -> Goal:
    size = f"{block_bytes >> 10} KiB" if block_bytes < 1 << 20 else f"{block_bytes >> 20} MiB"
    return Goal(f"start-up: all bytes checked, blocks of {size}", "GB/s", 0.7, "higher", PLAIN)


RATES = tuple(map(_goal, BLOCKS_BYTES))
BESIDE = Goal("load of 16 MiB while the start is checked", "ms", 1.5, "lower", ALONE)
GOALS = (*RATES, BESIDE)


def measure(
    folder: Path, rounds: int, seed: int, told: Callable[[str], None], total_bytes: int
) -> list[Figure]:
    """All figures. WrongAnswer if a block is not found again or cannot be read."""
    rng = random.Random(f"checking {seed}")
    figures = []
    for goal, block_bytes in zip(RATES, BLOCKS_BYTES, strict=True):
        told(f"storage: {goal.name}")
        geometry = Geometry(total_bytes // block_bytes, block_bytes, FINGERPRINT)
        with filled(folder / "checked.blocks", geometry, rng) as (path, _):
            samples = [(checked_gb_s(path, geometry), read_gb_s(path, geometry)) for _ in range(rounds)]
        ours, theirs = zip(*samples, strict=True)
        figures.append(Figure(goal, ours, {PLAIN: theirs}))
    told(f"storage: {BESIDE.name}")
    return [*figures, _beside(folder, rounds, rng, total_bytes)]


def checked_gb_s(path: Path, geometry: Geometry) -> float:
    """GB/s of blocks' bytes, from opening the file to knowing which of them are good."""
    with (
        closing(BlockFile(path, geometry, CHECKED)) as file,
        closing(Recovery(file, _nobody)) as it,
    ):
        seconds, is_over = timed(lambda: it.wait(DEADLINE_S))
        expect(
            is_over and it.found_blocks == geometry.num_slots,
            f"{it.found_blocks} of {geometry.num_slots} are good",
        )
    return geometry.num_slots * geometry.payload_bytes / seconds / 1e9


def read_gb_s(path: Path, geometry: Geometry) -> float:
    """The same by four threads that read past the page cache, several records at a time, and compare each
    with its digest; nothing else uses the machine.
    """
    each_bytes = record_bytes(geometry.payload_bytes)
    together = max(1, READ_BYTES // each_bytes)
    own = threading.local()

    def check(first: int) -> int:
        if not hasattr(own, "memory"):
            own.memory = memoryview(mmap.mmap(-1, together * each_bytes))
        os.preadv(fd, [own.memory], slot_offset_bytes(first, geometry.payload_bytes))
        good = 0
        for at in range(0, min(together, geometry.num_slots - first) * each_bytes, each_bytes):
            header = unpack_record(own.memory[at : at + SECTOR_BYTES])
            payload = own.memory[at + SECTOR_BYTES : at + SECTOR_BYTES + geometry.payload_bytes]
            good += header is not None and payload_digest(payload) == header.digest
        return good

    fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    try:
        with ThreadPoolExecutor(PLAIN_THREADS) as pool:
            seconds, good = timed(lambda: sum(pool.map(check, range(0, geometry.num_slots, together))))
    finally:
        os.close(fd)
    expect(good == geometry.num_slots, f"{good} of {geometry.num_slots} verify")
    return geometry.num_slots * geometry.payload_bytes / seconds / 1e9


@contextmanager
def filled(path: Path, geometry: Geometry, rng: random.Random) -> Iterator[tuple[Path, list[BlockKey]]]:
    """A file whose slots all hold a block, and the blocks' keys in the order of writing; gone in the end."""
    payload = memoryview(rng.randbytes(geometry.payload_bytes))
    keys = [BlockKey(rng.randbytes(32)) for _ in range(geometry.num_slots)]
    per_call = max(1, LOAD_BYTES // geometry.payload_bytes)
    try:
        with closing(DiskStore(path, geometry)) as store:
            expect(store.wait_recovered(DEADLINE_S), "the new file is not ready")
            for start in range(0, len(keys), per_call):
                some = keys[start : start + per_call]
                put = store.put_many(some, [payload] * len(some), deadline_s=DEADLINE_S)
                expect(put == [Outcome.OK] * len(some), f"blocks could not be stored: {set(put)}")
        yield path, keys
    finally:
        path.unlink(missing_ok=True)


def _beside(folder: Path, rounds: int, rng: random.Random, total_bytes: int) -> Figure:
    """Loads from one file, alone and while another one is checked on the same disk."""
    size = BLOCKS_BYTES[-1]
    geometry = Geometry(total_bytes // size, size, FINGERPRINT)
    samples: list[tuple[float, float]] = []
    with (
        filled(folder / "checked.blocks", geometry, rng) as (path, _),
        filled(folder / "loaded.blocks", geometry, rng) as (loaded, keys),
        closing(DiskStore(loaded, geometry)) as store,
    ):
        expect(store.wait_recovered(DEADLINE_S), "the file could not be looked at")
        load = Load(store, keys, rng)
        for _ in range(rounds):
            alone_ms = [load.once_ms() for _ in range(LOADS)]
            samples.append((median(_while_checked(path, geometry, load)), median(alone_ms)))
    ours, theirs = zip(*samples, strict=True)
    return Figure(BESIDE, ours, {ALONE: theirs})


def _while_checked(path: Path, geometry: Geometry, load: Load) -> list[float]:
    """Times of loads while the file at ``path`` is checked, again and again if once is too short."""
    beside_ms: list[float] = []
    while len(beside_ms) < LOADS:
        with (
            closing(BlockFile(path, geometry, CHECKED)) as file,
            closing(Recovery(file, _nobody)) as recovery,
        ):
            while not recovery.wait(0.0):
                beside_ms.append(load.once_ms())
    return beside_ms


def _nobody(end: int, found: list[Found]) -> None:
    """What is found is of no interest."""


class Load:
    """LOAD_BYTES of neighbouring blocks, from anywhere in the file, as a hit brings them up."""

    def __init__(self, store: DiskStore, keys: list[BlockKey], rng: random.Random) -> None:
        self._store = store
        self._keys = keys
        self._rng = rng
        self._count = LOAD_BYTES // BLOCKS_BYTES[-1]
        self._targets = [memoryview(mmap.mmap(-1, BLOCKS_BYTES[-1])) for _ in range(self._count)]

    def once_ms(self) -> float:
        """The time of one."""
        start = self._rng.randrange(len(self._keys) - self._count + 1)
        some = self._keys[start : start + self._count]
        seconds, got = timed(lambda: self._store.get_many(some, self._targets, deadline_s=DEADLINE_S))
        expect(got == [Outcome.OK] * len(some), f"blocks could not be read: {set(got)}")
        return 1e3 * seconds
