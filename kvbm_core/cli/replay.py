"""``kvbm replay``: what a trace would find in tiers of several sizes, served by the real leader."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import MofNCompleteColumn
from rich.table import Table

from kvbm_core.cli.completion import by_shell
from kvbm_core.cli.console import fail, progress_bar, table_console
from kvbm_core.cli.report import BAD_USAGE_EXIT
from kvbm_core.cli.trace_plots import PlotError, draw_study, label, require_plots
from kvbm_core.errors import ConfigError, IntegrityError
from kvbm_core.policy.named import LRU, make_policy
from kvbm_core.replay.machine import POLICIES, Policy
from kvbm_core.replay.study import Case, Row, Size, Study, cases_of, study
from kvbm_core.replay.trace import Trace, TraceError, read_trace
from kvbm_core.sizing.model import SizingError, read_model

WIDE = 125
"""Characters from which on all columns are shown."""
_HEADINGS = (
    "host",
    "disk",
    "policy",
    "device",
    "host",
    "disk",
    "any tier",
    "of bound",
    "written",
    "written / read",
)
_NARROW = (0, 1, 2, 6, 8)
_FIRST_NUMBER = 3
_NO_DISK = "none"


def replay_trace(
    trace: Annotated[
        Path,
        typer.Argument(
            help="A trace, or a folder of recorded ones.", metavar="TRACE", autocompletion=by_shell
        ),
    ],
    *,
    device: Annotated[str, typer.Option(help="The engine's own cache: one size.")] = "512000t",
    host: Annotated[str, typer.Option(help="Host tiers, with commas between them.")] = "1x,4x",
    disk: Annotated[str, typer.Option(help="Disk tiers; none: without one.")] = "none,4x,16x",
    policy: Annotated[str, typer.Option(help="What the disk takes in: filter, all, or both.")] = "filter,all",
    eviction: Annotated[str, typer.Option(help="Which blocks go: see KVBM_EVICTION_POLICY.")] = LRU,
    model: Annotated[str, typer.Option(help="For sizes in GB: a folder, or a name of the hub.")] = "",
    tp: Annotated[int, typer.Option(min=1, help="Tensor-parallel ranks, for sizes in GB.")] = 1,
    kv_dtype: Annotated[str, typer.Option(help="Of the KV cache, for sizes in GB.")] = "auto",
    block_tokens: Annotated[
        int | None, typer.Option(min=1, help="Of the trace's blocks, if not its format's.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Write a picture here, such as replay.png.", autocompletion=by_shell)
    ] = None,
    processes: Annotated[int | None, typer.Option(min=1, help="Replays at a time; unset: all cores.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="All counts as JSON, for programs.")] = False,
) -> None:
    """A request trace through the real leader and its tiers, without an engine.

    TRACE: Mooncake's format, Bailian's (Qwen's), or a recording (DYN_KVBM_ENABLE_RECORD). Sizes: 80GB (with
    --model), 4x (times the tier above), 500000t (tokens), 4000 (the trace's blocks), unlimited. No bytes move
    and every transfer ends at once. Exit status 2 if the trace or a size cannot be used.
    """
    try:
        if plot is not None:
            require_plots()
    except PlotError as error:
        fail(f"kvbm replay: {error}", 1)
    loaded = load_trace(trace, block_tokens)
    try:
        disks = [None if text == _NO_DISK else Size.parse(text) for text in _split(disk)]
        sizes = (Size.parse(device), [Size.parse(text) for text in _split(host)], disks)
        block_bytes = None
        if model:
            shape = read_model(model)
            shape.check_predictable()
            block_bytes = shape.kv(tp, kv_dtype).stored_bytes * loaded.block_tokens
        make_policy(eviction, "--eviction")
        policies = [one._replace(evicting=partial(make_policy, eviction)) for one in _policies(policy)]
        cases = cases_of(loaded, policies, sizes, block_bytes=block_bytes)
    except (ValueError, ConfigError, SizingError) as error:
        fail(f"kvbm replay: {str(error).removeprefix('kvbm: ')}", BAD_USAGE_EXIT)
    found = run_cases(loaded, cases, processes)
    if as_json:
        typer.echo(json.dumps(as_plain(found), indent=1))
    else:
        show(found, table_console())
    if plot is not None:
        try:
            draw_study(found, plot)
        except PlotError as error:
            fail(f"kvbm replay: {error}", 1)


def load_trace(path: Path, block_tokens: int | None) -> Trace:
    """The trace at ``path``; ends the command with one line if there is none."""
    try:
        return read_trace(path, block_tokens)
    except TraceError as error:
        fail(str(error), BAD_USAGE_EXIT)
    except OSError as error:
        fail(f"{path}: {error.strerror}", BAD_USAGE_EXIT)


def _split(text: str) -> list[str]:
    return [part.strip() for part in text.split(",")]


def _policies(text: str) -> list[Policy]:
    by_name = {policy.name: policy for policy in POLICIES}
    names = _split(text)
    unknown = [name for name in names if name not in by_name]
    if unknown:
        raise ValueError(f"--policy {unknown[0]}: one of {', '.join(by_name)}")
    return [by_name[name] for name in names]


def run_cases(trace: Trace, cases: Sequence[Case], processes: int | None) -> Study:
    """All of ``cases``, with a bar. Ends the command if counts do not add up: that is a bug."""
    processes = processes or len(os.sched_getaffinity(0))
    with progress_bar(MofNCompleteColumn()) as progress:
        task = progress.add_task("replays", total=len(cases) + 1)
        try:
            return study(
                trace, cases, processes=processes, told=lambda done: progress.update(task, completed=done)
            )
        except IntegrityError as wrong:
            fail(f"the counts do not add up, which is a bug in kvbm: {wrong}", 1)


def show(found: Study, console: Console) -> None:
    """Prints a row per replay; rates are shares of all prompt tokens."""
    columns = range(len(_HEADINGS)) if console.width >= WIDE else _NARROW
    caption = "" if len(columns) == len(_HEADINGS) else "a wider terminal, or --json, shows all tiers"
    if any(row.policy.is_candidate for row in found.rows):
        caption = f"* candidate, not in the product. {caption}".strip()
    table = Table(title="share of prompt tokens found, and blocks written to disk", caption=caption or None)
    for column in columns:
        justify: Any = "right" if column >= _FIRST_NUMBER else "left"
        table.add_column(_HEADINGS[column], justify=justify, overflow="fold")
    before = None
    for row in found.rows:
        if (row.host, row.disk) != before:
            table.add_section()
        before = (row.host, row.disk)
        cells = _cells(row, found.bound)
        table.add_row(*(cells[column] for column in columns))
    table.add_section()
    cells = ["all that there is", "", "", *_cells(found.bound, found.bound)[_FIRST_NUMBER:-2], "", ""]
    table.add_row(*(cells[column] for column in columns))
    console.print(table)


def _cells(row: Row, bound: Row) -> list[str]:
    tally, share = row.tally, row.share
    ratio = tally.writes_per_read
    return [
        _size(row.host, row.sizes.host_blocks),
        _NO_DISK if row.disk is None else _size(row.disk, row.sizes.disk_blocks),
        "" if row.disk is None else label(row),
        *(f"{share(part):.1%}" for part in (tally.device_tokens, tally.host_tokens, tally.disk_tokens)),
        f"{tally.hit_rate:.1%}",
        f"{tally.hit_tokens / max(1, bound.tally.hit_tokens):.0%}",
        "" if row.disk is None else f"{tally.written_blocks:,}",
        "" if row.disk is None else "none read" if ratio is None else f"{ratio:.2f}",
    ]


def _size(size: Size, blocks: int) -> str:
    return str(size) if size in (Size(), Size(blocks=blocks)) else f"{size}: {blocks:,}"


def as_plain(found: Study) -> dict[str, Any]:
    """For JSON."""
    return {
        "trace": found.trace,
        "bound": found.bound.plain(),
        "rows": [row.plain() for row in found.rows],
    }
