"""A goal, and the figure that is measured for it: ours beside the peers, and whether the goal is met."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any, Literal

BEST_PEER = "best peer"
LIMIT = "limit"


@dataclass(frozen=True)
class Goal:
    """What is asked of one figure.

    ``against`` BEST_PEER or the name of one peer: ``bound`` is for the ratio, ours over theirs. ``against``
    LIMIT: it is for our value itself, in ``unit``.
    """

    name: str
    unit: str
    bound: float
    better: Literal["lower", "higher"]
    against: str = BEST_PEER

    @property
    def text(self) -> str:
        """As the report shows it."""
        sign = "≤" if self.better == "lower" else "≥"
        return (
            f"{sign} {self.bound:,.4g} {self.unit}" if self.against == LIMIT else f"{sign} {self.bound:.3g}"
        )

    def holds(self, value: float) -> bool:
        """Whether a ratio (or, for a limit, our value) is good enough."""
        return value <= self.bound if self.better == "lower" else value >= self.bound


@dataclass(frozen=True)
class Figure:
    """One row of the report. ``ours[i]`` and each peer's sample ``i`` were measured one right after the
    other.

    Without samples the figure has not been measured, and ``note`` says why.
    """

    goal: Goal
    ours: tuple[float, ...] = ()
    peers: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    note: str = ""

    @property
    def is_measured(self) -> bool:
        """Whether there is something to judge; a ratio needs a peer."""
        return bool(self.ours) and (self.goal.against == LIMIT or self.reference in self.peers)

    @property
    def reference(self) -> str:
        """Whom we are held against: a peer's name, LIMIT, or "" when no peer was measured."""
        if self.goal.against != BEST_PEER:
            return self.goal.against
        choose = min if self.goal.better == "lower" else max
        return choose(self.peers, key=lambda name: median(self.peers[name]), default="")

    @property
    def our_value(self) -> float:
        """The median of our samples."""
        return median(self.ours)

    @property
    def their_value(self) -> float:
        """The median of the reference's samples, or the limit."""
        return self.goal.bound if self.goal.against == LIMIT else median(self.peers[self.reference])

    @property
    def ratios(self) -> list[float]:
        """Ours over the reference's, pair by pair; of a limit of 0, 1 plus ours."""
        if self.goal.against == LIMIT:
            return [value / self.goal.bound if self.goal.bound else 1 + value for value in self.ours]
        return [ours / theirs for ours, theirs in zip(self.ours, self.peers[self.reference], strict=True)]

    @property
    def ratio(self) -> float:
        """The median of the ratios."""
        return median(self.ratios)

    @property
    def spread(self) -> tuple[float, float]:
        """The quartiles of the ratios."""
        ordered = sorted(self.ratios)
        return _quantile(ordered, 0.25), _quantile(ordered, 0.75)

    @property
    def verdict(self) -> str:
        """``met``, ``short`` or ``not run``."""
        if not self.is_measured:
            return "not run"
        value = self.our_value if self.goal.against == LIMIT else self.ratio
        return "met" if self.goal.holds(value) else "short"

    def plain(self) -> dict[str, Any]:
        """Everything, for JSON: samples, and what follows from them."""
        raw: dict[str, Any] = {
            "goal": asdict(self.goal),
            "ours": list(self.ours),
            "peers": {name: list(samples) for name, samples in self.peers.items()},
            "note": self.note,
            "verdict": self.verdict,
        }
        if self.is_measured:
            raw |= {
                "reference": self.reference,
                "ours_median": self.our_value,
                "reference_median": self.their_value,
                "ratio_median_of_pairs": self.ratio,
                "ratio_quartiles": list(self.spread),
                "peer_medians": {name: median(samples) for name, samples in self.peers.items()},
            }
        return raw

    @staticmethod
    def read(raw: Mapping[str, Any]) -> Figure:
        """The figure that ``plain`` was made of. KeyError or TypeError when it is something else."""
        peers = {str(name): tuple(samples) for name, samples in raw["peers"].items()}
        return Figure(Goal(**raw["goal"]), tuple(raw["ours"]), peers, str(raw["note"]))


def _quantile(ordered: Sequence[float], share: float) -> float:
    return ordered[round(share * (len(ordered) - 1))]
