"""Tables and plots of LMBenchmark's runs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.lmbenchmark.checkout import Summary, Workload

BASELINE, OURS = "without kvbm", "with kvbm"
COLORS = {BASELINE: "#8a8f98", OURS: "#2f6fdb"}
ROWS = (
    ("mean time to first token, ms", "ttft_mean_s", 1000.0),
    ("median time to first token, ms", "ttft_median_s", 1000.0),
    ("90th percentile, ms", "ttft_p90_s", 1000.0),
    ("requests per second", "requests_per_s", 1.0),
    ("input tokens per second", "input_tokens_per_s", 1.0),
    ("output tokens per second", "output_tokens_per_s", 1.0),
    ("requests", "requests", 1.0),
)
"""Words, the field of Summary, and what it is multiplied by."""


@dataclass(frozen=True)
class Result:
    """One run. ``server``: OURS or BASELINE. ``repeat``: one of each server belong together."""

    workload: Workload
    server: str
    repeat: int
    summary: Summary


def value_of(results: Sequence[Result], workload: str, qps: float, server: str, field: str) -> float:
    """The median of all repeats."""
    return median(
        float(getattr(result.summary, field))
        for result in results
        if (result.workload.name, result.workload.qps, result.server) == (workload, qps, server)
    )


def points(results: Sequence[Result]) -> list[tuple[str, float]]:
    """Workloads with their rates, in the order of the runs."""
    return list(dict.fromkeys((result.workload.name, result.workload.qps) for result in results))


def _cells(results: Sequence[Result], workload: str, qps: float, row: tuple[str, str, float]) -> list[str]:
    words, field, factor = row
    base, ours = (factor * value_of(results, workload, qps, name, field) for name in (BASELINE, OURS))
    return [words, f"{base:,.4g}", f"{ours:,.4g}", f"{ours / base:.2f}" if base else ""]


def show(console: Console, results: Sequence[Result]) -> None:
    """A table for each workload and rate."""
    for workload, qps in points(results):
        table = Table(title=f"{workload} input, {qps:g} requests per second asked for", title_justify="left")
        table.add_column("")
        for name in (BASELINE, OURS, "ratio"):
            table.add_column(name, justify="right")
        for row in ROWS:
            table.add_row(*_cells(results, workload, qps, row))
        console.print(table)


def write(results: Sequence[Result], folder: Path, facts: dict[str, Any]) -> list[Path]:
    """``lmbenchmark.json``, ``.md`` and ``.png`` in ``folder``."""
    data = {"facts": facts, "runs": [asdict(result) for result in results]}
    paths = [folder / f"lmbenchmark.{kind}" for kind in ("json", "md", "png")]
    paths[0].write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
    lines = ["# LMBenchmark", "", *(f"* {name}: {value}" for name, value in facts.items())]
    for workload, qps in points(results):
        lines += ["", f"## {workload} input, {qps:g} requests per second asked for", ""]
        lines += [f"| | {BASELINE} | {OURS} | ratio |", "| --- | ---: | ---: | ---: |"]
        lines += [f"| {' | '.join(_cells(results, workload, qps, row))} |" for row in ROWS]
    paths[1].write_text("\n".join(lines) + "\n", encoding="utf-8")
    draw(results, paths[2])
    return paths


def draw(results: Sequence[Result], path: Path) -> None:
    """Time to the first token, and throughput: bars are medians, dots are runs."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shown = ((ROWS[0], "lower is better"), (ROWS[4], "higher is better"))
    places = points(results)
    figure, both = pyplot.subplots(
        len(places), 2, figsize=(9, 0.8 + 2.0 * len(places)), layout="constrained", squeeze=False
    )
    for axes_row, (workload, qps) in zip(both, places, strict=True):
        for axes, ((words, field, factor), better) in zip(axes_row, shown, strict=True):
            for at, server in enumerate((OURS, BASELINE)):
                values = [
                    factor * getattr(result.summary, field)
                    for result in results
                    if (result.workload.name, result.workload.qps, result.server) == (workload, qps, server)
                ]
                axes.barh(at, median(values), color=COLORS[server], height=0.7)
                axes.scatter(values, [at] * len(values), s=10, color="black", alpha=0.5, zorder=3)
                axes.annotate(
                    f"{median(values):,.4g}",
                    (median(values), at),
                    (5, 0),
                    textcoords="offset points",
                    va="center",
                )
            axes.set_yticks([0, 1], [OURS, BASELINE])
            axes.set_title(f"{workload} input, {qps:g}/s\n{words} ({better})", loc="left", fontsize=9)
            axes.spines[["top", "right"]].set_visible(False)
            axes.margins(x=0.18)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
