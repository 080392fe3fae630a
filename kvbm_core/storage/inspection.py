"""Stores that machines share, looked at from outside while engines use them: one face for all kinds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from kvbm_core.errors import Outcome
from kvbm_core.storage.disk.inspect import Contents, OnProgress
from kvbm_core.storage.names import ObjectInfo

OnCount = Callable[[int, "int | None"], None]
"""How much has been looked at, and of how much, if that is known."""


@dataclass(slots=True)
class Shard:
    """One rank's folder. ``contents``: its records by the time of their last use. ``num_blocks``: in them,
    but for ``untold`` records, whose names do not tell. ``temporary``: half written, or for a moment.
    ``strange``: names that are none of ours; they are neither counted in ``num_bytes`` nor ever touched.
    """

    namespace: str
    name: str
    contents: Contents = field(default_factory=Contents)
    num_blocks: int = 0
    untold: int = 0
    num_bytes: int = 0
    temporary: int = 0
    strange: int = 0
    unreadable: int = 0


class Model(NamedTuple):
    """A model's folder, but for its ranks' folders. ``evictor``: who keeps it within its size, by his own
    word, "host pid"; empty if nobody ever has. ``strange``: as a Shard's.
    """

    evictor: str = ""
    strange: int = 0


class Counted(NamedTuple):
    """``models`` by the name of their folder. ``strange``: names beside these folders."""

    shards: Sequence[Shard]
    models: dict[str, Model]
    strange: int = 0


class Removed(NamedTuple):
    """``strange``: names that are none of ours, which stay, and so do the folders that they are in."""

    records: int
    num_bytes: int
    strange: int


class Checked(NamedTuple):
    """A record that was read. ``what`` is wrong with it, empty if nothing is. ``is_foreign``: it may be right
    for somebody else, who has another secret, version or meaning; it is left alone.
    """

    name: str
    what: str = ""
    num_bytes: int = 0
    is_gone: bool = False
    is_unreadable: bool = False
    is_foreign: bool = False


class StoreInspection(Protocol):
    """A store as the command line looks at it. OSError, with a line for people, for what cannot be looked at
    or changed. Only names of ours are touched. One thread at a time.

    ``where`` it is, and the folder ``top`` of all that is kvbm's, for people. ``evicts_itself``: needs nobody
    to make room. ``models``: names of models' folders, none for all.
    """

    where: str
    top: str
    evicts_itself: bool

    def models(self) -> list[str]:
        """The models' folders that there are, in order."""

    def count(self, now_ns: int, on_count: OnCount) -> Counted:
        """Looks at everything; shards in order."""

    def verify(self, models: Sequence[str] = (), *, removes_damaged: bool = False) -> Iterator[Checked]:
        """Reads every record and checks it. What is damaged is removed if that is wanted."""

    def remove_model(self, namespace: str, on_records: OnProgress) -> Removed:
        """Removes its records, and what is half written."""

    def objects(self, models: Sequence[str] = ()) -> Iterator[ObjectInfo]:
        """Records, with the time of their last use as it is known."""

    def remove(self, names: Sequence[str]) -> list[Outcome]:
        """Of ``objects``. OK or MISS if it is gone."""

    def close(self) -> None:
        """Ends what looking has begun."""
