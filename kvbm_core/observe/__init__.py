"""What kvbm tells the outside: metrics, log lines, cache events, and the guard around the engine's seams."""

from __future__ import annotations
