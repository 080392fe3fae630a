"""What the shell offers after Tab, where typer's own answer would be in the way."""

from __future__ import annotations

from importlib.metadata import entry_points

CHECKS = "kvbm.checks"
"""Entry points: an engine's name, and the checks of its adapter (a sequence of Check)."""


def by_shell(incomplete: str) -> list[str]:
    """Nothing: then bash, zsh and fish complete paths by themselves. Of a path's parameter typer would give
    back what is already there, and the shell would stop at that.
    """
    return []


def complete_engine(incomplete: str) -> list[str]:
    """Names that ``kvbm doctor --engine`` takes."""
    return [name for name in engine_names() if name.startswith(incomplete)]


def engine_names() -> list[str]:
    """Of the engines that have checks."""
    return sorted(entry.name for entry in entry_points(group=CHECKS))
