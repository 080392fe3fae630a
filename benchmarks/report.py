"""The report of the suite: ``latest.json`` with every sample, ``latest.md`` with a row per figure, a plot per
part.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from benchmarks.figures import LIMIT, Figure
from benchmarks.suite import PartRun

if TYPE_CHECKING:
    from matplotlib.axes import Axes

HEADINGS = (
    "part",
    "figure",
    "ours",
    "best peer or limit",
    "ratio",
    "quartiles",
    "goal",
    "verdict",
    "measured",
)
VERDICT = HEADINGS.index("verdict")
STYLES = {"met": "green", "short": "yellow", "not run": "dim"}
OURS_COLOR, PEER_COLORS = "#2a7f62", ("#8c8c8c", "#c08552", "#5b7db1", "#b15b8c", "#a3a847")
COLUMNS = 3


class Report:
    """The runs of all parts, in the order of the suite; those of earlier days are kept until they are run
    again.
    """

    def __init__(self, folder: Path, order: Sequence[str]) -> None:
        self.folder = folder
        self._order = list(order)
        self._runs = _read_runs(folder / "latest.json")
        self._fresh: set[str] = set()

    @property
    def runs(self) -> list[PartRun]:
        """In the order of the suite; parts that the suite no longer has come last."""
        places = {name: place for place, name in enumerate(self._order)}
        return sorted(self._runs.values(), key=lambda run: places.get(run.part, len(places)))

    @property
    def complaints(self) -> list[str]:
        """What was wrong in the parts that were run now."""
        return [text for run in self.runs if run.part in self._fresh for text in run.findings.complaints]

    def add(self, run: PartRun) -> None:
        """Takes a part's run in place of its earlier one, and writes everything."""
        self._runs[run.part] = run
        self._fresh.add(run.part)
        self.folder.mkdir(parents=True, exist_ok=True)
        measured = [figure for figure in run.findings.figures if figure.is_measured]
        if measured:
            draw(measured, self.folder / f"{run.part}.png")
        plain = {
            "rows": [dict(zip(HEADINGS, row, strict=True)) for row in self._rows()],
            "parts": {each.part: each.plain() for each in self.runs},
        }
        (self.folder / "latest.json").write_text(json.dumps(plain, indent=1) + "\n", encoding="utf-8")
        (self.folder / "latest.md").write_text(self._markdown(), encoding="utf-8")

    def show(self, console: Console) -> None:
        """Prints the rows, and what was wrong."""
        shown = [place for place, heading in enumerate(HEADINGS) if heading != "quartiles"]
        table = Table(*(HEADINGS[place] for place in shown))
        for row in self._rows():
            style = STYLES[row[VERDICT]]
            table.add_row(
                *(f"[{style}]{row[place]}[/{style}]" if place == VERDICT else row[place] for place in shown)
            )
        console.print(table)
        for complaint in self.complaints:
            console.print(f"✗ {complaint}", style="red", markup=False, highlight=False)
        for note in self._notes():
            console.print(f"not run: {note}", markup=False, highlight=False, soft_wrap=True)

    def _rows(self) -> list[tuple[str, ...]]:
        return [
            (run.part, *_cells(figure), "now" if run.part in self._fresh else run.measured_at)
            for run in self.runs
            for figure in run.findings.figures
        ]

    def _notes(self) -> list[str]:
        missing = (
            (run.part, each) for run in self.runs for each in run.findings.figures if not each.is_measured
        )
        return list(
            dict.fromkeys(f"{part}: {figure.note or 'no peer to compare with'}" for part, figure in missing)
        )

    def _markdown(self) -> str:
        rows = [HEADINGS, tuple("---" for _ in HEADINGS), *self._rows()]
        lines = ["# kvbm, measured", "", *("| " + " | ".join(row) + " |" for row in rows), ""]
        lines += ["Values are medians. A ratio is ours over the peer's, pair by pair, then the median.", ""]
        lines += [f"* not run: {note}" for note in self._notes()]
        for run in self.runs:
            lines += ["", f"## {run.part}, {run.measured_at}", ""]
            lines += [f"* **{complaint}**" for complaint in run.findings.complaints] or [
                "All answers were right.",
                "",
            ]
            lines += [f"* {name}: {value}" for name, value in run.findings.settings.items()]
            lines += [f"* {name}: {value}" for name, value in run.machine.items()]
            lines += ["", *_peer_lines(run.findings.figures)]
            if (self.folder / f"{run.part}.png").exists():
                lines += ["", f"![samples]({run.part}.png)"]
        return "\n".join([*lines, ""])


def _read_runs(path: Path) -> dict[str, PartRun]:
    """What an earlier report holds; nothing if there is none, or if it is of another version."""
    try:
        parts = json.loads(path.read_text(encoding="utf-8"))["parts"]
        return {name: PartRun.read(name, raw) for name, raw in parts.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def _cells(figure: Figure) -> tuple[str, ...]:
    goal = figure.goal
    if not figure.is_measured:
        return goal.name, "", "", "", "", goal.text, figure.verdict
    low, high = figure.spread
    theirs = (
        "the limit"
        if goal.against == LIMIT
        else f"{_number(figure.their_value)} {goal.unit}, {figure.reference}"
    )
    return (
        goal.name,
        f"{_number(figure.our_value)} {goal.unit}",
        theirs,
        f"{figure.ratio:.3f}",
        f"{low:.3f} to {high:.3f}",
        goal.text,
        figure.verdict,
    )


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _peer_lines(figures: Iterable[Figure]) -> list[str]:
    """All peers of each figure: the table has room for the best one only."""
    lines = []
    for figure in figures:
        if figure.is_measured and len(figure.peers) > (figure.goal.against != LIMIT):
            medians = figure.plain()["peer_medians"].items()
            listed = ", ".join(f"{name} {_number(value)}" for name, value in medians)
            lines.append(
                f"* {figure.goal.name}, {figure.goal.unit}: ours {_number(figure.our_value)}, {listed}"
            )
    return lines


def draw(figures: Sequence[Figure], path: Path) -> None:
    """One panel per figure: every sample in the order measured, medians as lines."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows, columns = -(-len(figures) // COLUMNS), min(COLUMNS, len(figures))
    canvas, grid = pyplot.subplots(
        rows, columns, figsize=(5.5 * columns, 4 * rows), layout="constrained", squeeze=False
    )
    panels = list(grid.flat)
    for figure, axes in zip(figures, panels, strict=False):
        _panel(axes, figure)
    for axes in panels[len(figures) :]:
        axes.set_visible(False)
    canvas.savefig(path, dpi=110)
    pyplot.close(canvas)


def _panel(axes: Axes, figure: Figure) -> None:
    unit = figure.goal.unit
    series = [("kvbm", OURS_COLOR, figure.ours)]
    series += [
        (name, PEER_COLORS[place % len(PEER_COLORS)], samples)
        for place, (name, samples) in enumerate(figure.peers.items())
    ]
    for label, color, samples in series:
        middle = sorted(samples)[len(samples) // 2]
        numbers = range(1, len(samples) + 1)
        axes.scatter(numbers, samples, s=14, color=color, label=f"{label}: {_number(middle)} {unit}")
        axes.axhline(middle, color=color, linewidth=1, alpha=0.6)
    if figure.goal.against == LIMIT:
        axes.axhline(
            figure.goal.bound,
            color="black",
            linewidth=1,
            linestyle="--",
            label=f"limit: {figure.goal.bound:g}",
        )
    axes.set_title(f"{figure.goal.name}\nratio {figure.ratio:.3f}, {figure.verdict}", loc="left", fontsize=10)
    axes.set_ylabel(unit)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_ylim(bottom=0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="best", fontsize=8)
