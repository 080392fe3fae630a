"""What is known of the adapters (LoRA) that a running engine has in memory.

An engine loads an adapter when it is told to, at first use, and again after it had to make room: what it
has is what the files hold only if they have not changed since it may first have read them.
"""

from __future__ import annotations

import logging
import queue
import secrets
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from kvbm_core.identity.digest import (
    Digester,
    DigestMemory,
    Signature,
    StoppedError,
    UnreadableError,
    default_memory,
    signatures_of,
)
from kvbm_core.identity.hub import folder_of
from kvbm_core.identity.roots import Stamp, process_stamp
from kvbm_core.identity.weights import CLOCK_TICK_NS

log = logging.getLogger("kvbm")

_Files = tuple[tuple[str, Signature], ...]
MAX_ADAPTERS = 4096


@dataclass
class _Adapter:
    """``files``: as they were before the engine could read them first; None: there were none here."""

    path: str
    files: _Files | None
    seen_ns: int
    stamp: Stamp
    is_in_doubt: bool = False
    is_reloaded: bool = False
    """Requests bring their own path and load it anew in each step: no order tells when that ends."""


class AdapterIdentities:
    """Stamps of adapters by the engine's number. One thread, besides the one that digests.

    ``sees_loads``: ``changes`` is told of every order to load and remove. Without that no adapter is known.
    ``digests``: somebody keeps blocks for other processes; else no file is read.
    """

    def __init__(
        self, memory: DigestMemory | None = None, *, sees_loads: bool = True, digests: bool = True
    ) -> None:
        self._sees_loads = sees_loads
        self._digests = digests
        self._id = secrets.token_hex(16)
        self._loads = 0
        self._known: dict[int, _Adapter] = {}
        self._is_closed = threading.Event()
        self._digester = Digester(memory or default_memory(), self._is_closed.is_set)
        self._to_digest: queue.SimpleQueue[_Adapter | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def stamp_of(self, number: int, path: str) -> Stamp | None:
        """What the engine computes with for a request of this adapter; None if nobody can tell."""
        if not self._sees_loads:
            return None
        adapter = self._known.get(number) or self._first_seen(number, path)
        if adapter.path != path:
            # Either the engine goes on with the first one, or it had made room and loads this one now.
            adapter.is_in_doubt = True
        if adapter.is_in_doubt:
            return None
        files = _files_of(path)
        if adapter.files is None and files is not None:
            adapter.files = files  # the engine has fetched it
        elif files != adapter.files:
            adapter.is_in_doubt = True
            line = (
                "kvbm: the adapter in %s was changed after the engine had loaded it: its requests are not "
                "cached until it is loaded anew"
            )
            log.warning(line, path)
            return None
        return adapter.stamp

    def changes(self, number: int, path: str | None) -> None:
        """The engine is about to load the adapter of this number from ``path``; None: it removes it."""
        adapter = self._known.get(number)
        if adapter is not None and adapter.is_reloaded:
            return
        self._known.pop(number, None)
        if path is not None:
            self._first_seen(number, path)

    def reloads(self, number: int, path: str) -> bool:
        """A request loads the adapter of this number anew in each of its steps: nobody can tell any more what
        the engine has under it. Whether that is news.
        """
        adapter = self._known.get(number) or self._first_seen(number, path)
        is_news = not adapter.is_reloaded
        adapter.is_in_doubt = adapter.is_reloaded = True
        return is_news

    def close(self) -> None:
        """Ends the thread. May be called twice."""
        self._is_closed.set()
        self._to_digest.put(None)
        if self._thread is not None:
            self._thread.join()

    def _first_seen(self, number: int, path: str) -> _Adapter:
        if len(self._known) >= MAX_ADAPTERS:
            self._known.clear()
            self._sees_loads = False  # what was forgotten may have been loaded from other files
            log.warning("kvbm: more than %d adapters: their requests are not cached any more", MAX_ADAPTERS)
        self._loads += 1
        seen_ns = time.time_ns()
        stamp = process_stamp(f"adapter {number} load {self._loads} of {self._id}")
        adapter = self._known[number] = _Adapter(path, _files_of(path), seen_ns, stamp)
        if self._digests and adapter.files:
            if self._thread is None and not self._is_closed.is_set():
                self._thread = threading.Thread(target=self._run, name="kvbm-adapters", daemon=True)
                self._thread.start()
            self._to_digest.put(adapter)
        return adapter

    def _run(self) -> None:
        while (adapter := self._to_digest.get()) is not None and not self._is_closed.is_set():
            try:
                content = self._digester.content(folder_of(adapter.path) or Path(adapter.path))
            except StoppedError:
                return
            except UnreadableError as error:
                log.info("kvbm: %s: blocks of this adapter are not stored on disk", error)
                continue
            if (
                _files_of(adapter.path) == adapter.files
                and content.changed_ns < adapter.seen_ns - CLOCK_TICK_NS
            ):
                adapter.stamp = Stamp(f"sha256:{content.sha256}", is_lasting=True)
            else:
                line = "kvbm: the adapter in %s was changed while it was loaded: its blocks stay in memory"
                log.info(line, adapter.path)


def _files_of(path: str) -> _Files | None:
    try:
        folder = folder_of(path)
        if folder is None:
            return None
        # Which folder it is counts too: a link, or what a branch of the hub means, may be another one now.
        where = (str(folder.resolve()), Signature(0, 0, 0, 0, 0))
        return (where, *signatures_of(folder))
    except (OSError, RuntimeError, UnreadableError):
        return None
