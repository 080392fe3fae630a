"""How fast a model's weights are known by their content, beside what the disk and one core give."""

from __future__ import annotations

import hashlib
import os
import random
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.figures import LIMIT, Figure, Goal
from benchmarks.suite import expect
from kvbm_core.identity.digest import RACY_NS, Digester, DigestMemory

FASTEST = "disk or core"
COLD = Goal("weights: digest, from the disk", "GB/s", 0.8, "higher", FASTEST)
AGAIN = Goal("weights: read at a second start", "bytes", 0.0, "lower", LIMIT)
GOALS = (COLD, AGAIN)
FILES = 2
READ_BYTES = 1 << 20


def measure(
    folder: Path, rounds: int, seed: int, told: Callable[[str], None], total_bytes: int
) -> list[Figure]:
    """Turn by turn: the disk alone, one core alone (SHA-256), and the digest of the folder."""
    told("storage: digests of weights")
    model = folder / "a model"
    model.mkdir()
    block = random.Random(seed).randbytes(min(64 << 20, total_bytes // FILES))
    for number in range(FILES):
        with (model / f"model-{number}.safetensors").open("wb") as file:
            for _ in range(total_bytes // FILES // len(block)):
                file.write(block)
            os.fsync(file.fileno())
    sizes = [path.stat().st_size for path in model.iterdir()]
    ours, theirs, disk, core, again = [], [], [], [], []
    for number in range(rounds):
        memory = DigestMemory(folder / f"digests {number}")
        disk.append(_rate(sum(sizes), lambda: _read(model)))
        core.append(_rate(len(block), lambda: hashlib.sha256(block).digest()))
        _wait_until_settled(model)
        _forget(model)
        ours.append(_rate(sum(sizes), lambda m=memory: Digester(m).content(model)))  # type: ignore[misc]
        second = Digester(memory)
        expect(second.content(model) is not None and second.total_bytes == sum(sizes), "files are missing")
        again.append(float(second.read_bytes))
        theirs.append(min(disk[-1], core[-1]))
    note = f"disk {max(disk):.2f} GB/s, one core {max(core):.2f} GB/s at most"
    return [Figure(COLD, tuple(ours), {FASTEST: tuple(theirs)}, note), Figure(AGAIN, tuple(again))]


def _rate(num_bytes: int, action: Callable[[], object]) -> float:
    began_s = time.perf_counter()
    action()
    return num_bytes / 1e9 / (time.perf_counter() - began_s)


def _read(model: Path) -> None:
    _forget(model)
    buffer = bytearray(READ_BYTES)
    for path in model.iterdir():
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def _forget(model: Path) -> None:
    """Drops the files from the page cache."""
    for path in model.iterdir():
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _wait_until_settled(model: Path) -> None:
    newest_ns = max(path.stat().st_ctime_ns for path in model.iterdir())
    time.sleep(max(0.0, (newest_ns + RACY_NS - time.time_ns()) / 1e9) + 0.01)
