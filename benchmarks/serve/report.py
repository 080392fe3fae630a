"""The report of a run: JSON with every measurement, Markdown with the rows, a plot."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from benchmarks.serve.figures import Figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

HEADINGS = ("figure", "ours", "peer", "ratio", "quartiles", "goal", "verdict")
OURS_COLOR, PEER_COLOR = "#2a7f62", "#8c8c8c"


@dataclass(frozen=True)
class Report:
    """Everything a run found."""

    figures: Sequence[Figure]
    complaints: Sequence[str]
    settings: Mapping[str, str]
    machine: Mapping[str, str]

    def write(self, folder: Path) -> Path:
        """Write ``serve.json``, ``serve.png`` and ``serve.md``; returns the last."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "serve.json").write_text(json.dumps(self._plain(), indent=1) + "\n")
        draw(self.figures, folder / "serve.png")
        text = folder / "serve.md"
        text.write_text(self._markdown())
        return text

    def show(self, console: Console) -> None:
        """Print the rows, and what was wrong."""
        table = Table(*HEADINGS)
        for figure in self.figures:
            style = "green" if figure.met else "yellow"
            table.add_row(*_cells(figure)[:-1], f"[{style}]{figure.verdict}[/{style}]")
        console.print(table)
        for complaint in self.complaints:
            console.print(f"[red]✗ {complaint}[/red]")

    def _plain(self) -> dict[str, object]:
        return {
            "machine": dict(self.machine),
            "settings": dict(self.settings),
            "complaints": list(self.complaints),
            "figures": [
                {
                    "name": figure.name,
                    "unit": figure.unit,
                    "peer": figure.peer,
                    "ours_median": figure.ours,
                    "peer_median": figure.theirs,
                    "ratio_median_of_pairs": figure.ratio,
                    "ratio_of_medians": figure.ours / figure.theirs,
                    "ratio_quartiles": list(figure.spread),
                    "goal": figure.goal,
                    "verdict": figure.verdict,
                    "pairs": [list(pair) for pair in figure.pairs],
                }
                for figure in self.figures
            ],
        }

    def _markdown(self) -> str:
        rows = [HEADINGS, tuple("---" for _ in HEADINGS), *(_cells(figure) for figure in self.figures)]
        lines = ["# kvbm on a real server", "", *("| " + " | ".join(row) + " |" for row in rows), ""]
        lines += ["Ratios are ours over the peer's, pair by pair, and their median.", ""]
        lines += [f"* **{complaint}**" for complaint in self.complaints] or ["All answers were as they should be."]
        for title, facts in (("Settings", self.settings), ("Machine", self.machine)):
            lines += ["", f"## {title}", "", *(f"* {name}: {value}" for name, value in facts.items())]
        return "\n".join([*lines, "", "![pairs](serve.png)", ""])


def _cells(figure: Figure) -> tuple[str, ...]:
    low, high = figure.spread
    sign = "≤" if figure.better == "lower" else "≥"
    return (
        f"{figure.name} / {figure.peer}",
        f"{figure.ours:,.1f} {figure.unit}",
        f"{figure.theirs:,.1f} {figure.unit}",
        f"{figure.ratio:.3f}",
        f"{low:.3f} to {high:.3f}",
        f"{sign} {figure.goal:.2f}",
        figure.verdict,
    )


def draw(figures: Sequence[Figure], path: Path) -> None:
    """One panel per figure: every pair in the order measured, medians as lines."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    canvas, panels = pyplot.subplots(1, len(figures), figsize=(6 * len(figures), 4.5), layout="constrained")
    for figure, axes in zip(figures, panels, strict=True):
        _panel(axes, figure)
    canvas.savefig(path, dpi=150)
    pyplot.close(canvas)


def _panel(axes: Axes, figure: Figure) -> None:
    numbers = range(1, len(figure.pairs) + 1)
    series = (("with kvbm", OURS_COLOR, 0, figure.ours), (figure.peer, PEER_COLOR, 1, figure.theirs))
    for label, color, side, middle in series:
        values = [pair[side] for pair in figure.pairs]
        axes.scatter(numbers, values, s=22, color=color, label=f"{label}: median {middle:,.0f} {figure.unit}")
        axes.axhline(middle, color=color, linewidth=1, alpha=0.6)
    axes.set_title(f"{figure.name}\nmedian ratio {figure.ratio:.3f}, {figure.verdict}", loc="left", fontsize=11)
    axes.set_ylabel(figure.unit)
    axes.set_xlabel("pair")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_ylim(bottom=0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="best")
