"""Measure both figures in one run and say whether the goals are met."""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import httpx
from rich.console import Console

from benchmarks.client import EngineClient
from benchmarks.console import report_console
from benchmarks.machine import machine_facts
from benchmarks.serve import throughput, ttft
from benchmarks.serve.figures import Figure
from benchmarks.serve.report import Report
from benchmarks.server import ServerError, ServerOptions, VllmServer, exit_on_sigterm
from benchmarks.tiny_model import ensure_model

DEVICE_BLOCKS = 280  # of 32 tokens: room for two prompts of 4,000
HOST_CACHE_GB = 1.0
PAIRS, ROUNDS = 30, 40
EMPTY_CONNECTOR = (
    "--kv-transfer-config",
    '{"kv_connector":"EmptyConnector","kv_role":"kv_both",'
    '"kv_connector_module_path":"benchmarks.serve.empty_connector"}',
)
QUICK_PAIRS, QUICK_ROUNDS = 8, 4


def main() -> int:
    """Command line; 0 when everything was measured and every answer was right, goals met or not."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serve", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer pairs: a look, not a result")
    parser.add_argument("--output", type=Path, default=Path("bench-output"), help="folder for model, logs and report")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of weights and KV")
    parser.add_argument(
        "--empty-connector", action="store_true", help="the peer has a connector that does nothing: vLLM's own share"
    )
    parser.add_argument("--seed", type=int, default=1, help="of the prompts")
    arguments = parser.parse_args()
    console = report_console()
    exit_on_sigterm()
    try:
        report = run(console, arguments)
    except (ServerError, httpx.HTTPError) as error:
        console.print(f"benchmark: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        return 1
    report.show(console)
    console.print(f"report: {report.write(arguments.output)}")
    return 1 if report.complaints else 0


def run(console: Console, arguments: argparse.Namespace) -> Report:
    """Start both servers, measure, stop them."""
    machine = machine_facts()
    started_s = time.monotonic()
    with console.status("building the model") as status, ExitStack() as stack:
        model = ensure_model(arguments.output / "tiny-qwen3")
        servers = []
        for name, host_cache_gb in (("with-kvbm", HOST_CACHE_GB), ("without-kvbm", None)):
            status.update(f"starting vllm serve {name}")
            console.print(f"  … starting vllm serve {name}")
            extra = EMPTY_CONNECTOR if arguments.empty_connector and host_cache_gb is None else ()
            options = ServerOptions(model, DEVICE_BLOCKS, host_cache_gb, dtype=arguments.dtype, arguments=extra)
            servers.append(stack.enter_context(VllmServer(options, arguments.output / f"vllm-{name}.log")))
        pairs, rounds = (QUICK_PAIRS, QUICK_ROUNDS) if arguments.quick else (PAIRS, ROUNDS)
        console.print(f"  … measuring {pairs} pairs and {rounds} rounds, both servers up, one loaded at a time")
        peer = "vLLM with a connector that does nothing" if arguments.empty_connector else "vLLM without a connector"
        measuring = _measure(*servers, peer=peer, told=status.update, pairs=pairs, rounds=rounds, seed=arguments.seed)
        figures, complaints = asyncio.run(measuring)
    settings = {
        "peer": peer,
        "model": "tiny Qwen3, random weights, 4 layers",
        "dtype": arguments.dtype,
        "device cache": f"{DEVICE_BLOCKS} blocks of 32 tokens",
        "host cache": f"{HOST_CACHE_GB:g} GB",
        "ttft": f"{ttft.PROMPT_TOKENS} tokens, one request at a time",
        "throughput": f"{throughput.REQUESTS} prompts of {throughput.PROMPT_TOKENS} tokens,"
        f" {throughput.ANSWER_TOKENS} answer tokens, {throughput.CONCURRENCY} at once",
        "duration": f"{time.monotonic() - started_s:.0f} s",
    }
    return Report(figures, complaints, settings, machine)


async def _measure(
    with_kvbm: VllmServer,
    without: VllmServer,
    *,
    peer: str,
    told: Callable[[str], None],
    pairs: int,
    rounds: int,
    seed: int,
) -> tuple[list[Figure], list[str]]:
    """The figures, and what was wrong with the answers."""
    model = str(with_kvbm.options.model)
    async with (
        EngineClient(with_kvbm.base_url, model, with_kvbm.metrics_url) as ours,
        EngineClient(without.base_url, model) as plain,
    ):
        measured = await ttft.measure(ours, pairs, seed, told)
        loaded = await throughput.measure(ours, plain, rounds, seed + 1, told)
        complaints = ttft.complaints(measured) + await throughput.ask_again_alone(ours, plain, loaded)
    return [ttft.figure(measured), throughput.figure(loaded, peer)], complaints


if __name__ == "__main__":
    sys.exit(main())
