"""Where the command's tables and complaints go."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
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
