"""Tables, lines and JSON of ``kvbm disk``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.table import Table
from rich.text import Text

from kvbm_core.cli.report import age_text, ages_as_json, damage_lines, shown, unix_s
from kvbm_core.cli.status import format_bytes
from kvbm_core.storage.disk.inspect import Contents, Identity, Kind
from kvbm_core.storage.disk.record import FIRST_SLOT_BYTES, record_bytes
from kvbm_core.storage.disk.verify import Findings

KEY_DIGITS = 12
BAD_KINDS = (Kind.DAMAGED, Kind.UNREADABLE)


Looked = tuple[Identity, Contents]
"""A file and what its headers say."""
Checked = tuple[Identity, Findings]
"""A file and what its records say."""


def is_bad(checked: Checked) -> bool:
    """Whether anything in it is damaged, or cannot be read."""
    identity, findings = checked
    return identity.kind in BAD_KINDS or findings.good < findings.records


def files_table(directory: Path, looked: Sequence[Looked], now_ns: int) -> Table:
    """One row per block file."""
    table = Table("file", "format", "in use", title=Text(f"block files below {shown(directory)}"))
    for name in ("slots", "used", "free", "block", "file", "newest", "oldest"):
        table.add_column(name, justify="right", no_wrap=True)
    for identity, contents in looked:
        if identity.header is not None:
            slots = identity.header.num_slots
            table.add_row(
                file_name(directory, identity.path),
                str(identity.version),
                _use(identity),
                f"{slots:,}",
                f"{contents.used:,}",
                f"{slots - contents.used:,}",
                format_bytes(identity.header.payload_bytes),
                format_bytes(identity.file_bytes),
                age_text(contents.newest_ns, now_ns),
                age_text(contents.oldest_ns, now_ns),
            )
    return table


def verify_table(directory: Path, checked: Sequence[Checked], took_s: float) -> Table:
    """One row per block file, a sum, and how fast it went."""
    read_bytes = sum(findings.read_bytes for _, findings in checked)
    rate = format_bytes(read_bytes / max(took_s, 1e-9))
    speed = f"{format_bytes(read_bytes)} read in {took_s:.1f} s ({rate}/s)"
    table = Table("file", "in use", title=Text(f"records below {shown(directory)}"), caption=speed)
    for name in ("records", "good", "damaged", "unreadable"):
        table.add_column(name, justify="right", no_wrap=True)
    rows = [(identity, findings) for identity, findings in checked if identity.kind is Kind.BLOCKS]
    for number, (identity, findings) in enumerate(rows, 1):
        cells = [f"{count:,}" for count in _counts(findings)]
        table.add_row(
            file_name(directory, identity.path),
            _use(identity),
            *cells,
            end_section=number == len(rows) > 1,
        )
    if len(rows) > 1:
        sums = [sum(counts) for counts in zip(*(_counts(findings) for _, findings in rows), strict=True)]
        table.add_row("all", "", *(f"{count:,}" for count in sums))
    return table


def _counts(findings: Findings) -> tuple[int, int, int, int]:
    return findings.records, findings.good, len(findings.damaged), findings.unreadable


def damage(directory: Path, checked: Sequence[Checked]) -> Iterator[str]:
    """The first bad records, one line each, and how many more there are."""
    lines = [
        f"{'unreadable' if verdict.is_unreadable else 'damaged'}: {file_name(directory, identity.path)} slot "
        f"{verdict.slot} key {verdict.key.hex()[:KEY_DIGITS] + '…' if verdict.key else 'unknown'}: "
        f"{verdict.what}"
        for identity, findings in checked
        for verdict in sorted(findings.details)
    ]
    yield from damage_lines(lines, sum(findings.records - findings.good for _, findings in checked))
    if any(identity.is_in_use and findings.good < findings.records for identity, findings in checked):
        yield "some are in a file in use: a record that was being written while it was read may be among them"


def notes(directory: Path, looked: Sequence[Looked]) -> Iterator[str]:
    """One line for each file that is no block file of this version, and for what is wrong with the others."""
    for identity, contents in looked:
        name = file_name(directory, identity.path)
        if identity.header is None:
            yield f"{name}: {identity.kind.value.replace('_', ' ')}: {shown(identity.detail)}"
            continue
        header = identity.header
        full_bytes = FIRST_SLOT_BYTES + header.num_slots * record_bytes(header.payload_bytes)
        if identity.file_bytes < full_bytes:
            missing = format_bytes(full_bytes - identity.file_bytes)
            yield f"{name}: {missing} shorter than its header says; an engine makes it whole again"
        if contents.damaged:
            yield f"{name}: damaged headers: {contents.damaged:,}; kvbm disk verify names them"
        if contents.unreadable:
            yield f"{name}: headers that cannot be read: {contents.unreadable:,}; look at the disk"


def as_json(directory: Path, looked: Sequence[Looked]) -> dict[str, object]:
    """The keys are part of the interface: see docs/disk-files.md."""
    return {"directory": str(directory), "files": [_file_as_json(*one) for one in looked]}


def verified_as_json(
    directory: Path, checked: Sequence[Checked], erased: int | None, took_s: float
) -> dict[str, object]:
    """The keys are part of the interface: see docs/disk-files.md."""
    return {
        "directory": str(directory),
        "erased": erased,
        "took_s": round(took_s, 3),
        "files": [_checked_as_json(*one) for one in checked],
    }


def _checked_as_json(identity: Identity, findings: Findings) -> dict[str, object]:
    records, good, damaged, unreadable = _counts(findings)
    return {
        "path": str(identity.path),
        "kind": identity.kind.value,
        "detail": identity.detail,
        "in_use": None if identity.kind is Kind.UNREADABLE else identity.is_in_use,
        "pid": identity.pid,
        "records": records,
        "good": good,
        "damaged": damaged,
        "unreadable": unreadable,
        "read_bytes": findings.read_bytes,
        "details": [
            {
                "slot": verdict.slot,
                "key": verdict.key.hex() if verdict.key else None,
                "what": verdict.what,
                "unreadable": verdict.is_unreadable,
            }
            for verdict in sorted(findings.details)
        ],
    }


def _file_as_json(identity: Identity, contents: Contents) -> dict[str, object]:
    header = identity.header
    about = {
        "path": str(identity.path),
        "kind": identity.kind.value,
        "detail": identity.detail,
        "format_version": identity.version,
        "in_use": None if identity.kind is Kind.UNREADABLE else identity.is_in_use,
        "pid": identity.pid,
        "file_bytes": identity.file_bytes,
        "allocated_bytes": identity.allocated_bytes,
    }
    is_ours = header is not None
    return about | {
        "slots": header.num_slots if header else None,
        "used_slots": contents.used if is_ours else None,
        "free_slots": header.num_slots - contents.used if header else None,
        "damaged_headers": contents.damaged if is_ours else None,
        "unreadable_headers": contents.unreadable if is_ours else None,
        "block_bytes": header.payload_bytes if header else None,
        "slot_bytes": record_bytes(header.payload_bytes) if header else None,
        "newest_since_unix_s": unix_s(contents.newest_ns),
        "oldest_since_unix_s": unix_s(contents.oldest_ns),
        "used_slots_by_age": ages_as_json(contents) if is_ours else None,
    }


def file_name(directory: Path, path: Path) -> Text:
    """From ``directory`` on, or its name if it is the file; a Text, because a path in brackets is no
    markup.
    """
    if path == directory:
        inside = path if path.is_dir() else Path(path.name)
    else:
        inside = path.relative_to(directory) if path.is_relative_to(directory) else path
    return Text(shown(inside), overflow="fold")


def _use(identity: Identity) -> str:
    if not identity.is_in_use:
        return "no"
    return "yes" if identity.pid is None else f"by pid {identity.pid}"
