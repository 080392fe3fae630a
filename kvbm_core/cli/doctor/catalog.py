"""All checks: kvbm's own, and those of the engines' adapters (entry points ``kvbm.checks``)."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import entry_points

from kvbm_core.cli.completion import CHECKS
from kvbm_core.cli.doctor import disk, gpu, machine, model, nixl, packages, ports, servers, settings, stores
from kvbm_core.cli.doctor.check import Check, Finding, Subject, warning

OWN: tuple[Check, ...] = (
    *packages.CHECKS,
    *settings.CHECKS,
    *gpu.CHECKS,
    *machine.CHECKS,
    *disk.CHECKS,
    *nixl.CHECKS,
    *ports.CHECKS,
    *servers.CHECKS,
    *stores.CHECKS,
    *model.CHECKS,
)


def engine_checks(engine: str) -> tuple[Check, ...]:
    """Of this engine, or of all of them if it is empty. An adapter that cannot be loaded is a finding."""
    found: list[Check] = []
    for entry in sorted(entry_points(group=CHECKS), key=lambda entry: entry.name):
        if engine in ("", entry.name):
            try:
                found.extend(entry.load())
            except Exception as problem:  # whatever somebody's package does
                found.append(_broken(entry.name, problem))
    return tuple(found)


def _broken(name: str, problem: Exception) -> Check:
    seen = f"the checks of {name} cannot be loaded: {type(problem).__name__}: {problem}"

    def look(subject: Subject) -> Iterator[Finding]:
        yield warning(seen, "install kvbm again")

    return Check(name, f"checks of {name}", look)
