"""The app of the ``kvbm`` command: what all of its parts do alike."""

from __future__ import annotations

import io
from collections.abc import Callable
from contextlib import redirect_stdout
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

CUT = "…"
"""What rich puts where it cuts a word. Our own words do without."""
WHOLE_CHARS = 1000
"""No first sentence of a command's help is as long."""


class _Group(TyperGroup):
    """Its help cuts nothing."""

    def get_short_help_str(self, limit: int = WHOLE_CHARS) -> str:
        """See the class."""
        return super().get_short_help_str(WHOLE_CHARS)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """See the class."""
        _format_whole(self, super().format_help, ctx, formatter)


class _Command(TyperCommand):
    """Its help cuts nothing."""

    def get_short_help_str(self, limit: int = WHOLE_CHARS) -> str:
        """See the class."""
        return super().get_short_help_str(WHOLE_CHARS)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """See the class."""
        _format_whole(self, super().format_help, ctx, formatter)


def _format_whole(
    command: TyperCommand | TyperGroup, format_help: Callable[[Any, Any], None], ctx: Any, formatter: Any
) -> None:
    """In panels, unless these are too narrow for what is in them: then as plain text."""
    with redirect_stdout(io.StringIO()) as tried:
        format_help(ctx, formatter)
    mode = command.rich_markup_mode
    if CUT in tried.getvalue():
        command.rich_markup_mode = None
    try:
        format_help(ctx, formatter)
    finally:
        command.rich_markup_mode = mode


class App(typer.Typer):
    """All commands, also those of the apps that are added, have whole names in their help, and ``-h``."""

    def __init__(self, *, name: str, help: str) -> None:
        super().__init__(
            name=name,
            cls=_Group,
            help=help,
            no_args_is_help=True,
            rich_markup_mode="markdown",
            pretty_exceptions_enable=False,
            context_settings={"help_option_names": ["-h", "--help"]},
        )

    def command(self, name: str | None = None, **how: Any) -> Callable[[Any], Any]:
        """As typer's."""
        return super().command(name, **{"cls": _Command, **how})

    def add_typer(self, typer_instance: typer.Typer, **how: Any) -> None:
        """As typer's; call it when all commands of ``typer_instance`` are there."""
        for info in typer_instance.registered_commands:
            info.cls = _Command
        super().add_typer(typer_instance, **{"cls": _Group, **how})
