"""Whether the cache is in service, as ``/ready`` and ``/health`` tell it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Readiness:
    """``reason``: why not, in one line for a person; "" when ready."""

    is_ready: bool
    reason: str = ""


def always_ready() -> Readiness:
    """For an engine with nothing to wait for."""
    return Readiness(True)
