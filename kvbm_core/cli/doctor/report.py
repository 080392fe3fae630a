"""What ``kvbm doctor`` prints: a table, or JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from kvbm_core import __version__
from kvbm_core.cli.doctor.check import Level
from kvbm_core.cli.doctor.run import Looked

FORMAT = 1
NARROW_COLUMNS = 76
"""Below it the third column would be too narrow for the names of settings."""
OK_EXIT, WARNING_EXIT, ERROR_EXIT = 0, 1, 2
_STYLES = {Level.OK: "green", Level.NOTE: "cyan", Level.WARNING: "yellow", Level.ERROR: "bold red"}


def exit_code(looked: Sequence[Looked]) -> int:
    """0: nothing but notes. 1: warnings. 2: errors."""
    levels = {one.level for one in looked}
    if Level.ERROR in levels:
        return ERROR_EXIT
    return WARNING_EXIT if Level.WARNING in levels else OK_EXIT


def show_findings(console: Console, looked: Sequence[Looked]) -> None:
    """A row for each finding, its remedy below what was seen; one below the other where that is narrow."""
    is_narrow = console.width < NARROW_COLUMNS
    table = Table(title="kvbm doctor", show_lines=False)
    table.add_column("check", no_wrap=True)
    table.add_column("", no_wrap=True)
    table.add_column("seen, and what to do", overflow="fold")
    for one in looked:
        for number, finding in enumerate(one.findings):
            style = _STYLES[finding.level]
            level, text = Text(str(finding.level), style=style), Text(finding.seen, overflow="fold")
            if finding.remedy:
                text.append(f"\n→ {finding.remedy}", style=style)
            if is_narrow:
                console.print(Text.assemble((one.check.name, "bold"), ": ", level))
                console.print(Padding(text, (0, 0, 0, 2)))
            else:
                table.add_row("" if number else one.check.name, level, text)
    if not is_narrow:
        console.print(table)


def summary(looked: Sequence[Looked]) -> Iterator[str]:
    """How many of each level, and what was not looked at."""
    levels = [finding.level for one in looked for finding in one.findings]
    counts = ", ".join(f"{levels.count(level)} {_word(level, levels.count(level))}" for level in Level)
    yield f"{counts} ({len(looked)} checks)"
    idle = [one.check.name for one in looked if not one.findings]
    if idle:
        yield f"nothing of the kind is configured: {', '.join(idle)}"


def _word(level: Level, count: int) -> str:
    return str(level) if level is Level.OK or count == 1 else f"{level}s"


def as_json(looked: Sequence[Looked]) -> dict[str, object]:
    """The keys are part of the interface: see docs/doctor.md."""
    return {
        "format": FORMAT,
        "version": __version__,
        "exit_code": exit_code(looked),
        "checks": [
            {
                "check": one.check.name,
                "level": None if one.level is None else str(one.level),
                "took_s": round(one.took_s, 3),
                "findings": [
                    {"level": str(finding.level), "seen": finding.seen, "remedy": finding.remedy}
                    for finding in one.findings
                ],
            }
            for one in looked
        ],
    }
