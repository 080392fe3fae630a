"""How much random tests try: enough to see a broken promise with every change, and more of it at night."""

from __future__ import annotations

IS_NIGHTLY = False
"""Set by tests/conftest.py, before any test is imported, to what --nightly says."""


def tries(always: int, *, nightly: int) -> int:
    """How many examples, seeds or rounds a random test has now."""
    return nightly if IS_NIGHTLY else always
