"""The engine's device events and ours, made one stream of.

``Dedup``: a block is stored while it is anywhere, and removed when it is nowhere. ``Passthrough``: everything
as it was said, with its medium; only an engine's word that its device was cleared becomes removals, as a
router would take it for all media.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Protocol

import msgspec

from kvbm_core.events.log import Change, Cleared, removals
from kvbm_core.events.wire import BlockHash, BlockRemoved, BlockStored, Event
from kvbm_core.types import Tier

DEVICE_MEDIUM = "GPU"
ENGINE, OWN = 0, 1
_ENGINE_BIT = 1 << Tier.DEVICE
Place = tuple[int, BlockHash]
"""Group and hash."""
Identity = Place | bytes


class EngineStored(msgspec.Struct, tag="BlockStored", gc=False):
    """A BlockStored of an engine, or of who speaks for it: what it does not say has a default."""

    block_hashes: list[BlockHash]
    block_size: int
    parent_block_hash: BlockHash | None = None
    token_ids: list[int] = []
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[tuple[object, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    session_id: str | None = None
    cache_salt: str | None = None
    block_mm_infos: list[object] | None = None


class EngineRemoved(msgspec.Struct, tag="BlockRemoved", gc=False):
    """The same of a BlockRemoved."""

    block_hashes: list[BlockHash]
    medium: str | None = None
    group_idx: int | None = None


class EngineCleared(msgspec.Struct, tag="AllBlocksCleared", gc=False):
    """The same of an AllBlocksCleared."""


EngineEvent = EngineStored | EngineRemoved | EngineCleared


class EngineBatch(msgspec.Struct, array_like=True, gc=False):
    """What engines publish."""

    ts: float
    events: list[EngineEvent]
    data_parallel_rank: int | None = None


class Merge(Protocol):
    """One thread. Each call answers what is to be published."""

    def of_engine(self, event: EngineEvent) -> Iterator[Event]:
        """The engine has said something of its device."""

    def of_us(self, change: Change) -> Iterator[Event]:
        """Our tiers have changed."""

    def engine_lost(self) -> Iterator[Event]:
        """Some of what the engine said was missed: nobody knows what is on its device."""

    @property
    def residents(self) -> Mapping[tuple[str, int], list[BlockHash]]:
        """What is published as stored, by medium and group."""


class Passthrough:
    """See the module."""

    def __init__(self) -> None:
        self._device: dict[Place, None] = {}
        self._own: dict[tuple[str, int], set[BlockHash]] = {}

    def of_engine(self, event: EngineEvent) -> Iterator[Event]:
        """See Merge."""
        if isinstance(event, EngineCleared):
            yield from self.engine_lost()
            return
        places = [(event.group_idx or 0, block_hash) for block_hash in event.block_hashes]
        if isinstance(event, EngineStored):
            self._device.update(dict.fromkeys(places))
            yield _part(event, 0, len(places), event.parent_block_hash, event.medium)
            return
        for place in places:
            self._device.pop(place, None)
        yield BlockRemoved(event.block_hashes, event.medium, event.group_idx)

    def of_us(self, change: Change) -> Iterator[Event]:
        """See Merge."""
        medium = change.medium or ""
        if isinstance(change, Cleared):
            yield from removals(medium, change.hashes)
            self._own = {place: hashes for place, hashes in self._own.items() if place[0] != medium}
            return
        here = self._own.setdefault((medium, change.group_idx or 0), set())
        if isinstance(change, BlockStored):
            here.update(change.block_hashes)
        else:
            here.difference_update(change.block_hashes)
        yield change

    def engine_lost(self) -> Iterator[Event]:
        """See Merge."""
        gone, self._device = self._device, {}
        yield from _removals(gone, DEVICE_MEDIUM)

    @property
    def residents(self) -> Mapping[tuple[str, int], list[BlockHash]]:
        """See Merge."""
        found = {place: list(hashes) for place, hashes in self._own.items()}
        for group, block_hash in self._device:
            found.setdefault((DEVICE_MEDIUM, group), []).append(block_hash)
        return found


class _Block(msgspec.Struct, gc=False):
    """``media``: a bit for each tier. ``name``: under which it was published."""

    media: int
    name: BlockHash
    group: int


class Dedup:
    """See the module. ``same_hashes``: the engine and we call a block the same; else blocks are the same that
    have the same tokens, adapter and salt, and the same before them.

    All is published as on the device: a router keeps an index for each medium.
    """

    def __init__(self, media: Mapping[Tier, str], *, same_hashes: bool) -> None:
        self._tier_of = {medium: tier for tier, medium in media.items() if tier is not Tier.REMOTE}
        self._same_hashes = same_hashes
        self._blocks: dict[Identity, _Block] = {}
        # For each side: what it calls a block, and which block that is.
        self._known: tuple[dict[Place, Identity], dict[Place, Identity]] = ({}, {})

    def of_engine(self, event: EngineEvent) -> Iterator[Event]:
        """See Merge."""
        if isinstance(event, EngineCleared):
            yield from self._clear(_ENGINE_BIT, ENGINE)
        elif isinstance(event, EngineStored):
            yield from self._store(event, _ENGINE_BIT, ENGINE)
        else:
            yield from self._remove(event, _ENGINE_BIT, ENGINE)

    def of_us(self, change: Change) -> Iterator[Event]:
        """See Merge. What lies in stores that others share is not this engine's to lose, and is left out."""
        tier = self._tier_of.get(change.medium or "")
        if tier is None:
            return
        if isinstance(change, Cleared):
            yield from self._clear(1 << tier, OWN)
        elif isinstance(change, BlockStored):
            yield from self._store(change, 1 << tier, OWN)
        else:
            yield from self._remove(change, 1 << tier, OWN)

    def engine_lost(self) -> Iterator[Event]:
        """See Merge."""
        yield from self._clear(_ENGINE_BIT, ENGINE)

    @property
    def residents(self) -> Mapping[tuple[str, int], list[BlockHash]]:
        """See Merge."""
        found: dict[tuple[str, int], list[BlockHash]] = {}
        for block in self._blocks.values():
            found.setdefault((DEVICE_MEDIUM, block.group), []).append(block.name)
        return found

    def _store(self, event: EngineStored | BlockStored, bit: int, side: int) -> Iterator[Event]:
        group, known = event.group_idx or 0, self._known[side]
        parent = None if event.parent_block_hash is None else (group, event.parent_block_hash)
        before = self._block_of(parent, side)
        parent_name = event.parent_block_hash if before is None else before.name
        first: int | None = None
        first_parent: BlockHash | None = None
        for i, block_hash in enumerate(event.block_hashes):
            place = (group, block_hash)
            identity = self._identify(event, i, parent, side)
            known[place] = identity
            block = self._blocks.get(identity)
            is_new = block is None
            if block is None:
                block = self._blocks[identity] = _Block(0, block_hash, group)
            block.media |= bit
            if is_new and first is None:
                first, first_parent = i, parent_name
            elif not is_new and first is not None:
                yield _part(event, first, i, first_parent, DEVICE_MEDIUM)
                first = None
            parent, parent_name = place, block.name
        if first is not None:
            yield _part(event, first, len(event.block_hashes), first_parent, DEVICE_MEDIUM)

    def _block_of(self, place: Place | None, side: int) -> _Block | None:
        identity = None if place is None else self._known[side].get(place)
        return None if identity is None else self._blocks.get(identity)

    def _identify(
        self, event: EngineStored | BlockStored, i: int, parent: Place | None, side: int
    ) -> Identity:
        place = (event.group_idx or 0, event.block_hashes[i])
        if self._same_hashes:
            return place
        size = event.block_size
        tokens = event.token_ids[i * size : (i + 1) * size]
        before = b"" if parent is None else self._known[side].get(parent)
        if len(tokens) < size or not isinstance(before, bytes):
            return place  # nobody can tell what it is: it is its own
        digest = hashlib.blake2b(before, digest_size=16)
        digest.update(array("I", tokens).tobytes())
        digest.update(repr((place[0], event.lora_name, event.cache_salt)).encode() if parent is None else b"")
        digest.update(repr(_at(event.block_mm_infos, i)).encode())
        return digest.digest()

    def _remove(self, event: EngineRemoved | BlockRemoved, bit: int, side: int) -> Iterator[Event]:
        group, gone = event.group_idx or 0, list[Place]()
        for block_hash in event.block_hashes:
            identity = self._known[side].get((group, block_hash))
            block = None if identity is None else self._blocks.get(identity)
            if identity is None or block is None or not block.media & bit:
                continue
            block.media &= ~bit
            if side == ENGINE or not block.media & ~_ENGINE_BIT:
                del self._known[side][group, block_hash]
            if not block.media:
                del self._blocks[identity]
                gone.append((block.group, block.name))
        yield from _removals(gone, DEVICE_MEDIUM)

    def _clear(self, bit: int, side: int) -> Iterator[Event]:
        gone = list[Place]()
        for identity, block in list(self._blocks.items()):
            block.media &= ~bit
            if not block.media:
                del self._blocks[identity]
                gone.append((block.group, block.name))
        mine = _ENGINE_BIT if side == ENGINE else ~_ENGINE_BIT
        known = self._known[side]
        for place, identity in list(known.items()):
            left = self._blocks.get(identity)
            if left is None or not left.media & mine:
                del known[place]
        yield from _removals(gone, DEVICE_MEDIUM)


def _at(values: Sequence[object] | None, i: int) -> object:
    return values[i] if values and i < len(values) else None


def _part(
    event: EngineStored | BlockStored, first: int, end: int, parent: BlockHash | None, medium: str | None
) -> BlockStored:
    """Blocks ``first`` to ``end`` - 1 of an event. vLLM may leave out blocks between those of a window: then
    nobody can tell which tokens are whose.
    """
    size, num_blocks, tokens = event.block_size, len(event.block_hashes), event.token_ids
    if end - first < num_blocks:
        tokens = tokens[first * size : end * size] if len(tokens) == num_blocks * size else []
    return BlockStored(
        event.block_hashes[first:end],
        parent,
        tokens,
        size,
        event.lora_id,
        medium,
        event.lora_name,
        None if event.extra_keys is None else event.extra_keys[first:end],
        event.group_idx,
        event.kv_cache_spec_kind,
        event.kv_cache_spec_sliding_window,
        event.locality,
        event.session_id,
        event.cache_salt,
        None if event.block_mm_infos is None else event.block_mm_infos[first:end],
    )


def _removals(places: Iterable[Place], medium: str) -> Iterator[Event]:
    of_group: dict[int, list[BlockHash]] = {}
    for group, block_hash in places:
        of_group.setdefault(group, []).append(block_hash)
    yield from removals(medium, of_group)
