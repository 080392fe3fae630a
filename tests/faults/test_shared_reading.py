"""A process that reads along while another one writes, and while that one is killed and started again: no
wrong byte.

``KVBM_FAULT_SHARED_READS`` says how many blocks are asked for of each kind of file.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from random import Random

import pytest

from kvbm_core.errors import Outcome
from kvbm_core.storage.disk.allocate import FileOptions
from kvbm_core.storage.disk.block_file import Geometry
from kvbm_core.storage.disk.reader import DiskReader
from kvbm_core.storage.disk.slot_log import log_path
from kvbm_core.testing.store_contract import LONG_S, buffers, key_of
from tests.effort import tries
from tests.faults.sharing_writer import FINGERPRINT, NUM_KEYS, NUM_SLOTS, NUM_VERSIONS
from tests.faults.versions import payload_of, version_in
from tests.open_files import open_files

ROOT = Path(__file__).parents[2]
NUM_READS = int(os.environ.get("KVBM_FAULT_SHARED_READS") or tries(4000, nightly=20_000))
READS_OF_A_PART = 500
NUM_KILLS = 6
NUM_SPOILED, FEWEST_READ_WHILE_SPOILED = 400, 200
expected = lru_cache(maxsize=NUM_KEYS * NUM_VERSIONS)(payload_of)
NUMBER_OF = {key_of(number): number for number in range(NUM_KEYS)}


@pytest.fixture(autouse=True)
def no_open_files_are_left() -> Iterator[None]:
    before = open_files()
    yield
    assert open_files() == before


@contextmanager
def writer_of(
    path: Path, payload_bytes: int, *, is_direct: bool, version: int, seed: int
) -> Iterator[subprocess.Popen[str]]:
    """A process that writes there, once it has opened the file; killed afterwards if it has not ended."""
    arguments = [payload_bytes, int(is_direct), version, seed, path]
    command = [sys.executable, "-m", "tests.faults.sharing_writer", *map(str, arguments)]
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert said(process) == ["opened"], "the writer did not open the file"
            yield process
        finally:
            process.kill()


def said(process: subprocess.Popen[str]) -> list[str]:
    """The words of its next line."""
    assert process.stdout is not None
    return process.stdout.readline().split()


def calls_until_stopped(process: subprocess.Popen[str]) -> int:
    """Tells it to stop; how many calls it made."""
    assert process.stdin is not None
    process.stdin.close()
    while (words := said(process))[0] == "put":
        pass
    assert words[0] == "done" and process.wait(LONG_S) == 0
    return int(words[1])


class Reading:
    """A reader, what it was answered, and the versions that it saw."""

    def __init__(self, path: Path, payload_bytes: int, *, is_direct: bool, rng: Random) -> None:
        geometry = Geometry(NUM_SLOTS, payload_bytes, FINGERPRINT)
        self.store = DiskReader(path, geometry, FileOptions(is_direct=is_direct))
        self.counts: Counter[Outcome] = Counter()
        self.versions: set[int] = set()
        self._payload_bytes = payload_bytes
        self._rng = rng

    def read(self, num_blocks: int) -> None:
        """Asks for so many; AssertionError for an OK whose bytes are not all those of one version of that
        very key.
        """
        keys = self._rng.sample(list(NUMBER_OF), num_blocks)
        targets = buffers(num_blocks, self._payload_bytes)
        outcomes = self.store.get_many(keys, targets, deadline_s=LONG_S)
        self.counts.update(outcomes)
        for key, target, outcome in zip(keys, targets, outcomes, strict=True):
            if outcome is Outcome.OK:
                version = version_in(target)
                assert target == expected(NUMBER_OF[key], version, self._payload_bytes), "wrong bytes"
                self.versions.add(version)

    @property
    def num_asked(self) -> int:
        return sum(self.counts.values())


@pytest.mark.parametrize(("payload_bytes", "is_direct"), [(4096, False), (100_000, False), (20_000, True)])
def test_no_wrong_byte_while_the_writer_writes_over_what_is_read(
    tmp_path: Path, payload_bytes: int, is_direct: bool, rng: Random, tell: Callable[[str], None]
) -> None:
    path = tmp_path / "shared.blocks"
    reading = Reading(path, payload_bytes, is_direct=is_direct, rng=rng)
    reading.read(2)
    assert reading.counts == {Outcome.MISS: 2}, "it is there first"
    with writer_of(path, payload_bytes, is_direct=is_direct, version=1, seed=rng.getrandbits(32)) as process:
        reading.counts.clear()
        for end in range(READS_OF_A_PART, NUM_READS + 1, READS_OF_A_PART):
            assert said(process)[0] == "put", "both go on, however busy the machine is"
            while reading.num_asked < end:
                reading.read(rng.randrange(1, 7))
        calls = calls_until_stopped(process)
    during = Counter(reading.counts)
    for _ in range(20):
        reading.read(NUM_KEYS)
    last = list(reading.store.scan())
    reading.counts.clear()
    reading.read(NUM_KEYS)
    reading.store.close()
    told = ", ".join(f"{outcome} {count}" for outcome, count in sorted(during.items()))
    tell(f"{payload_bytes} bytes, direct {is_direct}: {calls} calls of the writer; blocks read: {told}")
    assert set(during) <= {Outcome.OK, Outcome.MISS}
    assert during[Outcome.OK] > NUM_READS // 4, "or the reader is of little use"
    assert reading.versions == set(range(1, 1 + NUM_VERSIONS)) and calls > NUM_READS // 100, (
        "or the writer stood still"
    )
    assert reading.counts[Outcome.OK] == len(last) == NUM_SLOTS, "at rest, all that is there is found"


def test_a_killed_writer_and_the_next_one_are_read_along(tmp_path: Path, rng: Random) -> None:
    path, payload_bytes = tmp_path / "shared.blocks", 20_000
    reading = Reading(path, payload_bytes, is_direct=False, rng=rng)
    newest = 0
    for kill in range(1, NUM_KILLS + 1):
        first_version = kill << 32
        with writer_of(
            path, payload_bytes, is_direct=False, version=first_version, seed=rng.getrandbits(32)
        ) as process:
            if kill == 1:
                assert said(process)[0] == "put", "the file is full, so that most of it survives"
            while not (reading.versions and max(reading.versions) >= first_version):
                reading.read(4)
            for _ in range(rng.randrange(300)):
                reading.read(4)
            process.send_signal(signal.SIGKILL)
            for _ in range(20):
                reading.read(4)
            assert process.wait(LONG_S) == -signal.SIGKILL
        reading.counts.clear()
        for _ in range(20):
            reading.read(NUM_KEYS)
        assert reading.counts[Outcome.OK] >= 20 * NUM_SLOTS // 2, "most blocks survive, and are found"
        assert max(reading.versions) > newest
        newest = max(reading.versions)
    assert set(reading.counts) <= {Outcome.OK, Outcome.MISS}
    reading.store.close()


def test_no_wrong_byte_whatever_the_log_says(tmp_path: Path, rng: Random) -> None:
    """It is spoiled again and again, under the writer's hands: bits flipped, cut, gone, an older one in its
    place.
    """
    path, payload_bytes = tmp_path / "shared.blocks", 8192
    reading = Reading(path, payload_bytes, is_direct=False, rng=rng)
    log = log_path(path)
    with writer_of(path, payload_bytes, is_direct=False, version=1, seed=rng.getrandbits(32)) as process:
        assert said(process)[0] == "put"
        turn, older = 0, log.read_bytes()
        # How much of it is found depends on how often the writer gets to run between two turns.
        while turn < NUM_SPOILED or reading.counts[Outcome.OK] < FEWEST_READ_WHILE_SPOILED:
            turn += 1
            spoil(log, older, rng)
            if turn % 50 == 0:
                older = log.read_bytes() if log.exists() else older
            for _ in range(4):
                reading.read(rng.randrange(1, 7))
        calls_until_stopped(process)
    reading.store.close()
    assert set(reading.counts) <= {Outcome.OK, Outcome.MISS}


def spoil(log: Path, older: bytes, rng: Random) -> None:
    """In one of several ways; the writer may be putting a new one in place meanwhile."""
    try:
        what = rng.randrange(5)
        if what == 0:
            log.unlink()
        elif what == 1:
            os.truncate(log, rng.randrange(log.stat().st_size + 1))
        elif what == 2:
            log.write_bytes(older)
        elif what == 3:
            log.write_bytes(rng.randbytes(rng.randrange(500)))
        else:
            content = bytearray(log.read_bytes())
            for bit in rng.sample(range(8 * len(content)), min(20, len(content))):
                content[bit // 8] ^= 1 << bit % 8
            with log.open("r+b") as file:
                file.write(content)
    except FileNotFoundError:
        pass
