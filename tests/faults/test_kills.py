"""A writer that is killed in the middle of a write: the file opens, and every byte that is answered is right.

``KVBM_FAULT_KILLS`` says how many are killed.
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
from kvbm_core.storage.disk.allocate import FileOptions
from kvbm_core.storage.disk.block_file import Geometry
from kvbm_core.storage.disk.store import DiskStore
from kvbm_core.testing.store_contract import LONG_S
from tests.effort import tries
from tests.faults.kill_nursery import FINGERPRINT, NUM_KEYS, NUM_SLOTS, VERSIONS_EACH
from tests.faults.nurseries import Moment, kill_one, nursery
from tests.faults.versions import read_all

NUM_KILLS = int(os.environ.get("KVBM_FAULT_KILLS") or tries(40, nightly=240))
SIZES = (65_536, 20_000, 262_144)
DIRECT_EVERY = 8
"""One kill in so many is of a writer with O_DIRECT: closing a store of that kind takes the kernel long."""


@pytest.fixture
def writers() -> Iterator[subprocess.Popen[str]]:
    """The warm interpreter."""
    with nursery("tests.faults.kill_nursery") as process:
        yield process


@pytest.mark.timeout(300 + NUM_KILLS)
def test_no_kill_costs_a_byte_or_the_file(
    writers: subprocess.Popen[str], tmp_path: Path, rng: Random, tell: Callable[[str], None]
) -> None:
    started_s = time.monotonic()
    counts: Counter[Outcome] = Counter()
    newest = 0
    for kill in range(NUM_KILLS):
        payload_bytes = SIZES[kill % len(SIZES)]
        is_direct = kill % DIRECT_EVERY == DIRECT_EVERY - 1
        path = tmp_path / f"{payload_bytes}.blocks"  # the next writers of this size go on with it
        first_version = (kill + 1) * VERSIONS_EACH
        order = f"{payload_bytes} {int(is_direct)} {first_version} {rng.getrandbits(32)} {path}"
        kill_one(writers, order, Moment.of(rng, kill))
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
