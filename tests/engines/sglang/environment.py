"""The environment with SGLang, which is another one than the tests' own: their pins do not agree."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from tests.engines import REPOSITORY

PYTHON = Path(os.environ.get("KVBM_SGLANG_PYTHON") or REPOSITORY / ".venv-sglang" / "bin" / "python")


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
        "PYTHONPATH": str(REPOSITORY),
        "SGLANG_USE_CPU_ENGINE": "1",
        "HF_HUB_OFFLINE": "1",
        **more,
    }


def build_tiny_model(folder: Path, kind: str = "qwen3") -> Path:
    """``folder`` with a model of tests.engines.tiny_model; RuntimeError with the last lines if it fails."""
    command = [str(PYTHON), "-m", "tests.engines.tiny_model", str(folder.absolute()), "--kind", kind]
    done = subprocess.run(command, env=variables(), capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"no tiny model was built:\n{done.stderr[-3000:]}")
    return folder
