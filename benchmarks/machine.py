"""Facts about the machine and the software, for the head of a report."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from tests.engines.process import ServerError
from tests.engines.vllm_server import vllm_version


def machine_facts() -> dict[str, str]:
    """What a reader needs to judge figures by; the load average tells what else was running at this
    moment.
    """
    return {
        "cpu": _field(Path("/proc/cpuinfo"), "model name") or platform.machine(),
        "cores": str(len(os.sched_getaffinity(0))),
        "memory": f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 1e9:.0f} GB",
        "kernel": platform.release(),
        "python": platform.python_version(),
        "vllm": _vllm(),
        "torch": _version("torch"),
        "kvbm": _version("kvbm"),
        "load average": " ".join(f"{load:.2f}" for load in os.getloadavg()),
    }


def _field(path: Path, name: str) -> str:
    lines = path.read_text(errors="replace").splitlines() if path.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(name)), "")


def _vllm() -> str:
    try:
        return vllm_version()
    except ServerError:
        return "not installed"


def _version(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "not installed"
