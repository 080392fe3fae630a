"""A warm interpreter that forks writers for test_directory_kills.py: one for each line on standard input.

Lines in: payload bytes, 1 for O_DIRECT, first version, seed, path. Lines out: ``pid <n>``, then ``put
<call>`` before each call, and ``dead <wait status>`` when the writer is gone.
"""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path
from random import Random

from kvbm_core.storage.directory.names import Meaning
from kvbm_core.storage.directory.store import DirectoryOptions, DirectoryStore
from tests.faults.kill_nursery import MOST_CALLS, say
from tests.faults.versions import put_versions

NUM_KEYS = 8
MEANING = Meaning("killed", b"killed", b"killed while wri")
OPTIONS = DirectoryOptions(num_threads=4)


def write_until_killed(payload_bytes: int, is_direct: bool, version: int, seed: int, path: Path) -> None:
    """Newer and newer versions of some keys, in place of what is there."""
    rng = Random(seed)
    options = DirectoryOptions(is_direct=is_direct, num_threads=4)
    store = DirectoryStore(path, MEANING, payload_bytes, options)
    for call in range(MOST_CALLS):
        numbers = rng.sample(range(NUM_KEYS), rng.randrange(1, NUM_KEYS))
        put_versions(
            store, {number: version + call for number in numbers}, payload_bytes, partial(say, "put", call)
        )


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
