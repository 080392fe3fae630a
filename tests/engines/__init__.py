"""Real engines as processes, for tests, benchmarks and the demo: servers, clients, jobs and tiny models."""

from __future__ import annotations

from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
