"""A host pool's pages on disk: keys in the pool's namespace, and who writes them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import torch

from kvbm_core.errors import Outcome
from kvbm_core.storage.disk.allocate import FileOptions
from kvbm_core.storage.disk.block_file import SUFFIX, Geometry
from kvbm_core.storage.disk.reader import DiskReader
from kvbm_core.storage.disk.store import DiskStore
from kvbm_core.tokens.namespace import KeyNamespace
from kvbm_sglang.identity import page_keys
from kvbm_sglang.pages import Pages

START_WAIT_S = 0.5  # for a new file; an old one is looked through in the background
DEADLINE_S = 4.0
"""Of a call, at most: SGLang gives its storage threads 10 s to end."""


class PageStore:
    """Pages by SGLang's keys, ``num_slots`` at most. Safe to call from any thread; a call ends within
    the options' deadline, DEADLINE_S at most.

    ``shares``: other ranks read along. DiskError, one line, if the folder cannot hold it.
    """

    def __init__(
        self,
        folder: Path,
        pages: Pages,
        namespace: KeyNamespace,
        num_slots: int,
        options: FileOptions,
        *,
        shares: bool,
    ) -> None:
        self._root = namespace.root()
        self.num_slots = num_slots
        self._deadline_s = options.io_deadline_s
        self._pages = pages
        path, meaning = _place_of(folder, namespace)
        self._store = DiskStore(
            path,
            Geometry(num_slots, pages.page_bytes, meaning),
            options,
            reads_straight=False,  # SGLang takes a page back as soon as a read has failed, late or not
            shares=shares,
        )
        self._store.wait_recovered(START_WAIT_S)

    @property
    def resident_pages(self) -> int:
        """Pages that can be got."""
        return self._store.resident_blocks

    @property
    def evicted_pages(self) -> int:
        """Pages that made room for others, so far."""
        return self._store.evicted_blocks_total

    def contains(self, keys: list[str]) -> list[bool]:
        """Which of them are there; no I/O."""
        found = self._store.contains_many(page_keys(self._root, keys), deadline_s=self._deadline_s)
        return [outcome is Outcome.OK for outcome in found]

    def put(self, keys: list[str], host_indices: torch.Tensor) -> list[Outcome]:
        """Keeps these pages."""
        memory = self._pages.memory_of(host_indices, len(keys))
        return self._store.put_many(page_keys(self._root, keys), memory, deadline_s=self._deadline_s)

    def get(self, keys: list[str], host_indices: torch.Tensor) -> list[Outcome]:
        """Fills these pages; one whose outcome is not OK holds garbage."""
        memory = self._pages.memory_of(host_indices, len(keys))
        return self._store.get_many(page_keys(self._root, keys), memory, deadline_s=self._deadline_s)

    def clear(self) -> None:
        """Forgets everything, for good."""
        self._store.clear()

    def close(self) -> None:
        """Idempotent."""
        self._store.close()


class FollowedPages:
    """Pages that another rank writes, with the same methods; until its folder is there nothing is found.

    ``find_folder``: where that rank writes, None while that is not known.
    """

    num_slots = 0  # the writer counts them
    resident_pages = 0
    evicted_pages = 0

    def __init__(
        self,
        find_folder: Callable[[], Path | None],
        pages: Pages,
        namespace: KeyNamespace,
        options: FileOptions,
    ) -> None:
        self._root = namespace.root()
        self._namespace = namespace
        self._pages = pages
        self._find_folder = find_folder
        self._options = options
        self._deadline_s = options.io_deadline_s
        self._reader: DiskReader | None = None

    def contains(self, keys: list[str]) -> list[bool]:
        """See PageStore."""
        reader = self._found_reader()
        if reader is None:
            return [False] * len(keys)
        found = reader.contains_many(page_keys(self._root, keys), deadline_s=self._deadline_s)
        return [outcome is Outcome.OK for outcome in found]

    def put(self, keys: list[str], host_indices: torch.Tensor) -> list[Outcome]:
        """REJECTED: SGLang lets one rank write."""
        return [Outcome.REJECTED] * len(keys)

    def get(self, keys: list[str], host_indices: torch.Tensor) -> list[Outcome]:
        """See PageStore."""
        reader = self._found_reader()
        if reader is None:
            return [Outcome.MISS] * len(keys)
        memory = self._pages.memory_of(host_indices, len(keys))
        return reader.get_many(page_keys(self._root, keys), memory, deadline_s=self._deadline_s)

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
            geometry = Geometry(1, self._pages.page_bytes, meaning)
            self._reader = DiskReader(path, geometry, self._options, reads_straight=False)
        return self._reader


def _place_of(folder: Path, namespace: KeyNamespace) -> tuple[Path, bytes]:
    """File and fingerprint of a pool's pages; their keys tell the weights apart."""
    meaning = hashlib.sha256(b"file" + namespace.without_weights().root()).digest()[:16]
    return folder / f"{dict(namespace.extra)['pool']}-{meaning.hex()}{SUFFIX}", meaning
