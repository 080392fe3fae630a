"""What a part of the suite is, and how one is run."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from enum import Enum
from pathlib import Path
from typing import Any, Protocol

from benchmarks.figures import Figure, Goal
from benchmarks.machine import machine_facts


class Effort(str, Enum):
    """How long to measure: QUICK is a look and no result."""

    QUICK = "quick"
    NORMAL = "normal"
    FULL = "full"


@dataclass(frozen=True)
class Options:
    """One run. ``output`` is the folder for reports, logs and models; ``told`` is called with what happens
    now.
    """

    seed: int = 1
    effort: Effort = Effort.NORMAL
    output: Path = Path("benchmarks/results")
    dtype: str = "bfloat16"
    empty_connector: bool = False
    told: Callable[[str], None] = lambda text: None

    def choose(self, quick: int, normal: int, full: int) -> int:
        """The number that goes with the effort."""
        return {Effort.QUICK: quick, Effort.NORMAL: normal, Effort.FULL: full}[self.effort]


@dataclass(frozen=True)
class Findings:
    """What a part found. ``complaints``: what was answered wrongly, a line each."""

    figures: Sequence[Figure]
    complaints: Sequence[str] = ()
    settings: Mapping[str, str] = field(default_factory=dict)


class CannotRun(Exception):
    """A part misses something; the message is one line that says what."""


class WrongAnswer(Exception):
    """What was timed gave a wrong answer; nothing that was measured counts."""


def expect(is_true: bool, otherwise: str) -> None:
    """Raises WrongAnswer(otherwise) unless ``is_true``."""
    if not is_true:
        raise WrongAnswer(otherwise)


class Part(Protocol):
    """A part of the suite. ``name`` is what ``ONLY=`` takes; ``goals`` are its rows."""

    name: str
    help: str
    goals: Sequence[Goal]

    def run(self, options: Options) -> Findings:
        """Measures; CannotRun if this machine or environment lacks something, WrongAnswer if an answer is
        wrong.
        """


@dataclass(frozen=True)
class PartRun:
    """The findings of one part, with when and where they were made."""

    part: str
    findings: Findings
    measured_at: str
    machine: Mapping[str, str]

    def plain(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "measured_at": self.measured_at,
            "machine": dict(self.machine),
            "settings": dict(self.findings.settings),
            "complaints": list(self.findings.complaints),
            "figures": [figure.plain() for figure in self.findings.figures],
        }

    @staticmethod
    def read(part: str, raw: Mapping[str, Any]) -> PartRun:
        """The run that ``plain`` was made of. KeyError or TypeError when it is something else."""
        figures = [Figure.read(figure) for figure in raw["figures"]]
        findings = Findings(figures, list(raw["complaints"]), dict(raw["settings"]))
        return PartRun(part, findings, str(raw["measured_at"]), dict(raw["machine"]))


def run_part(part: Part, options: Options) -> PartRun:
    """Runs one part now. If it cannot run, its rows are there and say so."""
    machine = machine_facts()
    measured_at = datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    started_s = time.monotonic()
    try:
        found = part.run(options)
    except CannotRun as reason:
        found = Findings([Figure(goal, note=str(reason)) for goal in part.goals])
    except WrongAnswer as wrong:
        found = Findings(
            [Figure(goal, note="an answer was wrong") for goal in part.goals], [f"{part.name}: {wrong}"]
        )
    run = {
        "seed": str(options.seed),
        "effort": options.effort.value,
        "duration": f"{time.monotonic() - started_s:.0f} s",
    }
    settings = {**found.settings, **run}
    return PartRun(part.name, Findings(found.figures, found.complaints, settings), measured_at, machine)
