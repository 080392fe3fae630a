"""A writer for test_shared_reading.py: puts one version after another into a small file until it is told to
stop.

Arguments: payload bytes, 1 for O_DIRECT, first version, seed, path. Prints ``opened``, then ``put <calls>``
after the calls that fill the file for the first time, again after each time as many, and ``done <calls>``
when standard input has ended.
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from random import Random

from kvbm_core.errors import Outcome
from kvbm_core.storage.disk.allocate import FileOptions
from kvbm_core.storage.disk.block_file import Geometry
from kvbm_core.storage.disk.store import DiskStore
from kvbm_core.testing.store_contract import LONG_S, key_of
from tests.faults.versions import aligned, payload_of, read_all

NUM_SLOTS = 12
NUM_KEYS = 18
MOST_BLOCKS = 4
"""In one call."""
NUM_VERSIONS = 8
"""Of each key; they are made beforehand, so that most of the time something is being written."""
FINGERPRINT = b"shared by writer"


def main(payload_bytes: int, is_direct: bool, version: int, seed: int, path: Path) -> None:
    """Until standard input ends."""
    told_to_stop = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), told_to_stop.set()), daemon=True).start()
    rng = Random(seed)
    geometry = Geometry(NUM_SLOTS, payload_bytes, FINGERPRINT)
    store = DiskStore(path, geometry, FileOptions(is_direct=is_direct), shares=True)
    assert store.wait_recovered(LONG_S)
    read_all(store, NUM_KEYS, payload_bytes)
    payloads = {
        (number, turn): aligned(payload_of(number, version + turn, payload_bytes))
        for number in range(NUM_KEYS)
        for turn in range(NUM_VERSIONS)
    }
    print("opened", flush=True)
    calls = 0
    while not told_to_stop.is_set():
        numbers = rng.sample(range(NUM_KEYS), rng.randrange(1, MOST_BLOCKS + 1))
        keys = [key_of(number) for number in numbers]
        store.remove_many(keys, deadline_s=LONG_S)
        chosen = [payloads[number, calls % NUM_VERSIONS] for number in numbers]
        outcomes = store.put_many(keys, chosen, deadline_s=LONG_S)
        assert outcomes == [Outcome.OK] * len(numbers)
        calls += 1
        if calls % (3 * NUM_SLOTS) == 0:
            print("put", calls, flush=True)
    store.close()
    print("done", calls, flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2] == "1", int(sys.argv[3]), int(sys.argv[4]), Path(sys.argv[5]))
