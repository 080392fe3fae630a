"""What ``kvbm remote`` needs of a shared store of any kind, while engines use it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from kvbm_core.errors import Outcome
from kvbm_core.storage.disk.inspect import Contents, OnProgress
from kvbm_core.storage.names import ObjectInfo

OnCount = Callable[[int, "int | None"], None]
"""Called with what has been looked at so far, and with the total if that is known."""


@dataclass(slots=True)
class Shard:
    """One rank's folder. ``contents``: its records by the time of their last use. ``num_blocks``: blocks in
    them, without those of ``untold`` records, whose names do not tell a number. ``temporary``: files that are
    being written, and copies made to renew a record. ``strange``: names that kvbm does not make; they are not
    counted in ``num_bytes``, and never touched.
    ``codec``: how its blocks are stored, such as "zstd, encrypted"; empty if that is not known.
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
    codec: str = ""


class Model(NamedTuple):
    """A model's folder, without its ranks' folders. ``evictor``: the engine that keeps it within its size, as
    "host pid"; empty if none ever has. ``strange``: as in Shard.
    """

    evictor: str = ""
    strange: int = 0


class Counted(NamedTuple):
    """``models``: by their folders' names. ``strange``: the number of other names beside these folders."""

    shards: Sequence[Shard]
    models: dict[str, Model]
    strange: int = 0


class Removed(NamedTuple):
    """``strange``: the number of names that kvbm does not make. They stay, and so do their folders."""

    records: int
    num_bytes: int
    strange: int


class Checked(NamedTuple):
    """A record that was read. ``what``: what is wrong with it; empty for nothing. ``is_foreign``: it may be
    right for engines with another secret, version or meaning; it is left alone.
    """

    name: str
    what: str = ""
    num_bytes: int = 0
    is_gone: bool = False
    is_unreadable: bool = False
    is_foreign: bool = False


class StoreInspection(Protocol):
    """A store as ``kvbm remote`` uses it. OSError, with a line for people, for a part that cannot be read or
    changed. It touches only names that kvbm makes. One thread at a time.

    ``where``: its URL or path, for people. ``top``: the folder of all that kvbm keeps there.
    ``evicts_itself``: the store makes room by itself. In all methods, ``models`` are names of models'
    folders; empty for all.
    """

    where: str
    top: str
    evicts_itself: bool

    def models(self) -> list[str]:
        """The names of the models' folders, in order."""

    def count(self, now_ns: int, on_count: OnCount) -> Counted:
        """Counts everything in the store; shards are in order of their names."""

    def verify(self, models: Sequence[str] = (), *, removes_damaged: bool = False) -> Iterator[Checked]:
        """Reads and checks every record. Removes damaged ones if ``removes_damaged``."""

    def remove_model(self, namespace: str, on_records: OnProgress) -> Removed:
        """Removes a model's records, and files that are half written."""

    def objects(self, models: Sequence[str] = ()) -> Iterator[ObjectInfo]:
        """The records; ``changed_s`` is the time of the last use, as far as the store knows it."""

    def remove(self, names: Sequence[str]) -> list[Outcome]:
        """Removes records that ``objects`` has named. OK or MISS: it is gone."""

    def close(self) -> None:
        """Closes connections and files."""
