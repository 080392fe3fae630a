"""What a fleet costs one etcd and one NATS, and what breaks first: ``python -m benchmarks.fleet``."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from rich.console import Console

from benchmarks.console import report_console
from benchmarks.fleet import report
from benchmarks.fleet.figures import PHASES, Figures
from benchmarks.fleet.scenario import Plan, run
from benchmarks.suite import CannotRun, WrongAnswer
from tests.engines.process import exit_on_sigterm


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; 0 when all was measured and every picture was right, 1 when not, 2 when it cannot run."""
    arguments = _parse(argv)
    console = report_console()
    exit_on_sigterm()
    sizes: dict[int, Figures] = {}
    status = 0
    for count in arguments.instances:
        plan = Plan(
            count,
            arguments.blocks_per_s,
            host_blocks=arguments.host_blocks,
            steady_s=arguments.steady_s,
            away_s=arguments.away_s,
            lease_s=arguments.lease_s,
        )
        try:
            with (
                tempfile.TemporaryDirectory(prefix="kvbm-fleet-") as folder,
                console.status("starting") as shown,
            ):
                found = partial(_found, console, sizes.setdefault(count, {}), count)
                run(plan, Path(folder), arguments.phases, shown.update, found)
        except WrongAnswer as wrong:
            console.print(f"✗ {count} instances: {wrong}", style="red", markup=False, highlight=False)
            status = 1
        except CannotRun as reason:
            console.print(f"not run: {reason}", markup=False, highlight=False, soft_wrap=True)
            status = 2
    if sizes:
        settings = {name: value for name, value in vars(arguments).items() if name != "output"}
        report.show(sizes, console)
        console.print(f"report: {report.write(sizes, arguments.output, settings)}")
    return status


def _found(console: Console, all_figures: Figures, count: int, phase: str, figures: Figures) -> None:
    """Progress: the figures of a phase that is over, which are kept if a later one fails."""
    all_figures.update(figures)
    units = {row.name: row.unit for row in PHASES[phase]}
    text = ", ".join(
        f"{name} {report.number(value)} {units[name]}".strip() for name, value in figures.items()
    )
    console.print(f"  … {count} instances, {phase}: {text}", markup=False, highlight=False, soft_wrap=True)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fleet", description=__doc__)
    parser.add_argument("--instances", type=_counts, default="100,300,1000", help="sizes with commas between")
    parser.add_argument(
        "--phases", type=_phases, default=",".join(PHASES), help=f"with commas between: {', '.join(PHASES)}"
    )
    parser.add_argument("--blocks-per-s", type=float, default=10_000.0, help="of the fleet; 312 each at most")
    parser.add_argument("--host-blocks", type=int, default=512, help="that an instance has")
    parser.add_argument("--steady-s", type=float, default=20.0, help="seconds of steady load")
    parser.add_argument("--away-s", type=float, default=20.0, help="seconds that etcd and NATS are away")
    parser.add_argument("--lease-s", type=float, default=15.0, help="KVBM_FLEET_LEASE_S")
    parser.add_argument(
        "--output", type=Path, default=Path("benchmarks/results"), help="folder of the report"
    )
    return parser.parse_args(argv)


def _phases(text: str) -> list[str]:
    phases = [part.strip() for part in text.split(",")]
    if not set(phases) <= set(PHASES):
        raise ValueError(text)
    return phases


def _counts(text: str) -> list[int]:
    counts = [int(part) for part in text.split(",")]
    if not counts or min(counts) < 1:
        raise ValueError(text)
    return counts


if __name__ == "__main__":
    sys.exit(main())
