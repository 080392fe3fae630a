"""A BlockStore in memory that can be slow, lose blocks, fail, hang and write late, all from one seed; and one
that keeps extents too.

``register()`` makes them usable as lower tiers by the URLs ``toy://NAME?seed=1&latency_ms=2&loses=0.1`` and
``toys://``, which keeps extents: what ``ToyFaults`` knows. Stores of one name in one process have their
blocks in common, as those of a directory.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from random import Random
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, urlsplit

from kvbm_core.errors import ConfigError, Outcome
from kvbm_core.storage.base import Memory, parts_of
from kvbm_core.storage.extents import EXTENT_BYTES, Extent
from kvbm_core.storage.late import LATE, ranges_of
from kvbm_core.storage.stores import StoreSpec, register_store
from kvbm_core.types import BlockKey

PUT, GET, CONTAINS, REMOVE, CLOSE = "put", "get", "contains", "remove", "close"
LATE_WRITE_CALLS = 5
"""A late write lands so many calls later, if nobody lets it land before."""


@dataclass(frozen=True, slots=True)
class ToyFaults:
    """How often, from 0.0 to 1.0. Of a key: ``fails`` (IO_ERROR), ``loses`` (forgotten for good), ``spoils``
    (CORRUPT, with garbage in the target), ``is_late`` (a get that is TIMED_OUT, and whose target is written
    all the same, later). Of a call: ``raises``. ``latency_ms``: of a call, on average.
    """

    seed: int = 0
    latency_ms: float = 0.0
    fails: float = 0.0
    loses: float = 0.0
    spoils: float = 0.0
    is_late: float = 0.0
    raises: float = 0.0


class ToyName(NamedTuple):
    """Of an extent: its last key, and how many blocks it has. A block alone is an extent of one."""

    meaning: str
    shard: str
    key: BlockKey
    num_blocks: int = 1


@dataclass
class ToyBlocks:
    """What stores of one name have in common; the least recently used is forgotten first. ``keys``: of
    extents of several blocks.
    """

    max_bytes: int | None = None
    lock: threading.RLock = field(default_factory=threading.RLock)
    blocks: OrderedDict[ToyName, bytes] = field(default_factory=OrderedDict)
    keys: dict[ToyName, tuple[BlockKey, ...]] = field(default_factory=dict)


class ToyStore:
    """Safe to call from any thread. ``hold`` makes calls hang, whatever their deadline, until ``let_go``."""

    def __init__(
        self,
        payload_bytes: int,
        faults: ToyFaults | None = None,
        blocks: ToyBlocks | None = None,
        *,
        meaning: str = "",
        shard: str = "",
    ) -> None:
        self.faults = faults or ToyFaults()
        self.calls: list[tuple[str, tuple[BlockKey, ...]]] = []
        """Name and keys of all that was asked."""
        self._payload_bytes = payload_bytes
        self._blocks = blocks or ToyBlocks()
        self._meaning, self._shard = meaning, shard
        self._random = Random(self.faults.seed)  # noqa: S311 (a test's randomness)
        self._changed = threading.Condition()
        self._gates: dict[str, threading.Event] = {}
        self._shut: list[threading.Event] = []
        self._num_hanging = 0
        self._is_closed = threading.Event()
        self._late: list[tuple[int, Memory, bytes, int]] = []

    # ---------------------------------------------------------------- for tests

    def hold(self, *calls: str) -> None:
        """Calls of these names hang from now on."""
        with self._changed:
            self._gates = {name: threading.Event() for name in calls}
            self._shut += self._gates.values()

    def hold_no_more(self) -> None:
        """Calls that come from now on do not hang; those that do, do on."""
        with self._changed:
            self._gates = {}

    def let_go(self) -> None:
        """Whatever hangs goes on."""
        with self._changed:
            shut, self._gates, self._shut = self._shut, {}, []
        for gate in shut:
            gate.set()

    def wait_hanging(self, count: int, timeout_s: float) -> bool:
        """Waits until so many calls hang."""
        with self._changed:
            return self._changed.wait_for(lambda: self._num_hanging >= count, timeout_s)

    def land(self) -> None:
        """All late writes land now."""
        self._land(None)

    def _land(self, number: int | None) -> None:
        with self._changed:
            due = [late for late in self._late if number is None or late[0] <= number]
            self._late = [late for late in self._late if late not in due]
        for _, target, content, token in due:
            _fill(target, content)
            LATE.end(token)

    def _write_late(self, target: Memory, content: bytes) -> None:
        token = LATE.add(ranges_of(target), target)
        self._late.append((len(self.calls) + LATE_WRITE_CALLS, target, content, token))

    # ---------------------------------------------------------------- BlockStore

    def contains_many(self, keys: Sequence[BlockKey], *, deadline_s: float) -> list[Outcome]:
        """See BlockStore."""
        return self._call(CONTAINS, keys, deadline_s, lambda index: self._contains(keys[index]))

    def put_many(
        self, keys: Sequence[BlockKey], payloads: Sequence[Memory], *, deadline_s: float
    ) -> list[Outcome]:
        """See BlockStore."""
        self._check(keys, payloads)
        own: set[ToyName] = set()
        return self._call(PUT, keys, deadline_s, lambda index: self._put(keys[index], payloads[index], own))

    def get_many(
        self, keys: Sequence[BlockKey], targets: Sequence[Memory], *, deadline_s: float
    ) -> list[Outcome]:
        """See BlockStore."""
        self._check(keys, targets, are_targets=True)
        return self._call(GET, keys, deadline_s, lambda index: self._get(keys[index], targets[index]))

    def remove_many(self, keys: Sequence[BlockKey], *, deadline_s: float) -> list[Outcome]:
        """See BlockStore."""
        return self._call(REMOVE, keys, deadline_s, lambda index: self._remove(keys[index]))

    def scan(self) -> Iterator[BlockKey]:
        """See BlockStore."""
        with self._blocks.lock:
            own = (self._meaning, self._shard)
            found = [name.key for name in self._blocks.blocks if name[:2] == own and name.num_blocks == 1]
        return iter(found)

    def close(self) -> None:
        """See BlockStore; hangs too if it is held."""
        self._hang(CLOSE)
        self._is_closed.set()
        self.let_go()

    # ---------------------------------------------------------------- a call

    def _call(
        self, name: str, keys: Sequence[BlockKey], deadline_s: float, act: Callable[[int], Outcome]
    ) -> list[Outcome]:
        with self._changed:
            self.calls.append((name, tuple(keys)))
            number = len(self.calls)
            latency_s = self._random.uniform(0.0, 2e-3 * self.faults.latency_ms)
            is_raised = self._is_drawn(self.faults.raises)
        self._land(number)
        self._hang(name)
        if is_raised:
            raise OSError(f"toy store: {name} failed")
        if latency_s:
            self._is_closed.wait(max(0.0, min(latency_s, deadline_s)))
        if self._is_closed.is_set():
            return [Outcome.REJECTED] * len(keys)
        if latency_s > deadline_s:
            return [Outcome.TIMED_OUT] * len(keys)
        with self._blocks.lock:
            return [self._one(act, index) for index in range(len(keys))]

    def _hang(self, name: str) -> None:
        with self._changed:
            gate = self._gates.get(name)
            self._num_hanging += gate is not None
            self._changed.notify_all()
        if gate is not None:
            gate.wait()
            with self._changed:
                self._num_hanging -= 1

    def _one(self, act: Callable[[int], Outcome], index: int) -> Outcome:
        with self._changed:
            if self._is_drawn(self.faults.fails):
                return Outcome.IO_ERROR
        return act(index)

    def _is_drawn(self, rate: float) -> bool:
        return rate > 0.0 and self._random.random() < rate

    # ---------------------------------------------------------------- a block

    def _own(self, key: BlockKey, num_blocks: int = 1) -> ToyName:
        return ToyName(self._meaning, self._shard, key, num_blocks)

    def _contains(self, key: BlockKey, num_blocks: int = 1) -> Outcome:
        return Outcome.OK if self._own(key, num_blocks) in self._blocks.blocks else Outcome.MISS

    def _remove(self, key: BlockKey) -> Outcome:
        return Outcome.MISS if self._blocks.blocks.pop(self._own(key), None) is None else Outcome.OK

    def _put(self, key: BlockKey, payload: Memory, own: set[ToyName], num_blocks: int = 1) -> Outcome:
        """``own``: put by the same call, and not to be forgotten for what comes behind."""
        name, blocks, most = self._own(key, num_blocks), self._blocks.blocks, self._blocks.max_bytes
        content = b"".join(parts_of(payload))
        used = sum(map(len, blocks.values())) - len(blocks.get(name, b""))
        for old in [old for old in blocks if old not in own and old != name]:
            if most is None or used + len(content) <= most:
                break
            used -= len(blocks.pop(old))
        if most is not None and used + len(content) > most:
            return Outcome.NO_SPACE
        blocks[name] = content
        blocks.move_to_end(name)
        own.add(name)
        return Outcome.OK

    def _get(self, key: BlockKey, target: Memory) -> Outcome:
        name, blocks = self._own(key), self._blocks.blocks
        with self._changed:
            if self._is_drawn(self.faults.loses):
                blocks.pop(name, None)
            content = blocks.get(name)
            if content is None:
                return Outcome.MISS
            blocks.move_to_end(name)
            if self._is_drawn(self.faults.spoils):
                _fill(target, self._random.randbytes(len(content)))
                return Outcome.CORRUPT
            if self._is_drawn(self.faults.is_late):
                self._write_late(target, content)
                return Outcome.TIMED_OUT
        _fill(target, content)
        return Outcome.OK

    def _check(
        self, keys: Sequence[BlockKey], memory: Sequence[Memory], *, are_targets: bool = False
    ) -> None:
        if len(keys) != len(memory):
            raise ValueError(f"{len(keys)} keys and {len(memory)} buffers")
        for parts in map(parts_of, memory):
            if sum(part.nbytes for part in parts) != self._payload_bytes:
                raise ValueError(f"a block is of {self._payload_bytes} bytes")
            if not all(part.contiguous and not (are_targets and part.readonly) for part in parts):
                raise ValueError("memory that cannot be used")


class ToyExtentStore(ToyStore):
    """A ToyStore that is an ExtentStore. Of an extent that is spoiled, some block and those behind it are."""

    concurrency = 3

    def contains_extents(self, extents: Sequence[Extent], *, deadline_s: float) -> list[Outcome]:
        """See ExtentStore."""
        return self._call(
            CONTAINS,
            _last_keys(extents),
            deadline_s,
            lambda index: self._contains(extents[index].keys[-1], extents[index].num_blocks),
        )

    def put_extents(
        self, extents: Sequence[Extent], payloads: Sequence[Sequence[Memory]], *, deadline_s: float
    ) -> list[Outcome]:
        """See ExtentStore."""
        self._check_extents(extents, payloads)
        if any(len(extent.keys) != extent.num_blocks for extent in extents):
            raise ValueError("a part of an extent is stored")
        own: set[ToyName] = set()

        def put(index: int) -> Outcome:
            extent = extents[index]
            whole = [part for memory in payloads[index] for part in parts_of(memory)]
            self._blocks.keys[self._own(extent.keys[-1], extent.num_blocks)] = extent.keys
            return self._put(extent.keys[-1], whole, own, extent.num_blocks)

        return self._call(PUT, _last_keys(extents), deadline_s, put)

    def get_extents(
        self, extents: Sequence[Extent], targets: Sequence[Sequence[Memory]], *, deadline_s: float
    ) -> list[list[Outcome]]:
        """See ExtentStore."""
        self._check_extents(extents, targets, are_targets=True)
        ends: dict[int, list[Outcome]] = {}

        def get(index: int) -> Outcome:
            ends[index] = self._get_extent(extents[index], targets[index])
            return Outcome.OK

        outcomes = self._call(GET, _last_keys(extents), deadline_s, get)
        return [ends.get(i, [outcome] * len(targets[i])) for i, outcome in enumerate(outcomes)]

    def _get_extent(self, extent: Extent, targets: Sequence[Memory]) -> list[Outcome]:
        name, blocks = self._own(extent.keys[-1], extent.num_blocks), self._blocks.blocks
        with self._changed:
            if self._is_drawn(self.faults.loses):
                blocks.pop(name, None)
            content = blocks.get(name)
            if content is None:
                return [Outcome.MISS] * len(targets)
            blocks.move_to_end(name)
            keys = self._blocks.keys.get(name, (name.key,))
            if keys[len(keys) - len(targets) :] != extent.keys:
                raise ValueError("an extent of other blocks was asked for")
            size, num_bad = self._payload_bytes, 0
            pieces = [content[at : at + size] for at in range(0, len(content), size)][-len(targets) :]
            if self._is_drawn(self.faults.spoils):
                num_bad = self._random.randint(1, len(targets))
            elif self._is_drawn(self.faults.is_late):
                for target, piece in zip(targets, pieces, strict=True):
                    self._write_late(target, piece)
                return [Outcome.TIMED_OUT] * len(targets)
        num_good = len(targets) - num_bad
        for i, (target, piece) in enumerate(zip(targets, pieces, strict=True)):
            _fill(target, piece if i < num_good else bytes(size))
        return [Outcome.OK] * num_good + [Outcome.CORRUPT] * num_bad

    def _check_extents(
        self,
        extents: Sequence[Extent],
        memory: Sequence[Sequence[Memory]],
        *,
        are_targets: bool = False,
    ) -> None:
        for extent, parts in zip(extents, memory, strict=True):
            if not 0 < len(extent.keys) <= extent.num_blocks:
                raise ValueError(f"{len(extent.keys)} keys of an extent of {extent.num_blocks} blocks")
            self._check(extent.keys, parts, are_targets=are_targets)


def _last_keys(extents: Sequence[Extent]) -> list[BlockKey]:
    return [extent.keys[-1] for extent in extents]


def _fill(target: Memory, content: bytes) -> None:
    at = 0
    for part in parts_of(target):
        part.cast("B")[:] = content[at : at + part.nbytes]
        at += part.nbytes


# ---------------------------------------------------------------- by URL

_SHARED: dict[str, ToyBlocks] = {}
OPENED: list[ToyStore] = []
"""Those that were opened by URL, for tests that hold them."""


def register() -> None:
    """Makes ``toy://`` and ``toys://`` URLs usable in this process."""
    register_store("toy", partial(_open, ToyStore))
    register_store("toys", partial(_open, ToyExtentStore), extent_bytes=EXTENT_BYTES)


def forget_all() -> None:
    """Nothing of what was opened by URL remains."""
    _SHARED.clear()
    OPENED.clear()


def forget(name: str) -> None:
    """The stores called ``name`` lose all that they have."""
    _SHARED.pop(name, None)


def land_all() -> None:
    """Late writes of all stores that were opened by URL land now."""
    for store in OPENED:
        store.land()


def lose(name: str, key: BlockKey, shard: str = "") -> bool:
    """The stores called ``name`` lose a block, and the extents that it is in, on ranks whose shard begins
    with ``shard``. False if they do not have it.
    """
    blocks = _SHARED[name]
    with blocks.lock:
        found = [
            own
            for own in blocks.blocks
            if key in blocks.keys.get(own, (own.key,)) and own.shard.startswith(shard)
        ]
        for own in found:
            del blocks.blocks[own]
    return bool(found)


def _open(kind: type[ToyStore], spec: StoreSpec) -> ToyStore:
    url, given = urlsplit(spec.url), dict[str, Any]()
    types = {known.name: int if known.name == "seed" else float for known in fields(ToyFaults)}
    for name, value in parse_qsl(url.query):
        try:
            given[name] = types[name](value)
        except (KeyError, ValueError):
            raise ConfigError("KVBM_REMOTE_URL", spec.url, f"{name}={value} is no fault of a toy") from None
    blocks = _SHARED.setdefault(url.netloc, ToyBlocks(spec.options.max_bytes))
    store = kind(spec.payload_bytes, ToyFaults(**given), blocks, meaning=spec.meaning, shard=spec.shard)
    OPENED.append(store)
    return store
