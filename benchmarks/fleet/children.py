"""Processes of the simulation: each does what it is told in lines of JSON, and answers each in one."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks.suite import CannotRun

ANSWER_S = 120.0

Doing = Callable[..., dict[str, Any]]


def serve(doings: Mapping[str, Doing]) -> None:
    """In the process: does what standard input says until it ends."""
    for line in sys.stdin:
        order = json.loads(line)
        answer = doings[order.pop("do")](**order)
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


class Child:
    """One of them, running ``module``. Not to be shared between threads."""

    def __init__(self, module: str, log_path: Path) -> None:
        self._log_path = log_path
        with log_path.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                cwd=Path(__file__).resolve().parents[2],
            )
        if self._process.stdin is None or self._process.stdout is None:
            raise RuntimeError("a process without pipes")
        self._orders, self._answers = self._process.stdin, self._process.stdout

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    def tell(self, do: str, **given: Any) -> None:
        """Without waiting for the answer."""
        try:
            self._orders.write(json.dumps({"do": do, **given}).encode() + b"\n")
            self._orders.flush()
        except OSError:
            raise self._failure("ended") from None

    def answer(self) -> dict[str, Any]:
        """To what it was told last. CannotRun if it has ended, or is late."""
        if not select.select([self._answers], [], [], ANSWER_S)[0]:
            raise self._failure(f"did not answer within {ANSWER_S:.0f} s")
        line = self._answers.readline()
        if not line:
            raise self._failure("ended")
        return dict(json.loads(line))

    def ask(self, do: str, **given: Any) -> dict[str, Any]:
        """Both."""
        self.tell(do, **given)
        return self.answer()

    def _failure(self, what: str) -> CannotRun:
        try:
            lines = self._log_path.read_text(errors="replace").strip().splitlines()
        except OSError:
            lines = []
        return CannotRun(f"a process of the simulation {what}: {lines[-1] if lines else 'no word of why'}")

    def kill(self) -> None:
        """As a loss of power; does not wait for it."""
        self._process.kill()

    def close(self) -> None:
        """Kills it. May be called twice."""
        self._process.kill()
        self._process.wait(30)
        with suppress(BrokenPipeError):  # of an order that it did not take
            self._orders.close()
        self._answers.close()


def cpu_s(pid: int) -> float:
    """CPU time that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def rss_bytes(pid: int) -> int:
    """Memory of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
