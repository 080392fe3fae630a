"""What a check is, what it is given, and what it answers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import NamedTuple

from kvbm_core.config import KvbmSettings

DEADLINE_S = 30.0
"""Of a check that waits for nothing but this machine; the slowest of them start a Python of their own."""


class Level(str, Enum):
    """How bad a finding is, from good to bad."""

    OK = "ok"
    NOTE = "note"
    WARNING = "warning"
    ERROR = "error"

    def __str__(self) -> str:
        return self.value


class Finding(NamedTuple):
    """``seen``: what was found. ``remedy``: what to do, in one line; empty where there is nothing to do."""

    level: Level
    seen: str
    remedy: str = ""


def ok(seen: str) -> Finding:
    """As it should be."""
    return Finding(Level.OK, seen)


def note(seen: str, remedy: str = "") -> Finding:
    """Good to know; kvbm works."""
    return Finding(Level.NOTE, seen, remedy)


def warning(seen: str, remedy: str) -> Finding:
    """kvbm works, but slower, less safely or not as the settings ask."""
    return Finding(Level.WARNING, seen, remedy)


def error(seen: str, remedy: str) -> Finding:
    """kvbm, or a part that the settings ask for, does not work."""
    return Finding(Level.ERROR, seen, remedy)


@dataclass(frozen=True)
class Subject:
    """What is looked at. ``model``: a path, or a name of the hub; empty: none. ``engine``: the one that is to
    be there, by the name of its checks; empty: any. ``root``: of what the kernel tells in files.
    """

    settings: KvbmSettings
    model: str = ""
    engine: str = ""
    root: Path = Path("/")

    def told(self, path: str) -> str:
        """What the kernel says in the file ``path`` (without a leading slash); empty if it says nothing."""
        try:
            return (self.root / path).read_text(encoding="utf-8", errors="replace").strip()
        except OSError:
            return ""


@dataclass(frozen=True)
class Check:
    """One thing to look at. ``about``: which, for docs/doctor.md. ``look`` may raise: ConfigError is an error
    with its remedy, anything else a warning that this could not be looked at. It writes nothing but temporary
    files, which it removes. No finding: nothing of the kind is configured.
    """

    name: str
    about: str
    look: Callable[[Subject], Iterable[Finding]]
    deadline_s: float = DEADLINE_S
