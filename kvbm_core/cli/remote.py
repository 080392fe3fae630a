"""``kvbm remote``: what is in a store that machines share, whether it is sound, and how it is kept small."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Annotated

import typer
from rich.progress import DownloadColumn, MofNCompleteColumn, TimeRemainingColumn, TransferSpeedColumn

from kvbm_core.cli.console import fail, progress_bar, show_table, table_console, without_library_lines
from kvbm_core.cli.remote_report import (
    as_json,
    lossy_line,
    models_table,
    notes,
    shards_table,
    strange_note,
    sweep_line,
    swept_as_json,
    unreadable_notes,
    uses_table,
    verified_as_json,
)
from kvbm_core.cli.report import BAD_USAGE_EXIT, DAMAGED_EXIT, damage_lines, shown, verdict
from kvbm_core.cli.status import format_bytes
from kvbm_core.config import KvbmSettings
from kvbm_core.config.readers import shown as shown_value
from kvbm_core.config.remote_url import read_remote_url, split_urls
from kvbm_core.config.server_url import MOONCAKE_SCHEME
from kvbm_core.errors import ConfigError
from kvbm_core.runtime.assembly import store_options
from kvbm_core.storage.inspection import Checked, Counted, Shard, StoreInspection
from kvbm_core.storage.remote.sweep import Sweeper, SweepLimits
from kvbm_core.storage.stores import StoreOptions, inspect_store

remote_app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="markdown",
    help="""
Look into a store that engines share, named as they name it in KVBM_REMOTE_URL: `file:///mnt/kv`,
`s3://bucket/prefix`.

1. `kvbm remote ls URL` says how much there is of each model.

2. `kvbm remote inspect URL` says it of each rank, and how long ago it was used.

3. `kvbm remote verify URL` reads everything and checks it.

4. `kvbm remote rm URL MODEL` removes the blocks of a model.

5. `kvbm remote sweep URL --max-gb N`, as a cron job, keeps it small where it has no rule of its own
(docs/remote.md).

Credentials come from the environment, as engines take them (docs/remote.md): never write them on the command
line, where every process of the machine can read them.
""",
)

Url = Annotated[str, typer.Argument(metavar="URL", help="Such as file:///mnt/kv or s3://bucket/prefix.")]
AsJson = Annotated[bool, typer.Option("--json", help="The same as JSON, for programs.")]
OnlyModels = Annotated[
    list[str] | None, typer.Argument(metavar="[MODEL...]", help="Only these folders of `ls`.")
]


@remote_app.command("ls")
def ls_command(url: Url, as_json_text: AsJson = False) -> None:
    """The models of which there are blocks: how many, how large, when they were last used.

    Works beside running engines and changes nothing.

    Exit status: 0; 1 if a part cannot be read; 2 if the store is not there or cannot be listed.
    """
    with _opened(url, "ls") as store:
        counted = _counted(store, url, as_json_text=as_json_text)
        if full := [shard for shard in counted.shards if shard.num_bytes]:
            show_table(table_console(), models_table(store.where, full, time.time_ns()))
        elif not any(unreadable_notes(counted.shards)):
            _say_nothing_there(store)
        _end(counted.shards)


@remote_app.command("inspect")
def inspect_command(url: Url, as_json_text: AsJson = False) -> None:
    """The same of each rank's folder, what is half written or strange there, how hot it is and who evicts.

    A record's time is that of its last use, to within an hour; in a bucket, to within a day.

    Exit status: 0; 1 if a part cannot be read; 2 if the store is not there or cannot be listed.
    """
    with _opened(url, "inspect") as store:
        counted = _counted(store, url, as_json_text=as_json_text)
        console = table_console()
        show_table(console, shards_table(store.where, counted.shards, time.time_ns()))
        if any(shard.contents.used for shard in counted.shards):
            show_table(console, uses_table(counted.shards))
        for line in notes(counted, store.where):
            typer.echo(line)
        _end(counted.shards)


@remote_app.command("verify")
def verify_command(
    url: Url,
    models: OnlyModels = None,
    remove_damaged: Annotated[
        bool, typer.Option("--remove-damaged", help="Remove what is damaged; engines may be running.")
    ] = False,
    as_json_text: AsJson = False,
) -> None:
    """Reads every record and checks it and its blocks, as engines do when they load one.

    Damage costs hits, never wrong answers. What was made with another secret than KVBM_REMOTE_SECRET_FILE's,
    by another version, or for another folder, is not ours to check: it is counted and left alone.

    With --json: "url", "good", "foreign" (a number for each reason), "removed", "not_looked_at" and "bad", a
    list with name, what and unreadable.

    Exit status: 0 if all are good; 1 if any is damaged (removed by this run or not) or cannot be read; 2 if
    the store is not there or cannot be listed.
    """
    with _opened(url, "verify") as store:
        counted = _counted(store, url, ends_if_empty=not as_json_text)
        chosen = _chosen(models, counted, "verify", store)
        good, foreign, bad = 0, list[Checked](), list[Checked]()
        with progress_bar(DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn()) as progress:
            total = sum(shard.num_bytes for shard in counted.shards if shard.namespace in chosen)
            bar = progress.add_task("blocks", total=total)
            for checked in store.verify(chosen, removes_damaged=remove_damaged):
                progress.advance(bar, checked.num_bytes)
                if checked.what:
                    (foreign if checked.is_foreign else bad).append(checked)
                else:
                    good += not checked.is_gone
        closed = list(unreadable_notes(counted.shards))
        if as_json_text:
            told = verified_as_json(url, good, foreign, bad, removed=remove_damaged)
            typer.echo(json.dumps(told | {"not_looked_at": closed}, indent=2))
            raise typer.Exit(DAMAGED_EXIT if bad or closed else 0)
        _say_verified(good, foreign, bad, closed, remove_damaged=remove_damaged)
        if line := lossy_line([shard for shard in counted.shards if shard.namespace in chosen]):
            typer.echo(line)
        raise typer.Exit(DAMAGED_EXIT if bad or closed else 0)


@remote_app.command("rm")
def rm_command(
    url: Url,
    models: Annotated[
        list[str] | None, typer.Argument(metavar="MODEL...", help="Folders as `ls` shows them.")
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="The blocks of all models.")] = False,
    is_sure: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    as_json_text: Annotated[
        bool, typer.Option("--json", help="The same as JSON, for programs; with --yes.")
    ] = False,
) -> None:
    """Removes the blocks of one or more models, or of all. Engines may be running: they miss them, no more.

    What has no name of kvbm's, or is of another version of it, stays.

    Exit status: 0; 1 if something could not be removed, or the answer was no; 2 for a model that is not
    there, or if the store cannot be listed.
    """
    with _opened(url, "rm") as store:
        there = store.models()
        chosen = there if everything else list(dict.fromkeys(models or ()))
        if bool(models) == everything:
            fail("kvbm remote rm: name the models to remove, or give --all", BAD_USAGE_EXIT)
        if as_json_text and not is_sure:
            fail("kvbm remote rm: --json does not ask: give --yes too", BAD_USAGE_EXIT)
        told = list[dict[str, object]]()
        _refuse_missing(chosen, there, "rm", store)
        if not chosen and not as_json_text:
            _say_nothing_there(store)
        elif chosen and not is_sure:
            typer.confirm(f"Remove all blocks of {', '.join(chosen)} {_below(store)}?", abort=True)
        for namespace in chosen:
            with progress_bar(MofNCompleteColumn()) as progress:
                bar = progress.add_task("records", total=None)
                try:
                    removed = store.remove_model(namespace, partial(progress.advance, bar))
                except OSError as error:
                    fail(f"kvbm remote rm: {_line_of(error, store)}", DAMAGED_EXIT)
            told.append({"model": namespace, **removed._asdict()})
            if as_json_text:
                continue
            line = f"{namespace}: {removed.records:,} records removed, {format_bytes(removed.num_bytes)}"
            typer.echo(line)
            if removed.strange:
                typer.echo(strange_note(namespace, removed.strange))
        if as_json_text:
            typer.echo(json.dumps({"url": url, "removed": told}, indent=2))


@remote_app.command("sweep")
def sweep_command(
    url: Url,
    max_gb: Annotated[
        float, typer.Option("--max-gb", min=0.001, help="Gigabytes (1e9 bytes) that may be there.")
    ],
    models: OnlyModels = None,
    is_dry: Annotated[bool, typer.Option("--dry-run", help="Say what would go, and remove nothing.")] = False,
    *,
    grace_s: Annotated[
        float, typer.Option("--grace-s", min=0.0, help="What was used within so many seconds stays.")
    ] = 3600.0,
    as_json_text: AsJson = False,
) -> None:
    """If there is more than --max-gb, removes what was used longest ago, down to nine tenths of it.

    The limit is for all models together, or for the MODELs that are named: one cron line for the store, or
    one for each model. Engines may be running, and so may other sweepers: they choose the same records. Last
    use is known to within an hour, in a bucket to within a day. A server that evicts by itself (Valkey,
    Redis, Mooncake Store) needs none of it.

    Exit status: 0 if no more is there than may be; 1 if there is, as it could not be removed or was used just
    now; 2 for an unknown model, or if the store is not there or cannot be listed.
    """
    with _opened(url, "sweep") as store:
        if store.evicts_itself and not as_json_text:
            typer.echo(f"{store.where}: the server evicts by itself: see docs/remote.md")
            return
        if store.evicts_itself:
            typer.echo(json.dumps({"url": url, "evicts_itself": True}, indent=2))
            return
        if models:
            _refuse_missing(models, store.models(), "sweep", store)
        limits = SweepLimits(int(max_gb * 1e9), grace_s)
        sweeper = Sweeper(store, limits, models or (), time.time)
        with progress_bar(MofNCompleteColumn(), TimeRemainingColumn()) as progress:
            listing = progress.add_task("records listed", total=None)
            removing = progress.add_task("bytes removed", total=None, visible=False)
            swept = sweeper.sweep(
                lambda seen, _: progress.update(listing, completed=seen),
                lambda seen, total: progress.update(removing, completed=seen, total=total, visible=True),
                is_dry=is_dry,
            )
        if as_json_text:
            typer.echo(json.dumps(swept_as_json(url, limits, swept, is_dry=is_dry), indent=2))
        else:
            typer.echo(sweep_line(store.where, limits, swept, is_dry=is_dry))
        raise typer.Exit(DAMAGED_EXIT if swept.trouble or swept.left_bytes > limits.max_bytes else 0)


# -------------------------------------------------------------------- inside

_REMEDIES = (
    (
        re.compile(r"\bNOAUTH\b|\bWRONGPASS\b|Authentication required|invalid username-password"),
        "set KVBM_REMOTE_PASSWORD_FILE, and KVBM_REMOTE_USERNAME if the server has users",
    ),
    (
        re.compile(r"\bNOPERM\b|has no permissions"),
        "docs/remote.md lists the rights that a user needs",
    ),
    (
        re.compile(r"cannot be listed: not found$"),
        "correct the bucket's name, or the server's address (AWS_ENDPOINT_URL_S3)",
    ),
)
"""By what a server or an engine says, where that alone does not tell what to do."""


@contextmanager
def _opened(url: str, command: str) -> Iterator[StoreInspection]:
    """The store. What fails within is one line and the end; settings that it does not need are not read."""
    _refuse_unfit(url, command)
    is_mooncake = url.lower().startswith(f"{MOONCAKE_SCHEME}:")
    # Mooncake logs a dozen lines at each start, and errors where none is; who wants them has set the level.
    with without_library_lines() if is_mooncake and "MC_LOG_LEVEL" not in os.environ else nullcontext():
        yield from _opened_store(url, command)


def _opened_store(url: str, command: str) -> Iterator[StoreInspection]:
    try:
        read_remote_url(url)
        options = StoreOptions()
        if not _is_directory(url):
            options = store_options(KvbmSettings.from_env(None))
        store = inspect_store(url, options)
    except ConfigError as error:
        fail(str(error), BAD_USAGE_EXIT)
    except ValueError as error:
        fail(f"kvbm remote {command}: {shown_value(url)}: {error}", BAD_USAGE_EXIT)
    try:
        yield store
    except ConfigError as error:
        fail(str(error), BAD_USAGE_EXIT)
    except OSError as error:
        fail(f"kvbm remote {command}: {_line_of(error, store)}", BAD_USAGE_EXIT)
    finally:
        store.close()


def _is_directory(url: str) -> bool:
    return url.lower().startswith("file:")


def _refuse_unfit(url: str, command: str) -> None:
    """Secrets, as every process of the machine can read a command line; and several stores."""
    if "@" in url and not _is_directory(url):
        remedy = "write no name or password into the URL; set them in the environment, see docs/remote.md"
        fail(f"kvbm remote {command}: {remedy}", BAD_USAGE_EXIT)
    if len(stores := split_urls(url)) > 1:
        fail(f"kvbm remote {command}: {len(stores)} stores are named; name one of them", BAD_USAGE_EXIT)


def _line_of(error: OSError, store: StoreInspection) -> str:
    if error.filename is None:
        text = error.strerror or str(error)
        remedy = next((f"; {remedy}" for words, remedy in _REMEDIES if words.search(text)), "")
        return f"{text if store.where in text else f'{store.where}: {text}'}{remedy}"
    remedy = "; run this as the engine's user" if isinstance(error, PermissionError) else ""
    return f"{error.filename}: {error.strerror}{remedy}"


def _chosen(
    models: Sequence[str] | None, counted: Counted, command: str, store: StoreInspection
) -> list[str]:
    """Those that are named, or all."""
    chosen = list(models or counted.models)
    _refuse_missing(chosen, list(counted.models), command, store)
    return chosen


def _refuse_missing(
    chosen: Sequence[str], there: Sequence[str], command: str, store: StoreInspection
) -> None:
    if missing := [name for name in chosen if name not in there]:
        remedy = "`kvbm remote ls` shows what there is"
        fail(f"kvbm remote {command}: no {shown(missing[0])} {_below(store)}: {remedy}", BAD_USAGE_EXIT)


def _below(store: StoreInspection) -> str:
    return f"below {shown(store.where)}"


def _say_nothing_there(store: StoreInspection) -> None:
    typer.echo(f"no blocks {_below(store)} ({store.top}/)")


def _say_verified(
    good: int,
    foreign: Sequence[Checked],
    bad: Sequence[Checked],
    closed: Sequence[str],
    *,
    remove_damaged: bool,
) -> None:
    lines = (
        f"{'unreadable' if checked.is_unreadable else 'damaged'}: {shown(checked.name)}: {checked.what}"
        for checked in bad
    )
    for line in damage_lines(lines, len(bad)):
        typer.echo(line)
    unreadable = sum(checked.is_unreadable for checked in bad)
    what = "records that can be read" if closed else "records"
    typer.echo(verdict(what, good, len(bad) - unreadable, unreadable))
    for line in closed:
        typer.echo(line)
    for why in dict.fromkeys(checked.what for checked in foreign):
        count = sum(checked.what == why for checked in foreign)
        typer.echo(f"{count:,} records are not ours to check, and left alone: {why}")
    if remove_damaged:
        typer.echo(f"{len(bad) - unreadable:,} damaged records removed")


def _end(shards: Sequence[Shard]) -> None:
    """Ends a command that has only looked, by whether it could look everywhere."""
    lines = list(unreadable_notes(shards))
    for line in lines:
        typer.echo(line, err=True)
    raise typer.Exit(DAMAGED_EXIT if lines else 0)


def _counted(
    store: StoreInspection, url: str, *, as_json_text: bool = False, ends_if_empty: bool = True
) -> Counted:
    """All that is there, counted with a bar.

    Ends the command here when it has said all: with ``as_json_text``, or that there is nothing.
    """
    with progress_bar(MofNCompleteColumn(), TimeRemainingColumn()) as progress:
        bar = progress.add_task("looked at", total=None)
        counted = store.count(
            time.time_ns(), lambda seen, total: progress.update(bar, completed=seen, total=total)
        )
    if as_json_text:
        typer.echo(json.dumps(as_json(url, counted), indent=2))
    elif not counted.shards and ends_if_empty:
        _say_nothing_there(store)
    if as_json_text or (not counted.shards and ends_if_empty):
        _end(counted.shards)
    return counted
