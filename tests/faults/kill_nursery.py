"""A warm interpreter that forks writers for test_kills.py: one for each line on standard input.

Lines in: payload bytes, 1 for O_DIRECT, first version, seed, path. Lines out: ``pid <n>``, then ``put
<call>`` before each call, and ``dead <wait status>`` when the writer is gone.
"""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path
from random import Random

from kvbm_core.storage.disk.allocate import FileOptions
from kvbm_core.storage.disk.block_file import Geometry
from kvbm_core.storage.disk.store import DiskStore
from kvbm_core.testing.store_contract import LONG_S
from tests.faults.versions import put_versions, read_all

NUM_SLOTS = 16
NUM_KEYS = 24
VERSIONS_EACH = 1_000_000
"""What a writer may use up."""
FINGERPRINT = b"killed while wri"
MOST_CALLS = 20_000
"""A writer that nobody kills ends some time."""


def say(*words: object) -> None:
    """One line, at once and in one piece."""
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


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


def main() -> None:
    """Until standard input ends."""
    for line in sys.stdin:
        payload_bytes, is_direct, version, seed, path = line.rstrip("\n").split(" ", 4)
        pid = os.fork()
        if pid == 0:
            try:
                say("pid", os.getpid())
                write_until_killed(int(payload_bytes), is_direct == "1", int(version), int(seed), Path(path))
            except BaseException as error:
                os.write(2, f"{type(error).__name__}: {error}\n".encode())
            finally:
                os._exit(1)
        say("dead", os.waitpid(pid, 0)[1])


if __name__ == "__main__":
    main()
