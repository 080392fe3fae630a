"""Where the command's tables and complaints go."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import NoReturn

import typer
from rich.cells import cell_len
from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn
from rich.styled import Styled
from rich.table import Table
from rich.text import Text

TABLE_WIDTH = 132
LONG_WORD_CHARS = 42
"""A longer word, such as a path, may be broken; the longest name of a setting is shorter."""
BROKEN_WORD_CHARS = 24
_BETWEEN_COLUMNS = 3


def table_console() -> Console:
    """A console as wide as the terminal, or as COLUMNS says; wide enough for the tables where neither is."""
    console = Console(highlight=False)
    if console.is_terminal or os.environ.get("COLUMNS", "").isdecimal():
        return console
    return Console(highlight=False, width=TABLE_WIDTH)


def show_table(console: Console, table: Table, narrow: Iterable[RenderableType] | None = None) -> None:
    """Prints ``table`` so that no word is cut: as a table if that fits, else ``narrow``, or its rows one
    below the other.
    """
    cells = [[_text(console, cell) for cell in column.cells] for column in table.columns]
    heads = [_text(console, column.header) for column in table.columns]
    needs = [
        max(map(_whole if column.no_wrap else _longest_word, [head, *own]))
        for column, head, own in zip(table.columns, heads, cells, strict=True)
    ]
    wants = [max(map(_whole, [head, *own])) for head, own in zip(heads, cells, strict=True)]
    spare = console.width - sum(needs) - _BETWEEN_COLUMNS * len(needs) - 1
    if spare < 0:
        if narrow is None:
            narrow = _one_below_the_other(table, heads, cells)
        for shown in narrow:
            console.print(shown, overflow="fold")
        return
    for column, width in zip(table.columns, _shared(spare, needs, wants), strict=True):
        column.width, column.overflow = width, "fold"
    console.print(table)


def _one_below_the_other(
    table: Table, heads: list[Text], cells: list[list[Text]]
) -> Iterator[RenderableType]:
    if table.title is not None:
        yield Styled(table.title, "italic")
    for number, row in enumerate(table.rows):
        grid = Table.grid(padding=(0, 2))
        grid.add_column(style="dim", no_wrap=True)
        grid.add_column(overflow="fold")
        for head, own in zip(heads, cells, strict=True):
            if own[number].plain:
                grid.add_row(head, own[number])
        yield Styled(grid, row.style or "")
        yield ""
    if table.caption is not None:
        yield Styled(table.caption, "dim")


def _text(console: Console, cell: object) -> Text:
    return cell if isinstance(cell, Text) else console.render_str(str(cell), highlight=False)


def _whole(text: Text) -> int:
    return max((cell_len(line) for line in text.plain.splitlines()), default=0)


def _longest_word(text: Text) -> int:
    lengths = map(cell_len, text.plain.split())
    return max((size if size <= LONG_WORD_CHARS else BROKEN_WORD_CHARS for size in lengths), default=0)


def _shared(spare: int, needs: list[int], wants: list[int]) -> list[int]:
    """``needs``, and as much of ``spare`` as is wanted, the same for each."""
    widths = list(needs)
    while spare > 0 and (wanting := [i for i, want in enumerate(wants) if widths[i] < want]):
        for index in wanting:
            more = min(max(1, spare // len(wanting)), wants[index] - widths[index], spare)
            widths[index] += more
            spare -= more
    return widths


def fail(message: str, exit_code: int) -> NoReturn:
    """One line on stderr, and the end."""
    typer.echo(message, err=True)
    raise typer.Exit(exit_code)


def progress_bar(*columns: ProgressColumn) -> Progress:
    """On a terminal, and gone when done; on stderr, so that what is printed can be piped."""
    console = Console(stderr=True)
    shown = (TextColumn("{task.description}"), BarColumn(), *columns)
    return Progress(*shown, console=console, transient=True, disable=not console.is_terminal)


@contextmanager
def without_library_lines() -> Iterator[None]:
    """What C libraries write to standard error meanwhile goes nowhere; what Python writes there is shown."""
    python_stderr = sys.stderr
    python_stderr.flush()
    shown = os.dup(2)
    try:
        with open(os.devnull, "wb") as nowhere, os.fdopen(os.dup(2), "w", buffering=1) as own_stderr:
            os.dup2(nowhere.fileno(), 2)
            if python_stderr is sys.__stderr__:
                sys.stderr = own_stderr
            yield
    finally:
        sys.stderr = python_stderr
        os.dup2(shown, 2)
        os.close(shown)
