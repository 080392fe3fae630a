"""A host pool's pages on disk: one DiskStore, keys in the pool's namespace."""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch

from kvbm_core.errors import Outcome
from kvbm_core.storage.disk.allocate import FileOptions
from kvbm_core.storage.disk.block_file import SUFFIX, Geometry
from kvbm_core.tiers.disk_store import DiskStore
from kvbm_core.tokens.namespace import KeyNamespace
from kvbm_sglang.identity import page_keys
from kvbm_sglang.pages import Pages

DEADLINE_S = 4.0  # SGLang gives its storage threads 10 s to end


class PageStore:
    """Pages by SGLang's keys, ``num_slots`` at most. Safe to call from any thread; a call ends within DEADLINE_S.

    DiskError, one line, if the folder cannot hold it.
    """

    def __init__(
        self, folder: Path, pages: Pages, namespace: KeyNamespace, num_slots: int, options: FileOptions
    ) -> None:
        self._root = namespace.root()
        self.num_slots = num_slots
        self._pages = pages
        meaning = hashlib.sha256(b"file" + self._root).digest()[:16]
        path = folder / f"{dict(namespace.extra)['pool']}-{meaning.hex()}{SUFFIX}"
        self._store = DiskStore(
            path,
            Geometry(num_slots, pages.page_bytes, meaning),
            options,
            reads_straight=False,  # SGLang takes a page back as soon as a read has failed, late or not
        )

    @property
    def resident_pages(self) -> int:
        """Pages that can be got."""
        return self._store.resident_blocks

    def contains(self, keys: list[str]) -> list[bool]:
        """Which of them are there; no I/O."""
        found = self._store.contains_many(page_keys(self._root, keys), deadline_s=DEADLINE_S)
        return [outcome is Outcome.OK for outcome in found]

    def put(self, keys: list[str], host_indices: torch.Tensor) -> list[Outcome]:
        """Keeps these pages."""
        memory = self._pages.memory_of(host_indices, len(keys))
        return self._store.put_many(page_keys(self._root, keys), memory, deadline_s=DEADLINE_S)

    def get(self, keys: list[str], host_indices: torch.Tensor) -> list[Outcome]:
        """Fills these pages; one whose outcome is not OK holds garbage."""
        memory = self._pages.memory_of(host_indices, len(keys))
        return self._store.get_many(page_keys(self._root, keys), memory, deadline_s=DEADLINE_S)

    def clear(self) -> None:
        """Forgets everything, for good."""
        self._store.clear()

    def close(self) -> None:
        """Idempotent."""
        self._store.close()
