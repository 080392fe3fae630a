"""The environment with SGLang, which is another one than the tests' own: their pins do not agree."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PYTHON = Path(os.environ.get("KVBM_SGLANG_PYTHON") or ROOT / ".venv-sglang" / "bin" / "python")


def is_installed() -> bool:
    """Whether ``make test`` has made it."""
    return PYTHON.exists()


def variables(**more: str) -> dict[str, str]:
    """For a process in it: SGLang on the CPU, no downloads, this checkout's code."""
    path = os.pathsep.join([str(PYTHON.parent), os.environ.get("PATH", "")])
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("DYN_KVBM_", "KVBM_"))}
    return {
        **kept,
        "PATH": path,
        "PYTHONPATH": str(ROOT),
        "SGLANG_USE_CPU_ENGINE": "1",
        "HF_HUB_OFFLINE": "1",
        **more,
    }
