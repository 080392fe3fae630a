"""Records of blocks on any ObjectEngine: a BlockStore, and an ExtentStore."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import NamedTuple

from kvbm_core.clock import Clock, SystemClock
from kvbm_core.errors import Outcome
from kvbm_core.observe.log import RateLimitedLogger
from kvbm_core.storage.base import Memory, check_blocks, check_targets, plain_parts
from kvbm_core.storage.disk.record import whole_sectors
from kvbm_core.storage.extents import MAX_EXTENT_BLOCKS, Extent, extent_blocks
from kvbm_core.storage.remote.encoding import Encoding
from kvbm_core.storage.remote.engine import GetItem, Got, ObjectEngine, PutItem, TakesMemory
from kvbm_core.storage.remote.judge import (
    OF_ANOTHER_SIZE,
    OURS,
    Verdict,
    cut,
    judge_blocks,
    judge_fields,
    open_trailer,
    stored_sizes,
)
from kvbm_core.storage.remote.names import RecordNames
from kvbm_core.storage.remote.records import (
    SALT_BYTES,
    TAIL_BYTES,
    RecordFields,
    StoredBlock,
    digest_of,
    pack_trailer_into,
    trailer_bytes,
)
from kvbm_core.storage.remote.renewals import Renewals
from kvbm_core.storage.remote.scratch import Lent, Scratch
from kvbm_core.types import BlockKey, group_of

TRAILERS_BYTES = 4 << 20
ENCODED_BYTES = 64 << 20
"""A store's own memory for calls under way: for trailers, and for blocks if they are encoded."""
CALLS_AT_ONCE = 4
"""So many calls share that memory; a call that needs more than its share is made in several steps."""
SIDE_S = 1.0
"""A removal that a call makes by the way takes no longer."""
LIST_DEADLINE_S = 10.0

limited_log = RateLimitedLogger()


class _Read(NamedTuple):
    """How ``extent`` is read. ``item``: what the engine is asked for. Blocks that are stored as they are go
    straight to ``targets`` and the trailer to ``memory``; otherwise all of it goes to ``memory``.
    """

    extent: Extent
    targets: Sequence[Memory]
    item: GetItem
    memory: memoryview


def check_extents(
    extents: Sequence[Extent],
    memory: Sequence[Sequence[Memory]],
    payload_bytes: int,
    *,
    are_whole: bool = False,
) -> None:
    """ValueError unless these are extents with memory for each key, and, if ``are_whole``, all their keys."""
    if len(extents) != len(memory):
        raise ValueError("each extent needs memory")
    for extent, own in zip(extents, memory, strict=True):
        check_blocks(extent.keys, own, payload_bytes)
        if not 0 < len(extent.keys) <= extent.num_blocks <= MAX_EXTENT_BLOCKS:
            raise ValueError(f"an extent is of 1 to {MAX_EXTENT_BLOCKS} blocks, with keys of the last")
        if are_whole and len(extent.keys) != extent.num_blocks:
            raise ValueError("an extent is stored whole: it needs a key for each of its blocks")


class RecordStore:
    """Safe to call from any thread; a call works in the thread that makes it, and in the engine's. What was
    read is renewed in a thread of its own, unless the engine evicts by itself: then it knows what is used.

    Nothing is locked and nothing is remembered: a record is named by its content, and believed for its
    checksums alone. Blocks that are stored as they are go from and to the caller's memory without a copy;
    those that are encoded pass through bounded memory of the store's own, and a call that does not get any
    in time is BUSY. A record that does not verify is removed; one of another secret, meaning or version,
    which somebody must have moved there, is left alone.

    ``close`` closes the engine too. ``payload_bytes``: of each block. ``concurrency``: calls at once that the
    engine takes well.
    """

    def __init__(
        self,
        engine: ObjectEngine,
        names: RecordNames,
        payload_bytes: int,
        encoding: Encoding | None = None,
        *,
        clock: Clock | None = None,
    ) -> None:
        self.concurrency = engine.traits.concurrency
        self._engine = engine
        self._names = names
        self._payload_bytes = payload_bytes
        self._encoding = encoding or Encoding()
        self._stored_bytes = self._encoding.stored_bytes(payload_bytes)
        self._clock = clock or SystemClock()
        room_bytes = TRAILERS_BYTES
        if not self._encoding.is_plain:
            room_bytes = max(ENCODED_BYTES, CALLS_AT_ONCE * self._room_bytes(extent_blocks(payload_bytes)))
        self._scratch = Scratch(room_bytes, self._clock)
        self._renewals = None if engine.traits.has_capacity else Renewals(engine, self._clock)
        self.register(*self._scratch.place)

    def register(self, address: int, num_bytes: int) -> None:
        """See TakesMemory; for engines that want to know."""
        if isinstance(self._engine, TakesMemory):
            self._engine.register(address, num_bytes)

    # ---------------------------------------------------------------- ExtentStore

    def contains_extents(self, extents: Sequence[Extent], *, deadline_s: float) -> list[Outcome]:
        """See ExtentStore. Records are not looked at."""
        return self._engine.exists(self._names_of(extents), deadline_s=deadline_s)

    def put_extents(
        self, extents: Sequence[Extent], payloads: Sequence[Sequence[Memory]], *, deadline_s: float
    ) -> list[Outcome]:
        """See ExtentStore. ValueError also for an extent of which a key is missing."""
        check_extents(extents, payloads, self._payload_bytes, are_whole=True)
        ends_at_s = self._clock.now_s() + deadline_s
        outcomes: list[Outcome] = []
        for step in self._steps(extents):
            outcomes += self._put(extents[step], payloads[step], ends_at_s)
        if self._renewals is not None:
            names = self._names_of(extents)
            self._renewals.written(
                name for name, end in zip(names, outcomes, strict=True) if end is Outcome.OK
            )
        return outcomes

    def get_extents(
        self, extents: Sequence[Extent], targets: Sequence[Sequence[Memory]], *, deadline_s: float
    ) -> list[list[Outcome]]:
        """See ExtentStore. A bad block costs no other one of its extent."""
        check_extents(extents, targets, self._payload_bytes)
        for own in targets:
            check_targets(own)
        ends_at_s = self._clock.now_s() + deadline_s
        outcomes: list[list[Outcome]] = []
        for step in self._steps(extents):
            outcomes += self._get(extents[step], targets[step], ends_at_s)
        if self._renewals is not None:
            names = self._names_of(extents)
            self._renewals.used(name for name, own in zip(names, outcomes, strict=True) if Outcome.OK in own)
        return outcomes

    # ---------------------------------------------------------------- BlockStore: extents of one

    def contains_many(self, keys: Sequence[BlockKey], *, deadline_s: float) -> list[Outcome]:
        """See BlockStore."""
        return self._engine.exists(self._names.names_of(keys, 1), deadline_s=deadline_s)

    def put_many(
        self, keys: Sequence[BlockKey], payloads: Sequence[Memory], *, deadline_s: float
    ) -> list[Outcome]:
        """See BlockStore."""
        return self.put_extents(_alone(keys), [[payload] for payload in payloads], deadline_s=deadline_s)

    def get_many(
        self, keys: Sequence[BlockKey], targets: Sequence[Memory], *, deadline_s: float
    ) -> list[Outcome]:
        """See BlockStore."""
        outcomes = self.get_extents(_alone(keys), [[target] for target in targets], deadline_s=deadline_s)
        return [outcome for (outcome,) in outcomes]

    def remove_many(self, keys: Sequence[BlockKey], *, deadline_s: float) -> list[Outcome]:
        """See BlockStore. Asks first what is there: to many stores, removing nothing is a success too."""
        names = self._names.names_of(keys, 1)
        ends_at_s = self._clock.now_s() + deadline_s
        there = self._engine.exists(names, deadline_s=deadline_s)
        wanted = [name for name, found in zip(names, there, strict=True) if found is Outcome.OK]
        removed = iter(self._engine.remove(wanted, deadline_s=self._left_s(ends_at_s)) if wanted else ())
        return [next(removed) if found is Outcome.OK else found for found in there]

    def scan(self) -> Iterator[BlockKey]:
        """The keys of extents of one; none with a secret. A store that cannot be listed ends it."""
        with suppress(OSError):
            for info in self._engine.scan(self._names.folder, deadline_s=LIST_DEADLINE_S):
                key = self._names.key_in(info.name)
                if key is not None:
                    yield key

    def close(self) -> None:
        """See BlockStore."""
        self._engine.close()
        if self._renewals is not None:
            self._renewals.close()

    # ---------------------------------------------------------------- both ways

    def _names_of(self, extents: Sequence[Extent]) -> list[str]:
        return [self._names.name_of(extent.keys[-1], extent.num_blocks) for extent in extents]

    def _room_bytes(self, num_blocks: int) -> int:
        """What a record of so many blocks takes of the store's own memory, at most."""
        blocks_bytes = 0 if self._encoding.is_plain else num_blocks * self._stored_bytes
        return whole_sectors(blocks_bytes + trailer_bytes(num_blocks) + 1)

    def _steps(self, extents: Sequence[Extent]) -> Iterator[slice]:
        """Slices of the extents that have room in a call's share of the memory."""
        most, begin, used = self._scratch.num_bytes // CALLS_AT_ONCE, 0, 0
        for index, extent in enumerate(extents):
            size = self._room_bytes(extent.num_blocks)
            if index > begin and used + size > most:
                yield slice(begin, index)
                begin, used = index, 0
            used += size
        if begin < len(extents):
            yield slice(begin, len(extents))

    def _take(self, extents: Sequence[Extent], ends_at_s: float) -> Lent | None:
        """Memory for all of these extents; None if there is none in time."""
        size = sum(self._room_bytes(extent.num_blocks) for extent in extents)
        return self._scratch.take(size, self._left_s(ends_at_s))

    def _rooms(self, extents: Sequence[Extent], memory: memoryview) -> Iterator[memoryview]:
        """The part of ``memory`` for each extent."""
        at = 0
        for extent in extents:
            size = self._room_bytes(extent.num_blocks)
            yield memory[at : at + size]
            at += size

    def _left_s(self, ends_at_s: float) -> float:
        return ends_at_s - self._clock.now_s()

    def _side_s(self, ends_at_s: float) -> float:
        return min(SIDE_S, self._left_s(ends_at_s))

    # ---------------------------------------------------------------- writing

    def _put(
        self, extents: Sequence[Extent], payloads: Sequence[Sequence[Memory]], ends_at_s: float
    ) -> list[Outcome]:
        lent = self._take(extents, ends_at_s)
        if lent is None:
            return [Outcome.BUSY] * len(extents)
        try:
            rooms = self._rooms(extents, lent.memory)
            items = [
                self._put_item(extent, own, room)
                for extent, own, room in zip(extents, payloads, rooms, strict=True)
            ]
            return self._engine.put(items, deadline_s=self._left_s(ends_at_s))
        finally:
            self._scratch.give_back(lent)

    def _put_item(self, extent: Extent, payloads: Sequence[Memory], room: memoryview) -> PutItem:
        fields = self._fields_of(extent)
        pieces: list[memoryview] = []
        at, stored = 0, list[Memory]()
        if self._encoding.is_plain:
            stored += payloads
            pieces += [part for payload in payloads for part in plain_parts(payload)]
        else:
            coder = self._encoding.coder(fields)
            for index, payload in enumerate(payloads):
                size = coder.encode(index, payload, room[at:])
                stored.append(room[at : at + size])
                at += size
            pieces.append(room[:at])
        blocks = [
            StoredBlock(self._tail_of(key), sum(part.nbytes for part in plain_parts(own)), digest_of(own))
            for key, own in zip(extent.keys, stored, strict=True)
        ]
        trailer = room[at : at + trailer_bytes(extent.num_blocks)]
        pack_trailer_into(trailer, fields, blocks)
        return PutItem(self._names.name_of(extent.keys[-1], extent.num_blocks), [*pieces, trailer])

    def _fields_of(self, extent: Extent) -> RecordFields:
        last = extent.keys[-1]
        return RecordFields(
            extent.num_blocks,
            group_of(last),
            self._encoding.number,
            self._names.life,
            self._names.fingerprint,
            self._names.secret_id,
            os.urandom(SALT_BYTES) if self._encoding.is_encrypted else bytes(SALT_BYTES),
            self._payload_bytes,
            self._names.mark_of(last),
        )

    def _tail_of(self, key: BlockKey) -> bytes:
        return self._names.mark_of(key)[-TAIL_BYTES:]

    # ---------------------------------------------------------------- reading

    def _get(
        self, extents: Sequence[Extent], targets: Sequence[Sequence[Memory]], ends_at_s: float
    ) -> list[list[Outcome]]:
        lent = self._take(extents, ends_at_s)
        if lent is None:
            return [[Outcome.BUSY] * len(own) for own in targets]
        try:
            rooms = self._rooms(extents, lent.memory)
            reads = [
                self._read_of(extent, own, room)
                for extent, own, room in zip(extents, targets, rooms, strict=True)
            ]
            gots = self._engine.get([read.item for read in reads], deadline_s=self._left_s(ends_at_s))
            outcomes, bad = [], list[str]()
            for read, got in zip(reads, gots, strict=True):
                verdicts = self._judge_all(read, got)
                outcomes.append([verdict.outcome for verdict in verdicts])
                if any([self._tell(read.item.name, verdict) for verdict in set(verdicts)]):
                    bad.append(read.item.name)
        finally:
            self._scratch.give_back(lent)
        if bad and self._left_s(ends_at_s) > 0:
            self._engine.remove(bad, deadline_s=self._side_s(ends_at_s))
        return outcomes

    def _read_of(self, extent: Extent, targets: Sequence[Memory], room: memoryview) -> _Read:
        """Reads from the first block that is wanted on, if all blocks have one size; else the whole record.
        A read from an offset has room for one byte more: otherwise nothing would tell that a record is too
        long.
        """
        skipped = extent.num_blocks - len(targets) if self._encoding.has_one_size else 0
        end_bytes = trailer_bytes(extent.num_blocks) + (1 if skipped else 0)
        name = self._names.name_of(extent.keys[-1], extent.num_blocks)
        if self._encoding.is_plain:
            pieces = [part for target in targets for part in plain_parts(target)]
            item = GetItem(name, [*pieces, room[:end_bytes]], skipped * self._stored_bytes)
            return _Read(extent, targets, item, room[:end_bytes])
        memory = room[: (extent.num_blocks - skipped) * self._stored_bytes + end_bytes]
        return _Read(extent, targets, GetItem(name, [memory], skipped * self._stored_bytes), memory)

    def _judge_all(self, read: _Read, got: Got) -> list[Verdict]:
        """One verdict per target; those that are OK are filled."""
        num_targets, end_bytes = len(read.targets), trailer_bytes(read.extent.num_blocks)
        if got.outcome is not Outcome.OK:
            bad = OF_ANOTHER_SIZE if got.outcome is Outcome.CORRUPT else Verdict(got.outcome)
            return [bad] * num_targets
        filled_bytes = got.num_bytes - (num_targets * self._payload_bytes if self._encoding.is_plain else 0)
        if not end_bytes <= filled_bytes <= read.memory.nbytes:
            return [OF_ANOTHER_SIZE] * num_targets
        trailer_at = filled_bytes - end_bytes
        trailer = open_trailer(read.memory[trailer_at:filled_bytes])
        if isinstance(trailer, Verdict):
            return [trailer] * num_targets
        verdict = judge_fields(trailer.fields, self._fields_of(read.extent))
        if verdict is not OURS:
            return [verdict] * num_targets
        sizes = stored_sizes(trailer, self._encoding, num_targets, got.num_bytes - end_bytes)
        if sizes is None:
            return [OF_ANOTHER_SIZE] * num_targets
        stored = read.targets if self._encoding.is_plain else cut(read.memory[:trailer_at], sizes)
        tails = [self._tail_of(key) for key in read.extent.keys]
        return judge_blocks(trailer, self._encoding, tails, stored, read.targets)

    @staticmethod
    def _tell(name: str, verdict: Verdict) -> bool:
        """Logs the flaw, if there is one. Whether the record is to be removed."""
        if verdict.flaw:
            line = "kvbm: %s: %s; it is %s"
            what = "removed" if verdict.is_bad else "left alone"
            limited_log.warning(verdict, line, name, verdict.flaw, what)
        return verdict.is_bad


def _alone(keys: Sequence[BlockKey]) -> list[Extent]:
    return [Extent(1, (key,)) for key in keys]
