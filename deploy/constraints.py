#!/usr/bin/env python3
"""Writes deploy/constraints: the versions of everything that judges, and of what it needs, as they are
installed in .venv, .venv-sglang and .venv-dynamo.

To take newer ones: KVBM_SETUP_NEWEST=1 make test in a fresh clone, then this, there.

    .venv/bin/python deploy/constraints.py
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import setup_env as env

ENVIRONMENTS = {"vllm": ".venv", "sglang": ".venv-sglang", "dynamo": ".venv-dynamo"}
# The set-up names these versions itself, or takes another build of them here than elsewhere.
NAMED = re.compile(
    r"(torch|triton|nvidia|vllm|sglang|kvbm|nixl|ai-dynamo|mooncake|pip$|setuptools$|wheel$)", re.IGNORECASE
)
HEADER = """\
# Tested together on Python {python}, without a GPU: deploy/setup_*.py take these versions there. Elsewhere,
# and for users, the ranges of pyproject.toml hold. Written by deploy/constraints.py.
"""


def installed(environment: Path) -> dict[str, str]:
    """Version by name of what is in this environment, but of what it lies on."""
    (packages,) = environment.glob("lib/python3.*/site-packages")
    command = [sys.executable, "-m", "pip", "freeze", "--path", str(packages)]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    pairs = [line.split("==") for line in lines if re.fullmatch(r"[\w.-]+==[\w.]+", line)]
    return {name: version for name, version in pairs if not NAMED.match(name)}


def main() -> None:
    """See above."""
    found = {name: installed(env.REPOSITORY / folder) for name, folder in ENVIRONMENTS.items()}
    found["dynamo"] = {**found["vllm"], **found["dynamo"]}  # which lies on the first
    python = ".".join(map(str, env.CONSTRAINED_PYTHON))
    for name, versions in found.items():
        lines = [f"{package}=={version}\n" for package, version in sorted(versions.items())]
        (env.CONSTRAINTS / f"{name}.txt").write_text(HEADER.format(python=python) + "".join(lines))


if __name__ == "__main__":
    main()
