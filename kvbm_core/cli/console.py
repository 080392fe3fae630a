"""Where the command's tables and complaints go."""

from __future__ import annotations

from typing import NoReturn

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn

TABLE_WIDTH = 132


def table_console() -> Console:
    """A console as wide as the terminal; wide enough for the tables where there is none."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=TABLE_WIDTH)


def fail(message: str, exit_code: int) -> NoReturn:
    """One line on stderr, and the end."""
    typer.echo(message, err=True)
    raise typer.Exit(exit_code)


def progress_bar(*columns: ProgressColumn) -> Progress:
    """On a terminal, and gone when done; on stderr, so that what is printed can be piped."""
    console = Console(stderr=True)
    shown = (TextColumn("{task.description}"), BarColumn(), *columns)
    return Progress(*shown, console=console, transient=True, disable=not console.is_terminal)
