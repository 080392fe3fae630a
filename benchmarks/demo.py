"""Show kvbm at work on a real engine: ``make demo``, or ``python -m benchmarks.demo``.

Serves a tiny model twice on loopback, first without and then with kvbm, plays the same conversations, and
compares answers and times to the first token. Exit status 0 only if every answer was the same and host memory
was hit.

With KVBM_AUDIT_RATE=1 every hit is computed again, and what is stored is compared with what comes out. Exit
status 0 then means: no block was wrong, of the host and, after a restart, of the disk.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import httpx
from rich.console import Console
from rich.status import Status

from benchmarks.console import report_console
from benchmarks.conversation import Conversations, Turn
from benchmarks.demo_report import compare, draw_plot, show
from tests.engines.client import Audits, EngineClient
from tests.engines.process import ServerError, exit_on_sigterm
from tests.engines.tiny_model import ensure_model
from tests.engines.vllm_server import ServerOptions, VllmServer, vllm_version

BLOCK_TOKENS = 32
DEVICE_TOKENS = 4096
DEVICE_BLOCKS = DEVICE_TOKENS // BLOCK_TOKENS + 1  # one is vLLM's own
HOST_CACHE_GB = 1.0
DISK_CACHE_GB = 1.0
USERS = 6
TURNS = 4
# In float32 a whole and a resumed prefill give the same tokens. In bfloat16 vLLM's own prefix cache already
# changes an answer now and then, as the rounding depends on how many tokens are computed at once: answers are
# not judged then.
DTYPE = "float32"
DTYPES = (DTYPE, "bfloat16")


class Steps:
    """Says what is being done: a live line on a terminal, one line per finished step in any case."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._started_s = time.monotonic()

    @contextmanager
    def step(self, what: str) -> Iterator[Status]:
        """One step; the status that it yields can be updated meanwhile."""
        started_s = time.monotonic()
        with self._console.status(what) as status:
            if not self._console.is_terminal:
                self._console.print(f"  … {what}")
            yield status
        self._console.print(f"  [green]✓[/green] {what} ({time.monotonic() - started_s:.0f} s)")

    @property
    def elapsed_s(self) -> float:
        """Seconds since the beginning."""
        return time.monotonic() - self._started_s


def main() -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(description="Serve a tiny model with kvbm and show what comes back.")
    parser.add_argument(
        "--output", type=Path, default=Path("demo-output"), help="folder for model, logs and plot"
    )
    parser.add_argument(
        "--dtype", choices=DTYPES, default=DTYPE, help="of the model; in bfloat16 answers may differ"
    )
    arguments = parser.parse_args()
    console = report_console()
    exit_on_sigterm()
    try:
        return run_demo(console, arguments.output, arguments.dtype)
    except ServerError as error:
        console.print(f"demo: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
    except httpx.HTTPError as error:
        console.print(f"[red]demo: the server failed ({error!r}); its log is in {arguments.output}[/red]")
    except KeyboardInterrupt:
        console.print("demo: interrupted; nothing is left running")
    return 1


def run_demo(console: Console, output: Path, dtype: str) -> int:
    """Play, compare, show; returns the exit status."""
    steps = Steps(console)
    console.print(
        f"[bold]kvbm demo[/bold]: vLLM {vllm_version()}, {USERS} users in turn, {TURNS} turns each; "
        "the device cache"
        f" holds {DEVICE_TOKENS:,} tokens, about one conversation."
    )
    with steps.step("building a tiny model with random weights"):
        model = ensure_model(output / "tiny-qwen3")
    disk = output / "disk-tier"
    shutil.rmtree(disk, ignore_errors=True)
    plain, _, _ = _serve_and_play(steps, _options(model, None, disk, dtype), output / "vllm-without-kvbm.log")
    options = _options(model, HOST_CACHE_GB, disk, dtype)
    with_kvbm, conversations, on_host = _serve_and_play(steps, options, output / "vllm-with-kvbm.log")
    restarted, on_disk = _serve_again(steps, options, output / "vllm-with-kvbm-again.log", conversations)
    shutil.rmtree(disk, ignore_errors=True)
    comparison = compare(plain, with_kvbm, restarted, BLOCK_TOKENS)
    comparison = replace(
        comparison,
        judges_answers=dtype == DTYPE,
        audits=(on_host, on_disk) if os.environ.get("KVBM_AUDIT_RATE") == "1" else (),
    )
    plot = draw_plot(comparison, output / "demo.png")
    show(console, comparison, plot, steps.elapsed_s)
    return 0 if comparison.good else 1


def _options(model: Path, host_cache_gb: float | None, disk: Path, dtype: str) -> ServerOptions:
    return ServerOptions(
        model,
        DEVICE_BLOCKS,
        host_cache_gb,
        dtype=dtype,
        max_model_len_tokens=DEVICE_TOKENS,
        block_size_tokens=BLOCK_TOKENS,
        env={"DYN_KVBM_DISK_CACHE_GB": str(DISK_CACHE_GB), "DYN_KVBM_DISK_CACHE_DIR": str(disk)},
    )


@contextmanager
def _serving(steps: Steps, options: ServerOptions, log_path: Path, starting: str) -> Iterator[VllmServer]:
    server = VllmServer(options, log_path)
    try:
        with steps.step(starting) as status:
            server.start(progress=lambda seconds, line: status.update(f"{starting}: {seconds:.0f} s"))
        yield server
    finally:
        server.stop()


def _serve_and_play(
    steps: Steps, options: ServerOptions, log_path: Path
) -> tuple[list[Turn], Conversations, Audits]:
    """All conversations; a server with kvbm is killed when they are over."""
    has_kvbm = options.host_cache_gb is not None
    name = "with kvbm" if has_kvbm else "without kvbm"
    with _serving(steps, options, log_path, f"starting vllm serve {name} on loopback") as server:
        with steps.step(f"playing {USERS} conversations {name}") as status:
            played = asyncio.run(_play(server, status, ask_again=has_kvbm))
        if has_kvbm:
            server.kill()
        return played


async def _play(
    server: VllmServer, status: Status, *, ask_again: bool
) -> tuple[list[Turn], Conversations, Audits]:
    metrics_url = server.metrics_url if server.options.host_cache_gb is not None else None
    async with EngineClient(server.base_url, str(server.options.model), metrics_url) as client:
        conversations = Conversations(client, USERS, TURNS)
        played = await conversations.play(
            ask_again=ask_again, told=lambda done, total: status.update(f"turn {done} of {total}")
        )
        return played, conversations, await client.audits()


def _serve_again(
    steps: Steps, options: ServerOptions, log_path: Path, conversations: Conversations
) -> tuple[list[Turn], Audits]:
    async def ask(server: VllmServer) -> tuple[list[Turn], Audits]:
        async with EngineClient(server.base_url, str(server.options.model), server.metrics_url) as client:
            return await conversations.last_turns(client), await client.audits()

    again = "starting vllm serve with kvbm again, after kill -9"
    asking = f"asking for the last turn of {USERS} conversations again"
    with _serving(steps, options, log_path, again) as server, steps.step(asking):
        return asyncio.run(ask(server))


if __name__ == "__main__":
    sys.exit(main())
