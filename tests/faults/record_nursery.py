"""A warm interpreter that forks writers for test_record_kills.py: one for each line on standard input.

Orders: number of the writer, seed, URL; what else a store takes is in the environment. See nurseries.py.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from random import Random
from typing import cast

from kvbm_core.config import KvbmSettings
from kvbm_core.runtime.assembly import store_options
from kvbm_core.storage.base import Memory
from kvbm_core.storage.extents import Extent
from kvbm_core.storage.remote import s3
from kvbm_core.storage.remote.engine import ObjectEngine
from kvbm_core.storage.remote.names import BESIDE
from kvbm_core.storage.remote.record_store import RecordStore
from kvbm_core.storage.stores import StoreSpec, open_engine, record_store
from kvbm_core.testing.extent_contract import extent_of
from kvbm_core.testing.store_contract import LONG_S
from tests.faults.nurseries import MOST_CALLS, Calls, Moment, fork_for_each_line
from tests.faults.versions import aligned, payload_of

PAYLOAD_BYTES = 16_384
SIZES = (1, 8, 32)
"""Of extents."""
SHARED = [extent_of(number, SIZES[number % 3]) for number in range(6)]
"""All writers write these, each with bytes of its own."""
MOST_RENEWED = 4


def own_extents(writer: int, call: int) -> list[Extent]:
    """What only this writer writes, in this call: it is there with its bytes, or it is not there."""
    first = 1000 + (writer * MOST_CALLS + call) * 4
    return [extent_of(first + index, SIZES[(first + index) % 3]) for index in range(4)]


def payloads_of(extents: Sequence[Extent], version: int) -> list[list[Memory]]:
    """Every byte says whose it is."""
    return [
        [aligned(payload_of(number_of(key), version, PAYLOAD_BYTES)) for key in extent.keys]
        for extent in extents
    ]


def number_of(key: bytes) -> int:
    """Stands for a key in its payload's stamp."""
    return int.from_bytes(key[:7], "little")


def opened(url: str) -> tuple[ObjectEngine, RecordStore]:
    """The store with this URL, as an engine opens it."""
    options = store_options(KvbmSettings.from_env(None))
    engine = open_engine(url, options)
    spec = StoreSpec(url, PAYLOAD_BYTES, "killed while writing", "0of1", "org/Model", options)
    return engine, cast(RecordStore, record_store(engine, spec))


def write_until_killed(writer: int, seed: int, url: str, moment: Moment) -> None:
    """New extents, and those that others have written; in a bucket every second writer renews some, too."""
    rng, renews, calls = Random(seed), bool(writer % 2), Calls(moment)
    s3.RENEW_AFTER_S = float("-inf")  # each of them is old enough
    engine, store = opened(url)
    for call in range(MOST_CALLS):
        extents = [*own_extents(writer, call), *rng.sample(SHARED, 2)]
        rng.shuffle(extents)
        payloads = payloads_of(extents, writer)
        names = records_of(engine) if renews and not engine.traits.has_capacity else []
        calls.begin(call)
        store.put_extents(extents, payloads, deadline_s=LONG_S)
        if names:
            engine.renew(rng.sample(names, min(MOST_RENEWED, len(names))), deadline_s=LONG_S)


def records_of(engine: ObjectEngine) -> list[str]:
    """Names of records, without what is beside them for a moment."""
    names = (info.name for info in engine.scan("", deadline_s=LONG_S))
    return sorted(name for name in names if not name.endswith(BESIDE))


def write(order: str, moment: Moment) -> None:
    """As the order says."""
    writer, seed, url = order.split(" ", 2)
    write_until_killed(int(writer), int(seed), url, moment)


if __name__ == "__main__":
    import_module(sys.argv[1])  # loaded once for all writers
    fork_for_each_line(write)
