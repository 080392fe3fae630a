"""LMCache beside the environment, not in it: its dependencies would replace torch and numpy by CUDA builds.

The wheel and the three small packages that its CPU code imports go into a folder of their own, without
dependencies; the folder is put behind everything else on the import path. Packages come from wherever pip is
configured to look.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

VERSION = "0.5.6"
REQUIREMENTS = (f"lmcache=={VERSION}", "aiofile", "aiofiles", "caio")
FOLDER = Path(__file__).resolve().parent.parent / ".bench-peers"
INSTALL_TIMEOUT_S = 300


def lmcache_problem(told: Callable[[str], None]) -> str | None:
    """Makes ``import lmcache`` work, installing it if need be. None, or why it does not work, in one line."""
    target = FOLDER / f"lmcache-{VERSION}-py{sys.version_info.major}{sys.version_info.minor}"
    if not target.exists():
        told(f"installing LMCache {VERSION} into {target}")
        problem = _install(target)
        if problem is not None:
            return problem
    os.environ.setdefault("LMCACHE_LOG_LEVEL", "CRITICAL")  # it logs a warning per block when it is full
    if str(target) not in sys.path:
        sys.path.append(str(target))
    try:
        import lmcache.v1.distributed.l1_manager
        import lmcache.v1.storage_backend.storage_manager  # noqa: F401
    except Exception as error:  # whatever a package of others does at import, the other peers are still there
        return f"LMCache {VERSION} does not import: {type(error).__name__}: {error}"
    return None


def _install(target: Path) -> str | None:
    scratch = target.with_name(f"{target.name}.part")
    shutil.rmtree(scratch, ignore_errors=True)
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--target", str(scratch), *REQUIREMENTS]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"LMCache {VERSION} could not be installed: {error}"
    if done.returncode != 0:
        reason = (done.stderr.strip().splitlines() or ["pip says nothing"])[-1]
        return f"LMCache {VERSION} could not be installed: {reason}"
    scratch.rename(target)
    return None
