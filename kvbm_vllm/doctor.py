"""What ``kvbm doctor`` looks at of vLLM."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator

from kvbm_core.cli.doctor.check import Check, Finding, Subject, error, note, ok, warning
from kvbm_core.cli.doctor.settings import unheeded
from kvbm_core.config.fields import Adapter
from kvbm_core.errors import UnsupportedError
from kvbm_vllm.versions import SUPPORTED, check_version, installed_version, interface_differences

NAME = "vllm"
RUN_FOR_REAL = "0.32."
IMPORT_S = 100.0
"""vLLM takes a quarter of that to be imported on two slow cores."""


def look_at_vllm(subject: Subject) -> Iterator[Finding]:
    """Its version, what of it is tested, and settings that it does not heed."""
    try:
        version = installed_version()
    except UnsupportedError as problem:
        if subject.engine == NAME:
            yield error("vLLM is not installed in this environment", str(problem).rpartition("; ")[2])
        return
    try:
        is_tested = check_version(version)
    except UnsupportedError:
        yield error(f"vLLM {version} is older than what kvbm serves", f"install {SUPPORTED}")
        return
    if not is_tested:
        yield _untested(version)
    elif version.startswith(RUN_FOR_REAL):
        yield ok(f"vLLM {version}: this kvbm was run with it")
    else:
        yield note(f"vLLM {version}: kvbm was tested against its sources, and run with {RUN_FOR_REAL}x")
    yield from unheeded(subject.settings, (Adapter.VLLM,))


def _untested(version: str) -> Finding:
    seen = f"vLLM {version} is newer than what kvbm was tested with ({SUPPORTED})"
    different = _differences()
    if different:
        return error(
            f"{seen}, and its connector interface has changed: {different[0]}", f"install {SUPPORTED}"
        )
    remedy = "compare some answers with those of a server without kvbm, or set KVBM_VERIFY_ONBOARD=1"
    return warning(f"{seen}; its connector interface fits", remedy)


def _differences() -> list[str]:
    """In a process of its own: importing vLLM takes long, and may end it."""
    try:
        done = subprocess.run(  # noqa: S603 - this very module
            [sys.executable, "-m", __name__], capture_output=True, timeout=IMPORT_S, check=False, text=True
        )
        found: list[str] = json.loads(done.stdout.splitlines()[-1])
        return found
    except subprocess.TimeoutExpired:
        return [f"vLLM could not be imported within {IMPORT_S:g} s"]
    except (ValueError, LookupError):
        return [f"vLLM cannot be imported: {' '.join(done.stderr.split())[-200:]}"]


def _probe() -> list[str]:
    from kvbm_vllm.connector import DynamoConnector

    return interface_differences(DynamoConnector)


CHECKS = (
    Check(NAME, "vLLM: its version, what of it is tested, settings that it ignores", look_at_vllm, 110.0),
)

if __name__ == "__main__":
    print(json.dumps(_probe()))
