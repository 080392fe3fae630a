"""``kvbm disk``: what is in the files of the disk tier, and whether it is sound."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import DownloadColumn, MofNCompleteColumn, TimeRemainingColumn, TransferSpeedColumn

from kvbm_core.cli.completion import by_shell
from kvbm_core.cli.console import fail, progress_bar, show_table, table_console
from kvbm_core.cli.disk_report import (
    BAD_KINDS,
    Checked,
    Looked,
    as_json,
    damage,
    file_name,
    files_table,
    is_bad,
    notes,
    verified_as_json,
    verify_table,
)
from kvbm_core.cli.report import BAD_USAGE_EXIT, DAMAGED_EXIT, ages_table, verdict
from kvbm_core.clock import SystemClock
from kvbm_core.storage.disk.allocate import SETTING, DiskError
from kvbm_core.storage.disk.block_file import SUFFIX
from kvbm_core.storage.disk.inspect import Contents, Identity, Kind, find_files, identify, scan
from kvbm_core.storage.disk.record import record_bytes
from kvbm_core.storage.disk.verify import Findings, erase, held_for_erasing, verify

disk_app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="markdown",
    help=f"""
Look into the files of the disk tier.

The engine keeps one file per rank under {SETTING}, `kvbm/<name>-<index>/rank-<r>-of-<w>{SUFFIX}`.
Both commands take that directory, any folder above or below it, or one file.

1. `kvbm disk inspect DIR` says in seconds what is in them, also while an engine uses them.

2. `kvbm disk verify DIR` reads everything and checks it.
""",
)

Directory = Annotated[
    Path,
    typer.Argument(
        metavar="DIR",
        help=f"The value of {SETTING}, another folder, or one {SUFFIX} file.",
        autocompletion=by_shell,
    ),
]


@disk_app.command("inspect")
def inspect_command(
    directory: Directory,
    as_json_text: Annotated[bool, typer.Option("--json", help="The same as JSON, for programs.")] = False,
) -> None:
    """What block files there are, how full, how hot, and whether a process uses them.

    Reads the headers alone, changes nothing, and works beside a running engine.

    Example: `kvbm disk inspect /mnt/nvme`

    A record's age counts from the start of the process that wrote it. With --json: "directory" and "files", a
    list with path, kind (blocks, foreign_format, damaged_header, empty, not_a_block_file, unreadable),
    detail, format_version, in_use, pid, file_bytes, allocated_bytes, slots, used_slots, free_slots,
    damaged_headers, unreadable_headers, block_bytes, slot_bytes, newest_since_unix_s, oldest_since_unix_s and
    used_slots_by_age; what is not known is null.

    Exit status: 0; 1 if a file, a folder or a header cannot be read; 2 if DIR is not there or cannot be read.
    """
    now_ns = time.time_ns()
    identities = _identities(directory, "inspect")
    looked = _look(identities, now_ns)
    if as_json_text:
        typer.echo(json.dumps(as_json(directory, looked), indent=2))
        raise typer.Exit(_look_exit(looked))
    _nothing_there(directory, identities)
    console = table_console()
    if any(identity.kind is Kind.BLOCKS for identity, _ in looked):
        show_table(console, files_table(directory, looked, now_ns))
    if any(contents.used for _, contents in looked):
        rows = [(file_name(directory, identity.path), contents) for identity, contents in looked]
        show_table(console, ages_table("used slots by age", "file", rows))
    for line in notes(directory, looked):
        typer.echo(line)
    raise typer.Exit(_look_exit(looked))


@disk_app.command("verify")
def verify_command(
    directory: Directory,
    erase_damaged: Annotated[
        bool,
        typer.Option(
            "--erase-damaged", help="Overwrite the headers of damaged records; no engine may be running."
        ),
    ] = False,
    as_json_text: Annotated[bool, typer.Option("--json", help="The same as JSON, for programs.")] = False,
) -> None:
    """Reads every record and checks its header and its payload.

    Changes nothing, unless --erase-damaged is given. Damage costs hits, never wrong answers: the engine
    checks the same, and takes what does not verify for a miss.

    Example: `kvbm disk verify /mnt/nvme && echo sound`

    With --json: "directory", "erased" (null without --erase-damaged), "took_s" and "files", a list with path,
    kind, detail, in_use, pid, records, good, damaged, unreadable, read_bytes and "details": the first bad
    records, each with slot, key (null if unknown), what and unreadable.

    Exit status: 0 if all records are good; 1 if any is damaged (erased by this run or not), or if a file or a
    record cannot be read; 2 if DIR is not there, or if --erase-damaged cannot have a file because a process
    uses it.
    """
    identities = _identities(directory, "verify")
    clock = SystemClock()
    started_s = clock.now_s()
    with ExitStack() as stack:
        held: dict[Path, int] = {}
        if erase_damaged:
            identities = _held(identities, held, stack)
        if not as_json_text:
            _nothing_there(directory, identities)
        checked = _check(identities)
        erased = _erase(checked, held) if erase_damaged else 0
    took_s = clock.now_s() - started_s
    if as_json_text:
        told = verified_as_json(directory, checked, erased if erase_damaged else None, took_s)
        typer.echo(json.dumps(told, indent=2))
        raise typer.Exit(DAMAGED_EXIT if any(map(is_bad, checked)) else 0)
    if any(identity.kind is Kind.BLOCKS for identity, _ in checked):
        show_table(table_console(), verify_table(directory, checked, took_s))
    about_files = notes(directory, [(identity, Contents()) for identity, _ in checked])
    about_records = _verdict(checked, erased if erase_damaged else None)
    for line in (*damage(directory, checked), *about_files, *about_records):
        typer.echo(line)
    raise typer.Exit(DAMAGED_EXIT if any(map(is_bad, checked)) else 0)


def _look(identities: Sequence[Identity], now_ns: int) -> list[Looked]:
    """Reads all headers, with a bar; a file that went away in between is said to be unreadable."""
    looked: list[Looked] = []
    with progress_bar(MofNCompleteColumn(), TimeRemainingColumn()) as progress:
        bar = progress.add_task("headers", total=sum(identity.reachable_slots for identity in identities))
        for identity in identities:
            try:
                contents = scan(identity, now_ns=now_ns, on_slots=partial(progress.advance, bar))
                looked.append((identity, contents))
            except OSError as error:
                looked.append((_lost(identity, error), Contents()))
    return looked


def _look_exit(looked: Sequence[Looked]) -> int:
    is_all_read = all(
        identity.kind is not Kind.UNREADABLE and not contents.unreadable for identity, contents in looked
    )
    return 0 if is_all_read else DAMAGED_EXIT


def _check(identities: Sequence[Identity]) -> list[Checked]:
    """First all headers, so that it is known how much there is to read."""
    checked: list[Checked] = []
    looked = _look(identities, time.time_ns())
    with progress_bar(DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn()) as progress:
        total_bytes = sum(
            contents.occupied * record_bytes(identity.header.payload_bytes)
            for identity, contents in looked
            if identity.header is not None
        )
        bar = progress.add_task("records", total=total_bytes)
        for identity, _ in looked:
            try:
                checked.append((identity, verify(identity, on_bytes=partial(progress.advance, bar))))
            except OSError as error:
                checked.append((_lost(identity, error), Findings()))
    return checked


def _held(identities: Sequence[Identity], held: dict[Path, int], stack: ExitStack) -> list[Identity]:
    """All of them locked before anything is read, so that nothing is half done; looked at again under the
    lock.
    """
    again = list(identities)
    for number, identity in enumerate(identities):
        if identity.kind is Kind.BLOCKS:
            try:
                held[identity.path] = stack.enter_context(held_for_erasing(identity.path))
            except DiskError as error:
                fail(f"kvbm disk verify: --erase-damaged: {error.strerror or error}", BAD_USAGE_EXIT)
            again[number] = identify(identity.path, is_held_by_us=True)
    return again


def _erase(checked: Sequence[Checked], held: dict[Path, int]) -> int:
    erased = 0
    for identity, findings in checked:
        if identity.header is not None and findings.damaged:
            try:
                erased += erase(held[identity.path], identity.header, findings.damaged)
            except OSError as error:
                fail(
                    f"kvbm disk verify: {identity.path}: {error.strerror}: not all damaged "
                    "records were erased",
                    BAD_USAGE_EXIT,
                )
    return erased


def _verdict(checked: Sequence[Checked], erased: int | None) -> Iterator[str]:
    good = sum(findings.good for _, findings in checked)
    damaged = sum(len(findings.damaged) for _, findings in checked)
    unreadable = sum(findings.unreadable for _, findings in checked)
    yield verdict("records", good, damaged, unreadable)
    if damaged and erased is None:
        yield "--erase-damaged frees the slots of the damaged ones, while no engine runs"
    if damaged and erased is not None:
        yield f"{erased:,} damaged records erased; their slots are free"
    if closed := sum(identity.kind in BAD_KINDS for identity, _ in checked):
        yield f"{closed:,} files or folders could not be checked"


def _identities(directory: Path, command: str) -> list[Identity]:
    remedy = f"name the directory of {SETTING}, or one {SUFFIX} file"
    try:
        os.scandir(directory).close()
    except NotADirectoryError:
        pass
    except FileNotFoundError:
        fail(f"kvbm disk {command}: no such directory: {directory}: {remedy}", BAD_USAGE_EXIT)
    except OSError as error:
        fail(
            f"kvbm disk {command}: {directory} cannot be read ({error.strerror}): run this as the "
            "engine's user",
            BAD_USAGE_EXIT,
        )
    closed: list[OSError] = []
    identities = [identify(path) for path in find_files(directory, closed.append)]
    return identities + [
        Identity(Path(error.filename), Kind.UNREADABLE, error.strerror or "") for error in closed
    ]


def _nothing_there(directory: Path, identities: Sequence[Identity]) -> None:
    if not identities:
        typer.echo(f"no block files below {directory}")
        raise typer.Exit


def _lost(identity: Identity, error: OSError) -> Identity:
    return Identity(identity.path, Kind.UNREADABLE, error.strerror or str(error))
