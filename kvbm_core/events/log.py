"""The event log: which blocks are where, under the names that the engine's router knows.

The tiers say what they hold by kvbm's keys; an adapter says what a block is called outside, once it is there.
Both only leave a note, on the thread that serves requests. ``fold`` makes the picture and the events of the
notes, on the thread of whoever publishes.

What it tells of a request with a salt is hashes alone, which engines make with the salt: who does not know it
learns from them neither the tokens nor whether two prompts are the same under different salts.
"""

from __future__ import annotations

import threading
from array import array
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from kvbm_core.blocks.slot_tier import Residency
from kvbm_core.events.wire import MAX_BATCH_HASHES, BlockHash, BlockRemoved, BlockStored
from kvbm_core.types import BlockKey, Tier, group_of

MAX_NOTED_BLOCKS = 65_536
"""With more than that in notes, whoever leaves one folds."""


class Cleared(NamedTuple):
    """Nothing is in a medium any more; ``hashes``, by group, were."""

    medium: str
    hashes: Mapping[int, Sequence[BlockHash]]


Change = BlockStored | BlockRemoved | Cleared
Outlet = Callable[[Change], None]
"""Takes a change; must be short."""


class Names(NamedTuple):
    """What consecutive blocks of one chain are called outside: ``hashes[i]`` for ``keys[i]``, in the engine's
    own form.

    ``parent``: the hash of the block before the first; None: that is the first of all. ``tokens``: of all the
    blocks; None: not to be told. ``extra_keys``: for each block, what its hash depends on besides tokens and
    parent.
    """

    keys: Sequence[BlockKey]
    hashes: Sequence[Any]
    parent: Any
    block_tokens: int
    tokens: Sequence[int] | None = None
    lora_id: int | None = None
    lora_name: str | None = None
    extra_keys: Sequence[tuple[object, ...] | None] | None = None


_UNTOLD = (None, None)


class _Run(msgspec.Struct, gc=False):
    """What blocks that were named together share; ``extra_keys`` of all of them."""

    tokens: array[int] | None
    block_tokens: int
    lora_id: int | None
    lora_name: str | None
    extra_keys: Sequence[tuple[object, ...] | None] | None


class _Block(msgspec.Struct, gc=False):
    """A block: ``media``, a bit for each tier that has it; its name, and where in its run it is.

    No garbage collector looks at it: there may be millions.
    """

    media: int
    name: BlockHash | None = None
    parent: BlockHash | None = None
    run: _Run | None = None
    index: int = 0


class Snapshot(NamedTuple):
    """What is in which medium, by (medium, group)."""

    hashes: Mapping[tuple[str, int], list[BlockHash]]


class _Stored(NamedTuple):
    tier: Tier
    keys: Sequence[BlockKey]


class _Removed(NamedTuple):
    tier: Tier
    keys: Sequence[BlockKey]


class _Cleared(NamedTuple):
    tier: Tier


class _Renamed(NamedTuple):
    lora_ids: Collection[int] | None


class Attention(NamedTuple):
    """What a group's layers attend to, in vLLM's words: its ``kv_cache_spec_kind`` ("full_attention",
    "sliding_window"), and the window. Routers count blocks of full attention alone.
    """

    kind: str
    window_tokens: int | None = None


class EventLog(Residency):
    """``media``: what tiers are called; of others nothing is told. ``hash_of`` makes a published hash of the
    engine's own form. ``attention``: of each group; empty: not to be told.

    What says so may be called from any thread, the rest from the thread that changes the tiers; these only
    append to a list.
    """

    def __init__(
        self,
        media: Mapping[Tier, str],
        hash_of: Callable[[Any], BlockHash],
        attention: Sequence[Attention] = (),
    ) -> None:
        self._media = dict(media)
        self._hash_of = hash_of
        self._attention = dict(enumerate(attention))
        self._notes: deque[_Stored | _Removed | _Cleared | _Renamed | Names] = deque()
        self._num_noted = 0
        self._is_stored_noted = False
        self._lock = threading.RLock()
        self._blocks: dict[BlockKey, _Block] = {}
        self._unnamed: set[BlockKey] = set()
        self._outlets: list[Outlet] = []

    # ---------------------------------------------------------------- notes

    def stored(self, tier: Tier, keys: Sequence[BlockKey]) -> None:
        """See Residency."""
        if tier in self._media:
            self._note(_Stored(tier, keys), len(keys))
            self._is_stored_noted = True

    def removed(self, tier: Tier, keys: Sequence[BlockKey]) -> None:
        """See Residency."""
        if tier in self._media:
            self._note(_Removed(tier, keys), len(keys))

    def cleared(self, tier: Tier, keys: Sequence[BlockKey]) -> None:
        """See Residency."""
        if tier in self._media:
            self._note(_Cleared(tier), len(keys))

    def renamed(self, lora_ids: Collection[int] | None = None) -> None:
        """What was named so far is found under these names no more, as the weights are others;
        ``lora_ids``: those of these adapters alone.
        """
        self._note(_Renamed(lora_ids), 1)

    def name(self, names: Names) -> None:
        """What blocks that can be matched are called. Those that have a name keep it."""
        self._note(names, len(names.keys))

    def lacks_names(self, keys: Sequence[BlockKey]) -> bool:
        """Whether some of ``keys`` can be matched and have no name, as nobody has seen their tokens in this
        process; or may be so, as there are notes of what was stored.
        """
        return self._is_stored_noted or (bool(self._unnamed) and not self._unnamed.isdisjoint(keys))

    def _note(self, note: _Stored | _Removed | _Cleared | _Renamed | Names, num_blocks: int) -> None:
        self._notes.append(note)
        self._num_noted += num_blocks
        # Nobody waits here: who has the lock folds, or makes a snapshot, which is soon over.
        if self._num_noted > MAX_NOTED_BLOCKS:
            self.try_fold()

    # ---------------------------------------------------------------- the picture

    @property
    def lock(self) -> threading.RLock:
        """Held while the picture changes and while its events are handed on. Any thread."""
        return self._lock

    def connect(self, outlet: Outlet) -> None:
        """Hands every event to ``outlet`` from now on, in order, during ``fold``. Any thread."""
        with self._lock:
            self._outlets.append(outlet)

    def fold(self) -> None:
        """Makes events of all notes. Any thread."""
        with self._lock:
            self._num_noted = 0
            self._is_stored_noted = False
            while self._notes:
                note = self._notes.popleft()
                match note:
                    case _Stored(tier, keys):
                        self._fold_stored(tier, keys)
                    case _Removed(tier, keys):
                        self._fold_removed(tier, keys)
                    case _Cleared(tier):
                        self._fold_cleared(tier)
                    case Names():
                        for first in range(0, len(note.keys), MAX_BATCH_HASHES):
                            self._fold_names(note, first)
                    case _Renamed(lora_ids):
                        self._fold_renamed(lora_ids)

    def snapshot(self) -> Snapshot:
        """What has been folded; a copy. Any thread."""
        with self._lock:
            return Snapshot(
                {
                    (medium, group): hashes
                    for tier, medium in self._media.items()
                    for group, hashes in self._named_in(tier).items()
                }
            )

    def try_fold(self) -> None:
        """As ``fold``, unless somebody else is at it. Never waits."""
        if self._lock.acquire(blocking=False):
            try:
                self.fold()
            finally:
                self._lock.release()

    def _emit(self, change: Change) -> None:
        for outlet in self._outlets:
            outlet(change)

    def _fold_stored(self, tier: Tier, keys: Sequence[BlockKey]) -> None:
        bit, blocks, new = 1 << tier, self._blocks, list[tuple[BlockKey, _Block]]()
        if tier is Tier.REMOTE:  # told once, by who stored it; others remove it, or nobody
            known = ((key, blocks.get(key)) for key in keys)
            self._tell_stored(tier, [(key, b) for key, b in known if b is not None and b.name is not None])
            return
        for key in keys:
            block = blocks.get(key)
            if block is None:
                blocks[key] = _Block(bit)
                self._unnamed.add(key)
            elif not block.media & bit:
                block.media |= bit
                if block.name is not None:
                    new.append((key, block))
        self._tell_stored(tier, new)

    def _fold_names(self, names: Names, first: int) -> None:
        end = min(first + MAX_BATCH_HASHES, len(names.keys))
        size, tokens, extra = names.block_tokens, names.tokens, names.extra_keys
        run = _Run(
            None if tokens is None else array("I", tokens[first * size : end * size]),
            size,
            names.lora_id,
            names.lora_name,
            None if extra is None or tokens is None else list(extra[first:end]),
        )
        hash_of, blocks, unnamed = self._hash_of, self._blocks, self._unnamed
        before = names.hashes[first - 1] if first else names.parent
        parent = None if before is None else hash_of(before)
        new = list[tuple[BlockKey, _Block]]()
        for i in range(first, end):
            key, name = names.keys[i], hash_of(names.hashes[i])
            block = blocks.get(key)
            if block is not None and block.name is None:
                block.name, block.parent, block.run, block.index = name, parent, run, i - first
                unnamed.discard(key)
                new.append((key, block))
            parent = name
        for tier in self._media:
            bit = 1 << tier
            self._tell_stored(tier, [pair for pair in new if pair[1].media & bit])

    def _tell_stored(self, tier: Tier, blocks: Sequence[tuple[BlockKey, _Block]]) -> None:
        medium, i, num_blocks = self._media[tier], 0, len(blocks)
        while i < num_blocks:
            key, block = blocks[i]
            run, first = block.run, block.index
            end = i + 1
            while end < num_blocks and blocks[end][1].run is run and blocks[end][1].index == first + end - i:
                end += 1
            if run is None:
                i = end
                continue
            size, last, group = run.block_tokens, first + end - i, group_of(key)
            attention = self._attention.get(group, _UNTOLD)
            tokens = [] if run.tokens is None else run.tokens[first * size : last * size].tolist()
            self._emit(
                BlockStored(
                    [b.name for _, b in blocks[i:end] if b.name is not None],
                    block.parent,
                    tokens,
                    size,
                    run.lora_id,
                    medium,
                    run.lora_name,
                    None if run.extra_keys is None else list(run.extra_keys[first:last]),
                    group,
                    *attention,
                )
            )
            i = end

    def _fold_removed(self, tier: Tier, keys: Sequence[BlockKey]) -> None:
        bit, blocks, gone = 1 << tier, self._blocks, dict[int, list[BlockHash]]()
        for key in keys:
            block = blocks.get(key)
            if block is None or not block.media & bit:
                continue
            block.media &= ~bit
            if block.name is not None:
                gone.setdefault(group_of(key), []).append(block.name)
            if not block.media:
                del blocks[key]
                self._unnamed.discard(key)
        for event in removals(self._media[tier], gone):
            self._emit(event)

    def _fold_cleared(self, tier: Tier) -> None:
        bit, gone = 1 << tier, self._named_in(tier)
        for block in self._blocks.values():
            block.media &= ~bit
        self._blocks = {key: block for key, block in self._blocks.items() if block.media}
        if self._unnamed:
            self._unnamed = {key for key in self._unnamed if key in self._blocks}
        self._emit(Cleared(self._media[tier], gone))

    def _fold_renamed(self, lora_ids: Collection[int] | None) -> None:
        tiers = [tier for tier in self._media if tier is not Tier.REMOTE]
        if lora_ids is None:
            gone = {tier: self._named_in(tier) for tier in tiers}
            self._blocks = {key: _Block(block.media) for key, block in self._blocks.items()}
            self._unnamed = set(self._blocks)
            for tier, hashes in gone.items():
                if hashes:
                    self._emit(Cleared(self._media[tier], hashes))
            return
        of_them = {
            key: block
            for key, block in self._blocks.items()
            if block.run is not None and block.run.lora_id in lora_ids
        }
        for tier in tiers:
            for event in removals(self._media[tier], _named(of_them, tier)):
                self._emit(event)
        self._blocks.update((key, _Block(block.media)) for key, block in of_them.items())
        self._unnamed.update(of_them)

    def _named_in(self, tier: Tier) -> dict[int, list[BlockHash]]:
        return _named(self._blocks, tier)


def _named(blocks: Mapping[BlockKey, _Block], tier: Tier) -> dict[int, list[BlockHash]]:
    """Of those that ``tier`` has, by group."""
    bit, found = 1 << tier, dict[int, list[BlockHash]]()
    for key, block in blocks.items():
        if block.media & bit and block.name is not None:
            found.setdefault(group_of(key), []).append(block.name)
    return found


def removals(medium: str, hashes: Mapping[int, Sequence[BlockHash]]) -> Iterator[BlockRemoved]:
    """Of ``hashes``, by group; as many for each event as a batch has."""
    for group, some in hashes.items():
        for first in range(0, len(some), MAX_BATCH_HASHES):
            yield BlockRemoved(list(some[first : first + MAX_BATCH_HASHES]), medium, group)
