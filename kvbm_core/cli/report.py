"""What ``kvbm disk`` and ``kvbm remote`` say alike: ages, how hot blocks are, damage, and a verdict."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime, timezone
from itertools import islice
from typing import Any

from rich.table import Table
from rich.text import Text

from kvbm_core.storage.disk.inspect import Contents
from kvbm_core.storage.disk.verify import MAX_DETAILS

DAMAGED_EXIT = 1
BAD_USAGE_EXIT = 2
AGE_NAMES = ("last hour", "last day", "last week", "older")
BAR_CELLS = 8
EIGHTHS = " ▏▎▍▌▋▊▉█"
_UNITS_S = ((86_400, "d"), (3600, "h"), (60, "min"))


def ages_table(title: str, what: str, rows: Sequence[tuple[Text, Contents]]) -> Table:
    """How hot: each row's slots or records by age, as bars; with a sum if there are several rows."""
    table = Table(what, *AGE_NAMES, "since (UTC)", title=title)
    rows = [(name, contents) for name, contents in rows if contents.used]
    if len(rows) > 1:
        rows.append((Text("all"), Contents.sum_of(contents for _, contents in rows)))
    for name, contents in rows:
        bars = [f"{bar(count / contents.used)} {count:,}" for count in contents.ages]
        table.add_row(name, *bars, date_text(contents.oldest_ns))
    return table


def ages_as_json(contents: Contents) -> dict[str, int]:
    """Slots or records by age."""
    return dict(zip((name.replace(" ", "_") for name in AGE_NAMES), contents.ages, strict=True))


def damage_lines(lines: Iterable[str], total: int) -> Iterator[str]:
    """The first MAX_DETAILS of ``lines``, and how many more of ``total`` there are."""
    yield from islice(lines, MAX_DETAILS)
    if total > MAX_DETAILS:
        yield f"and {total - MAX_DETAILS:,} more"


def verdict(what: str, good: int, damaged: int, unreadable: int) -> str:
    """One line on all of them; ``what``: they are, in the plural."""
    total = good + damaged + unreadable
    if damaged or unreadable:
        bad = f"{damaged:,} of {total:,} {what} are damaged, {unreadable:,} unreadable"
        return f"{bad}: misses for an engine"
    return f"all {total:,} {what} are good" if total else f"no {what}"


def unix_s(time_ns: int | None) -> float | None:
    """For JSON."""
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
    """UTC, to the minute; a question mark for a time that no calendar has."""
    if then_ns is None:
        return ""
    try:
        return f"{datetime.fromtimestamp(then_ns // 10**9, timezone.utc):%Y-%m-%d %H:%M}"
    except (ValueError, OverflowError, OSError):  # a file system keeps any time that it is given
        return "?"


def bar(share: float) -> str:
    """``share`` (0 to 1) of BAR_CELLS, padded; more than nothing is always seen."""
    eighths = math.ceil(share * BAR_CELLS * 8)
    text = EIGHTHS[8] * (eighths // 8) + (EIGHTHS[eighths % 8] if eighths % 8 else "")
    return text.ljust(BAR_CELLS)


def finite(value: Any) -> Any:
    """The same for JSON, which has no word for numbers that are none."""
    if isinstance(value, dict):
        return {key: finite(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def shown(text: object) -> str:
    """Without characters that would move a terminal's cursor, or that it cannot print."""
    return "".join(char if char.isprintable() else "?" for char in str(text))
