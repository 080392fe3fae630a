"""Extents put into an object store and got back, beside obstore's own calls with the same bytes.

The server is nginx with WebDAV, which keeps files in memory and checks nothing: it is the client that is
measured. Everybody has as many threads, and so connections, and none signs the bytes, as over TLS.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple, Protocol

from pydantic import SecretStr

from benchmarks.figures import Figure, Goal
from benchmarks.storage.blocks import Blocks
from benchmarks.suite import CannotRun, Options, expect
from benchmarks.timing import rotated
from kvbm_core.config.remote_url import remote_bucket
from kvbm_core.errors import Outcome
from kvbm_core.storage.extents import EXTENT_BYTES, Extent
from kvbm_core.storage.names import Meaning
from kvbm_core.storage.remote.engine import GetItem, PutItem
from kvbm_core.storage.remote.names import RecordNames
from kvbm_core.storage.remote.record_store import RecordStore
from kvbm_core.storage.remote.s3 import NUM_THREADS, S3Engine
from kvbm_core.storage.remote.s3_client import S3Options, StoreMaker, store_maker
from tests.engines.object_servers import ACCESS_KEY, BUCKET, REGION, SECRET_KEY, NginxServer

BLOCK_BYTES = 128 << 10
EXTENT_BLOCKS = EXTENT_BYTES // BLOCK_BYTES
NUM_EXTENTS = 64
LOOK_UPS = 1024
CALLERS = 4
"""Threads that call a record store, as a mover has."""
DEADLINE_S = 120.0
SHARE, CPU_TIMES, EXISTS_SHARE = 0.85, 1.2, 0.8
PEER = "obstore's own calls"
ENGINE, RECORDS = "engine", "records"
WAYS = ("put", "get")
MEANING = Meaning("benchmark", b"benchmark", b"remote benchmark")


def rate_goal(side: str, way: str) -> Goal:
    """Ours against obstore's."""
    return Goal(f"object store, {side}: {way}, 4 MiB", "GB/s", SHARE, "higher", PEER)


def cpu_goal(side: str, way: str) -> Goal:
    """Ours against obstore's."""
    return Goal(f"object store, {side}: {way}, 4 MiB, CPU", "CPU s/GB", CPU_TIMES, "lower", PEER)


def exists_goal(side: str) -> Goal:
    """Ours against obstore's."""
    return Goal(f"object store, {side}: look-ups", "1/s", EXISTS_SHARE, "higher", PEER)


SIDES = (ENGINE, RECORDS)
GOALS = {
    goal.name: goal
    for goal in (
        *(make(side, way) for side in SIDES for way in WAYS for make in (rate_goal, cpu_goal)),
        *(exists_goal(side) for side in SIDES),
    )
}


class Take(NamedTuple):
    """Of one turn. ``rates`` in GB/s and ``cpu`` in s/GB, of a put and a get; look-ups in 1/s."""

    rates: tuple[float, float]
    cpu: tuple[float, float]
    exists: float


class Side(Protocol):
    """A way to keep extents in the store; everything in one call each."""

    name: str

    def put(self) -> None:
        """All of them."""

    def get(self) -> None:
        """All of them."""

    def exists(self) -> None:
        """LOOK_UPS times; all are there."""

    def close(self) -> None:
        """Ends threads."""


class PlainSide:
    """obstore's calls in threads. What it brings is its own memory, which is not copied to the blocks'."""

    name = PEER

    def __init__(self, make: StoreMaker, extents: Sequence[memoryview]) -> None:
        self._store = make(DEADLINE_S)
        self._extents = extents
        self._pool = ThreadPoolExecutor(NUM_THREADS)

    def put(self) -> None:
        """See Side."""
        import obstore

        def act(index: int) -> None:
            obstore.put(self._store, f"plain/{index}", self._extents[index], use_multipart=False)

        list(self._pool.map(act, range(NUM_EXTENTS)))

    def get(self) -> None:
        """See Side."""
        import obstore

        def act(index: int) -> int:
            return len(obstore.get(self._store, f"plain/{index}").bytes())

        read_bytes = sum(self._pool.map(act, range(NUM_EXTENTS)))
        expect(read_bytes == NUM_EXTENTS * EXTENT_BYTES, f"{PEER}: {read_bytes} bytes were read")

    def exists(self) -> None:
        """See Side."""
        import obstore

        list(self._pool.map(lambda i: obstore.head(self._store, f"plain/{i % NUM_EXTENTS}"), range(LOOK_UPS)))

    def close(self) -> None:
        """See Side."""
        self._pool.shutdown()


class EngineSide:
    """The engine, to and from the blocks' memory."""

    name = ENGINE

    def __init__(
        self, engine: S3Engine, sources: Sequence[memoryview], targets: Sequence[memoryview]
    ) -> None:
        self._engine = engine
        self._puts = [PutItem(f"ours/{number}", [memory]) for number, memory in enumerate(sources)]
        self._gets = [GetItem(f"ours/{number}", [memory]) for number, memory in enumerate(targets)]

    def put(self) -> None:
        """See Side."""
        _expect_ok(self.name, self._engine.put(self._puts, deadline_s=DEADLINE_S))

    def get(self) -> None:
        """See Side."""
        got = self._engine.get(self._gets, deadline_s=DEADLINE_S)
        _expect_ok(self.name, [one.outcome for one in got])

    def exists(self) -> None:
        """See Side."""
        names = [self._gets[number % NUM_EXTENTS].name for number in range(LOOK_UPS)]
        _expect_ok(self.name, self._engine.exists(names, deadline_s=DEADLINE_S))

    def close(self) -> None:
        """See Side."""
        self._engine.close()


class RecordSide:
    """Records of blocks on the engine: with checksums, and called by as many threads as a mover has."""

    name = RECORDS

    def __init__(self, engine: S3Engine, blocks: Blocks, memory: Sequence[memoryview]) -> None:
        self._store = RecordStore(engine, RecordNames(MEANING), BLOCK_BYTES)
        self._pool = ThreadPoolExecutor(CALLERS)
        starts = range(0, blocks.num_blocks, EXTENT_BLOCKS)
        self._extents = [Extent(EXTENT_BLOCKS, tuple(blocks.keys[at : at + EXTENT_BLOCKS])) for at in starts]
        self._sources = [memory[at : at + EXTENT_BLOCKS] for at in starts]
        end = blocks.num_blocks
        self._targets = [memory[end + at : end + at + EXTENT_BLOCKS] for at in starts]

    def put(self) -> None:
        """See Side."""

        def act(part: slice) -> list[Outcome]:
            return self._store.put_extents(self._extents[part], self._sources[part], deadline_s=DEADLINE_S)

        self._all(act)

    def get(self) -> None:
        """See Side."""

        def act(part: slice) -> list[Outcome]:
            found = self._store.get_extents(self._extents[part], self._targets[part], deadline_s=DEADLINE_S)
            return [outcome for outcomes in found for outcome in outcomes]

        self._all(act)

    def exists(self) -> None:
        """See Side."""
        wanted = [self._extents[number % NUM_EXTENTS] for number in range(LOOK_UPS)]
        _expect_ok(self.name, self._store.contains_extents(wanted, deadline_s=DEADLINE_S))

    def _all(self, act: Callable[[slice], list[Outcome]]) -> None:
        step = NUM_EXTENTS // CALLERS
        parts = [slice(at, at + step) for at in range(0, NUM_EXTENTS, step)]
        for outcomes in self._pool.map(act, parts):
            _expect_ok(self.name, outcomes)

    def close(self) -> None:
        """See Side."""
        self._pool.shutdown()
        self._store.close()


def measure(options: Options) -> list[Figure]:
    """All three in turns."""
    if why := NginxServer.missing():
        raise CannotRun(why)
    rounds = options.choose(2, 9, 20)
    with ExitStack() as stack:
        blocks = Blocks(NUM_EXTENTS * EXTENT_BLOCKS, BLOCK_BYTES, options.seed)
        stack.callback(blocks.close)
        server = stack.enter_context(NginxServer(stack.enter_context(_folder())))
        stack.enter_context(_unsigned())
        sides = _sides(server.base_url, blocks)
        for side in sides:
            stack.callback(side.close)
        takes: dict[str, list[Take]] = {side.name: [] for side in sides}
        for number in range(rounds + 1):
            for side in rotated(sides, number):
                options.told(f"remote: round {number} of {rounds}: {side.name}")
                take = _take(side, blocks)
                if number:
                    takes[side.name].append(take)
    return _figures(takes)


def _sides(url: str, blocks: Blocks) -> list[Side]:
    bucket = remote_bucket(f"s3://{BUCKET}/benchmark")
    make = store_maker(bucket, S3Options(url, REGION, SecretStr(ACCESS_KEY), SecretStr(SECRET_KEY)))
    memory = blocks.slab.array.data
    whole = [memory[at : at + EXTENT_BYTES] for at in range(0, len(memory), EXTENT_BYTES)]
    each = [memory[at : at + BLOCK_BYTES] for at in range(0, len(memory), BLOCK_BYTES)]
    sources, targets = whole[:NUM_EXTENTS], whole[NUM_EXTENTS:]
    return [
        EngineSide(S3Engine(make, bucket, DEADLINE_S), sources, targets),
        RecordSide(S3Engine(make, bucket, DEADLINE_S), blocks, each),
        PlainSide(make, sources),
    ]


def _take(side: Side, blocks: Blocks) -> Take:
    cpu: list[float] = []

    def counted(move: Callable[[], None]) -> Callable[[], None]:
        def run() -> None:
            started_s = time.process_time()
            move()
            cpu.append((time.process_time() - started_s) / (blocks.total_bytes / 1e9))

        return run

    if side.name == PEER:
        rates = [_rate(counted(move), blocks.total_bytes) for move in (side.put, side.get)]
    else:
        rates = list(blocks.turn(side.name, counted(side.put), counted(side.get)))
    return Take((rates[0], rates[1]), (cpu[0], cpu[1]), _rate(side.exists, LOOK_UPS * 1e9))


def _rate(work: Callable[[], None], amount: float) -> float:
    """Billions of it in a second."""
    started_s = time.perf_counter()
    work()
    return amount / 1e9 / (time.perf_counter() - started_s)


def _figures(takes: dict[str, list[Take]]) -> list[Figure]:
    figures = []

    def add(goal: Goal, side: str, value: Callable[[Take], float]) -> None:
        ours, theirs = (tuple(map(value, takes[name])) for name in (side, PEER))
        figures.append(Figure(goal, ours, {PEER: theirs}))

    for side in SIDES:
        for place, way in enumerate(WAYS):
            add(rate_goal(side, way), side, lambda take, place=place: take.rates[place])  # type: ignore[misc]
            add(cpu_goal(side, way), side, lambda take, place=place: take.cpu[place])  # type: ignore[misc]
    for side in SIDES:
        add(exists_goal(side), side, lambda take: take.exists)
    return figures


@contextmanager
def _folder() -> Iterator[Path]:
    in_memory = Path("/dev/shm")  # noqa: S108 - a file system in memory, and a folder of our own in it
    parent = in_memory if os.access(in_memory, os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="kvbm-objects-", dir=parent) as folder:
        yield Path(folder)


@contextmanager
def _unsigned() -> Iterator[None]:
    name = "AWS_UNSIGNED_PAYLOAD"
    before = os.environ.get(name)
    os.environ[name] = "true"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def _expect_ok(name: str, outcomes: Sequence[Outcome]) -> None:
    expect(set(outcomes) == {Outcome.OK}, f"{name}: {set(outcomes)}")
