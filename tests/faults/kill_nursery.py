"""A warm interpreter that forks writers for test_kills.py: one for each line on standard input.

Lines in: payload bytes, 1 for O_DIRECT, first version, seed, path. Lines out: see nurseries.py.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from random import Random

from kvbm_core.storage.disk.allocate import FileOptions
from kvbm_core.storage.disk.block_file import Geometry
from kvbm_core.storage.disk.store import DiskStore
from kvbm_core.testing.store_contract import LONG_S
from tests.faults.nurseries import MOST_CALLS, fork_for_each_line, say
from tests.faults.versions import put_versions, read_all

NUM_SLOTS = 16
NUM_KEYS = 24
VERSIONS_EACH = 1_000_000
"""What a writer may use up."""
FINGERPRINT = b"killed while wri"


def write_until_killed(payload_bytes: int, is_direct: bool, version: int, seed: int, path: Path) -> None:
    """Opens the file, checks all that is in it, then writes newer and newer versions."""
    rng = Random(seed)
    geometry = Geometry(NUM_SLOTS, payload_bytes, FINGERPRINT)
    store = DiskStore(path, geometry, FileOptions(is_direct=is_direct))
    assert store.wait_recovered(LONG_S)
    read_all(store, NUM_KEYS, payload_bytes)
    for call in range(MOST_CALLS):
        numbers = rng.sample(range(NUM_KEYS), rng.randrange(1, NUM_SLOTS + 1))
        versions = {number: version + call for number in numbers}
        put_versions(store, versions, payload_bytes, on_ready=partial(say, "put", call))


def write(line: str) -> None:
    """As the line says."""
    payload_bytes, is_direct, version, seed, path = line.split(" ", 4)
    write_until_killed(int(payload_bytes), is_direct == "1", int(version), int(seed), Path(path))


if __name__ == "__main__":
    fork_for_each_line(write)
