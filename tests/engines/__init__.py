"""Real engines as processes, for tests, benchmarks and the demo: servers, clients, jobs and tiny models."""

from __future__ import annotations

from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
PATIENCE_S = 120.0
"""How long tests wait for what comes soon: a guard against hanging, on the busiest machine."""
