"""LMBenchmark's synthetic conversations against an engine with kvbm and one without:
``python -m benchmarks.lmbenchmark CHECKOUT``.

Serves a model twice by itself, or takes two servers that run already (--ours, --baseline).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from benchmarks.console import report_console
from benchmarks.lmbenchmark.checkout import FULL, TINY, Checkout, Workload
from benchmarks.lmbenchmark.report import BASELINE, OURS, Result, show, write
from benchmarks.machine import machine_facts
from benchmarks.suite import CannotRun
from tests.engines.process import ServerError, exit_on_sigterm
from tests.engines.tiny_model import ensure_model
from tests.engines.vllm_server import ServerOptions, VllmServer

USERS_APART = 100_000
"""Each run has users of its own."""


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; 0 when all was measured, 1 when it cannot run."""
    arguments = _parse(argv)
    console = report_console()
    exit_on_sigterm()
    try:
        checkout = Checkout(arguments.checkout, arguments.python)
        arguments.output.mkdir(parents=True, exist_ok=True)
        results = [
            one for repeat in range(arguments.repeats) for one in _round(console, checkout, arguments, repeat)
        ]
    except (CannotRun, ServerError) as error:
        console.print(f"lmbenchmark: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        return 1
    show(console, results)
    facts = {**machine_facts(), "model": arguments.model or "tiny", "sizes": arguments.sizes}
    for path in write(results, arguments.output, facts):
        console.print(f"report: {path}", highlight=False, soft_wrap=True)
    return 0


def _round(
    console: Console, checkout: Checkout, arguments: argparse.Namespace, repeat: int
) -> Iterator[Result]:
    """Every workload on both servers; which one is first changes from round to round."""
    servers = (BASELINE, OURS) if repeat % 2 == 0 else (OURS, BASELINE)
    for name in servers:
        with _server(arguments, name, repeat) as (url, model):
            for number, workload in enumerate(_workloads(arguments)):
                words = f"{workload.name} input, {workload.qps:g}/s, {name}, round {repeat + 1}"
                console.print(f"  … {words}", markup=False, highlight=False)
                output = arguments.output / f"{name.replace(' ', '-')}-{number}-{repeat}.csv"
                first_user = USERS_APART * (repeat * 100 + number) + 1
                summary = checkout.run(workload, url, model, output, first_user=first_user)
                yield Result(workload, name, repeat, summary)


@contextmanager
def _server(arguments: argparse.Namespace, name: str, repeat: int) -> Iterator[tuple[str, str]]:
    """URL and model of a server with kvbm, or of one without."""
    given = arguments.ours if name == OURS else arguments.baseline
    with ExitStack() as running:
        if given:
            yield given, arguments.model
            return
        model = arguments.model or str(ensure_model(arguments.output / "tiny-qwen3"))
        options = ServerOptions(
            model,
            arguments.device_blocks,
            arguments.host_gb if name == OURS else None,
            max_model_len_tokens=arguments.max_tokens,
        )
        log = arguments.output / f"vllm-{name.replace(' ', '-')}-{repeat}.log"
        yield running.enter_context(VllmServer(options, log)).base_url, model


def _workloads(arguments: argparse.Namespace) -> list[Workload]:
    chosen = [one for one in (FULL if arguments.sizes == "full" else TINY) if one.name in arguments.only]
    return [
        replace(one, qps=qps, duration_s=arguments.duration_s or one.duration_s)
        for one in chosen
        for qps in arguments.qps or [one.qps]
    ]


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.lmbenchmark", description=__doc__)
    parser.add_argument("checkout", type=Path, help="a checkout of LMBenchmark")
    parser.add_argument("--python", default=sys.executable, help="one that has its requirements")
    parser.add_argument(
        "--only", type=_names, default=["long", "short"], help="long, short, or both with a comma between"
    )
    parser.add_argument("--qps", type=float, nargs="+", help="requests per second, one run for each")
    parser.add_argument(
        "--sizes",
        choices=("full", "tiny"),
        help="full: LMBenchmark's own; tiny: for the tiny model, and its default",
    )
    parser.add_argument("--duration-s", type=int, help="of each run, without its warm-up")
    parser.add_argument("--repeats", type=int, default=1, help="rounds of both servers; medians are shown")
    parser.add_argument("--model", default="", help="a name or folder; by default a tiny one is made")
    parser.add_argument("--ours", default="", help="URL of a running server with kvbm; needs --model")
    parser.add_argument("--baseline", default="", help="URL of a running server without; needs --model")
    parser.add_argument(
        "--device-blocks", type=int, default=129, help="of 32 tokens, of the servers begun here"
    )
    parser.add_argument(
        "--max-tokens", type=int, default=4096, help="of a request, to the servers begun here"
    )
    parser.add_argument(
        "--host-gb", type=float, default=1.0, help="kvbm's host tier, of the server begun here"
    )
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/lmbenchmark"), help="folder")
    arguments = parser.parse_args(argv)
    if (arguments.ours or arguments.baseline) and not arguments.model:
        parser.error("--ours and --baseline need --model, the name by which the servers know it")
    if arguments.repeats < 1:
        parser.error("--repeats is at least 1")
    arguments.sizes = arguments.sizes or ("full" if arguments.model else "tiny")
    return arguments


def _names(text: str) -> list[str]:
    names = text.split(",")
    if not set(names) <= {"long", "short"}:
        raise argparse.ArgumentTypeError("long, short, or long,short")
    return names


if __name__ == "__main__":
    sys.exit(main())
