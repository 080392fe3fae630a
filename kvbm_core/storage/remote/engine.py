"""The seam between kvbm's records and whatever keeps them: objects under names. No idea of blocks here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

from kvbm_core.errors import Outcome
from kvbm_core.storage.names import ObjectInfo


class EngineTraits(NamedTuple):
    """What an engine takes well, and what it may do.

    ``concurrency``: calls at once. ``batch_items``: items in one call. ``writes_late``: memory of a call that
    was given up may still be read or written by its library (the engine is then ``HoldsLate``).
    ``has_capacity``: it evicts by itself. ``max_object_bytes``: what is larger is not for it.
    """

    concurrency: int
    batch_items: int
    writes_late: bool = False
    has_capacity: bool = False
    max_object_bytes: int | None = None


class PutItem(NamedTuple):
    """``pieces`` in order are the object's bytes."""

    name: str
    pieces: Sequence[memoryview]


class GetItem(NamedTuple):
    """``pieces`` in order take the object's bytes from ``offset_bytes`` on."""

    name: str
    pieces: Sequence[memoryview]
    offset_bytes: int = 0


class Got(NamedTuple):
    """``num_bytes`` were filled. With any outcome but OK they are garbage."""

    outcome: Outcome
    num_bytes: int = 0


class ObjectEngine(Protocol):
    """One store of objects. Safe to call from any thread.

    Names are relative, of ``[a-z0-9._/-]``, at most 200 characters. Every call answers for each item, in
    order, within ``deadline_s`` seconds (and a grace of 0.2 s), and raises only for misuse. An object is seen
    whole or not at all. Why it fails, an engine logs itself, once, and once that it works again
    (``TroubleLog``); that it does not answer is said by whoever asks. Nothing of a credential is ever in a
    log line, an exception or a ``repr``. After ``close`` all is REJECTED.
    """

    @property
    def traits(self) -> EngineTraits:
        """Does not change."""

    def put(self, items: Sequence[PutItem], *, deadline_s: float) -> list[Outcome]:
        """OK: it can be got, by anybody. One that was there already counts as OK, rewritten or not."""

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
        """They were used: whoever makes room shall take others first. OK also where that means nothing."""

    def close(self) -> None:
        """Releases threads and connections, in some seconds at most; idempotent."""


@runtime_checkable
class TakesMemory(Protocol):
    """An engine that wants to know the memory of its pieces beforehand, such as RDMA does."""

    def register(self, address: int, num_bytes: int) -> None:
        """Pieces lie in this memory from now on. Once per memory."""
