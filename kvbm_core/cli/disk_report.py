"""Tables, lines and JSON of ``kvbm disk``."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import NamedTuple

from rich.table import Table
from rich.text import Text

from kvbm_core.cli.status import format_bytes
from kvbm_core.storage.disk.inspect import Contents, Holder, Identity, Kind
from kvbm_core.storage.disk.record import FIRST_SLOT_BYTES, record_bytes
from kvbm_core.storage.disk.verify import MAX_DETAILS, Findings

AGE_NAMES = ("last hour", "last day", "last week", "older")
KEY_DIGITS = 12
BAR_CELLS = 8
EIGHTHS = " ▏▎▍▌▋▊▉█"
BAD_KINDS = (Kind.DAMAGED, Kind.UNREADABLE)
_UNITS_S = ((86_400, "d"), (3600, "h"), (60, "min"))


class Looked(NamedTuple):
    """A file and what its headers say."""

    identity: Identity
    contents: Contents


class Checked(NamedTuple):
    """A file and what its records say."""

    identity: Identity
    findings: Findings

    @property
    def is_bad(self) -> bool:
        """Whether anything in it is damaged, or cannot be read."""
        return (
            self.identity.kind in BAD_KINDS or bool(self.findings.damaged) or bool(self.findings.unreadable)
        )

    def looked(self) -> Looked:
        """For ``notes``, without what ``damage_lines`` says better."""
        return Looked(self.identity, Contents())


def files_table(directory: Path, looked: Sequence[Looked], now_ns: int) -> Table:
    """One row per block file."""
    table = Table("file", "format", "in use", title=Text(f"block files below {shown(directory)}"))
    for name in ("slots", "used", "free", "block", "file", "newest", "oldest"):
        table.add_column(name, justify="right", no_wrap=True)
    for identity, contents in looked:
        if identity.header is not None:
            slots = identity.header.num_slots
            table.add_row(
                _name(directory, identity.path),
                str(identity.version),
                _use(identity.holder),
                f"{slots:,}",
                f"{contents.used:,}",
                f"{slots - contents.used:,}",
                format_bytes(identity.header.payload_bytes),
                format_bytes(identity.file_bytes),
                age_text(contents.newest_ns, now_ns),
                age_text(contents.oldest_ns, now_ns),
            )
    return table


def ages_table(directory: Path, looked: Sequence[Looked]) -> Table:
    """How hot: used slots by the age of the process that wrote them, as bars; with a sum if there are several
    files.
    """
    table = Table("file", *AGE_NAMES, "since (UTC)", title="used slots by age")
    rows = [(_name(directory, identity.path), contents) for identity, contents in looked if contents.used]
    if len(rows) > 1:
        oldest = [contents.oldest_ns for _, contents in rows if contents.oldest_ns is not None]
        sums = [sum(counts) for counts in zip(*(contents.ages for _, contents in rows), strict=True)]
        rows.append((Text("all"), Contents(used=sum(sums), oldest_ns=min(oldest), ages=sums)))
    for name, contents in rows:
        bars = [f"{bar(count / contents.used)} {count:,}" for count in contents.ages]
        table.add_row(name, *bars, date_text(contents.oldest_ns))
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
            _name(directory, identity.path),
            _use(identity.holder),
            *cells,
            end_section=number == len(rows) > 1,
        )
    if len(rows) > 1:
        sums = [sum(counts) for counts in zip(*(_counts(findings) for _, findings in rows), strict=True)]
        table.add_row("all", "", *(f"{count:,}" for count in sums))
    return table


def _counts(findings: Findings) -> tuple[int, int, int, int]:
    return findings.records, findings.good, len(findings.damaged), findings.unreadable


def damage_lines(directory: Path, checked: Sequence[Checked]) -> Iterator[str]:
    """The first bad records, one line each, and how many more there are."""
    total = sum(len(findings.damaged) + findings.unreadable for _, findings in checked)
    details = [(identity.path, verdict) for identity, findings in checked for verdict in findings.details]
    for path, verdict in details[:MAX_DETAILS]:
        key = f"key {verdict.key.hex()[:KEY_DIGITS]}…" if verdict.key else "key unknown"
        word = "unreadable" if verdict.is_unreadable else "damaged"
        yield f"{word}: {_name(directory, path)} slot {verdict.slot} {key}: {verdict.what}"
    if total > MAX_DETAILS:
        yield f"and {total - MAX_DETAILS:,} more"
    if any(identity.holder and (findings.damaged or findings.unreadable) for identity, findings in checked):
        yield "some are in a file in use: a record that was being written while it was read may be among them"


def notes(directory: Path, looked: Sequence[Looked]) -> Iterator[str]:
    """One line for each file that is no block file of this version, and for what is wrong with the others."""
    for identity, contents in looked:
        name = _name(directory, identity.path)
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


def _file_as_json(identity: Identity, contents: Contents) -> dict[str, object]:
    header, holder = identity.header, identity.holder
    about = {
        "path": str(identity.path),
        "kind": identity.kind.value,
        "detail": identity.detail,
        "format_version": identity.version,
        "in_use": None if identity.kind is Kind.UNREADABLE else holder is not None,
        "pid": holder.pid if holder else None,
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
        "newest_since_unix_s": _seconds(contents.newest_ns),
        "oldest_since_unix_s": _seconds(contents.oldest_ns),
        "used_slots_by_age": dict(
            zip((name.replace(" ", "_") for name in AGE_NAMES), contents.ages, strict=True)
        )
        if is_ours
        else None,
    }


def _seconds(time_ns: int | None) -> float | None:
    return None if time_ns is None else time_ns / 1e9


def age_text(then_ns: int | None, now_ns: int) -> str:
    """In one coarse unit; nothing for nothing."""
    if then_ns is None:
        return ""
    age_s = max(0, (now_ns - then_ns) // 10**9)
    for unit_s, name in _UNITS_S:
        if age_s >= unit_s:
            return f"{age_s // unit_s:,} {name}"
    return f"{age_s} s"


def date_text(then_ns: int | None) -> str:
    """UTC, to the minute."""
    if then_ns is None:
        return ""
    return f"{datetime.fromtimestamp(then_ns // 10**9, timezone.utc):%Y-%m-%d %H:%M}"


def bar(share: float) -> str:
    """``share`` (0 to 1) of BAR_CELLS, padded; more than nothing is always seen."""
    eighths = math.ceil(share * BAR_CELLS * 8)
    text = EIGHTHS[8] * (eighths // 8) + (EIGHTHS[eighths % 8] if eighths % 8 else "")
    return text.ljust(BAR_CELLS)


def shown(text: object) -> str:
    """Without characters that would move a terminal's cursor, or that it cannot print."""
    return "".join(char if char.isprintable() else "?" for char in str(text))


def _name(directory: Path, path: Path) -> Text:
    """From ``directory`` on; a Text, because a path in brackets is no markup."""
    inside = path.relative_to(directory) if path != directory and path.is_relative_to(directory) else path
    return Text(shown(inside), overflow="fold")


def _use(holder: Holder | None) -> str:
    if holder is None:
        return "no"
    return "yes" if holder.pid is None else f"by pid {holder.pid}"
