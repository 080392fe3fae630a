"""A writer that is killed in the middle of a write: the file opens, and every byte that is answered is right.

``KVBM_FAULT_KILLS`` says how many are killed.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import IO

import pytest

from kvbm_core.errors import Outcome
from kvbm_core.storage.disk.allocate import FileOptions
from kvbm_core.storage.disk.block_file import Geometry
from kvbm_core.storage.disk.store import DiskStore
from kvbm_core.testing.store_contract import LONG_S
from tests.effort import tries
from tests.faults.kill_nursery import FINGERPRINT, NUM_KEYS, NUM_SLOTS, VERSIONS_EACH
from tests.faults.versions import read_all

ROOT = Path(__file__).parents[2]
NUM_KILLS = int(os.environ.get("KVBM_FAULT_KILLS") or tries(40, nightly=240))
SIZES = (65_536, 20_000, 262_144)
DIRECT_EVERY = 8
"""One kill in so many is of a writer with O_DIRECT: closing a store of that kind takes the kernel long."""


@pytest.fixture
def nursery() -> Iterator[subprocess.Popen[str]]:
    """The warm interpreter."""
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tests.faults.kill_nursery"]
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        bufsize=1,
    )
    with process:
        yield process
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(LONG_S) == 0


def pipes(process: subprocess.Popen[str]) -> tuple[IO[str], IO[str]]:
    """Its standard input and output."""
    assert process.stdin is not None and process.stdout is not None
    return process.stdin, process.stdout


def soon(rng: Random, line: str) -> float:
    """Within a few milliseconds."""
    return rng.random() * rng.choice((0.0003, 0.001, 0.004))


def kill_one(
    process: subprocess.Popen[str],
    order: str,
    rng: Random,
    moment_s: Callable[[Random, str], float] = soon,
) -> int:
    """Has a writer started, and killed at a random moment after its first call: ``moment_s`` after the line
    that announces a call. The number of the last call that it has begun.
    """
    commands, answers = pipes(process)
    commands.write(order + "\n")
    word, pid = answers.readline().split()
    assert word == "pid"
    for _ in range(rng.randrange(2, 5)):
        line = answers.readline()
        assert line.startswith("put "), f"the writer did not open the file: {line}"
    end_s = time.perf_counter() + moment_s(rng, line)
    while time.perf_counter() < end_s:
        pass
    os.kill(int(pid), signal.SIGKILL)
    while line.startswith("put "):
        last, line = line, answers.readline()
    assert line.split() == ["dead", str(int(signal.SIGKILL))]
    return int(last.split()[1])


@pytest.mark.timeout(300 + NUM_KILLS)
def test_no_kill_costs_a_byte_or_the_file(
    nursery: subprocess.Popen[str], tmp_path: Path, rng: Random, tell: Callable[[str], None]
) -> None:
    started_s = time.monotonic()
    counts: Counter[Outcome] = Counter()
    newest = 0
    for kill in range(NUM_KILLS):
        payload_bytes = SIZES[kill % len(SIZES)]
        is_direct = kill % DIRECT_EVERY == DIRECT_EVERY - 1
        path = tmp_path / f"{payload_bytes}.blocks"  # the next writers of this size go on with it
        first_version = (kill + 1) * VERSIONS_EACH
        kill_one(
            nursery, f"{payload_bytes} {int(is_direct)} {first_version} {rng.getrandbits(32)} {path}", rng
        )
        store = DiskStore(path, Geometry(NUM_SLOTS, payload_bytes, FINGERPRINT), FileOptions(is_direct=False))
        try:
            assert store.wait_recovered(LONG_S)
            outcomes, versions = read_all(store, NUM_KEYS, payload_bytes)
        finally:
            store.close()
        counts.update(outcomes)
        assert all(version < first_version + VERSIONS_EACH for version in versions if version is not None)
        newest += any(version is not None and version >= first_version for version in versions)
    took_s = time.monotonic() - started_s
    told = ", ".join(f"{outcome} {count}" for outcome, count in sorted(counts.items()))
    tell(f"{NUM_KILLS} kills in {took_s:.1f} s, no wrong byte, every file opened; reads: {told}")
    assert set(counts) <= {Outcome.OK, Outcome.MISS, Outcome.CORRUPT}
    assert counts[Outcome.OK] > NUM_KILLS * NUM_SLOTS // 2, "most blocks survive, or this test sees nothing"
    assert newest >= 0.9 * NUM_KILLS, (
        "what was put before the kill is there, but for what a torn write went over"
    )
