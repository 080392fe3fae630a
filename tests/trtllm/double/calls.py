"""Every call between the executor and the connector, with its values."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Call:
    """One call: in which step, with what, and what it returned.

    ``values`` has no request objects, only their ids and the positions at the time of the call, so that it
    can go from process to process.
    """

    step: int
    name: str
    values: dict[str, Any]
    result: Any = None


@dataclass
class Calls:
    """The calls of one rank, oldest first."""

    keeps_all: bool = True
    counts: Counter[str] = field(default_factory=Counter)
    all: list[Call] = field(default_factory=list)

    def add(self, call: Call) -> None:
        """Notes a call."""
        self.counts[call.name] += 1
        if self.keeps_all:
            self.all.append(call)

    def count(self, name: str) -> int:
        """How many calls of this name there were."""
        return self.counts[name]

    def named(self, name: str) -> list[Call]:
        """The calls of this name."""
        return [call for call in self.all if call.name == name]

    def names(self) -> list[str]:
        """The names in order."""
        return [call.name for call in self.all]

    def clear(self) -> None:
        """Forgets all calls and counts."""
        self.counts.clear()
        self.all.clear()
