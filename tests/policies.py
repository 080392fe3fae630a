"""Eviction policies that are installed for a while, as a package of somebody else installs them."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path

from kvbm_core.policy.base import Spare
from kvbm_core.policy.lru import LruPolicy
from kvbm_core.policy.named import POLICIES
from kvbm_core.policy.recency import Slots
from kvbm_core.tokens.runs import BlockRun
from tests import outside


class Listening(LruPolicy):
    """TakesRuns: remembers what it was told."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[tuple[BlockRun, list[int]]] = []

    def tell(self, run: BlockRun, slots: Slots) -> None:
        self.told.append((run, slots.tolist()))


class Undecided(LruPolicy):
    """Raises whenever it is to choose."""

    def evict(self, count_blocks: int, spare: Spare | None = None) -> Slots | None:
        raise RuntimeError("which one")


class Careless(LruPolicy):
    """Chooses these, whoever holds them."""

    chooses: object = None

    def evict(self, count_blocks: int, spare: Spare | None = None) -> Slots | None:
        return self.chooses  # type: ignore[return-value]


def broken() -> LruPolicy:
    """What fails when a tier is made."""
    raise RuntimeError("out of order,\nin two lines")


def nothing() -> None:
    """A maker that forgot to return what it made."""


class Deaf(LruPolicy):
    """TakesRuns: raises whenever it is told."""

    def tell(self, run: BlockRun, slots: Slots) -> None:
        raise RuntimeError("not heard,\ntwice")


def installed(folder: Path, **policies: str) -> AbstractContextManager[None]:
    """``policies``: by name what the entry point says, ``module:attribute``."""
    return outside.installed(folder, POLICIES, policies)
