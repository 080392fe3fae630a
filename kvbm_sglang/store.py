"""A host pool's pages on disk, and in a store that machines share: keys in the pool's namespace, and who
writes them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

import torch

from kvbm_core.blocks.slot_tier import BlockTier
from kvbm_core.errors import Outcome
from kvbm_core.storage.base import BlockStore, Memory
from kvbm_core.storage.disk.allocate import FileOptions
from kvbm_core.storage.disk.block_file import SUFFIX, Geometry
from kvbm_core.storage.disk.reader import DiskReader
from kvbm_core.storage.disk.store import DiskStore
from kvbm_core.tokens.namespace import KeyNamespace
from kvbm_core.types import BlockKey, Tier
from kvbm_sglang.events import EventFeed
from kvbm_sglang.identity import page_keys
from kvbm_sglang.pages import Pages
from kvbm_sglang.store_chain import Answers, StoreChain

START_WAIT_S = 0.5  # for a new file; an old one is looked through in the background
DEADLINE_S = 4.0
"""Of a call, at most: SGLang gives its storage threads 10 s to end."""


class PagesOnDisk(BlockStore, Protocol):
    """A rank's pages on its machine."""

    num_slots: int

    @property
    def resident_blocks(self) -> int:
        """Pages that can be got."""

    @property
    def evicted_blocks_total(self) -> int:
        """Pages that made room for others, so far."""

    def touch(self, keys: Sequence[BlockKey]) -> None:
        """These are in use, the first ones first, though nobody reads them."""

    def clear(self) -> None:
        """Forgets everything, for good."""


class OwnFile(DiskStore):
    """Pages that this rank writes, ``num_slots`` at most. ``shares``: other ranks read along. ``books``:
    see DiskStore.

    DiskError, one line, if the folder cannot hold it.
    """

    def __init__(
        self,
        folder: Path,
        namespace: KeyNamespace,
        page_bytes: int,
        num_slots: int,
        options: FileOptions,
        *,
        shares: bool,
        books: BlockTier | None = None,
    ) -> None:
        self.num_slots = num_slots
        path, meaning = _place_of(folder, namespace)
        super().__init__(
            path,
            Geometry(num_slots, page_bytes, meaning),
            options,
            reads_straight=False,  # SGLang takes a page back as soon as a read has failed, late or not
            shares=shares,
            books=books,
        )
        self.wait_recovered(START_WAIT_S)


class FollowedFile:
    """Pages that another rank writes; until its folder is there nothing is found.

    ``find_folder``: where that rank writes, None while that is not known.
    """

    num_slots = 0  # the writer counts them
    resident_blocks = 0
    evicted_blocks_total = 0

    def __init__(
        self,
        find_folder: Callable[[], Path | None],
        namespace: KeyNamespace,
        page_bytes: int,
        options: FileOptions,
    ) -> None:
        self._find_folder = find_folder
        self._namespace = namespace
        self._page_bytes = page_bytes
        self._options = options
        self._reader: DiskReader | None = None

    def contains_many(self, keys: Sequence[BlockKey], *, deadline_s: float) -> list[Outcome]:
        """See BlockStore."""
        reader = self._found_reader()
        missing = [Outcome.MISS] * len(keys)
        return missing if reader is None else reader.contains_many(keys, deadline_s=deadline_s)

    def put_many(
        self, keys: Sequence[BlockKey], payloads: Sequence[Memory], *, deadline_s: float
    ) -> list[Outcome]:
        """REJECTED: SGLang lets one rank write."""
        return [Outcome.REJECTED] * len(keys)

    def get_many(
        self, keys: Sequence[BlockKey], targets: Sequence[Memory], *, deadline_s: float
    ) -> list[Outcome]:
        """See BlockStore."""
        reader = self._found_reader()
        missing = [Outcome.MISS] * len(keys)
        return missing if reader is None else reader.get_many(keys, targets, deadline_s=deadline_s)

    def remove_many(self, keys: Sequence[BlockKey], *, deadline_s: float) -> list[Outcome]:
        """REJECTED, as ``put_many``."""
        return [Outcome.REJECTED] * len(keys)

    def scan(self) -> Iterator[BlockKey]:
        """See BlockStore."""
        reader = self._found_reader()
        return iter(()) if reader is None else reader.scan()

    def touch(self, keys: Sequence[BlockKey]) -> None:
        """Nothing: the writer evicts."""

    def clear(self) -> None:
        """Nothing: the writer clears, and this follows."""

    def close(self) -> None:
        """Idempotent."""
        reader, self._reader = self._reader, None
        if reader is not None:
            reader.close()

    def _found_reader(self) -> DiskReader | None:
        # Asked for by one thread first, SGLang's query; two readers would only be one too many.
        if self._reader is None and (folder := self._find_folder()) is not None:
            path, meaning = _place_of(folder, self._namespace)
            geometry = Geometry(1, self._page_bytes, meaning)
            self._reader = DiskReader(path, geometry, self._options, reads_straight=False)
        return self._reader


class PageStore:
    """A pool's pages by SGLang's keys: ``disk``, and the remote store of ``chain`` if there is one.
    ``events``: of the disk. Safe to call from any thread; a call ends within ``deadline_s``. ``prefix``: the
    pages before those of a call, which follow each other; none, if nobody says; None if they are of no chain.
    """

    def __init__(
        self,
        disk: PagesOnDisk,
        chain: StoreChain | None,
        pages: Pages,
        namespace: KeyNamespace,
        deadline_s: float,
        *,
        events: EventFeed | None = None,
    ) -> None:
        self.disk = disk
        self._events = events
        self._chain = chain
        self._pages = pages
        self._root = namespace.root()
        self._deadline_s = deadline_s
        self._last_put = ""

    def find(self, keys: list[str]) -> list[Tier | None]:
        """Where each of them is. No I/O of the disk."""
        named = page_keys(self._root, keys)
        if self._chain is None:
            found = Answers(self.disk.contains_many(named, deadline_s=self._deadline_s), set())
        else:
            found = self._chain.find(named, deadline_s=self._deadline_s)
        if self._events is not None:
            self._events.wanted(named, keys)
        return [
            None if outcome is not Outcome.OK else Tier.REMOTE if i in found.remote else Tier.DISK
            for i, outcome in enumerate(found.outcomes)
        ]

    def put(
        self, keys: list[str], host_indices: torch.Tensor, prefix: Sequence[str] | None = None
    ) -> list[Outcome]:
        """Keeps these pages. What is before them is in use, and stays on the disk for as long as they do."""
        memory = self._pages.memory_of(host_indices, len(keys))
        named = page_keys(self._root, keys)
        if prefix and prefix[-1] != self._last_put:  # not a part of what was put just now
            self.disk.touch(page_keys(self._root, list(prefix)))
        self._last_put = keys[-1]
        generation = self._events.generation if self._events is not None else 0
        if self._chain is None:
            outcomes = self.disk.put_many(named, memory, deadline_s=self._deadline_s)
        else:
            head = self._head(prefix)
            outcomes = self._chain.put_many(named, memory, deadline_s=self._deadline_s, head=head)
        if self._events is not None:
            self._events.kept(named, keys, generation)
        return outcomes

    def get(
        self, keys: list[str], host_indices: torch.Tensor, prefix: Sequence[str] | None = None
    ) -> Answers:
        """Fills these pages; one whose outcome is not OK holds garbage."""
        memory = self._pages.memory_of(host_indices, len(keys))
        named = page_keys(self._root, keys)
        if self._chain is None:
            return Answers(self.disk.get_many(named, memory, deadline_s=self._deadline_s), set())
        return self._chain.fetch(named, memory, deadline_s=self._deadline_s, head=self._head(prefix))

    def _head(self, prefix: Sequence[str] | None) -> list[BlockKey] | None:
        return None if prefix is None else page_keys(self._root, list(prefix[-1:]))

    def clear(self) -> None:
        """Forgets everything on the disk, for good. What machines share stays."""
        self.disk.clear()

    def close(self) -> None:
        """Idempotent."""
        store: BlockStore = self._chain or self.disk
        store.close()


def meaning_of(namespace: KeyNamespace) -> bytes:
    """What the bytes of a pool's pages mean; their keys tell the weights apart."""
    return hashlib.sha256(b"file" + namespace.without_weights().root()).digest()[:16]


def _place_of(folder: Path, namespace: KeyNamespace) -> tuple[Path, bytes]:
    """File and fingerprint of a pool's pages."""
    meaning = meaning_of(namespace)
    return folder / f"{dict(namespace.extra)['pool']}-{meaning.hex()}{SUFFIX}", meaning
