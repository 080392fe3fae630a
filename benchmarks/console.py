"""Where programs print to."""

from __future__ import annotations

from rich.console import Console

FILE_WIDTH = 120


def report_console() -> Console:
    """A console as wide as the terminal, and wide enough for a table when the output goes to a file."""
    console = Console()
    return console if console.is_terminal else Console(width=FILE_WIDTH)
