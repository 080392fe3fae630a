"""Eviction policies that are installed for a while, as a package of somebody else installs them."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager
from pathlib import Path

from kvbm_core.config.installed import POLICIES
from kvbm_core.policy.base import Spare
from kvbm_core.policy.lru import LruPolicy
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


class Failing(LruPolicy):
    """Raises, or answers so, where it is asked by this name."""

    def __init__(self, name: str, answer: object = None) -> None:
        super().__init__()
        self._name, self._answer = name, answer

    def __getattribute__(self, name: str) -> object:
        if name.startswith("_") or name != self._name:
            return super().__getattribute__(name)
        if self._answer is None:
            raise RuntimeError("no,\nnot today")
        return self._answer

    def tell(self, run: BlockRun, slots: Slots) -> None:
        """TakesRuns."""


class Full(LruPolicy):
    """Raises as soon as a block comes."""

    def insert(self, slots: Slots) -> None:
        raise RuntimeError("no more")


class Careless(LruPolicy):
    """Chooses these, whoever holds them."""

    chooses: object = None

    def evict(self, count_blocks: int, spare: Spare | None = None) -> Slots | None:
        return self.chooses  # type: ignore[return-value]


def broken() -> LruPolicy:
    """What fails when a tier is made."""
    raise RuntimeError("out of order,\nin two lines")


def leave() -> LruPolicy:
    """As a program does that cannot go on."""
    sys.exit(3)


def nothing() -> None:
    """A maker that forgot to return what it made."""


def installed(folder: Path, **policies: str) -> AbstractContextManager[None]:
    """``policies``: by name what the entry point says, ``module:attribute``."""
    return outside.installed(folder, POLICIES, policies)
