"""``kvbm plan``: how many gigabytes of host memory and disk a load needs, and what they bring."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from kvbm_core.cli.completion import by_shell
from kvbm_core.cli.console import fail, progress_bar, show_table, table_console
from kvbm_core.cli.options import Json
from kvbm_core.cli.replay import WIDE, load_trace
from kvbm_core.cli.report import BAD_USAGE_EXIT
from kvbm_core.cli.trace_plots import PlotError, draw_advice, require_plots
from kvbm_core.replay.study import facts
from kvbm_core.replay.trace import Trace, write_trace
from kvbm_core.sizing.advice import Advice, Adviser, Choice, Limits
from kvbm_core.sizing.hardware import GPUS, Hardware, Span, gpu_of, with_overrides
from kvbm_core.sizing.load import MAX_TOKENS, Load
from kvbm_core.sizing.model import KvShape, Model, SizingError, read_model

_HEADINGS = (
    "host GB",
    "disk GB",
    "disk takes",
    "found",
    "from .. to",
    "device",
    "host",
    "disk",
    "TTFT p50 s",
    "TTFT p90 s",
    "disk TB/day",
)
_POLICY = _HEADINGS.index("disk takes")
_NARROW = (0, 1, 2, 3, 8, 10)

Option = typer.Option
hardware = partial(typer.Option, rich_help_panel="Hardware")
load_option = partial(typer.Option, rich_help_panel="Load, without a trace")
limit = partial(typer.Option, rich_help_panel="Limits")

TraceFile = Annotated[
    Path | None, typer.Argument(help="As kvbm replay takes.", metavar="[TRACE]", autocompletion=by_shell)
]
ModelName = Annotated[str, Option(help="A folder with config.json, or a hub name that is in the cache here.")]
BlockTokens = Annotated[int | None, Option(min=1, help="Of the trace's blocks, if not its format's.")]
Picture = Annotated[
    Path | None, Option(help="Write a picture here, such as plan.png.", autocompletion=by_shell)
]
SavedTrace = Annotated[
    Path | None, Option(help="Write the trace that was used, for kvbm replay.", autocompletion=by_shell)
]
GpuName = Annotated[str, hardware(help=f"One of {', '.join(GPUS)}.")]
Ranks = Annotated[int, hardware(min=1, help="Tensor-parallel ranks.")]
KvDtype = Annotated[str, hardware(help="Of the KV cache: auto, fp8, bfloat16, float16, float32.")]
GpuGb = Annotated[float | None, hardware(min=0.1, help="Memory of one GPU, if not as sold.")]
GpuTflops = Annotated[float | None, hardware(min=0.01, help="Of one GPU: dense, bf16.")]
LinkSpeed = Annotated[float | None, hardware("--link-gb-per-s", min=0.01, help="From the host to one GPU.")]
DiskSpeed = Annotated[float, hardware("--disk-gb-per-s", min=0.001, help="That the disk reads.")]
MemoryShare = Annotated[float, hardware(min=0.01, max=1, help="What the engine takes of the GPUs' memory.")]
WeightsGb = Annotated[float | None, hardware(min=0, help="Of the model; unset: as its files, or estimated.")]
DeviceGb = Annotated[float | None, hardware(min=0, help="The engine's own KV cache, over all ranks.")]
Speed = Annotated[float | None, hardware("--prefill-tokens-per-s", min=1, help="As measured.")]
Users = Annotated[int, load_option(min=1, max=100_000, help="Conversations at a time.")]
Turns = Annotated[float, load_option(min=1, help="Of a conversation.")]
SystemTokens = Annotated[int, load_option(min=0, help="That begin every prompt.")]
PromptTokens = Annotated[int, load_option(min=1, help="New in each turn.")]
AnswerTokens = Annotated[int, load_option(min=1, help="Of each turn.")]
ThinkTime = Annotated[float, load_option(min=0.1, help="Seconds from an answer to the next prompt.")]
Hours = Annotated[float, load_option(min=0.05, max=24, help="How long it lasts.")]
MostHost = Annotated[float, limit(min=0, help="Gigabytes of host memory that kvbm may have.")]
MostDisk = Annotated[float, limit(min=0, help="Gigabytes of disk.")]
DriveWrites = Annotated[float, limit("--drive-writes-per-day", min=0, help="That the disk bears.")]


def plan_tiers(
    trace: TraceFile = None,
    *,
    model: ModelName = "",
    gpu: GpuName = "h100",
    tp: Ranks = 1,
    kv_dtype: KvDtype = "auto",
    gpu_gb: GpuGb = None,
    gpu_tflops: GpuTflops = None,
    link_gb_s: LinkSpeed = None,
    disk_gb_s: DiskSpeed = 5.0,
    memory_share: MemoryShare = 0.9,
    weights_gb: WeightsGb = None,
    device_cache_gb: DeviceGb = None,
    prefill_tokens_s: Speed = None,
    users: Users = 50,
    turns: Turns = 5,
    system_tokens: SystemTokens = 500,
    prompt_tokens: PromptTokens = 500,
    answer_tokens: AnswerTokens = 300,
    think_s: ThinkTime = 30,
    hours: Hours = 1,
    max_host_gb: MostHost = 1000,
    max_disk_gb: MostDisk = 8000,
    drive_writes: DriveWrites = 1,
    block_tokens: BlockTokens = None,
    plot: Picture = None,
    save_trace: SavedTrace = None,
    as_json: Json = False,
) -> None:
    """How many gigabytes of host memory and disk: what they find, how soon requests start, what the disk
    bears.

    From a model's config, the hardware, and a trace; or, in place of a trace, a few numbers about the load.
    Predicts what the leader does with tiers of many sizes, and takes the smallest that find within 2 points
    of what the largest do. Exit status 2 if something that was given cannot be used.
    """
    try:
        if plot is not None:
            require_plots()
        if not model:
            raise SizingError(
                "--model is missing: a folder with config.json, or a hub name that is in the cache"
            )
        shape = read_model(model)
        shape.check_predictable()
        most = shape.max_tokens or MAX_TOKENS
        load = Load(users, turns, system_tokens, prompt_tokens, answer_tokens, think_s, hours * 3600, most)
        used = load.trace() if trace is None else load_trace(trace, block_tokens)
        unit = with_overrides(gpu_of(gpu), memory_gb=gpu_gb, tflops=gpu_tflops, host_gb_s=link_gb_s)
        machine = Hardware(unit, tp, memory_share, disk_gb_s, weights_gb, device_cache_gb, prefill_tokens_s)
        limits = Limits(max_host_gb, max_disk_gb, drive_writes)
        report = _Report(used, shape, shape.kv(tp, kv_dtype), machine, limits)
        _say(report, as_json=as_json, plot=plot, save_trace=save_trace)
    except SizingError as error:
        fail(f"kvbm plan: {error}", BAD_USAGE_EXIT)
    except PlotError as error:
        fail(f"kvbm plan: {error}", 1)
    except OSError as error:
        fail(f"kvbm plan: {error.filename}: {error.strerror}", 1)


class _Report:
    """Advice for one load, model and machine, as it is shown."""

    def __init__(self, trace: Trace, model: Model, kv: KvShape, hardware: Hardware, limits: Limits) -> None:
        self.trace = trace
        self.model = model
        self.kv = kv
        with progress_bar() as progress:
            task = progress.add_task("the trace", total=None)
            adviser = Adviser(trace, model, kv, hardware, limits)
            self.advice = adviser.advise(lambda what: progress.update(task, description=what))

    @property
    def title(self) -> str:
        """One line."""
        advice, trace = self.advice, self.trace
        return (
            f"{self.model.name}: {self.kv.stored_bytes / 1024:,.0f} KiB of KV per token, "
            f"{advice.device_gb:.1f} GB on the device; {trace.name}: {len(trace.requests):,} requests in "
            f"{trace.seconds / 3600:.1f} h"
        )

    def plain(self) -> dict[str, Any]:
        """For JSON."""
        advice = self.advice
        return {
            "model": self.model.name,
            "kv_bytes_per_token": self.kv.stored_bytes,
            "device_cache_gb": advice.device_gb,
            "trace": facts(self.trace),
            "advice": advice.taken.plain(),
            "choices": [choice.plain() for choice in advice.choices],
            "environment": advice.environment,
            "warnings": list(advice.warnings),
            "notes": list(self.model.notes),
        }


def _say(report: _Report, *, as_json: bool, plot: Path | None, save_trace: Path | None) -> None:
    if save_trace is not None:
        write_trace(save_trace, report.trace)
    if plot is not None:
        draw_advice(report.advice, plot, report.title)
    if as_json:
        typer.echo(json.dumps(report.plain(), indent=1))
        return
    console = table_console()
    console.print(report.title, markup=False)
    _show(report.advice, console)
    for line in report.advice.environment:
        typer.echo(line)
    for line in report.advice.warnings:
        typer.echo(f"warning: {line}", err=True)
    for line in report.model.notes:
        typer.echo(f"note: {line}", err=True)


def _show(advice: Advice, console: Console) -> None:
    is_wide = console.width >= WIDE
    columns = range(len(_HEADINGS)) if is_wide else _NARROW
    caption = "→ advice. TTFT: without waiting for others; from the better to the worse machine"
    table = Table(title="share of prompt tokens found, and what it brings", caption=caption)
    for column in columns:
        table.add_column(_HEADINGS[column], justify="left" if column == _POLICY else "right")
    before = advice.choices[0]
    for choice in advice.choices:
        if bool(choice.host_gb) != bool(before.host_gb) or bool(choice.disk_gb) != bool(before.disk_gb):
            table.add_section()
        before, is_taken = choice, choice is advice.taken
        cells = _cells(choice, is_taken=is_taken)
        table.add_row(*(cells[column] for column in columns), style="bold" if is_taken else "")
    show_table(console, table)


def _cells(choice: Choice, *, is_taken: bool) -> list[str]:
    return [
        "→ " * is_taken + (f"{choice.host_gb:,.0f}" if choice.host_gb else "none"),
        f"{choice.disk_gb:,.0f}" if choice.disk_gb else "none",
        choice.policy.name if choice.disk_gb else "",
        f"{choice.rate:.1%}",
        f"{choice.rates.worse:.0%} .. {choice.rates.better:.0%}",
        f"{choice.device_rate:.1%}",
        f"{choice.host_rate:.1%}",
        f"{choice.disk_rate:.1%}",
        _seconds(choice.start.p50_s),
        _seconds(choice.start.p90_s),
        f"{choice.written_tb_per_day:,.1f}" if choice.disk_gb else "",
    ]


def _seconds(span: Span) -> str:
    return f"{span.better:.2g}-{span.worse:.2g}"
