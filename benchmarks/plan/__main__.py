"""Does the leader reach what ``kvbm plan`` predicts: ``python -m benchmarks.plan [TRACE.jsonl ...]``.

Two made-up loads, and the traces that are named, at six sizes each.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import typer
from rich.table import Table

from benchmarks.console import report_console
from benchmarks.plan.comparison import LIMIT_POINTS, Pair, compare
from benchmarks.plan.loads import agents, documents
from kvbm_core.cli.replay import load_trace
from kvbm_core.sizing.reuse import fit


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; 0 when every prediction is near enough, 1 when not, 2 when a trace cannot be used."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plan", description=__doc__)
    parser.add_argument("traces", type=Path, nargs="*", help="as kvbm replay takes them")
    parser.add_argument(
        "--output", type=Path, default=Path("benchmarks/results"), help="folder of the report"
    )
    arguments = parser.parse_args(argv)
    console = report_console()
    try:
        traces = [fit(load_trace(path, None)) for path in arguments.traces]
    except typer.Exit as ended:
        return ended.exit_code
    pairs: list[Pair] = []
    with console.status("comparing") as status:
        for trace in (*traces, agents(), documents()):
            pairs += compare(trace, status.update)
    console.print(_table(pairs))
    arguments.output.mkdir(parents=True, exist_ok=True)
    path = arguments.output / "plan.json"
    path.write_text(json.dumps([pair.plain() for pair in pairs], indent=1) + "\n", encoding="utf-8")
    worst = max(pair.off_points for pair in pairs)
    faster = sum(pair.reached_s for pair in pairs) / sum(pair.predicted_s for pair in pairs)
    console.print(
        f"off by {worst:.2f} points at most (limit: {LIMIT_POINTS:g}), {faster:.0f} times faster; {path}"
    )
    return 0 if worst <= LIMIT_POINTS else 1


def _table(pairs: Sequence[Pair]) -> Table:
    table = Table(title="share of prompt tokens found: predicted, and reached by the leader")
    for heading in ("trace", "device", "host", "disk", "policy", "predicted", "reached", "off by"):
        table.add_column(heading, justify="left" if heading in ("trace", "policy") else "right")
    before = pairs[0].trace
    for pair in pairs:
        if pair.trace != before:
            table.add_section()
        before = pair.trace
        table.add_row(
            pair.trace,
            *(f"{blocks:,}" for blocks in pair.sizes),
            pair.policy.name if pair.sizes.disk_blocks else "",
            f"{pair.predicted:.2%}",
            f"{pair.reached:.2%}",
            f"{pair.off_points:.2f}",
        )
    return table


if __name__ == "__main__":
    sys.exit(main())
