"""A warm interpreter that forks writers for test_directory_kills.py: one for each line on standard input.

Orders: payload bytes, 1 for O_DIRECT, first version, seed, path. See nurseries.py.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from random import Random

from kvbm_core.storage.directory.store import DirectoryOptions, DirectoryStore
from kvbm_core.storage.names import Meaning
from tests.faults.nurseries import MOST_CALLS, Calls, Moment, fork_for_each_line
from tests.faults.versions import put_versions

NUM_KEYS = 8
MEANING = Meaning("killed", b"killed", b"killed while wri")
OPTIONS = DirectoryOptions(num_threads=4)


def write(order: str, moment: Moment) -> None:
    """Newer and newer versions of some keys, in place of what is there."""
    *numbers, path = order.split(" ", 4)
    payload_bytes, is_direct, version, seed = map(int, numbers)
    rng, calls = Random(seed), Calls(moment)
    options = DirectoryOptions(is_direct=bool(is_direct), num_threads=4)
    store = DirectoryStore(Path(path), MEANING, payload_bytes, options)
    for call in range(MOST_CALLS):
        chosen = rng.sample(range(NUM_KEYS), rng.randrange(1, NUM_KEYS))
        put_versions(
            store, {number: version + call for number in chosen}, payload_bytes, partial(calls.begin, call)
        )


if __name__ == "__main__":
    fork_for_each_line(write)
