"""fio: what the disk gives to whoever does nothing but read and write."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from itertools import count
from pathlib import Path
from typing import Any

from benchmarks.storage.sides import Rates
from benchmarks.suite import CannotRun, expect

DEPTH = 32
PROBE_BYTES = 1 << 20
TIMEOUT_S = 300.0
HUGE_PAGE_BYTES = 2 << 20
ENGINES = ("libaio", "io_uring")
MISSING = "fio is not installed (apt-get install fio)"
# glibc's malloc then asks for transparent huge pages, as our slab does; without them fio was up to 2 times
# slower.
HUGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}


def fio_problem(engine: str, folder: Path) -> str | None:
    """Why fio cannot be measured with ``engine`` on files in ``folder``; None if it can. Costs a file of 1
    MiB.
    """
    if not _program():
        return MISSING
    probe = FioSide(engine, folder / "fio.probe", PROBE_BYTES, PROBE_BYTES // 4)
    try:
        probe.turn()
    except CannotRun as reason:
        return str(reason)
    finally:
        probe.close()
    return None


def fio_version() -> str:
    """For the report; fio must be there."""
    return subprocess.run(
        [_program(), "--version"], capture_output=True, text=True, check=True
    ).stdout.strip()


class FioSide:
    """A Side that writes and reads each block of a file once, in random order, in a process of fio.

    ``turn`` raises CannotRun if fio fails.
    """

    def __init__(self, engine: str, path: Path, total_bytes: int, block_bytes: int) -> None:
        self.name = f"fio {engine}"
        self._engine = engine
        self._path = path
        self._total_bytes = total_bytes
        self._block_bytes = block_bytes
        self._seeds = count(1)

    def turn(self) -> Rates:
        """See Side."""
        return Rates(self._rate("write"), self._rate("read"))

    def close(self) -> None:
        """See Side."""
        self._path.unlink(missing_ok=True)

    def _rate(self, direction: str) -> float:
        job = parse(self._run(direction), self.name)
        done = job[direction]
        expect(
            done["io_bytes"] == self._total_bytes,
            f"{self.name} moved {done['io_bytes']} of {self._total_bytes} bytes",
        )
        return float(done["bw_bytes"]) / 1e9

    def _run(self, direction: str) -> subprocess.CompletedProcess[str]:
        settings = {
            "name": "blocks",
            "filename": self._path,
            "size": self._total_bytes,
            "bs": self._block_bytes,
            "rw": f"rand{direction}",
            "randseed": next(self._seeds),
            "ioengine": self._engine,
            "iodepth": DEPTH,
            "direct": 1,
            "end_fsync": 1,
            "fallocate": "native",
            "iomem": "malloc",
            "iomem_align": HUGE_PAGE_BYTES,
            "output-format": "json",
        }
        command = [_program(), *(f"--{name}={value}" for name, value in settings.items())]
        environment = {**os.environ, **HUGE_PAGES}
        return subprocess.run(
            command,
            capture_output=True,
            text=True,
            check=False,
            timeout=TIMEOUT_S,
            env=environment,
            cwd=self._path.parent,
        )


def _program() -> str:
    """Where fio is; empty if it is not."""
    return shutil.which("fio") or ""


def parse(result: subprocess.CompletedProcess[str], name: str) -> dict[str, Any]:
    """The one job of fio's JSON. CannotRun, with fio's own first line, if it failed."""
    start = result.stdout.find("{")  # notes may stand before it
    try:
        job: dict[str, Any] = json.loads(result.stdout[start:])["jobs"][0]
    except (ValueError, KeyError, IndexError):
        job = {"error": -1}
    if result.returncode or job["error"]:
        said = [
            line
            for line in (result.stderr + "\n" + result.stdout[: max(start, 0)]).splitlines()
            if line.strip()
        ]
        raise CannotRun(f"{name}: {said[0] if said else f'ended with status {result.returncode}'}")
    return job
