"""Tests of this folder on the newest supported vLLM's Python, where that is not the one installed.

Its compiled parts are not needed: scheduler, block manager and connector hooks are Python. They come from
`make contract`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.effort import IS_NIGHTLY

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
NEWEST = "0.33.0"
SOURCES = Path(os.environ.get("KVBM_CONTRACT_SOURCES") or ROOT / ".contract") / NEWEST
ALL = bool(os.environ.get("KVBM_VLLM_NEWEST_ALL"))
ALWAYS = ("test_harness.py", "test_scheduler_composed.py", "test_scheduler_scenarios.py")
AT_NIGHT = ("test_startup.py", "test_states.py")
TIMEOUT_S = 1500

WHAT_IT_IS = (
    "from importlib import metadata, util; print(metadata.version('vllm'), util.find_spec('vllm').origin)"
)


@pytest.mark.timeout(TIMEOUT_S + 60)
def test_on_the_newest_vllm(tell: Callable[[str], None], tmp_path: Path) -> None:
    if not list(SOURCES.glob("*.dist-info")):
        pytest.skip(f"NOT RUN: tests/vllm on vLLM {NEWEST}: set KVBM_CONTRACT_SOURCES (make test does)")
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    environment["PYTHONPATH"] = os.pathsep.join(
        [str(SOURCES.absolute()), *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    python = [sys.executable, "-W", "ignore"]
    told = subprocess.run(
        [*python, "-c", WHAT_IT_IS], env=environment, cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert told.stdout.split() == [f"{NEWEST}+cpu", str(SOURCES.absolute() / "vllm" / "__init__.py")]
    some = [*ALWAYS, *(AT_NIGHT if IS_NIGHTLY else ())]
    files = sorted(HERE.glob("test_*.py")) if ALL else [HERE / name for name in some]
    command = [sys.executable, "-m", "pytest", "-n", "0", "-q", "-p", "no:cacheprovider"]
    paths = [str(path) for path in files if path != Path(__file__)]
    done = subprocess.run(
        [*command, *paths],
        env=environment,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:]
    told_last = next(line for line in reversed(done.stdout.splitlines()) if " passed" in line)
    tell(f"vLLM {NEWEST}: {told_last}")
    if not ALL:
        tell(f"NOT RUN: the other files of tests/vllm on vLLM {NEWEST}: set KVBM_VLLM_NEWEST_ALL=1")
