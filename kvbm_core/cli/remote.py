"""``kvbm remote``: what is in a shared directory, whether it is sound, and how to make room by hand."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import DownloadColumn, MofNCompleteColumn, TimeRemainingColumn, TransferSpeedColumn

from kvbm_core.cli.console import fail, progress_bar, table_console
from kvbm_core.cli.remote_report import (
    as_json,
    namespaces_table,
    notes,
    shards_table,
    strange_note,
    unreadable_notes,
    uses_table,
)
from kvbm_core.cli.report import BAD_USAGE_EXIT, DAMAGED_EXIT, damage_lines, shown, verdict
from kvbm_core.cli.status import format_bytes
from kvbm_core.config.remote_url import read_remote_url, remote_directory
from kvbm_core.storage.directory.inspect import (
    Checked,
    Model,
    Shard,
    count,
    files_in,
    look_at,
    remove_namespace,
    shards_in,
    verify,
)
from kvbm_core.storage.directory.names import TOP

FANS = 4096

remote_app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="markdown",
    help="""
Look into a directory that engines share, named as they name it: `file:///mnt/kv`.

1. `kvbm remote ls URL` says how much there is of each model.

2. `kvbm remote inspect URL` says it of each rank, and how long ago it was used.

3. `kvbm remote verify URL` reads everything and checks it.

4. `kvbm remote rm URL MODEL` removes the blocks of a model.
""",
)

Url = Annotated[str, typer.Argument(metavar="URL", help="A directory, such as file:///mnt/kv.")]
AsJson = Annotated[bool, typer.Option("--json", help="The same as JSON, for programs.")]


@remote_app.command("ls")
def ls_command(url: Url, as_json_text: AsJson = False) -> None:
    """The models of which there are blocks: how many, how large, when they were last used.

    Works beside running engines and changes nothing.

    Exit status: 0; 1 if a part cannot be read; 2 if the directory is not there or cannot be read.
    """
    directory, shards, _ = _counted(url, "ls", as_json_text=as_json_text)
    if full := [shard for shard in shards if shard.num_bytes]:
        table_console().print(namespaces_table(directory, full, time.time_ns()))
    elif not any(unreadable_notes(shards)):
        _say_nothing_there(directory)
    _end(shards)


@remote_app.command("inspect")
def inspect_command(url: Url, as_json_text: AsJson = False) -> None:
    """The same of each rank's folder, what is half written or strange there, how hot it is and who evicts.

    A block's time is that of its last use, to within an hour.

    Exit status: 0; 1 if a part cannot be read; 2 if the directory is not there or cannot be read.
    """
    directory, shards, models = _counted(url, "inspect", as_json_text=as_json_text)
    console = table_console()
    console.print(shards_table(directory, shards, time.time_ns()))
    if any(shard.contents.used for shard in shards):
        console.print(uses_table(shards))
    for line in notes(shards, models):
        typer.echo(line)
    _end(shards)


@remote_app.command("verify")
def verify_command(
    url: Url,
    remove_damaged: Annotated[
        bool, typer.Option("--remove-damaged", help="Remove what is damaged; engines may be running.")
    ] = False,
) -> None:
    """Reads every block and checks its header and its bytes, as engines do when they load one.

    Damage costs hits, never wrong answers.

    Exit status: 0 if all are good; 1 if any is damaged (removed by this run or not) or cannot be read; 2 if
    the directory is not there or cannot be read.
    """
    directory, shards, _ = _counted(url, "verify")
    good, bad = 0, list[Checked]()
    with progress_bar(DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn()) as progress:
        bar = progress.add_task("blocks", total=sum(shard.num_bytes for shard in shards))
        for shard in shards:
            for checked in verify(list(files_in(directory, shard.namespace, shard.name))):
                progress.advance(bar, checked.num_bytes)
                if checked.what:
                    bad.append(checked)
                else:
                    good += not checked.is_gone
    unreadable = sum(checked.is_unreadable for checked in bad)
    lines = (
        f"{'unreadable' if checked.is_unreadable else 'damaged'}: "
        f"{shown(checked.path.relative_to(directory))}: {checked.what}"
        for checked in bad
    )
    for line in damage_lines(lines, len(bad)):
        typer.echo(line)
    closed = list(unreadable_notes(shards))
    what = "blocks that can be read" if closed else "blocks"
    typer.echo(verdict(what, good, len(bad) - unreadable, unreadable))
    for line in closed:
        typer.echo(line)
    if remove_damaged:
        typer.echo(f"{_removed(bad):,} damaged blocks removed")
    raise typer.Exit(DAMAGED_EXIT if bad or closed else 0)


@remote_app.command("rm")
def rm_command(
    url: Url,
    models: Annotated[
        list[str] | None, typer.Argument(metavar="MODEL...", help="Folders as `ls` shows them.")
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="The blocks of all models.")] = False,
    is_sure: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Removes the blocks of one or more models, or of all. Engines may be running: they miss them, no more.

    What has no name of kvbm's, or is of another version of it, stays.

    Exit status: 0; 1 if something could not be removed, or the answer was no; 2 for a model that is not
    there, or if the directory cannot be read.
    """
    directory = _directory(url, "rm")
    there = sorted({namespace for namespace, _ in _shards(directory, "rm")})
    chosen = there if everything else list(dict.fromkeys(models or ()))
    if bool(models) == everything:
        fail("kvbm remote rm: name the models to remove, or give --all", BAD_USAGE_EXIT)
    if missing := [name for name in chosen if name not in there]:
        fail(
            f"kvbm remote rm: no {missing[0]} below {directory}: `kvbm remote ls` shows what there is",
            BAD_USAGE_EXIT,
        )
    if not chosen:
        _say_nothing_there(directory)
    elif not is_sure:
        typer.confirm(f"Remove all blocks of {', '.join(chosen)} below {directory}?", abort=True)
    for namespace in chosen:
        with progress_bar(MofNCompleteColumn()) as progress:
            bar = progress.add_task("files", total=None)
            try:
                removed = remove_namespace(directory, namespace, partial(progress.advance, bar))
            except OSError as error:
                fail(f"kvbm remote rm: {error.filename}: {error.strerror}", DAMAGED_EXIT)
        typer.echo(f"{namespace}: {removed.files:,} blocks removed, {format_bytes(removed.num_bytes)}")
        if removed.strange:
            typer.echo(strange_note(namespace, removed.strange))


def _directory(url: str, command: str) -> Path:
    try:
        return remote_directory(read_remote_url(url) or "")
    except ValueError as error:
        fail(f"kvbm remote {command}: {url}: {error}", BAD_USAGE_EXIT)


def _shards(directory: Path, command: str) -> list[tuple[str, str]]:
    try:
        return list(shards_in(directory))
    except OSError as error:
        remedy = "; run this as the engine's user" if isinstance(error, PermissionError) else ""
        fail(f"kvbm remote {command}: {error.filename}: {error.strerror}{remedy}", BAD_USAGE_EXIT)


def _models(directory: Path, command: str, there: Sequence[tuple[str, str]]) -> dict[str, Model]:
    try:
        return {namespace: look_at(directory, namespace) for namespace, _ in there}
    except OSError as error:
        fail(f"kvbm remote {command}: {error.filename}: {error.strerror}", BAD_USAGE_EXIT)


def _say_nothing_there(directory: Path) -> None:
    typer.echo(f"no blocks below {directory} ({TOP}/)")


def _end(shards: Sequence[Shard]) -> None:
    """Ends a command that has only looked, by whether it could look everywhere."""
    lines = list(unreadable_notes(shards))
    for line in lines:
        typer.echo(line, err=True)
    raise typer.Exit(DAMAGED_EXIT if lines else 0)


def _counted(
    url: str, command: str, *, as_json_text: bool = False
) -> tuple[Path, list[Shard], dict[str, Model]]:
    """The directory, all ranks' folders in it, counted with a bar, and what else is in each model's.

    Ends the command here when it has said all: with ``as_json_text``, or that there is nothing.
    """
    directory = _directory(url, command)
    there = _shards(directory, command)
    now_ns = time.time_ns()
    counted = []
    with progress_bar(MofNCompleteColumn(), TimeRemainingColumn()) as progress:
        bar = progress.add_task("folders", total=len(there) * FANS)
        for number, (namespace, shard) in enumerate(there, 1):
            counted.append(count(directory, namespace, shard, now_ns, partial(progress.advance, bar)))
            progress.update(bar, completed=number * FANS)
    models = _models(directory, command, there)
    if as_json_text:
        typer.echo(json.dumps(as_json(directory, counted, models), indent=2))
    elif not counted:
        _say_nothing_there(directory)
    if as_json_text or not counted:
        _end(counted)
    return directory, counted, models


def _removed(bad: Sequence[Checked]) -> int:
    removed = 0
    for checked in bad:
        if not checked.is_unreadable:
            try:
                checked.path.unlink()
                removed += 1
            except OSError as error:
                fail(f"kvbm remote verify: {checked.path}: {error.strerror}", BAD_USAGE_EXIT)
    return removed
