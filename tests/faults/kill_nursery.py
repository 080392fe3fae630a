"""A warm interpreter that forks writers for test_kills.py: one for each line on standard input.

Orders: payload bytes, 1 for O_DIRECT, first version, seed, path. See nurseries.py.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from random import Random

from kvbm_core.storage.disk.allocate import FileOptions
from kvbm_core.storage.disk.block_file import Geometry
from kvbm_core.storage.disk.store import DiskStore
from kvbm_core.testing.store_contract import LONG_S
from tests.faults.nurseries import MOST_CALLS, Calls, Moment, fork_for_each_line
from tests.faults.versions import put_versions, read_all

NUM_SLOTS = 16
NUM_KEYS = 24
VERSIONS_EACH = 1_000_000
"""What a writer may use up."""
FINGERPRINT = b"killed while wri"


def write(order: str, moment: Moment) -> None:
    """Opens the file, checks all that is in it, then writes newer and newer versions."""
    *numbers, path = order.split(" ", 4)
    payload_bytes, is_direct, version, seed = map(int, numbers)
    rng, calls = Random(seed), Calls(moment)
    geometry = Geometry(NUM_SLOTS, payload_bytes, FINGERPRINT)
    store = DiskStore(Path(path), geometry, FileOptions(is_direct=bool(is_direct)))
    assert store.wait_recovered(LONG_S)
    read_all(store, NUM_KEYS, payload_bytes)
    for call in range(MOST_CALLS):
        chosen = rng.sample(range(NUM_KEYS), rng.randrange(1, NUM_SLOTS + 1))
        versions = {number: version + call for number in chosen}
        put_versions(store, versions, payload_bytes, on_ready=partial(calls.begin, call))


if __name__ == "__main__":
    fork_for_each_line(write)
