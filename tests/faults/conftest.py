"""What tests of faults share."""

from __future__ import annotations

from tests.faults.deadlines import waits_s

__all__ = ["waits_s"]
