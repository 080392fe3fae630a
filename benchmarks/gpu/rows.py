"""What is measured on a GPU: rows with a goal, and cells of tables from which a choice is made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any, Literal

Better = Literal["lower", "higher"]


@dataclass(frozen=True)
class Goal:
    """What one row is held to. ``bound`` is for the ratio over ``peer`` or, where that is empty, for our
    value.

    Without a bound the row is for information.
    """

    name: str
    unit: str
    peer: str = ""
    bound: float | None = None
    better: Better = "lower"

    @property
    def text(self) -> str:
        """As the report shows it."""
        if self.bound is None:
            return "-"
        unit = "" if self.peer else f" {self.unit}"
        return f"{'≤' if self.better == 'lower' else '≥'} {self.bound:g}{unit}"


@dataclass(frozen=True)
class Row:
    """One figure: our samples, the peer's taken beside them, or ``failure``."""

    goal: Goal
    ours: tuple[float, ...] = ()
    theirs: tuple[float, ...] = ()
    failure: str = ""

    @property
    def ratio(self) -> float | None:
        """The median of the ratios, pair by pair; None where there is no peer."""
        if self.failure or not self.ours or not self.theirs:
            return None
        return median(a / b for a, b in zip(self.ours, self.theirs, strict=True))

    @property
    def verdict(self) -> str:
        """``met``, ``short``, ``measured`` (no goal) or ``failed: why``."""
        value = self.ratio if self.goal.peer else median(self.ours) if self.ours else None
        if self.failure or value is None:
            return f"failed: {self.failure or 'no samples'}"
        if self.goal.bound is None:
            return "measured"
        holds = value <= self.goal.bound if self.goal.better == "lower" else value >= self.goal.bound
        return "met" if holds else "short"

    def cells(self, *, is_dry: bool) -> tuple[str, ...]:
        """Name, ours, peer, ratio, goal, verdict; a dry run judges nothing but whether the row came out."""
        peer = f"{median(self.theirs):,.4g} ({self.goal.peer})" if self.theirs else self.goal.peer or "-"
        ours = f"{median(self.ours):,.4g} {self.goal.unit}" if self.ours else "-"
        ratio = "-" if self.ratio is None else f"{self.ratio:.3f}"
        verdict = "dry run" if is_dry and not self.verdict.startswith("failed") else self.verdict
        return (self.goal.name, ours, peer, ratio, self.goal.text, verdict)

    def plain(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "ratio": self.ratio, "verdict": self.verdict}

    @staticmethod
    def read(raw: Mapping[str, Any]) -> Row:
        """The row that ``plain`` was made of."""
        return Row(Goal(**raw["goal"]), tuple(raw["ours"]), tuple(raw["theirs"]), str(raw["failure"]))


@dataclass(frozen=True)
class Cell:
    """One line of a table: what was set, and what came out."""

    table: str
    values: Mapping[str, str] = field(default_factory=dict)


Result = Row | Cell
