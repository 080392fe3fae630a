"""Blocks of one rank, kept as head shards, so that ranks of engines of another size can read them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any

from kvbm_core.clock import Clock, SystemClock
from kvbm_core.errors import Outcome
from kvbm_core.layout.heads import HeadShards
from kvbm_core.observe.log import RateLimitedLogger
from kvbm_core.storage.base import BlockStore, Memory, check_blocks, check_targets
from kvbm_core.storage.call_pool import CallPool, IsGivenUp
from kvbm_core.storage.extents import Extent, extent_blocks
from kvbm_core.storage.remote.head_copies import copies_of
from kvbm_core.storage.remote.record_store import RecordStore, check_extents
from kvbm_core.storage.remote.scratch import Lent, Scratch
from kvbm_core.types import BlockKey, group_of

ROOM_BYTES = 64 << 20
CALLS_AT_ONCE = 4
"""The memory is shared by so many calls; one that needs more is made in several steps."""
CLOSE_TIMEOUT_S = 2.0
WORST_FIRST = (
    Outcome.CORRUPT,
    Outcome.INCOMPATIBLE,
    Outcome.MISS,
    Outcome.REJECTED,
    Outcome.NO_SPACE,
    Outcome.IO_ERROR,
    Outcome.TIMED_OUT,
    Outcome.BUSY,
    Outcome.OK,
)
"""Of a block's shards: one that is not there is an answer, whatever is not known of the others."""

limited_log = RateLimitedLogger()

Outcomes = list[list[Outcome]]
"""Of each item."""
AskShard = Callable[[int, float], Outcomes]
"""Asks the store of one shard, by its number among this rank's, and has so many seconds."""
MoveShard = Callable[[int, Sequence[int], list[list[memoryview]], float], Outcomes]
"""The same of some of the items, each with the memory of its blocks."""


class HeadStore:
    """BlockStore of blocks of ``payload_bytes``, kept in ``stores``, which it closes: one per shard of this
    rank, in order. Safe to call from any thread; so many ``calls_at_once`` go on without waiting.

    Shards pass through bounded memory of its own: a store that is late touches nobody else's, and a call that
    does not get any in time is BUSY. A block's outcome is the worst of its shards. A rank that shares its
    shards with others and is not their keeper stores nothing, and says OK: the keeper's outcome counts. A
    block that the shards' codec cannot keep is REJECTED.
    """

    def __init__(
        self,
        heads: HeadShards,
        stores: Sequence[BlockStore],
        payload_bytes: int,
        *,
        calls_at_once: int = CALLS_AT_ONCE,
        clock: Clock | None = None,
    ) -> None:
        if len(stores) != len(heads.own):
            raise ValueError(f"{len(stores)} stores for {len(heads.own)} shards")
        self._stores = tuple(stores)
        self._is_keeper = heads.is_keeper
        self._payload_bytes = payload_bytes
        self._shard_bytes = heads.shard_bytes
        self._room_bytes = len(stores) * heads.shard_bytes
        self._copies = tuple(copies_of(group, heads) for group in heads.groups)
        self._clock = clock or SystemClock()
        self._calls = CallPool("head-shards", calls_at_once * len(stores), self._clock)
        largest_bytes = extent_blocks(heads.shard_bytes) * self._room_bytes
        self._scratch = Scratch(max(ROOM_BYTES, CALLS_AT_ONCE * largest_bytes), self._clock)

    @property
    def place(self) -> tuple[int, int]:
        """Address and size of the memory that shards pass through, for an engine that wants to know."""
        return self._scratch.place

    # ---------------------------------------------------------------- BlockStore

    def contains_many(self, keys: Sequence[BlockKey], *, deadline_s: float) -> list[Outcome]:
        """See BlockStore."""
        return self._ask(
            lambda n, left_s: _each(self._stores[n].contains_many(keys, deadline_s=left_s)),
            len(keys),
            deadline_s,
        )

    def put_many(
        self, keys: Sequence[BlockKey], payloads: Sequence[Memory], *, deadline_s: float
    ) -> list[Outcome]:
        """See BlockStore."""
        check_blocks(keys, payloads, self._payload_bytes)
        self._check_groups(keys)

        def put(n: int, step: Sequence[int], shards: list[list[memoryview]], left_s: float) -> Outcomes:
            return _each(self._stores[n].put_many(_of(keys, step), _flat(shards), deadline_s=left_s))

        return _flat(self._put(_each(keys), _each(payloads), put, deadline_s))

    def get_many(
        self, keys: Sequence[BlockKey], targets: Sequence[Memory], *, deadline_s: float
    ) -> list[Outcome]:
        """See BlockStore."""
        check_blocks(keys, targets, self._payload_bytes)
        self._check_groups(keys)
        check_targets(targets)

        def get(n: int, step: Sequence[int], shards: list[list[memoryview]], left_s: float) -> Outcomes:
            return _each(self._stores[n].get_many(_of(keys, step), _flat(shards), deadline_s=left_s))

        return _flat(self._get(_each(keys), _each(targets), get, deadline_s))

    def remove_many(self, keys: Sequence[BlockKey], *, deadline_s: float) -> list[Outcome]:
        """See BlockStore."""
        return self._ask(
            lambda n, left_s: _each(self._stores[n].remove_many(keys, deadline_s=left_s)),
            len(keys),
            deadline_s,
        )

    def scan(self) -> Iterator[BlockKey]:
        """See BlockStore: those of which all shards are there."""
        first, *others = self._stores
        elsewhere = [set(store.scan()) for store in others]
        return (key for key in first.scan() if all(key in keys for keys in elsewhere))

    def close(self) -> None:
        """See BlockStore."""
        for store in self._stores:
            store.close()
        self._calls.close(CLOSE_TIMEOUT_S)

    # ---------------------------------------------------------------- blocks and shards

    def _check_groups(self, keys: Sequence[BlockKey]) -> None:
        if any(group_of(key) >= len(self._copies) for key in keys):
            raise ValueError(f"a key of none of {len(self._copies)} groups")

    def _put(
        self,
        keys: Sequence[Sequence[BlockKey]],
        payloads: Sequence[Sequence[Memory]],
        put: MoveShard,
        deadline_s: float,
    ) -> Outcomes:
        """One outcome per item."""
        if not self._is_keeper:
            return [[Outcome.OK] for _ in keys]
        ends_at_s = self._clock.now_s() + deadline_s
        outcomes: Outcomes = []
        for step in self._steps(payloads):
            lent = self._take(_of(payloads, step), ends_at_s)
            if lent is None:
                outcomes += _all(Outcome.BUSY, [1] * len(step))
                continue
            try:
                kept = self._divide(keys, payloads, step, lent)
                move = self._mover(put, kept, _of(payloads, kept), lent)
                asked = self._ask_all(move, [1] * len(kept), ends_at_s, lent.memory) if kept else []
                ends = dict(zip(kept, asked, strict=True))
                outcomes += [ends.get(index, [Outcome.REJECTED]) for index in step]
            finally:
                self._scratch.give_back(lent)
        return outcomes

    def _divide(
        self,
        keys: Sequence[Sequence[BlockKey]],
        payloads: Sequence[Sequence[Memory]],
        step: Sequence[int],
        lent: Lent,
    ) -> list[int]:
        """Fills rooms for the shards of those items all of whose blocks can be kept, and says which."""
        kept: list[int] = []
        rooms = self._rooms(lent)
        for index in step:
            own = zip(keys[index], payloads[index], rooms[: len(keys[index])], strict=True)
            if all(self._copies[group_of(key)].divide(payload, room) for key, payload, room in own):
                kept.append(index)
                rooms = rooms[len(keys[index]) :]
            else:
                line = "kvbm: shared store: a block is not stored, as its numbers are infinite, or nearly"
                limited_log.warning("numbers", line)
        return kept

    def _get(
        self,
        keys: Sequence[Sequence[BlockKey]],
        targets: Sequence[Sequence[Memory]],
        get: MoveShard,
        deadline_s: float,
    ) -> Outcomes:
        """One outcome per target of each item; those that are OK are filled."""
        ends_at_s = self._clock.now_s() + deadline_s
        outcomes: Outcomes = []
        for step in self._steps(targets):
            own = _of(targets, step)
            sizes = list(map(len, own))
            lent = self._take(own, ends_at_s)
            if lent is None:
                outcomes += _all(Outcome.BUSY, sizes)
                continue
            try:
                move = self._mover(get, step, own, lent)
                ends = self._ask_all(move, sizes, ends_at_s, lent.memory)
                blocks = zip(_flat(ends), _flat(_of(keys, step)), _flat(own), strict=True)
                for (end, key, target), room in zip(blocks, self._rooms(lent), strict=False):
                    if end is Outcome.OK:
                        self._copies[group_of(key)].join(room, target)
                outcomes += ends
            finally:
                self._scratch.give_back(lent)
        return outcomes

    def _steps(self, memory: Sequence[Sequence[Memory]]) -> Iterator[range]:
        """Items that go together, by the memory that they take."""
        most, begin, used = self._scratch.num_bytes // CALLS_AT_ONCE, 0, 0
        for index, own in enumerate(memory):
            size = len(own) * self._room_bytes
            if index > begin and used + size > most:
                yield range(begin, index)
                begin, used = index, 0
            used += size
        if begin < len(memory):
            yield range(begin, len(memory))

    def _take(self, memory: Sequence[Sequence[Memory]], ends_at_s: float) -> Lent | None:
        """Room for all of their shards; None if there is none in time."""
        num_bytes = sum(map(len, memory)) * self._room_bytes
        return self._scratch.take(num_bytes, ends_at_s - self._clock.now_s())

    def _rooms(self, lent: Lent) -> list[memoryview]:
        """For the shards of each block."""
        size = self._room_bytes
        return [lent.memory[at : at + size] for at in range(0, lent.memory.nbytes - size + 1, size)]

    def _mover(
        self, move: MoveShard, items: Sequence[int], memory: Sequence[Sequence[Memory]], lent: Lent
    ) -> AskShard:
        """``move`` with the memory of each shard of these items, which have the first rooms."""
        starts = list(accumulate(map(len, memory), initial=0))

        def ask(n: int, left_s: float) -> Outcomes:
            offset, size = n * self._shard_bytes, self._shard_bytes
            places = range(offset, offset + starts[-1] * self._room_bytes, self._room_bytes)
            shards = [lent.memory[at : at + size] for at in places]
            return move(n, items, [shards[begin:end] for begin, end in pairwise(starts)], left_s)

        return ask

    # ---------------------------------------------------------------- all shards at once

    def _ask(self, ask: AskShard, count: int, deadline_s: float) -> list[Outcome]:
        return _flat(self._ask_all(ask, [1] * count, self._clock.now_s() + deadline_s, None))

    def _ask_all(
        self, ask: AskShard, sizes: Sequence[int], ends_at_s: float, memory: memoryview | None
    ) -> Outcomes:
        """The worst of what the shards' stores say; they are asked at the same time, about ``memory``."""
        count = len(self._stores)
        answers: list[Outcomes | None] = [None] * count

        def task(n: int, is_given_up: IsGivenUp) -> Outcome:
            answers[n] = ask(n, ends_at_s - self._clock.now_s())
            return Outcome.OK

        targets = None if memory is None else [memory] * count
        ends = self._calls.run(task, count, deadline_s=ends_at_s - self._clock.now_s(), targets=targets)
        whole = [
            answer if end is Outcome.OK and answer is not None else _all(end, sizes)
            for end, answer in zip(ends, answers, strict=True)
        ]
        return [
            [min(of_block, key=WORST_FIRST.index) for of_block in zip(*of_item, strict=True)]
            for of_item in zip(*whole, strict=True)
        ]


class HeadRecords(HeadStore):
    """The same of records, and an ExtentStore. ``stores`` have one engine. ``concurrency``: calls at once
    that it takes well.
    """

    def __init__(
        self,
        heads: HeadShards,
        stores: Sequence[RecordStore],
        payload_bytes: int,
        *,
        clock: Clock | None = None,
    ) -> None:
        self._records = tuple(stores)
        self.concurrency = max(1, self._records[0].concurrency // len(stores))
        super().__init__(heads, stores, payload_bytes, calls_at_once=self.concurrency, clock=clock)
        self._records[0].register(*self.place)

    def contains_extents(self, extents: Sequence[Extent], *, deadline_s: float) -> list[Outcome]:
        """See ExtentStore."""
        return self._ask(
            lambda n, left_s: _each(self._records[n].contains_extents(extents, deadline_s=left_s)),
            len(extents),
            deadline_s,
        )

    def put_extents(
        self, extents: Sequence[Extent], payloads: Sequence[Sequence[Memory]], *, deadline_s: float
    ) -> list[Outcome]:
        """See ExtentStore."""
        check_extents(extents, payloads, self._payload_bytes, are_whole=True)

        def put(n: int, step: Sequence[int], shards: list[list[memoryview]], left_s: float) -> Outcomes:
            return _each(self._records[n].put_extents(_of(extents, step), shards, deadline_s=left_s))

        return _flat(self._put(self._keys_of(extents), payloads, put, deadline_s))

    def get_extents(
        self, extents: Sequence[Extent], targets: Sequence[Sequence[Memory]], *, deadline_s: float
    ) -> list[list[Outcome]]:
        """See ExtentStore."""
        check_extents(extents, targets, self._payload_bytes)
        for own in targets:
            check_targets(own)

        def get(n: int, step: Sequence[int], shards: list[list[memoryview]], left_s: float) -> Outcomes:
            return self._records[n].get_extents(_of(extents, step), shards, deadline_s=left_s)

        return self._get(self._keys_of(extents), targets, get, deadline_s)

    def _keys_of(self, extents: Sequence[Extent]) -> list[tuple[BlockKey, ...]]:
        for extent in extents:
            self._check_groups(extent.keys)
        return [extent.keys for extent in extents]


def _each(items: Sequence[Any]) -> list[list[Any]]:
    return [[item] for item in items]


def _of(items: Sequence[Any], numbers: Sequence[int]) -> list[Any]:
    return [items[number] for number in numbers]


def _flat(items: Sequence[Sequence[Any]]) -> list[Any]:
    return [one for own in items for one in own]


def _all(outcome: Outcome, sizes: Sequence[int]) -> Outcomes:
    return [[outcome] * size for size in sizes]
