"""Ours and a store's own client in turns: the same blocks from and to the same memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Protocol, cast

import numpy as np
import numpy.typing as npt

from benchmarks.figures import Figure, Goal
from benchmarks.suite import expect
from benchmarks.timing import rotated, timed
from kvbm_core.errors import Outcome
from kvbm_core.storage.remote.record_store import RecordStore
from kvbm_core.storage.stores import StoreSpec, open_store
from kvbm_core.types import BlockKey, SequenceHash, block_key

PUT, GET, EXISTS = "put", "get", "existence"
DEADLINE_S = 60.0
LOOK_UPS = 20
"""An existence sample asks so many times for FOUND_AND_NOT blocks."""
FOUND_AND_NOT = 512


class Blocks:
    """``count`` blocks of random bytes, and memory to read them into."""

    def __init__(self, count: int, block_bytes: int, seed: int) -> None:
        self.count, self.block_bytes = count, block_bytes
        rng = np.random.default_rng(seed)
        self.slab = rng.integers(0, 256, (2, count, block_bytes), dtype=np.uint8)
        self.sources, self.targets = self.slab

    @property
    def num_bytes(self) -> int:
        """Of all blocks."""
        return self.count * self.block_bytes

    def keys(self, number: int, count: int | None = None) -> list[BlockKey]:
        """Others for each round and side; as many as there are blocks."""
        rng = np.random.default_rng((number, self.block_bytes))
        return [block_key(SequenceHash(rng.bytes(32)), 0) for _ in range(count or self.count)]

    def check(self) -> None:
        """WrongAnswer unless what was read is what was written; forgets it."""
        expect(bool(np.array_equal(self.sources, self.targets)), "other bytes than were put")
        self.targets[:] = 0


class Side(Protocol):
    """Who puts, gets and looks for all blocks at once; each raises WrongAnswer if one fails."""

    name: str

    def put(self, keys: Sequence[BlockKey]) -> None:
        """New ones."""

    def get(self, keys: Sequence[BlockKey]) -> None:
        """Into the targets."""

    def exists(self, keys: Sequence[BlockKey], absent: Sequence[BlockKey]) -> None:
        """In one call."""

    def remove(self, keys: Sequence[BlockKey]) -> None:
        """Makes room."""

    def close(self) -> None:
        """Ends it."""


class KvbmSide:
    """Records with checksums, opened by URL, in calls of ``batch`` blocks."""

    name = "kvbm"

    def __init__(self, spec: StoreSpec, blocks: Blocks, batch: int) -> None:
        self._store = cast(RecordStore, open_store(spec))
        slab = blocks.slab
        self._store.register(slab.ctypes.data, slab.nbytes)
        self._sources, self._targets = _views(blocks.sources), _views(blocks.targets)
        self._batch = batch

    def _all(self, count: int, call: Callable[[slice], Sequence[Outcome]]) -> None:
        for start in range(0, count, self._batch):
            outcomes = call(slice(start, start + self._batch))
            expect(set(outcomes) == {Outcome.OK}, f"kvbm: {set(map(str, outcomes))}")

    def put(self, keys: Sequence[BlockKey]) -> None:
        """See Side."""
        put, sources = self._store.put_many, self._sources
        self._all(len(keys), lambda part: put(keys[part], sources[part], deadline_s=DEADLINE_S))

    def get(self, keys: Sequence[BlockKey]) -> None:
        """See Side."""
        get, targets = self._store.get_many, self._targets
        self._all(len(keys), lambda part: get(keys[part], targets[part], deadline_s=DEADLINE_S))

    def exists(self, keys: Sequence[BlockKey], absent: Sequence[BlockKey]) -> None:
        """See Side."""
        outcomes = self._store.contains_many([*keys, *absent], deadline_s=DEADLINE_S)
        held = [Outcome.OK] * len(keys) + [Outcome.MISS] * len(absent)
        expect(outcomes == held, "kvbm: a block is missing, or is not")

    def remove(self, keys: Sequence[BlockKey]) -> None:
        """See Side."""
        self._store.remove_many(keys, deadline_s=DEADLINE_S)

    def close(self) -> None:
        """See Side."""
        self._store.close()


def _views(blocks: npt.NDArray[np.uint8]) -> list[memoryview]:
    return [block.data for block in blocks]


def batches(keys: Sequence[BlockKey], size: int) -> list[slice]:
    """Runs of them."""
    return [slice(start, start + size) for start in range(0, len(keys), size)]


@dataclass
class Samples:
    """Rates (GB/s or names/s) and CPU seconds per GB, of one side and operation."""

    rates: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)


def take_turns(sides: Sequence[Side], blocks: Blocks, rounds: int) -> dict[str, dict[str, Samples]]:
    """By operation and side. A round before them, which is not counted, warms connections and memory."""
    absent = blocks.keys(1, max(1, FOUND_AND_NOT - blocks.count))
    found: dict[str, dict[str, Samples]] = {
        what: {side.name: Samples() for side in sides} for what in (PUT, GET, EXISTS)
    }
    for number in range(-1, rounds):
        order = rotated(sides, number)
        keys = {side.name: blocks.keys(2 + 10 * (number + 1) + at) for at, side in enumerate(order)}
        for what in (PUT, GET, EXISTS):
            for side in order:
                started_cpu_s = time.process_time()
                seconds, _ = timed(partial(_do, side, what, keys[side.name], absent))
                cpu_s = time.process_time() - started_cpu_s
                if number >= 0:
                    work = (
                        LOOK_UPS * (len(absent) + blocks.count) if what == EXISTS else blocks.num_bytes / 1e9
                    )
                    found[what][side.name].rates.append(work / seconds)
                    found[what][side.name].cpu_s.append(cpu_s / work)
                if what == GET:
                    blocks.check()
        for side in order:
            side.remove(keys[side.name])
    return found


def _do(side: Side, what: str, keys: Sequence[BlockKey], absent: Sequence[BlockKey]) -> None:
    if what == EXISTS:
        for _ in range(LOOK_UPS):
            side.exists(keys, absent)
    else:
        (side.put if what == PUT else side.get)(keys)


def figures(goals: Mapping[str, Goal], found: Mapping[str, Mapping[str, Samples]]) -> list[Figure]:
    """``goals`` by operation."""
    made = []
    for what, goal in goals.items():
        samples = found[what]
        peers = {name: tuple(of.rates) for name, of in samples.items() if name != KvbmSide.name}
        note = ""
        if what != EXISTS:
            cpu = ", ".join(f"{name} {median(of.cpu_s):.2f}" for name, of in samples.items())
            note = f"client's CPU s/GB: {cpu}"
        made.append(Figure(goal, tuple(samples[KvbmSide.name].rates), peers, note))
    return made
