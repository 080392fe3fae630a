"""Options that several commands have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from kvbm_core.cli.completion import by_shell


def file_option(name: str, help: str) -> Any:
    """One that names a file."""
    return typer.Option(name, metavar="FILE", help=help, autocompletion=by_shell)


Instance = Annotated[str, typer.Option("--instance", help="One instance, by its name (kvbm fleet status).")]
Json = Annotated[bool, typer.Option("--json", help="As JSON, for programs.")]
Key = Annotated[Path | None, file_option("--key", "Your key (kvbm keys operator FILE): asks over NATS.")]
