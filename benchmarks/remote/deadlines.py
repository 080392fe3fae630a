"""How much later than asked a call ends while its server hangs; the promise is 0.2 s (``ObjectEngine``)."""

from __future__ import annotations

import errno
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from pathlib import Path
from statistics import quantiles
from typing import Any, NamedTuple

import numpy as np
from pydantic import SecretStr

from benchmarks.figures import LIMIT, Figure, Goal
from benchmarks.remote.peer_wire import NAME, keys_in, terms_of
from benchmarks.remote.peers import TCP, other
from benchmarks.remote.s3 import MEANING
from benchmarks.suite import CannotRun, Findings, Options, expect
from benchmarks.timing import timed
from kvbm_core.config.remote_url import remote_bucket
from kvbm_core.errors import Outcome
from kvbm_core.fleet.keys import new_keys
from kvbm_core.peers.client import PeerStore
from kvbm_core.storage.directory.calls import FileCalls
from kvbm_core.storage.directory.store import DirectoryStore
from kvbm_core.storage.late import LATE, ranges_of
from kvbm_core.storage.remote.engine import GetItem, ObjectEngine, PutItem
from kvbm_core.storage.remote.mooncake import THREADS
from kvbm_core.storage.remote.s3 import S3Engine
from kvbm_core.storage.remote.s3_client import S3Options, store_maker
from kvbm_core.testing.peer_owner import key_of
from tests.engines.freeze import freeze, thaw
from tests.engines.mooncake_pool import MooncakePool, find_mooncake
from tests.engines.silent_server import silent_server
from tests.engines.valkey_server import ValkeyServer, find_server

ASKED_S = 0.1
PROMISE_MS = 200.0
NUM_BYTES = 100_000
GIVE_UP_S = 60.0


class Hanging(NamedTuple):
    """``late_s``: one call, and how much later than asked it has ended. ``rest``: after THREADS of them, each
    of which may keep a thread until the server answers.
    """

    late_s: Callable[[], float]
    rest: Callable[[], None] = lambda: None


def _late_s(ask: Callable[[], Sequence[Outcome]]) -> float:
    seconds, outcomes = timed(ask)
    expect(outcomes == [Outcome.TIMED_OUT], f"a server that hangs: {outcomes}")
    return seconds - ASKED_S


def _asking(engine: ObjectEngine, target: memoryview) -> Callable[[], float]:
    item = GetItem("a", [target])
    return lambda: _late_s(lambda: [got.outcome for got in engine.get([item], deadline_s=ASKED_S)])


def _put(engine: ObjectEngine) -> None:
    outcomes = engine.put([PutItem("a", [memoryview(bytes(NUM_BYTES))])], deadline_s=GIVE_UP_S)
    expect(outcomes == [Outcome.OK], f"before the server hangs: {outcomes}")


def _until(is_so: Callable[[], bool]) -> None:
    ends_at_s = time.monotonic() + GIVE_UP_S
    while not is_so():
        expect(time.monotonic() < ends_at_s, "a server that is back, and what hung goes on hanging")
        time.sleep(0.01)


@contextmanager
def _s3(folder: Path) -> Iterator[Hanging]:
    with silent_server() as server:
        bucket, url = remote_bucket("s3://bucket/benchmark"), server.environment["AWS_ENDPOINT_URL_S3"]
        make = store_maker(bucket, S3Options(url, "us-east-1", SecretStr("nobody"), SecretStr("nothing")))
        with closing(S3Engine(make, bucket, 2 * ASKED_S)) as engine:
            yield Hanging(
                _asking(engine, memoryview(bytearray(NUM_BYTES))),
                lambda: expect(server.connections() > 0, "nobody asked the bucket's server"),
            )


@contextmanager
def _valkey(folder: Path) -> Iterator[Hanging]:
    if find_server() is None:
        raise CannotRun("no Valkey or Redis server is installed; make setup brings one")
    with ValkeyServer(folder) as server, closing(server.engine()) as engine:
        _put(engine)
        server.freeze()
        yield Hanging(_asking(engine, memoryview(bytearray(NUM_BYTES))))


@contextmanager
def _mooncake(folder: Path) -> Iterator[Hanging]:
    if find_mooncake() is None:
        raise CannotRun("Mooncake is not installed, or misses libibverbs; make setup brings it")
    with MooncakePool(folder) as pool, closing(pool.engine()) as engine:
        _put(engine)
        target = memoryview(bytearray(NUM_BYTES))

        def rest() -> None:
            pool.nodes[0].thaw()
            _until(lambda: not LATE.holds(ranges_of(target)))
            pool.nodes[0].freeze()

        pool.nodes[0].freeze()
        yield Hanging(_asking(engine, target), rest)


@contextmanager
def _directory(folder: Path) -> Iterator[Hanging]:
    is_back = threading.Event()

    class Away(FileCalls):
        @staticmethod
        def lstat(*where: Any, **more: Any) -> Any:
            is_back.wait(GIVE_UP_S)
            raise OSError(errno.EIO, "the server was away")

        stat = open = lstat

    with closing(DirectoryStore(folder, MEANING, NUM_BYTES, calls=Away())) as store:

        def rest() -> None:
            is_back.set()
            _until(lambda: not store.stuck_threads)
            is_back.clear()

        yield Hanging(lambda: _late_s(lambda: store.contains_many([key_of(1)], deadline_s=ASKED_S)), rest)
        is_back.set()


@contextmanager
def _peers(folder: Path) -> Iterator[Hanging]:
    new_keys(folder, NAME)
    keys = keys_in(folder)
    target = np.zeros(NUM_BYTES, np.uint8).data
    with other("own", folder, NUM_BYTES, 1) as owner:
        address = owner.heard(TCP)

        def late_s() -> float:
            # A new one each time: who does not answer is not asked again for a while.
            with closing(PeerStore(terms_of("asker", NUM_BYTES), keys)) as store:
                peer = store.at(address)
                return _late_s(lambda: peer.get_many([key_of(1)], [target], deadline_s=ASKED_S))

        freeze(owner.pid)
        try:
            yield Hanging(late_s)
        finally:
            thaw(owner.pid)


STORES: dict[str, Callable[[Path], AbstractContextManager[Hanging]]] = {
    "a bucket": _s3,
    "Valkey": _valkey,
    "Mooncake Store": _mooncake,
    "a shared directory": _directory,
    "a peer (ZMQ)": _peers,
}


def _goals(store: str) -> list[Goal]:
    return [
        Goal(f"{store} hangs: a call is late by, {what}", "ms", PROMISE_MS, "lower", LIMIT)
        for what in ("median", "99th percentile")
    ]


class DeadlinesPart:
    """Each store by itself: one that is not installed does not keep the others from being measured."""

    name = "deadlines"
    help = "how much later than asked a call ends while its server hangs"
    goals: Sequence[Goal] = tuple(goal for store in STORES for goal in _goals(store))

    def run(self, options: Options) -> Findings:
        """See Part."""
        figures: list[Figure] = []
        for store, hanging in STORES.items():
            options.told(f"deadlines: {store}")
            try:
                with tempfile.TemporaryDirectory() as folder, hanging(Path(folder)) as server:
                    late_ms = _measured(server, options.choose(1, 12, 60))
            except CannotRun as reason:
                figures += [Figure(goal, note=str(reason)) for goal in _goals(store)]
                continue
            p99_ms = quantiles(late_ms, n=100, method="inclusive")[-1]
            figures += map(Figure, _goals(store), [tuple(late_ms), (p99_ms,)])
        return Findings(figures, settings={"a call's deadline": f"{ASKED_S} s"})


def _measured(server: Hanging, turns: int) -> list[float]:
    late_ms: list[float] = []
    for _ in range(turns):
        late_ms += [1000 * server.late_s() for _ in range(THREADS)]
        server.rest()
    return late_ms
