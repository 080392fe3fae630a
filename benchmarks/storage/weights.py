"""How fast a model's weights are known by their content, beside what the disk and one core give to threads of
the same low priority.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median

from benchmarks.figures import LIMIT, Figure, Goal
from benchmarks.suite import expect
from kvbm_core.identity.digest import (
    RACY_NS,
    READ_BYTES,
    READS_AHEAD,
    Digester,
    DigestMemory,
    yield_to_others,
)

FASTEST = "disk or core"
CORE = "one core"
COLD = Goal("weights: digest, from the disk", "GB/s", 0.8, "higher", FASTEST)
WARM = Goal("weights: digest, from the page cache", "GB/s", 0.8, "higher", CORE)
AGAIN = Goal("weights: read at a second start", "bytes", 0.0, "lower", LIMIT)
GOALS = (COLD, WARM, AGAIN)
FILES = 2
COPY_BYTES = 1 << 20
TURN_BYTES = 512 << 20
PIECE_BYTES = 64 << 20
TURNS_A_ROUND = 4
"""What the disk and the other programs of a machine give changes within seconds: many short turns."""


def measure(
    folder: Path, rounds: int, seed: int, told: Callable[[str], None], total_bytes: int
) -> list[Figure]:
    """Turn by turn: the disk alone (past the page cache, which is a matter of memory), one core alone
    (SHA-256), and the digest of the folder, from the disk and from the page cache.
    """
    told("storage: digests of weights")
    model = folder / "a model"
    model.mkdir()
    file_bytes = min(TURN_BYTES, total_bytes) // FILES
    piece = random.Random(seed).randbytes(min(PIECE_BYTES, file_bytes))
    block = piece * (file_bytes // len(piece))
    for number in range(FILES):
        with (model / f"model-{number}.safetensors").open("wb") as file:
            file.write(block)
            os.fsync(file.fileno())
    _wait_until_settled(model)
    num_bytes, order = FILES * file_bytes, random.Random(seed)
    ways: dict[str, Callable[[], object]] = {
        "disk": lambda: _read_past_cache(model),
        "core": lambda: [hashlib.sha256(block) for _ in range(FILES)],
        "cold": lambda: Digester(memory).content(model),
        "warm": lambda: Digester(DigestMemory(None)).content(model),
    }
    took: dict[str, list[float]] = {way: [] for way in ways}
    again: list[float] = []
    for number in range(rounds * TURNS_A_ROUND):
        memory = DigestMemory(folder / f"digests {number}")
        # In another order each time: a disk that was left alone for a moment is faster for a while.
        for way in order.sample(sorted(ways), len(ways)):
            (_read if way == "warm" else _forget)(model)
            took[way].append(_rate(num_bytes, ways[way]))
        second = Digester(memory)
        is_whole = second.content(model) is not None and second.total_bytes == num_bytes
        expect(is_whole, "files are missing")
        again.append(float(second.read_bytes))
    disk, core = took["disk"], took["core"]
    least = tuple(min(disk, core, key=median))
    note = f"disk {median(disk):.2f} GB/s, one core {median(core):.2f} GB/s"
    return [
        Figure(COLD, tuple(took["cold"]), {FASTEST: least}, note),
        Figure(WARM, tuple(took["warm"]), {CORE: tuple(core)}),
        Figure(AGAIN, tuple(again)),
    ]


def _rate(num_bytes: int, action: Callable[[], object]) -> float:
    """GB/s of it, at a digest's priority."""
    with ThreadPoolExecutor(1, initializer=yield_to_others) as pool:
        began_s = time.perf_counter()
        pool.submit(action).result()
        return num_bytes / 1e9 / (time.perf_counter() - began_s)


def _read(model: Path) -> None:
    buffer = bytearray(COPY_BYTES)
    for path in model.iterdir():
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def _read_past_cache(model: Path) -> None:
    """By as many threads at once as a digest has reading."""
    for path in model.iterdir():
        fd, size_bytes = os.open(path, os.O_RDONLY | os.O_DIRECT), path.stat().st_size
        buffers = threading.local()

        def read(at: int, fd: int = fd, buffers: threading.local = buffers) -> None:
            if not hasattr(buffers, "mine"):
                buffers.mine = mmap.mmap(-1, READ_BYTES)
            os.preadv(fd, [buffers.mine], at)

        try:
            with ThreadPoolExecutor(READS_AHEAD, initializer=yield_to_others) as pool:
                for _ in pool.map(read, range(0, size_bytes, READ_BYTES)):
                    pass
        finally:
            os.close(fd)


def _forget(model: Path) -> None:
    """Drops the files from the page cache."""
    for path in model.iterdir():
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _wait_until_settled(model: Path) -> None:
    newest_ns = max(path.stat().st_ctime_ns for path in model.iterdir())
    time.sleep(max(0.0, (newest_ns + RACY_NS - time.time_ns()) / 1e9) + 0.01)
