"""``kvbm disk``: what is in the files of the disk tier, and whether it is sound."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Annotated, Protocol, TypeVar

import typer
from rich.progress import DownloadColumn, MofNCompleteColumn, TimeRemainingColumn, TransferSpeedColumn

from kvbm_core.cli.console import fail, progress_bar, table_console
from kvbm_core.cli.disk_report import (
    BAD_KINDS,
    Checked,
    Looked,
    ages_table,
    as_json,
    damage_lines,
    files_table,
    notes,
    verify_table,
)
from kvbm_core.clock import SystemClock
from kvbm_core.storage.disk.allocate import SETTING, DiskError
from kvbm_core.storage.disk.block_file import SUFFIX
from kvbm_core.storage.disk.inspect import Contents, Identity, Kind, OnProgress, find_files, identify, scan
from kvbm_core.storage.disk.record import record_bytes
from kvbm_core.storage.disk.verify import Findings, erase, held_for_erasing, occupied_slots, verify

DAMAGED_EXIT = 1
BAD_USAGE_EXIT = 2

Out = TypeVar("Out")
Out_co = TypeVar("Out_co", covariant=True)


class SlotsTask(Protocol[Out_co]):
    """What is done with the headers of one file."""

    def __call__(self, identity: Identity, *, on_slots: OnProgress) -> Out_co:
        """``on_slots(count)`` as it goes; OSError if the file does not open."""


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
    Path, typer.Argument(metavar="DIR", help=f"The value of {SETTING}, another folder, or one {SUFFIX} file.")
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

    Exit status: 0; 2 if DIR is not there or cannot be read.
    """
    now_ns = time.time_ns()
    identities = _identities(directory, "inspect")
    looked = []
    for identity, contents in _over_slots(identities, partial(scan, now_ns=now_ns)):
        looked.append(Looked(identity, contents or Contents()))
    if as_json_text:
        typer.echo(json.dumps(as_json(directory, looked), indent=2))
        return
    _nothing_there(directory, identities)
    console = table_console()
    if any(one.identity.kind is Kind.BLOCKS for one in looked):
        console.print(files_table(directory, looked, now_ns))
    if any(one.contents.used for one in looked):
        console.print(ages_table(directory, looked))
    for line in notes(directory, looked):
        typer.echo(line)


@disk_app.command("verify")
def verify_command(
    directory: Directory,
    erase_damaged: Annotated[
        bool,
        typer.Option(
            "--erase-damaged", help="Overwrite the headers of damaged records; no engine may be running."
        ),
    ] = False,
) -> None:
    """Reads every record and checks its header and its payload.

    Changes nothing, unless --erase-damaged is given. Damage costs hits, never wrong answers: the engine
    checks the same, and takes what does not verify for a miss.

    Example: `kvbm disk verify /mnt/nvme && echo sound`

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
        _nothing_there(directory, identities)
        checked = _check(identities)
        erased = _erase(checked, held) if erase_damaged else 0
    took_s = clock.now_s() - started_s
    if any(one.identity.kind is Kind.BLOCKS for one in checked):
        table_console().print(verify_table(directory, checked, took_s))
    for line in (*damage_lines(directory, checked), *notes(directory, [one.looked() for one in checked])):
        typer.echo(line)
    typer.echo(_verdict(checked, erased if erase_damaged else None))
    raise typer.Exit(DAMAGED_EXIT if any(one.is_bad for one in checked) else 0)


def _over_slots(identities: Sequence[Identity], task: SlotsTask[Out]) -> list[tuple[Identity, Out | None]]:
    """``task`` of each file, with a bar; a file that went away in between is said to be unreadable."""
    done: list[tuple[Identity, Out | None]] = []
    with progress_bar(MofNCompleteColumn(), TimeRemainingColumn()) as progress:
        bar = progress.add_task("headers", total=sum(identity.reachable_slots for identity in identities))
        for identity in identities:
            try:
                done.append((identity, task(identity, on_slots=partial(progress.advance, bar))))
            except OSError as error:
                done.append((_lost(identity, error), None))
    return done


def _check(identities: Sequence[Identity]) -> list[Checked]:
    """First all headers, so that it is known how much there is to read."""
    checked = []
    listed = _over_slots(identities, occupied_slots)
    with progress_bar(DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn()) as progress:
        total_bytes = sum(
            len(slots) * record_bytes(identity.header.payload_bytes)
            for identity, slots in listed
            if identity.header is not None and slots is not None
        )
        bar = progress.add_task("records", total=total_bytes)
        for identity, slots in listed:
            try:
                findings = verify(identity, slots or (), on_bytes=partial(progress.advance, bar))
                checked.append(Checked(identity, findings))
            except OSError as error:
                checked.append(Checked(_lost(identity, error), Findings()))
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
    for one in checked:
        if one.identity.header is not None and one.findings.damaged:
            try:
                erased += erase(held[one.identity.path], one.identity.header, one.findings.damaged)
            except OSError as error:
                fail(
                    f"kvbm disk verify: {one.identity.path}: {error.strerror}: not all damaged "
                    "records were erased",
                    BAD_USAGE_EXIT,
                )
    return erased


def _verdict(checked: Sequence[Checked], erased: int | None) -> str:
    records = sum(one.findings.records for one in checked)
    damaged = sum(len(one.findings.damaged) for one in checked)
    unreadable = sum(one.findings.unreadable for one in checked)
    lines = []
    if damaged or unreadable:
        lines.append(
            f"{damaged:,} of {records:,} records are damaged, {unreadable:,} unreadable: misses for an engine"
        )
    if damaged and erased is None:
        lines.append("--erase-damaged frees the slots of the damaged ones, while no engine runs")
    if damaged and erased is not None:
        lines.append(f"{erased:,} damaged records erased; their slots are free")
    if not lines:
        lines.append(f"all {records:,} records are good" if records else "no records")
    if closed := sum(one.identity.kind in BAD_KINDS for one in checked):
        lines.append(f"{closed:,} files or folders could not be checked")
    return "\n".join(lines)


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
