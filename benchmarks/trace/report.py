"""What a study of a trace found: a table, ``trace.json`` with every count, ``trace.png``."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from benchmarks.trace.study import Row, Size, Study

if TYPE_CHECKING:
    from matplotlib.axes import Axes

HEADINGS = (
    "host",
    "disk",
    "policy",
    "device",
    "host",
    "disk",
    "any tier",
    "of bound",
    "written",
    "written / read",
)
FIRST_NUMBER = 3
PARTS = (("device", "#8fc1e3"), ("host", "#2a7f62"), ("disk", "#c9822b"))


def show(study: Study, console: Console) -> None:
    """Prints a row per replay; rates are shares of all prompt tokens."""
    table = Table(
        title="token hit rates, and blocks written to disk", caption="* candidate, not in the product"
    )
    for place, heading in enumerate(HEADINGS):
        table.add_column(
            heading, justify="right" if place >= FIRST_NUMBER else "left", no_wrap=place < FIRST_NUMBER
        )
    for before, row in zip((study.bound, *study.rows), study.rows, strict=False):
        if (before.host, before.disk) != (row.host, row.disk):
            table.add_section()
        table.add_row(*_cells(row, study.bound))
    table.add_section()
    cells = _cells(study.bound, study.bound)
    table.add_row(*cells[: FIRST_NUMBER - 1], "bound", *cells[FIRST_NUMBER:])
    console.print(table)


def _cells(row: Row, bound: Row) -> tuple[str, ...]:
    tally = row.tally
    ratio = tally.writes_per_read
    return (
        _size(row.host, row.sizes.host_blocks),
        _size(row.disk, row.sizes.disk_blocks),
        label(row),
        f"{row.share(tally.device_tokens):.1%}",
        f"{row.share(tally.host_tokens):.1%}",
        f"{row.share(tally.disk_tokens):.1%}",
        f"{row.share(tally.hit_tokens):.1%}",
        f"{tally.hit_tokens / max(1, bound.tally.hit_tokens):.0%}",
        f"{tally.written_blocks:,}",
        "none read" if ratio is None else f"{ratio:.2f}",
    )


def _size(size: Size, blocks: int) -> str:
    return f"{size}: {blocks:,}" if size.factor else str(size)


def label(row: Row) -> str:
    """The policy's name, marked if it is a candidate."""
    return row.policy.name + "*" * row.policy.is_candidate


def write(study: Study, folder: Path, settings: Mapping[str, Any]) -> Path:
    """``trace.json`` and ``trace.png`` in ``folder``, which is made if need be; the path of the first."""
    folder.mkdir(parents=True, exist_ok=True)
    plain = {
        "measured_at": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "settings": dict(settings),
        "trace": study.trace,
        "bound": study.bound.plain(),
        "rows": [row.plain() for row in study.rows],
    }
    path = folder / "trace.json"
    path.write_text(json.dumps(plain, indent=1) + "\n", encoding="utf-8")
    draw(study, folder / "trace.png")
    return path


def draw(study: Study, path: Path) -> None:
    """Left where prompt tokens came from, beside the bound; right what was written to disk for it."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = [f"host {row.host}, disk {row.disk}: {label(row)}" for row in study.rows]
    height = 1.5 + 0.24 * len(names)
    canvas, (rates, writes) = pyplot.subplots(1, 2, figsize=(14, height), layout="constrained", sharey=True)
    _draw_rates(rates, study)
    places = range(len(names))
    writes.barh(places, [row.tally.written_blocks for row in study.rows], color=PARTS[-1][1])
    writes.set_title("blocks written to disk", loc="left", fontsize=10)
    rates.set_yticks(places, names, fontsize=8)
    rates.invert_yaxis()
    for axes in (rates, writes):
        axes.spines[["top", "right"]].set_visible(False)
    canvas.legend(
        *rates.get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False, fontsize=9
    )
    canvas.savefig(path, dpi=110)
    pyplot.close(canvas)


def _draw_rates(axes: Axes, study: Study) -> None:
    starts: Sequence[float] = [0.0] * len(study.rows)
    for name, color in PARTS:
        shares = [100 * row.share(getattr(row.tally, f"{name}_tokens")) for row in study.rows]
        axes.barh(range(len(shares)), shares, left=starts, color=color, label=name)
        starts = [start + share for start, share in zip(starts, shares, strict=True)]
    bound = 100 * study.bound.share(study.bound.tally.hit_tokens)
    axes.axvline(bound, color="black", linewidth=1, linestyle="--", label=f"bound: {bound:.1f} %")
    axes.set_title("prompt tokens found in a tier, %", loc="left", fontsize=10)
