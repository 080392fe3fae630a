"""kvbm's core: blocks, tiers and transfers; knows no engine, and imports none."""

from __future__ import annotations

__version__ = "0.1.0"
