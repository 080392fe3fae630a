"""The one exception of the double, and how long it waits before it raises it."""

from __future__ import annotations

PATIENCE_S = 200.0
"""For whatever is waited for here: a guard against hanging, and nothing else. It is less than a test's own
time limit, so that whoever waits can say what for.
"""


class DoubleFailure(AssertionError):
    """The connector did what kills the real executor's loop, or brought a wrong byte."""
