"""All measurements in one run: ``python -m benchmarks [--only leader,transfer]``; `make bench` calls this."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.console import report_console
from benchmarks.parts import PARTS
from benchmarks.report import Report
from benchmarks.suite import Effort, Options, Part, run_part
from tests.engines.process import exit_on_sigterm


def main(argv: Sequence[str] | None = None, *, program: str = "python -m benchmarks", only: str = "") -> int:
    """Command line; 0 when everything was measured and every answer was right, goals met or not."""
    arguments = _parse(argv, program, only)
    console = report_console()
    exit_on_sigterm()
    options = Options(
        arguments.seed, arguments.effort, arguments.output, arguments.dtype, arguments.empty_connector
    )
    report = Report(arguments.output, [part.name for part in PARTS])
    for part in arguments.only:
        console.print(f"  … {part.name}: {part.help}", markup=False, highlight=False)
        with console.status(part.name) as status:
            report.add(run_part(part, replace(options, told=status.update)))
    report.show(console)
    console.print(f"report: {arguments.output / 'latest.md'}")
    return 1 if report.complaints else 0


def _parse(argv: Sequence[str] | None, program: str, only: str) -> argparse.Namespace:
    listed = "; ".join(f"{part.name}: {part.help}" for part in PARTS)
    parser = argparse.ArgumentParser(prog=program, description=__doc__, epilog=listed)
    parser.add_argument(
        "--only", type=_parts, default=only, help="names of parts with commas between; all by default"
    )
    length = parser.add_mutually_exclusive_group()
    length.add_argument(
        "--quick", dest="effort", action="store_const", const=Effort.QUICK, help="a look, not a result"
    )
    length.add_argument("--full", dest="effort", action="store_const", const=Effort.FULL, help="more rounds")
    parser.add_argument(
        "--output", type=Path, default=Path("benchmarks/results"), help="folder of reports and logs"
    )
    parser.add_argument("--seed", type=int, default=1, help="of keys, prompts and block numbers")
    parser.add_argument(
        "--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="serve: of weights and KV"
    )
    parser.add_argument(
        "--empty-connector", action="store_true", help="serve: the peer has a connector that does nothing"
    )
    parser.set_defaults(effort=Effort.NORMAL)
    return parser.parse_args(argv)


def _parts(text: str) -> list[Part]:
    wanted = [name.strip() for name in text.split(",") if name.strip()]
    known = {part.name: part for part in PARTS}
    unknown = [name for name in wanted if name not in known]
    if unknown:
        raise argparse.ArgumentTypeError(f"no part {', '.join(unknown)}; there are {', '.join(known)}")
    return [part for part in PARTS if not wanted or part.name in wanted]


if __name__ == "__main__":
    sys.exit(main())
