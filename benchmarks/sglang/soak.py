"""kvbm under SGLang's HiCache for a long time: ``python -m benchmarks.sglang.soak [--minutes 15] [--clients
8]``.

What happens is in tests.engines.sglang.soak. Exit status 0 only if every answer was right, nothing failed,
and memory, file handles and threads of the scheduler did not grow.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import httpx
from rich.console import Console
from rich.table import Table

from benchmarks.console import report_console
from tests.engines.process import ServerError, exit_on_sigterm
from tests.engines.sglang.environment import build_tiny_model, is_installed
from tests.engines.sglang.soak import BUSY, RULES, Options, Soak, growth, soak_model
from tests.engines.sglang.soak_prompts import ROUNDING

OUTPUT = Path("benchmarks/results/sglang-soak")
MAX_SHOWN_COMPLAINTS = 20


def show(console: Console, soak: Soak) -> None:
    """The table, then every complaint."""
    tally, rounds = soak.tally, soak.rounds
    befores = [each.before for each in rounds]
    busy = sum(each.failures.get(kind, 0) for each in befores for kind in BUSY)
    hits = tally.cached_tokens / max(1, tally.prompt_tokens)
    table = Table("kvbm under SGLang HiCache", "", "must be")
    table.add_row("rounds: 2 flushes, clear, detach, attach", f"{len(rounds)}", "")
    table.add_row("answers", f"{tally.answers:,}", "equal")
    table.add_row("  with other last bits of log-probabilities, in batches", f"{tally.other_last_bits:,}", "")
    table.add_row("    by at most", f"{tally.largest_difference:.3f}", f"{ROUNDING:g}")
    table.add_row("  with the runner-up of a near tie, in batches", f"{tally.near_ties:,}", "")
    table.add_row("  prompt tokens from any cache", f"{hits:.0%}", "")
    table.add_row("pages written to kvbm's file", f"{sum(each.written_pages for each in befores):,}", "")
    capacity = max((each.capacity_pages for each in befores), default=0)
    table.add_row("  its capacity", f"{capacity:,}", "less than a round's")
    table.add_row("pages read from it", f"{sum(each.read_pages for each in befores):,}", "> 0")
    table.add_row("pages refused, as no slot or thread was free", f"{busy:,}", "")
    for name, rule in RULES.items():
        limit = f"{rule.times - 1:+.0%}" if rule.times > 1 else f"+{rule.plus:g}"
        verdict = f"at most {limit}, last quarter over second"
        table.add_row(rule.name, growth(rule, soak.series(name)), verdict)
    complaints = soak.complaints()
    table.add_row("complaints", f"[{'red' if complaints else 'green'}]{len(complaints)}[/]", "0")
    console.print(table)
    for complaint in complaints[:MAX_SHOWN_COMPLAINTS]:
        console.print(f"✗ {complaint}", style="red", markup=False, highlight=False)


def main() -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        description="kvbm under a real SGLang server for a long time, on the CPU."
    )
    parser.add_argument("--minutes", type=float, default=15.0, help="how long clients ask")
    parser.add_argument("--clients", type=int, default=8, help="how many ask at once")
    parser.add_argument("--seed", type=int, default=0, help="of the prompts and of their order")
    parser.add_argument(
        "--detached", action="store_true", help="without kvbm: what SGLang's memory does by itself"
    )
    parser.add_argument("--output", type=Path, default=OUTPUT, help="folder for model, log and samples")
    arguments = parser.parse_args()
    console = report_console()
    exit_on_sigterm()
    if not is_installed():
        console.print("soak: the environment with SGLang is missing: make setup-sglang", style="red")
        return 1
    asked = {"seed": arguments.seed, "is_detached": arguments.detached}
    options = Options(arguments.output, arguments.minutes, arguments.clients, **asked)
    try:
        model = build_tiny_model(options.output.absolute() / "tiny-qwen3")
        with console.status("starting") as status:

            def told(line: str) -> None:
                status.update(line)
                if line.startswith("round"):
                    console.print(f"  {line}", highlight=False, soft_wrap=True)

            soak = soak_model(model, options, told)
    except (ServerError, httpx.HTTPError) as error:
        console.print(f"soak: {error}; see {options.output}", style="red", markup=False, highlight=False)
        return 1
    except KeyboardInterrupt:
        console.print("soak: interrupted; nothing is left running")
        return 1
    show(console, soak)
    return 1 if soak.complaints() else 0


if __name__ == "__main__":
    sys.exit(main())
