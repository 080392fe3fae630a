"""Engines that are killed while they write records to a store on another machine, while another engine reads:
no wrong byte, no reader held beyond its deadline, nothing left for good.

``KVBM_FAULT_RECORD_KILLS`` says how many are killed for each kind of store.
"""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from random import Random
from typing import NamedTuple

import pytest
import redis

from kvbm_core.config import KvbmSettings
from kvbm_core.errors import Outcome
from kvbm_core.runtime.assembly import store_options
from kvbm_core.storage.base import Memory
from kvbm_core.storage.extents import Extent
from kvbm_core.storage.inspection import StoreInspection
from kvbm_core.storage.remote.sweep import Sweeper, SweepLimits
from kvbm_core.storage.stores import inspect_store
from kvbm_core.testing.file_io_contract import memory_of
from kvbm_core.testing.store_contract import LONG_S
from tests.effort import tries
from tests.engines.mooncake_pool import MooncakePool
from tests.engines.object_servers import BUCKET, SeaweedServer
from tests.engines.ports import HOST
from tests.engines.valkey_server import ValkeyServer
from tests.faults.deadlines import GRACE_S
from tests.faults.nurseries import Moment, kill_one, nursery
from tests.faults.record_nursery import PAYLOAD_BYTES, SHARED, number_of, opened, own_extents
from tests.faults.versions import payload_of, version_in

NUM_KILLS = int(os.environ.get("KVBM_FAULT_RECORD_KILLS") or tries(12, nightly=200))
JOINING = "each writer takes more than a second to join the pool"
READ_S = 3.0
"""How long a read may take by its own deadline."""
EARLY = "before a call had ended"
MORE = 4
"""Threads or descriptors: connections to a store come and go."""
KILLS_EACH = 10
"""Between two looks at all of the store."""


class Store(NamedTuple):
    """``url`` and what else its clients have to have in their environment. ``module``: the client's, which
    writers load beforehand.
    """

    url: str
    environment: dict[str, str]
    module: str


@contextmanager
def bucket(folder: Path) -> Iterator[Store]:
    with SeaweedServer(folder) as server:
        server.make_bucket()
        yield Store(f"s3://{BUCKET}/killed", server.client_environment, "obstore")
        uploads = server.admin().list_multipart_uploads(Bucket=BUCKET)
        assert not uploads.get("Uploads"), "parts of objects are left, which a bucket keeps for good"


@contextmanager
def valkey(folder: Path) -> Iterator[Store]:
    with ValkeyServer(folder) as server:
        login = {"KVBM_REMOTE_PASSWORD_FILE": server.login().password_file}
        yield Store(server.url, login, "kvbm_core.storage.remote.valkey")
        with redis.Redis(HOST, server.port, password=server.password) as client:
            until(
                lambda: client.info("clients")["connected_clients"] == 1, "connections of the dead are left"
            )
            assert client.dbsize() == 0


@contextmanager
def mooncake(folder: Path) -> Iterator[Store]:
    # By default the memory of what is half written is free again after ten minutes.
    soon = ["--put_start_discard_timeout_sec=5", "--put_start_release_timeout_sec=10"]
    with MooncakePool(folder, segment_bytes=1 << 30, options=soon) as pool:
        port = {"MOONCAKE_MASTER_METRICS_PORT": str(pool.metrics_port)}
        yield Store(f"mooncake://{pool.address}", port, "mooncake.store")
        until(lambda: pool.allocated_bytes() == 0, "the master keeps memory of what is half written")


def until(is_so: Callable[[], bool], else_what: str) -> None:
    """Waits for a server to see that somebody is dead."""
    ends_at_s = time.monotonic() + LONG_S
    while not is_so():
        assert time.monotonic() < ends_at_s, else_what
        time.sleep(0.05)


class Reader:
    """Another engine, which reads all the time. A wrong byte and a late answer are raised by ``stop``."""

    def __init__(self, url: str) -> None:
        _, self.store = opened(url)
        self.counts: Counter[Outcome] = Counter()
        self.longest_s = 0.0
        self.wanted: list[Extent] = list(SHARED)
        self._errors: list[BaseException] = []
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            while not self._is_over.is_set():
                self.counts.update(end for ends, _ in self.read(self.wanted) for end in ends)
        except BaseException as error:
            self._errors.append(error)

    def read(self, extents: Sequence[Extent]) -> list[tuple[list[Outcome], set[int]]]:
        """Outcomes of each extent's blocks, and who wrote those that are OK."""
        targets: list[list[Memory]] = [
            [memory_of(PAYLOAD_BYTES).data for _ in extent.keys] for extent in extents
        ]
        started_s = time.monotonic()
        found = self.store.get_extents(extents, targets, deadline_s=READ_S)
        self.longest_s = max(self.longest_s, time.monotonic() - started_s)
        return [
            (ends, writers_of(extent, own, ends))
            for extent, own, ends in zip(extents, targets, found, strict=True)
        ]

    def stop(self) -> None:
        """Idempotent."""
        self._is_over.set()
        self._thread.join(LONG_S)
        self.store.close()
        for error in self._errors:
            raise error


def writers_of(extent: Extent, targets: Sequence[Memory], outcomes: Sequence[Outcome]) -> set[int]:
    """AssertionError for an OK whose bytes are not all those that one writer has for that very key."""
    writers = set()
    for key, target, outcome in zip(extent.keys, targets, outcomes, strict=True):
        if outcome is Outcome.OK:
            assert isinstance(target, memoryview)
            writer = version_in(target)
            assert target == payload_of(number_of(key), writer, PAYLOAD_BYTES), f"wrong bytes for {key.hex()}"
            writers.add(writer)
    return writers


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "make",
    [
        pytest.param(bucket, id="s3", marks=pytest.mark.nightly("SeaweedFS: two minutes for 200 kills")),
        pytest.param(valkey, id="valkey", marks=pytest.mark.valkey),
        pytest.param(mooncake, id="mooncake", marks=[pytest.mark.mooncake, pytest.mark.nightly(JOINING)]),
    ],
)
def test_no_kill_costs_a_byte_or_a_deadline(
    make: Callable[[Path], AbstractContextManager[Store]],
    tmp_path: Path,
    rng: Random,
    monkeypatch: pytest.MonkeyPatch,
    tell: Callable[[str], None],
) -> None:
    started_s = time.monotonic()
    seen: Counter[str] = Counter()
    held: list[tuple[int, int]] = []
    num_early = 0
    with make(tmp_path) as store:
        for name, value in store.environment.items():
            monkeypatch.setenv(name, value)
        reader = Reader(store.url)
        inspection = inspect_store(store.url, store_options(KvbmSettings.from_env(None)))
        try:
            with nursery("tests.faults.record_nursery", store.module) as process:
                for kill in range(1, NUM_KILLS + 1):
                    reader.wanted = [*SHARED, *own_extents(kill, 0), *own_extents(kill, 1)]
                    order = f"{kill} {rng.getrandbits(32)} {store.url}"
                    moment = Moment.of(rng, kill)
                    num_early += moment.is_early
                    look(kill, kill_one(process, order, moment), reader, seen)
                    if kill % KILLS_EACH == 0 or kill == NUM_KILLS:
                        look_at_all(inspection, seen)
                    held.append(held_now())
        finally:
            inspection.close()
            reader.stop()
    told = ", ".join(f"{what} {count}" for what, count in sorted(seen.items()))
    reads = ", ".join(f"{outcome} {count}" for outcome, count in sorted(reader.counts.items()))
    tell(
        f"{NUM_KILLS} kills in {time.monotonic() - started_s:.1f} s, no wrong byte; {told}; meanwhile: "
        f"{reads}; longest read {reader.longest_s:.2f} s"
    )
    assert reader.longest_s < READ_S + GRACE_S
    assert reader.counts[Outcome.OK] > NUM_KILLS and seen[EARLY] >= num_early > 0, "this test sees nothing"
    before, after = held[: NUM_KILLS // 2], held[NUM_KILLS // 2 :]
    for index, what in enumerate(("descriptors", "threads")):
        assert max(now[index] for now in after) <= max(now[index] for now in before) + MORE, what
    assert set(reader.counts) <= {Outcome.OK, Outcome.MISS}, "what is half written is not there"


def held_now() -> tuple[int, int]:
    """Descriptors and threads of this process."""
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


def look(writer: int, last: int, reader: Reader, seen: Counter[str]) -> None:
    """A writer was killed in its call ``last``: each of its own extents is there whole, or not at all."""
    there = []
    for call in range(last + 1):
        for outcomes, writers in reader.read(own_extents(writer, call)):
            assert set(outcomes) in ({Outcome.OK}, {Outcome.MISS}), f"half of it is there: {outcomes}"
            assert writers <= {writer}
            there.append(outcomes[0] is Outcome.OK)
            assert there[-1] or call == last, "a put that had ended is lost"
    reader.counts.update(end for ends, _ in reader.read(SHARED) for end in ends)
    seen[EARLY] += not all(there)
    seen["amid its records"] += 0 < sum(there[-4:]) < 4


def look_at_all(inspection: StoreInspection, seen: Counter[str]) -> None:
    """Every record is right, and a sweep leaves nothing."""
    damaged = [one for one in inspection.verify() if one.what]
    assert not damaged, damaged
    found = inspection.count(time.time_ns(), lambda count, of: None)
    assert not found.strange and not any(place.strange for place in (*found.models.values(), *found.shards))
    seen["left beside a record"] += sum(shard.temporary for shard in found.shards)
    limits = SweepLimits(max_bytes=0, grace_s=0.0)
    swept = Sweeper(inspection, limits, (), lambda: time.time() + 60).sweep(_count, _count)
    assert not swept.trouble and swept.removed
    seen["swept"] += swept.removed
    assert not list(inspection.objects())


def _count(done: int, of: int | None) -> None:
    """Nobody is told."""
