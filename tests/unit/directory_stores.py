"""Stores in a shared directory for tests, and file operations that hang and fail as those of a share do."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvbm_core.storage.directory.calls import FileCalls
from kvbm_core.storage.directory.names import file_name
from kvbm_core.storage.directory.store import DirectoryOptions, DirectoryStore
from kvbm_core.storage.names import Meaning, fan_folder
from kvbm_core.testing.store_contract import LONG_S, buffers, content_in, content_of
from kvbm_core.types import BlockKey

PAYLOAD_BYTES = 8192
MEANING = Meaning("org/Model-7B", b"a namespace", b"fingerprint".ljust(16))
CALLS = [name for name in vars(FileCalls) if not name.startswith("_") and name != "wall_s"]


class FaultyCalls(FileCalls):
    """``fails``: errno by the name of a call, which does nothing else (but close closes). ``hangs``: those
    that wait for ``gate`` and then go on, as on a hard mount whose server is away; ``hanging``: how many.
    """

    def __init__(self) -> None:
        self.fails: dict[str, int] = {}
        self.hangs: set[str] = set()
        self.gate = threading.Event()
        self.hanging = 0
        self.seen: list[str] = []
        self._lock = threading.Lock()
        for name in CALLS:
            setattr(self, name, self._wrapped(name, getattr(os, name)))

    def _wrapped(self, name: str, call: Any) -> Any:
        def faulty(*args: Any, **more: Any) -> Any:
            self.seen.append(name)
            if name in self.hangs:
                with self._lock:
                    self.hanging += 1
                assert self.gate.wait(2 * LONG_S)
                with self._lock:
                    self.hanging -= 1
            if name in self.fails:
                if name == "close":
                    call(*args)
                raise OSError(self.fails[name], os.strerror(self.fails[name]))
            return call(*args, **more)

        return faulty


@contextmanager
def opened(
    folder: Path, options: DirectoryOptions | None = None, meaning: Meaning = MEANING, **more: Any
) -> Iterator[DirectoryStore]:
    """A store of blocks of PAYLOAD_BYTES, closed afterwards."""
    options = options or DirectoryOptions(num_threads=2)
    store = DirectoryStore(folder, meaning, PAYLOAD_BYTES, options, **more)
    try:
        yield store
    finally:
        store.close()


def put(store: DirectoryStore, keys: list[BlockKey], deadline_s: float = LONG_S) -> list[Any]:
    """Each key's ``content_of``."""
    payloads = buffers(len(keys), PAYLOAD_BYTES)
    for key, payload in zip(keys, payloads, strict=True):
        payload[:] = content_of(key, PAYLOAD_BYTES)
    return store.put_many(keys, payloads, deadline_s=deadline_s)


def get(store: DirectoryStore, keys: list[BlockKey], deadline_s: float = LONG_S) -> list[Any]:
    """Checks every byte of what is OK."""
    targets = buffers(len(keys), PAYLOAD_BYTES)
    outcomes = store.get_many(keys, targets, deadline_s=deadline_s)
    for key, target, outcome in zip(keys, targets, outcomes, strict=True):
        if str(outcome) == "ok":
            assert content_in(target) == content_of(key, PAYLOAD_BYTES), "wrong bytes"
    return outcomes


def path_of(folder: Path, key: BlockKey, meaning: Meaning = MEANING) -> Path:
    """The file of a block."""
    name = file_name(key)
    return folder / "kvbm1" / meaning.namespace_folder / meaning.shard_folder / fan_folder(name) / name


def files_below(folder: Path) -> list[Path]:
    """All that are no folders."""
    return sorted(Path(at, name) for at, _, names in os.walk(folder) for name in names)
