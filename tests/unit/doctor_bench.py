"""One check of ``kvbm doctor`` alone, the whole command in a process of its own, and faulty file systems."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvbm_core.cli.doctor.catalog import OWN
from kvbm_core.cli.doctor.check import Finding, Level, Subject
from kvbm_core.cli.doctor.run import run_checks
from kvbm_core.config import KvbmSettings
from kvbm_sglang.doctor import CHECKS as SGLANG_CHECKS
from kvbm_trtllm.doctor import CHECKS as TRTLLM_CHECKS
from kvbm_vllm.doctor import CHECKS as VLLM_CHECKS

ROOT = Path(__file__).resolve().parents[2]
CHECKS = {check.name: check for check in (*OWN, *VLLM_CHECKS, *SGLANG_CHECKS, *TRTLLM_CHECKS)}
BAD = (Level.WARNING, Level.ERROR)


def look(
    name: str, *, model: str = "", engine: str = "", root: Path = Path("/"), **settings: object
) -> list[Finding]:
    """What this check finds, with these settings beside those of the environment."""
    subject = Subject(KvbmSettings.from_env(settings), model, engine, root)
    (looked,) = run_checks([CHECKS[name]], subject)
    return list(looked.findings)


def found(findings: list[Finding], level: Level, *words: str) -> Finding:
    """The one of this level, which says these words and has a remedy."""
    (one,) = [finding for finding in findings if finding.level in BAD]
    assert one.level is level, findings
    text = f"{one.seen} -> {one.remedy}"
    assert all(word in text for word in words), text
    assert one.remedy and "\n" not in text
    return one


def is_well(findings: list[Finding]) -> bool:
    """Whether there are findings, and none of them is bad."""
    return bool(findings) and not [finding for finding in findings if finding.level in BAD]


def doctor(
    *arguments: str,
    before: str = "",
    path: tuple[Path, ...] = (),
    flags: tuple[str, ...] = (),
    **environ: str,
) -> tuple[int, Any, str]:
    """Exit status, JSON and standard error of ``kvbm doctor --json``. ``before``: what Python does first.
    ``path``: folders before all others. ``flags``: Python's own.
    """
    folders = [*path, ROOT, ROOT / "compat"]
    program = (
        f"import sys\nsys.path[:0] = {list(map(str, folders))!r}\n{before}\n"
        f"sys.argv[:] = ['kvbm', 'doctor', '--json', *{list(arguments)!r}]\n"
        "from kvbm_core.cli.main import run\nrun()"
    )
    names = {*KvbmSettings.env_names().values(), "PYTHONPATH"}
    plain = {name: value for name, value in os.environ.items() if name not in names}
    done = subprocess.run(
        [sys.executable, *flags, "-c", program],
        cwd="/",
        env={**plain, **environ},
        capture_output=True,
        text=True,
        timeout=250,
    )
    try:
        return done.returncode, json.loads(done.stdout), done.stderr
    except ValueError:
        raise AssertionError(f"{done.returncode}: {done.stdout}{done.stderr}") from None


def levels(answer: Any) -> dict[str, str | None]:
    """Check -> its level."""
    return {check["check"]: check["level"] for check in answer["checks"]}


@contextmanager
def mounted(folder: Path, kind: str, options: str = "", source: str = "none") -> Iterator[Path]:
    """A file system at ``folder``, in memory or in the file ``source``. Needs root."""
    folder.mkdir(parents=True, exist_ok=True)
    command = ["mount", "-t", kind, *(["-o", options] if options else []), source, str(folder)]
    if subprocess.run(command, capture_output=True).returncode:
        pytest.skip("NOT RUN: file systems with faults: mounts need root")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)
