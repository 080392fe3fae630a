"""Which admission policy a trace speaks for: ``python -m benchmarks.trace TRACE.jsonl [--device-blocks
N]``.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.console import report_console
from benchmarks.suite import WrongAnswer
from benchmarks.trace import report
from benchmarks.trace.requests import TraceError
from benchmarks.trace.study import Size, study

DEVICE_BLOCKS = 1000


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; 0 when all counts added up, 1 when not, 2 when the trace cannot be read."""
    arguments = _parse(argv)
    console = report_console()
    try:
        with console.status("replaying") as status:
            found = study(
                arguments.trace,
                arguments.device_blocks,
                arguments.host_blocks,
                arguments.disk_blocks,
                seed=arguments.seed,
                processes=arguments.processes,
                told=status.update,
            )
    except WrongAnswer as wrong:
        console.print(f"✗ {wrong}", style="red", markup=False, highlight=False)
        return 1
    except (OSError, TraceError) as problem:
        console.print(f"{arguments.trace.name}: {problem}", style="red", markup=False, highlight=False)
        return 2
    settings = {
        "trace": arguments.trace.name,
        "device_blocks": arguments.device_blocks,
        "seed": arguments.seed,
    }
    report.show(found, console)
    console.print(f"report: {report.write(found, arguments.output, settings)}")
    return 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.trace", description=__doc__)
    parser.add_argument("trace", type=Path, help="requests in Mooncake's format, one JSON object a line")
    parser.add_argument("--device-blocks", type=_count, default=DEVICE_BLOCKS, help="of 512 tokens")
    sizes = "sizes with commas between: 4000, 4x (times {}), unlimited; {}"
    hosts, disks = "1x,4x", "4x,16x,unlimited"
    parser.add_argument("--host-blocks", type=_sizes, default=hosts, help=sizes.format("the device", hosts))
    parser.add_argument("--disk-blocks", type=_sizes, default=disks, help=sizes.format("the host", disks))
    parser.add_argument(
        "--output", type=Path, default=Path("benchmarks/results"), help="folder of the report"
    )
    parser.add_argument(
        "--seed", type=int, default=1, help="of the blocks' keys; counts must not depend on it"
    )
    cores = len(os.sched_getaffinity(0))
    parser.add_argument(
        "--processes", type=_count, default=cores, help="replays at a time; all cores by default"
    )
    return parser.parse_args(argv)


def _count(text: str) -> int:
    count = int(text)
    if count < 1:
        raise ValueError(text)
    return count


def _sizes(text: str) -> list[Size]:
    return [Size.parse(part.strip()) for part in text.split(",")]


if __name__ == "__main__":
    sys.exit(main())
