"""Writers in a shared directory that are killed while another process reads: no wrong byte, at most misses.

``KVBM_FAULT_DIRECTORY_KILLS`` says how many are killed.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

import pytest

from kvbm_core.errors import Outcome
from kvbm_core.storage.directory.evictor import TEMPORARY_S
from kvbm_core.storage.directory.names import is_temporary
from kvbm_core.storage.directory.store import DirectoryStore
from tests.effort import tries
from tests.faults.directory_nursery import MEANING, NUM_KEYS, OPTIONS
from tests.faults.kill_nursery import VERSIONS_EACH
from tests.faults.nurseries import Moment, kill_one, nursery
from tests.faults.versions import read_all
from tests.unit.directory_stores import files_below

NUM_KILLS = int(os.environ.get("KVBM_FAULT_DIRECTORY_KILLS") or tries(100, nightly=500))
SIZES = (65_536, 20_000, 131_072)


@pytest.fixture
def writers() -> Iterator[subprocess.Popen[str]]:
    """The warm interpreter."""
    with nursery("tests.faults.directory_nursery") as process:
        yield process


@pytest.mark.timeout(300 + NUM_KILLS)
def test_no_kill_costs_a_byte(
    writers: subprocess.Popen[str], tmp_path: Path, rng: Random, tell: Callable[[str], None]
) -> None:
    started_s = time.monotonic()
    counts: Counter[Outcome] = Counter()
    readers = {}
    for size in SIZES:
        (tmp_path / str(size)).mkdir()
        readers[size] = DirectoryStore(tmp_path / str(size), MEANING, size, OPTIONS)
    newest = 0
    try:
        for kill in range(NUM_KILLS):
            size = SIZES[kill % len(SIZES)]
            first_version = (kill + 1) * VERSIONS_EACH
            order = f"{size} {kill % 2} {first_version} {rng.getrandbits(32)} {tmp_path / str(size)}"
            kill_one(writers, order, Moment.of(rng, kill))
            outcomes, versions = read_all(readers[size], NUM_KEYS, size)
            counts.update(outcomes)
            newest += any(version is not None and version >= first_version for version in versions)
        half_written = [path for path in files_below(tmp_path) if is_temporary(path.name)]
        for path in half_written:
            os.utime(path, (time.time() - TEMPORARY_S - 60,) * 2)
        removed = sum(store.evictor.evict().removed_temporary for store in readers.values())
    finally:
        for store in readers.values():
            store.close()
    told = ", ".join(f"{outcome} {count}" for outcome, count in sorted(counts.items()))
    tell(
        f"{NUM_KILLS} kills in {time.monotonic() - started_s:.1f} s, no wrong byte; {len(half_written)} "
        f"files were left half written, all removed; reads: {told}"
    )
    assert set(counts) <= {Outcome.OK, Outcome.MISS}, "what is torn is never seen under its name"
    assert counts[Outcome.OK] > NUM_KILLS * NUM_KEYS // 4 and newest > NUM_KILLS // 2, (
        "this test sees nothing"
    )
    assert len(half_written) == removed > NUM_KILLS // 50, "they are killed while they write"
