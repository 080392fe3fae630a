"""Blocks from another instance by NIXL's UCX, beside NIXL's own write of as many from a second process."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from benchmarks.figures import Figure, Goal
from benchmarks.remote.peer_wire import READY, SECONDS
from benchmarks.remote.peers import SIZES, TCP, TOTAL_BYTES, Other, Ours, other
from benchmarks.suite import CannotRun, Options, expect
from kvbm_core.peers.client import CONCURRENCY, call_blocks
from kvbm_core.peers.landing import PROGRESS_PAUSE_S, LandingZone
from kvbm_core.peers.ucx import EXTRA, Agent, is_installed
from kvbm_core.testing.peer_owner import content_of, key_of

PEER = "NIXL's own write"
WAYS = {"TCP": ("tcp,self", 0.8), "shared memory": ("tcp,sm,self", 0.4)}
"""What UCX may use, and the goal."""
WAIT_S = 60.0
RATES = {
    (way, size): Goal(f"peers, NIXL over {way}: blocks of {text}", "GB/s", goal, "higher", PEER)
    for way, (_, goal) in WAYS.items()
    for size, text in SIZES.items()
}
GOALS = {goal.name: goal for goal in RATES.values()}


class Bare:
    """Memory that another process writes to; nothing is looked up, copied or compared."""

    name = PEER

    def __init__(self, writer: Other, size: int, count: int) -> None:
        self._writer = writer
        self._memory = np.zeros((count, size), np.uint8)
        self._agent = Agent("benchmark-reader", int(self._memory.ctypes.data), self._memory.nbytes)
        self._line = f"{self._agent.zone().hex()} {self._memory.ctypes.data}\n"
        self._is_over = threading.Event()

    def seconds(self) -> float:
        """Of all blocks, as the other process says."""
        self._memory[:] = 0
        self._is_over.clear()
        thread = threading.Thread(target=self._take)
        thread.start()
        try:
            self._writer.given.write(self._line)
            self._writer.given.flush()
            took_s = float(self._writer.heard(SECONDS).split()[1])
        finally:
            self._is_over.set()
            thread.join()
        expect(bool(self._memory.all()), "NIXL: a byte did not come")
        return took_s

    def _take(self) -> None:
        while not self._is_over.is_set():
            self._agent.progress()
            time.sleep(PROGRESS_PAUSE_S)

    def close(self) -> None:
        """Ends the agent."""
        self._agent.close()


@contextmanager
def only(transports: str) -> Iterator[None]:
    """UCX uses these, here and in processes that are started meanwhile."""
    before = os.environ.get("UCX_TLS")
    os.environ["UCX_TLS"] = transports
    try:
        yield
    finally:
        if before is None:
            del os.environ["UCX_TLS"]
        else:
            os.environ["UCX_TLS"] = before


def measure(options: Options) -> list[Figure]:
    """Rates over each way, of both sizes."""
    if not is_installed():
        raise CannotRun(f"NIXL is not installed; {EXTRA}")
    found, rounds = list[Figure](), options.choose(3, 9, 15)
    for way, (transports, _) in WAYS.items():
        with only(transports):
            found += [_of_size(RATES[way, size], size, rounds) for size in SIZES]
    return found


def _of_size(goal: Goal, size: int, rounds: int) -> Figure:
    count, nowhere = TOTAL_BYTES // size, Path()
    targets = np.zeros((count, size), np.uint8)
    with other("own-nixl", nowhere, size, count) as owner, other("write", nowhere, size, count) as writer:
        address = owner.heard(TCP)
        writer.heard(READY)
        zone = LandingZone(size, call_blocks(size), CONCURRENCY)
        if not zone.wait(WAIT_S):
            raise CannotRun("NIXL's UCX cannot be had here")
        ours, bare = Ours(None, address, size, targets, zone), Bare(writer, size, count)
        try:
            ours.get(count)
            expect(
                all(t.tobytes() == content_of(key_of(n + 1), size) for n, t in enumerate(targets)), "bytes"
            )
            bare.seconds()
            rates: dict[str, list[float]] = {ours.name: [], PEER: []}
            for number in range(rounds):
                for name in (ours.name, PEER) if number % 2 else (PEER, ours.name):
                    took_s = bare.seconds() if name == PEER else _timed(ours, count)
                    rates[name].append(TOTAL_BYTES / took_s / 1e9)
            return Figure(goal, tuple(rates[ours.name]), {PEER: tuple(rates[PEER])})
        finally:
            ours.close()
            bare.close()


def _timed(ours: Ours, count: int) -> float:
    started_s = time.perf_counter()
    ours.get(count)
    return time.perf_counter() - started_s
