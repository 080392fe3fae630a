"""The one exception of the double."""

from __future__ import annotations


class DoubleFailure(AssertionError):
    """The connector did what kills the real executor's loop, or brought a wrong byte."""
