"""Pictures of what ``kvbm replay`` and ``kvbm plan`` found; matplotlib (the extra ``plot``) is loaded for
them alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvbm_core.replay.study import Row, Study
from kvbm_core.sizing.advice import Advice, Choice

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PARTS = (("device", "#8fc1e3"), ("host", "#2a7f62"), ("disk", "#c9822b"))
_DPI = 110


class PlotError(Exception):
    """A picture that cannot be made: one line."""


def require_plots() -> None:
    """PlotError where no picture can be drawn: to be asked before minutes of computing."""
    try:
        import matplotlib
    except ImportError:
        raise PlotError("--plot needs matplotlib: pip install matplotlib") from None
    matplotlib.use("Agg")


@contextmanager
def _picture(path: Path, columns: int, size_inches: tuple[float, float], **more: Any) -> Iterator[Any]:
    """(figure, its axes), written to ``path`` in the end. PlotError if it cannot be."""
    require_plots()
    from matplotlib import pyplot

    canvas, axes = pyplot.subplots(1, columns, figsize=size_inches, layout="constrained", **more)
    try:
        yield canvas, axes
        canvas.savefig(path, dpi=_DPI)
    except (OSError, ValueError) as error:
        raise PlotError(f"{path}: the plot cannot be written: {error}") from None
    finally:
        pyplot.close(canvas)


def label(row: Row) -> str:
    """The policy's name, marked if it is a candidate."""
    return row.policy.name + "*" * row.policy.is_candidate


def draw_study(study: Study, path: Path) -> None:
    """Left where prompt tokens came from, beside the bound; right what was written to disk for it."""
    names = [
        f"host {row.host}" + ("" if row.disk is None else f", disk {row.disk}: {label(row)}")
        for row in study.rows
    ]
    size = (14, 1.5 + 0.24 * len(names))
    with _picture(path, 2, size, sharey=True) as (canvas, (rates, writes)):
        shares = [
            [100 * row.share(getattr(row.tally, f"{name}_tokens")) for name, _ in PARTS] for row in study.rows
        ]
        _stack(rates, shares)
        bound = 100 * study.bound.tally.hit_rate
        rates.axvline(bound, color="black", linewidth=1, linestyle="--", label=f"bound: {bound:.1f} %")
        rates.set_title("prompt tokens found in a tier, %", loc="left", fontsize=10)
        writes.barh(range(len(names)), [row.tally.written_blocks for row in study.rows], color=PARTS[-1][1])
        writes.set_title("blocks written to disk", loc="left", fontsize=10)
        rates.set_yticks(range(len(names)), names, fontsize=8)
        rates.invert_yaxis()
        _finish(canvas, (rates, writes), rates)


def _stack(axes: Axes, shares: Sequence[Sequence[float]]) -> None:
    """A bar for each of ``shares``, which are percentages by tier."""
    starts = [0.0] * len(shares)
    for number, (name, color) in enumerate(PARTS):
        widths = [share[number] for share in shares]
        axes.barh(range(len(shares)), widths, left=starts, color=color, label=name)
        starts = [start + width for start, width in zip(starts, widths, strict=True)]


def _finish(canvas: Any, every: Sequence[Axes], told: Axes) -> None:
    for axes in every:
        axes.spines[["top", "right"]].set_visible(False)
    canvas.legend(
        *told.get_legend_handles_labels(), loc="outside lower center", ncols=5, frameon=False, fontsize=9
    )


def choice_name(choice: Choice) -> str:
    """In a plot."""
    if not choice.host_gb:
        return "device alone"
    host = f"host {choice.host_gb:,.0f} GB"
    if not choice.disk_gb:
        return host
    return f"{host}, disk {choice.disk_gb:,.0f} GB ({choice.policy.name})"


def draw_advice(advice: Advice, path: Path, title: str) -> None:
    """Hit rate over host memory; where tokens come from with each choice; and its time to first token."""
    names = [choice_name(choice) + " ←" * (choice is advice.taken) for choice in advice.choices]
    places = range(len(names))
    with _picture(path, 3, (15, 2.2 + 0.26 * len(names))) as (canvas, (curve, rates, starts)):
        canvas.suptitle(title, fontsize=11, x=0.01, ha="left")
        curve.semilogx(*zip(*((gb, 100 * rate) for gb, rate in advice.curve), strict=True), color=PARTS[1][1])
        curve.axvline(advice.device_gb, color=PARTS[0][1], linestyle=":")
        curve.annotate(
            "device's cache", (advice.device_gb, 0), fontsize=8, rotation=90, ha="right", va="bottom"
        )
        for choice in advice.choices:
            if choice.disk_gb:
                total_gb = choice.host_gb + choice.disk_gb
                curve.plot([total_gb], [100 * choice.rate], "o", color=PARTS[2][1], markersize=4)
        taken = advice.taken
        curve.plot(
            [max(taken.host_gb + taken.disk_gb, advice.device_gb)], [100 * taken.rate], "k*", markersize=11
        )
        curve.set_title("hits, % (line: host alone; dots: with disk; star: advice)", loc="left", fontsize=10)
        curve.set_xlabel("GB of host and disk")
        curve.set_xlim(left=advice.device_gb / 4)
        curve.set_ylim(bottom=0)
        _stack(rates, [[100 * c.device_rate, 100 * c.host_rate, 100 * c.disk_rate] for c in advice.choices])
        rates.set_title("prompt tokens found, %", loc="left", fontsize=10)
        rates.set_yticks(places, names, fontsize=8)
        for part, color in (("p90_s", "#bbbbbb"), ("p50_s", "#444444")):
            spans = [getattr(choice.start, part) for choice in advice.choices]
            firsts, widths = [s.better for s in spans], [s.worse - s.better for s in spans]
            starts.barh(places, widths, left=firsts, height=0.5, color=color)
        starts.set_title("time to first token, s (p50 dark, p90 light)", loc="left", fontsize=10)
        starts.set_yticks(places, [""] * len(names))
        starts.set_xlim(left=0)
        for axes in (rates, starts):
            axes.invert_yaxis()
        _finish(canvas, (curve, rates, starts), rates)
