"""A warm interpreter that forks writers for test_directory_kills.py: one for each line on standard input.

Lines in: payload bytes, 1 for O_DIRECT, first version, seed, path. Lines out: see nurseries.py.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from random import Random

from kvbm_core.storage.directory.store import DirectoryOptions, DirectoryStore
from kvbm_core.storage.names import Meaning
from tests.faults.nurseries import MOST_CALLS, fork_for_each_line, say
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


def write(line: str) -> None:
    """As the line says."""
    payload_bytes, is_direct, version, seed, path = line.split(" ", 4)
    write_until_killed(int(payload_bytes), is_direct == "1", int(version), int(seed), Path(path))


if __name__ == "__main__":
    fork_for_each_line(write)
