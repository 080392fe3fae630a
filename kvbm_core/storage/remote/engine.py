"""The interface of stores that keep objects under names. Records of blocks are built on it; an engine itself
knows nothing of blocks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

from kvbm_core.errors import Outcome
from kvbm_core.storage.names import ObjectInfo


class EngineTraits(NamedTuple):
    """What an engine can do, and how it is used best.

    ``concurrency``: so many calls at once are fastest. ``batch_items``: so many items in one call are
    fastest. ``has_capacity``: the store bounds itself and evicts. ``max_object_bytes``: larger objects are
    refused.
    """

    concurrency: int
    batch_items: int
    has_capacity: bool = False
    max_object_bytes: int | None = None


class PutItem(NamedTuple):
    """An object to write: its bytes are those of ``pieces``, in order."""

    name: str
    pieces: Sequence[memoryview]


class GetItem(NamedTuple):
    """An object to read: ``pieces`` are filled in order with its bytes from ``offset_bytes`` on."""

    name: str
    pieces: Sequence[memoryview]
    offset_bytes: int = 0


class Got(NamedTuple):
    """How a read ended. ``num_bytes`` were filled; with any outcome but OK the pieces hold garbage."""

    outcome: Outcome
    num_bytes: int = 0


@runtime_checkable
class ObjectEngine(Protocol):
    """One store of objects. Safe to call from any thread.

    Names are relative, of ``[a-z0-9._/-]``, at most 200 characters. Every call answers for each item, in
    order, within ``deadline_s`` seconds and a grace of 0.2 s, and raises only for misuse. When calls begin to
    fail, the engine logs why, once, and again when they work (``TroubleLog``); time-outs are logged by the
    caller. No part of a credential is ever in a log line, an exception or a ``repr``. After ``close`` every
    call is REJECTED. Memory of a call that its library may still read or write when the call has returned is
    in ``late.LATE`` before, and until then.

    Readers see an object whole or not at all. Beside a client that overwrites or removes the object that is
    read, Mooncake alone does not promise this: the read may fail, or be OK with bytes of two objects. Records
    can bear it: what is under a name never changes, and each record has a checksum.
    """

    @property
    def traits(self) -> EngineTraits:
        """Does not change."""

    def put(self, items: Sequence[PutItem], *, deadline_s: float) -> list[Outcome]:
        """OK: every client can read the object now. If one of this name was there already, it may be
        rewritten or left as it is.
        """

    def get(self, items: Sequence[GetItem], *, deadline_s: float) -> list[Got]:
        """OK: filled up to the end of the pieces or of the object. MISS: there is no such object. CORRUPT:
        the object holds more than the pieces take, if it is read from its start.
        """

    def exists(self, names: Sequence[str], *, deadline_s: float) -> list[Outcome]:
        """OK or MISS; anything else: not known. OK does not promise that a later get succeeds."""

    def remove(self, names: Sequence[str], *, deadline_s: float) -> list[Outcome]:
        """OK or MISS."""

    def scan(self, prefix: str, *, deadline_s: float) -> Iterator[ObjectInfo]:
        """Objects whose names begin with ``prefix``, in no order. OSError, with a line for people, if they
        cannot be listed; ``deadline_s`` is of each request. For the sweeper and the command line.
        """

    def renew(self, names: Sequence[str], *, deadline_s: float) -> list[Outcome]:
        """Marks the objects as used just now, so that others are evicted first. OK also from a store that has
        no such mark.
        """

    def close(self) -> None:
        """Releases threads and connections, in some seconds at most; idempotent."""


@runtime_checkable
class TakesMemory(Protocol):
    """An engine that has to know beforehand in which memory pieces lie, as for RDMA."""

    def register(self, address: int, num_bytes: int) -> None:
        """From now on pieces may lie in this memory. Called once for each."""
