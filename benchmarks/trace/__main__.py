"""``kvbm replay`` with policies that are not in the product beside those that are:
``python -m benchmarks.trace TRACE.jsonl [--device SIZE]``.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import typer

from benchmarks.console import report_console
from benchmarks.trace.policies import COMPARED
from kvbm_core.cli.replay import as_plain, load_trace, run_cases, show
from kvbm_core.cli.trace_plots import draw_study
from kvbm_core.replay.study import Size, Study, cases_of

SIZES = "as kvbm replay takes them; {}"


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; 0 when all counts added up, 1 when not, 2 when the trace or a size cannot be used."""
    arguments = _parse(argv)
    try:
        trace = load_trace(arguments.trace, None)
        sizes = (arguments.device, arguments.host, arguments.disk)
        found = run_cases(trace, cases_of(trace, COMPARED, sizes), arguments.processes)
    except typer.Exit as ended:
        return ended.exit_code
    settings = {"trace": trace.name, "device": str(arguments.device)}
    console = report_console()
    show(found, console)
    console.print(f"report: {_write(found, arguments.output, settings)}")
    return 0


def _write(found: Study, folder: Path, settings: Mapping[str, Any]) -> Path:
    """``trace.json`` and ``trace.png`` in ``folder``, which is made if need be; the path of the first."""
    folder.mkdir(parents=True, exist_ok=True)
    measured_at = datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    plain = {"measured_at": measured_at, "settings": dict(settings), **as_plain(found)}
    path = folder / "trace.json"
    path.write_text(json.dumps(plain, indent=1) + "\n", encoding="utf-8")
    draw_study(found, folder / "trace.png")
    return path


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.trace", description=__doc__)
    parser.add_argument("trace", type=Path, help="as kvbm replay takes it")
    device, hosts, disks = "1000", "1x,4x", "4x,16x,unlimited"
    parser.add_argument("--device", type=Size.parse, default=device, help=SIZES.format(device))
    parser.add_argument("--host", type=_sizes, default=hosts, help=SIZES.format(hosts))
    parser.add_argument("--disk", type=_sizes, default=disks, help=SIZES.format(disks))
    results = Path("benchmarks/results")
    parser.add_argument("--output", type=Path, default=results, help="folder of the report")
    parser.add_argument("--processes", type=int, help="replays at a time; all cores by default")
    return parser.parse_args(argv)


def _sizes(text: str) -> list[Size]:
    return [Size.parse(part.strip()) for part in text.split(",")]


if __name__ == "__main__":
    sys.exit(main())
