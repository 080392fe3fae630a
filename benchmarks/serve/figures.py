"""A figure: what was measured, against what, and whether the goal is met."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal


@dataclass(frozen=True)
class Figure:
    """One row of the report: ours against a limit or a peer. ``pairs`` holds each (ours, peer), as measured."""

    name: str
    unit: str
    pairs: tuple[tuple[float, float], ...]
    peer: str
    goal: float
    better: Literal["lower", "higher"]

    @property
    def ours(self) -> float:
        """The median of our values."""
        return median(ours for ours, _ in self.pairs)

    @property
    def theirs(self) -> float:
        """The median of the peer's values."""
        return median(theirs for _, theirs in self.pairs)

    @property
    def ratios(self) -> list[float]:
        """Ours over the peer's, pair by pair."""
        return [ours / theirs for ours, theirs in self.pairs]

    @property
    def ratio(self) -> float:
        """The median of the ratios: what the goal is held against."""
        return median(self.ratios)

    @property
    def spread(self) -> tuple[float, float]:
        """The quartiles of the ratios."""
        ordered = sorted(self.ratios)
        return _quantile(ordered, 0.25), _quantile(ordered, 0.75)

    @property
    def met(self) -> bool:
        """Whether the goal is met."""
        return self.ratio <= self.goal if self.better == "lower" else self.ratio >= self.goal

    @property
    def verdict(self) -> str:
        """The last column of the report."""
        return "met" if self.met else "short"


def _quantile(ordered: Sequence[float], share: float) -> float:
    return ordered[round(share * (len(ordered) - 1))]
