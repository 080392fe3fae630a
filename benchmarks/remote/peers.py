"""Blocks from another instance over ZMQ with CURVE, beside a bare CURVE socket between two processes."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import numpy as np
import zmq

from benchmarks.figures import Figure, Goal
from benchmarks.remote.peer_wire import NAME, keys_in, terms_of
from benchmarks.suite import Options, expect
from benchmarks.timing import rotated
from kvbm_core.errors import Outcome
from kvbm_core.fleet.keys import CurveKeys, new_keys
from kvbm_core.peers.client import CONCURRENCY, PeerStore, call_blocks
from kvbm_core.peers.landing import LandingZone
from kvbm_core.testing.peer_owner import content_of, key_of
from tests.engines import REPOSITORY

SIZES = {128 << 10: "128 KiB", 2 << 20: "2 MiB"}
TOTAL_BYTES = 256 << 20
DEADLINE_S = 60.0
TCP = "tcp://"
PEER = "a bare CURVE socket"
RATES = {
    size: Goal(f"peers, ZMQ with CURVE: blocks of {text}", "GB/s", 0.8, "higher", PEER)
    for size, text in SIZES.items()
}
ALONE = Goal("peers, ZMQ with CURVE: 64 blocks of 128 KiB, one question", "ms", 3.0, "lower", PEER)
GOALS = {goal.name: goal for goal in (*RATES.values(), ALONE)}


class Other:
    """Another process; NIXL writes its log to standard output too."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        if process.stdin is None or process.stdout is None:
            raise ValueError("a process without pipes")
        self.pid = process.pid
        self.given, self._said = process.stdin, process.stdout

    def heard(self, *words: str) -> str:
        """The next line that begins with one of them."""
        for line in self._said:
            if line.startswith(words):
                return line.strip()
        raise ValueError(f"the other process ended before it said {words}")


@contextmanager
def other(what: str, folder: Path, size: int, number: int) -> Iterator[Other]:
    """See peer_wire."""
    command = [sys.executable, "-m", "benchmarks.remote.peer_wire", what, str(folder), str(size), str(number)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=REPOSITORY, stdin=pipe, stdout=pipe, text=True) as process:
        talk = Other(process)
        try:
            yield talk
        finally:
            talk.given.close()


class Ours:
    """What a mover of peers does: several questions at once, each for some blocks."""

    name = "kvbm"

    def __init__(
        self,
        keys: CurveKeys | None,
        address: str,
        size: int,
        targets: np.ndarray,
        zone: LandingZone | None = None,
    ) -> None:
        self._store = PeerStore(terms_of("asker", size), keys, zone=zone)
        self._peer = self._store.at(address)
        self._targets = [target.data for target in targets]
        self._batch = call_blocks(size)
        self._pool = ThreadPoolExecutor(CONCURRENCY)

    def get(self, count: int) -> None:
        """Blocks 1 to ``count``."""
        parts = [range(at, min(at + self._batch, count)) for at in range(0, count, self._batch)]
        ended = self._pool.map(self._some, parts)
        expect({o for outcomes in ended for o in outcomes} == {Outcome.OK}, "kvbm: a block did not come")

    def _some(self, part: range) -> list[Outcome]:
        keys = [key_of(number + 1) for number in part]
        return self._peer.get_many(keys, self._targets[part.start : part.stop], deadline_s=DEADLINE_S)

    def close(self) -> None:
        """Ends threads and connections."""
        self._pool.shutdown()
        self._store.close()


class Bare:
    """As many sockets in as many threads; nothing is looked up or compared."""

    name = PEER

    def __init__(self, keys: CurveKeys, address: str, size: int, targets: np.ndarray) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._targets = targets
        self._batch = call_blocks(size)
        self._sockets = []
        for _ in range(CONCURRENCY):
            socket = keys.client_socket(self._context, zmq.DEALER, keys.server_key(NAME))
            socket.connect(address)
            self._sockets.append(socket)
        self._pool = ThreadPoolExecutor(CONCURRENCY)

    def get(self, count: int) -> None:
        """As many blocks."""
        each = -(-count // CONCURRENCY) if count > self._batch else count
        parts = [range(at, min(at + each, count)) for at in range(0, count, each)]
        list(self._pool.map(self._some, self._sockets, parts))

    def _some(self, socket: zmq.Socket[bytes], part: range) -> None:
        for start in range(part.start, part.stop, self._batch):
            numbers = range(start, min(start + self._batch, part.stop))
            socket.send(str(len(numbers)).encode())
            for number in numbers:
                frame = socket.recv(copy=False)
                np.copyto(self._targets[number], np.frombuffer(frame.buffer, np.uint8))

    def close(self) -> None:
        """Ends threads and connections."""
        self._pool.shutdown()
        self._context.destroy(linger=0)


def measure(options: Options) -> list[Figure]:
    """Rates of both sizes, and how long 64 blocks take alone."""
    found, rounds = list[Figure](), options.choose(3, 9, 15)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        new_keys(folder, NAME)
        keys = keys_in(folder)
        for size in SIZES:
            found += _of_size(keys, folder, size, rounds)
    return found


def _of_size(keys: CurveKeys, folder: Path, size: int, rounds: int) -> list[Figure]:
    count = TOTAL_BYTES // size
    targets = np.zeros((count, size), np.uint8)
    with other("own", folder, size, count) as owner, other("send", folder, size, 0) as sender:
        ours = Ours(keys, owner.heard(TCP), size, targets)
        bare = Bare(keys, sender.heard(TCP), size, targets)
        try:
            ours.get(count)
            expect(
                all(t.tobytes() == content_of(key_of(n + 1), size) for n, t in enumerate(targets)), "bytes"
            )
            bare.get(count)
            rates = _turns([ours, bare], rounds, lambda side: count * size / _timed(side, count) / 1e9)
            figures = [Figure(RATES[size], tuple(rates[ours.name]), {PEER: tuple(rates[PEER])})]
            if size == min(SIZES):
                alone = _turns([ours, bare], rounds, _p50_ms)
                figures.append(Figure(ALONE, tuple(alone[ours.name]), {PEER: tuple(alone[PEER])}))
            return figures
        finally:
            ours.close()
            bare.close()


def _turns(
    sides: list[Ours | Bare], rounds: int, take: Callable[[Ours | Bare], float]
) -> dict[str, list[float]]:
    samples: dict[str, list[float]] = {side.name: [] for side in sides}
    for number in range(rounds):
        for side in rotated(sides, number):
            samples[side.name].append(take(side))
    return samples


def _timed(side: Ours | Bare, count: int) -> float:
    started_s = time.perf_counter()
    side.get(count)
    return time.perf_counter() - started_s


def _p50_ms(side: Ours | Bare) -> float:
    return median(_timed(side, 64) for _ in range(20)) * 1000
