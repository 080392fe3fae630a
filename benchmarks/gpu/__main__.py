"""Builds, checks and measures on a GPU: ``python -m benchmarks.gpu [--dry-run] [--output DIR] [--minutes
10]``.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import cast

from benchmarks.gpu import report
from benchmarks.gpu.facts import gpu_machine_facts
from benchmarks.gpu.rows import Goal, Result, Row
from benchmarks.gpu.stages import Options, Stage, now_s, result_path, run_apart, run_here, told_by

# Module and class of each stage, in order: what a stage needs (torch, an HTTP client) is imported when it is
# due, so that one whose needs are not met is a failed row.
STAGES = {
    "checks": ("checks", "ChecksStage"),
    "copies": ("copies", "CopiesStage"),
    "pinned": ("pinned", "PinnedStage"),
    "ways": ("ways", "WaysStage"),
    "layers": ("layers", "LayersStage"),
    "disk": ("disk", "DiskStage"),
    "broadcast": ("broadcast", "BroadcastStage"),
    "serving": ("serving", "ServingStage"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; 0 when every row came out, goals met or not."""
    arguments = _parse(argv)
    output = arguments.output or Path("benchmarks/results", "gpu-dry-run" if arguments.dry_run else "gpu")
    options = Options(
        output, arguments.dry_run, arguments.minutes, arguments.seed, tuple(arguments.vllm_wheel)
    )
    output.mkdir(parents=True, exist_ok=True)
    if arguments.stage:
        with result_path(options, arguments.stage).open("w", encoding="utf-8") as sink:
            return 0 if run_here(load_stage(arguments.stage), options, sink) else 1
    return run_all(options, arguments.only)


def run_all(options: Options, only: Sequence[str]) -> int:
    """Runs the stages one after the other, tells what comes out, writes the report after each."""
    facts = gpu_machine_facts()
    started_s = now_s()
    results: dict[str, list[Result]] = {}
    last = ""
    for name in only or STAGES:
        print(f"  … {name}", flush=True)
        results[name] = _run_stage(name, options, 60 * options.minutes - (now_s() - started_s))
        for row in results[name]:
            if isinstance(row, Row):
                print("    " + "  ".join(row.cells(is_dry=options.is_dry)), flush=True)
        last = report.write(options.output, facts, results, now_s() - started_s, is_dry=options.is_dry)
    print(f"report: {options.output / 'gpu.md'}\n{last}")
    rows = [row for found in results.values() for row in found if isinstance(row, Row)]
    return 1 if any(row.verdict.startswith("failed") for row in rows) else 0


def load_stage(name: str) -> Stage:
    """Imports it. ImportError if this environment lacks something that it needs."""
    module, class_name = STAGES[name]
    return cast(Stage, getattr(importlib.import_module(f"benchmarks.gpu.{module}"), class_name)())


def _run_stage(name: str, options: Options, left_s: float) -> list[Result]:
    """A stage gets its share of the run, the last one all that is left."""
    try:
        stage = load_stage(name)
    except ImportError as error:
        return [Row(Goal(f"stage {name}", ""), failure=told_by(error))]
    share_s = left_s if name == list(STAGES)[-1] else min(left_s, 60 * options.minutes * stage.share)
    arguments = [
        "--output",
        str(options.output),
        "--minutes",
        str(options.minutes),
        "--seed",
        str(options.seed),
    ]
    arguments += ["--dry-run"] if options.is_dry else []
    arguments += [f"--vllm-wheel={wheel}" for wheel in options.wheels]
    return run_apart(stage, options, arguments, timeout_s=max(share_s, 1.0))


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument(
        "--dry-run", action="store_true", help="try every stage on the CPU; its figures mean nothing"
    )
    parser.add_argument(
        "--output", type=Path, help="folder of reports and logs, benchmarks/results/gpu by default"
    )
    parser.add_argument("--minutes", type=float, default=10.0, help="for everything together")
    parser.add_argument("--seed", type=int, default=1, help="of blocks, slots and prompts")
    parser.add_argument(
        "--only", type=_stages, default=(), help=f"some of {', '.join(STAGES)}, with commas between"
    )
    parser.add_argument(
        "--vllm-wheel",
        type=Path,
        action="append",
        default=[],
        help="a wheel to install for the serving stage; repeatable",
    )
    parser.add_argument(
        "--stage", choices=STAGES, help=argparse.SUPPRESS
    )  # what a stage's own process is told
    return parser.parse_args(argv)


def _stages(text: str) -> list[str]:
    wanted = [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in wanted if name not in STAGES]
    if unknown:
        raise argparse.ArgumentTypeError(f"no stage {', '.join(unknown)}; there are {', '.join(STAGES)}")
    return [name for name in STAGES if name in wanted]


if __name__ == "__main__":
    sys.exit(main())
