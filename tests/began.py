"""Tests whose engine lives in the test's own process, which is older than the weights that the test wrote."""

from __future__ import annotations

import time
from typing import Any
from unittest.mock import patch


def begins_now(module: str) -> Any:
    """A context in which ``module`` takes its engine's process for one that begins after what was written."""
    return patch(f"{module}.process_began_ns", lambda: time.time_ns() + 10**9)
