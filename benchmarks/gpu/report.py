"""The report: ``gpu.json`` with every sample, ``gpu.md`` to read."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from benchmarks.gpu.rows import Cell, Result, Row

HEADINGS = ("name", "ours", "peer", "ratio", "goal", "verdict")
DRY = "DRY RUN on the CPU: the figures mean nothing."


def write(
    folder: Path,
    facts: Mapping[str, str],
    results: Mapping[str, Sequence[Result]],
    seconds: float,
    *,
    is_dry: bool,
) -> str:
    """Writes both files and returns the closing line."""
    rows = [row for stage in results.values() for row in stage if isinstance(row, Row)]
    last = closing_line(rows, seconds, is_dry=is_dry)
    folder.mkdir(parents=True, exist_ok=True)
    plain = {
        "dry_run": is_dry,
        "machine": dict(facts),
        "seconds": seconds,
        "rows": {
            name: [row.plain() for row in stage if isinstance(row, Row)] for name, stage in results.items()
        },
        "tables": {
            name: [vars(cell) for cell in stage if isinstance(cell, Cell)] for name, stage in results.items()
        },
        "closing": last,
    }
    (folder / "gpu.json").write_text(json.dumps(plain, indent=1) + "\n", encoding="utf-8")
    (folder / "gpu.md").write_text(
        "\n".join(_markdown(facts, results, last, is_dry)) + "\n", encoding="utf-8"
    )
    return last


def closing_line(rows: Sequence[Row], seconds: float, *, is_dry: bool) -> str:
    """How many goals are met, short, failed."""
    counts = Counter(row.cells(is_dry=is_dry)[-1].partition(":")[0] for row in rows)
    named = ", ".join(f"{number} {verdict}" for verdict, number in sorted(counts.items()))
    return f"{len(rows)} rows: {named}; {seconds:.0f} s" + (f". {DRY}" if is_dry else "")


def _markdown(
    facts: Mapping[str, str], results: Mapping[str, Sequence[Result]], last: str, is_dry: bool
) -> Iterator[str]:
    yield "# kvbm on a GPU"
    yield ""
    if is_dry:
        yield f"**{DRY}**"
        yield ""
    yield from _table(("machine", ""), list(facts.items()))
    for stage, found in results.items():
        yield f"## {stage}"
        yield ""
        yield from _table(HEADINGS, [row.cells(is_dry=is_dry) for row in found if isinstance(row, Row)])
        cells = [cell for cell in found if isinstance(cell, Cell)]
        for table in dict.fromkeys(cell.table for cell in cells):
            lines = [cell.values for cell in cells if cell.table == table]
            columns = list(dict.fromkeys(column for line in lines for column in line))
            yield f"### {table}"
            yield ""
            yield from _table(columns, [[line.get(column, "-") for column in columns] for line in lines])
    yield last


def _table(headings: Sequence[str], lines: Sequence[Sequence[str]]) -> Iterator[str]:
    yield "| " + " | ".join(headings) + " |"
    yield "|" + " --- |" * len(headings)
    for line in lines:
        yield "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in line) + " |"
    yield ""
