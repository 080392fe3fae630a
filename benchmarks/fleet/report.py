"""What the sizes of fleet cost: a table, ``fleet.json``, ``fleet.md``, and ``fleet.png`` with the times."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.fleet.figures import PHASES, Figures, Row
from benchmarks.machine import machine_facts

COLORS = ("#2a7f62", "#5b7db1", "#c08552", "#b15b8c", "#8c8c8c")


def number(value: float | None) -> str:
    """Three digits of it."""
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def cells(row: Row, sizes: Mapping[int, Figures]) -> list[str]:
    """A row of the table."""
    return [row.title, row.unit, *(number(figures.get(row.name)) for figures in sizes.values())]


def show(sizes: Mapping[int, Figures], console: Console) -> None:
    """Prints a row per figure and a column per size."""
    sizes = dict(sorted(sizes.items()))
    table = Table("figure", "unit", *(f"{count:,}" for count in sizes))
    for phase, rows in PHASES.items():
        table.add_section()
        table.add_row(f"[bold]{phase}[/bold]")
        for row in rows:
            table.add_row(*cells(row, sizes))
    console.print(table)


def write(sizes: Mapping[int, Figures], folder: Path, settings: Mapping[str, Any]) -> Path:
    """All files, in ``folder``, which is made if need be; the path of the table."""
    folder.mkdir(parents=True, exist_ok=True)
    sizes = dict(sorted(sizes.items()))
    machine, now = machine_facts(), datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    plain = {
        "measured_at": now,
        "settings": dict(settings),
        "machine": machine,
        "instances": {str(count): figures for count, figures in sizes.items()},
    }
    (folder / "fleet.json").write_text(json.dumps(plain, indent=1) + "\n", encoding="utf-8")
    heading = ["instances", "", *(f"{count:,}" for count in sizes)]
    lines = [f"# Simulated fleets, {now}", ""]
    for phase, rows in PHASES.items():
        lines += [f"## {phase}", "", _line(heading), _line(["---"] * len(heading))]
        lines += [*(_line(cells(row, sizes)) for row in rows), ""]
    lines += [f"* {name}: {value}" for name, value in {**settings, **machine}.items()]
    (folder / "fleet.md").write_text("\n".join([*lines, "", "![times](fleet.png)", ""]), encoding="utf-8")
    draw(sizes, folder / "fleet.png")
    return folder / "fleet.md"


def _line(texts: list[str]) -> str:
    return "| " + " | ".join(texts) + " |"


def draw(sizes: Mapping[int, Figures], path: Path) -> None:
    """Times by number of instances, a panel per phase."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    phases = {phase: [row for row in rows if row.is_time] for phase, rows in PHASES.items()}
    phases = {phase: rows for phase, rows in phases.items() if rows}
    canvas, grid = pyplot.subplots(1, len(phases), figsize=(5 * len(phases), 4.5), layout="constrained")
    for axes, (phase, rows) in zip(grid, phases.items(), strict=True):
        for color, row in zip(COLORS, rows, strict=False):
            points = [(count, figures[row.name]) for count, figures in sizes.items() if row.name in figures]
            axes.plot(*zip(*points, strict=True) if points else ((), ()), "o-", color=color, label=row.title)
        axes.set_title(phase, loc="left", fontsize=10)
        axes.set_xscale("log")
        axes.set_xticks(list(sizes), [f"{count:,}" for count in sizes])
        axes.minorticks_off()
        axes.set_xlabel("instances")
        axes.set_ylim(bottom=0)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, loc="best", fontsize=7)
    grid[0].set_ylabel("s")
    canvas.savefig(path, dpi=110)
    pyplot.close(canvas)
