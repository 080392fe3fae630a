#!/usr/bin/env python3
"""Writes deploy/locks, as ``make locks``: the newest versions that the ranges allow of all that is needed."""

from __future__ import annotations

import tempfile
from pathlib import Path

import setup_dynamo
import setup_env
import setup_sglang
from packages import LEFT_OUT, LOCKED_FOR, LOCKS, REPOSITORY, Packages, uv

PYTHON = ".".join(map(str, LOCKED_FOR[0]))
# Set-up names torch's version itself: its builds differ between registries.
OPTIONS = (
    *("--excludes", str(LEFT_OUT), "--python-version", PYTHON, "--no-emit-package", "torch"),
    *("--upgrade", "--no-annotate", "--no-header", "--quiet"),
)
HEADER = f"""\
# Tested together on Python {PYTHON} on {LOCKED_FOR[1]}, without a GPU: deploy/setup_*.py take these versions
# there. Elsewhere, and for users, the ranges of pyproject.toml hold. Written by `make locks`.
"""


def main() -> None:
    """See above."""
    # In this order: the tools are the same with vLLM and without.
    write(setup_env.VLLM_FOR_CPU)
    write(setup_env.CORE, "-c", str(LOCKS / f"{setup_env.VLLM_FOR_CPU.lock}.txt"))
    write(setup_sglang.FOR_CPU)
    write(setup_dynamo.FOR_CPU)


def write(packages: Packages, *options: str) -> None:
    """Writes their lock."""
    extras = [text for extra in packages.extras for text in ("--extra", extra)]
    with tempfile.TemporaryDirectory(prefix="kvbm-setup-") as scratch:
        found = Path(scratch) / "found.txt"
        sources = ("-", str(REPOSITORY / "pyproject.toml"), *extras, "-o", str(found))
        uv(f"locking {packages.lock}", "pip", "compile", *sources, *OPTIONS, *options, lines=packages.needed)
        lines = {*found.read_text(encoding="utf-8").splitlines(), *packages.alone}
    text = HEADER + "".join(f"{line}\n" for line in sorted(lines))
    (LOCKS / f"{packages.lock}.txt").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
