"""Processes that are killed while they write: both sides of a warm interpreter that forks one for each line.

Lines in: what to write. Lines out: ``pid <n>``, then ``put <call>`` and what else the writer says before each
call, and ``dead <wait status>`` when it is gone.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import IO

from kvbm_core.testing.store_contract import LONG_S

ROOT = Path(__file__).parents[2]
MOST_CALLS = 20_000
"""A writer that nobody kills ends some time."""

# -------------------------------------------------------------------- in the interpreter, and in writers


def say(*words: object) -> None:
    """One line, at once and in one piece."""
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


def fork_for_each_line(write: Callable[[str], None]) -> None:
    """Until standard input ends: each line is given to a writer of its own, which somebody kills."""
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            try:
                say("pid", os.getpid())
                write(line.rstrip("\n"))
            except BaseException as error:
                os.write(2, f"{type(error).__name__}: {error}\n".encode())
            finally:
                os._exit(1)
        say("dead", os.waitpid(pid, 0)[1])


# -------------------------------------------------------------------- in a test


@contextmanager
def nursery(module: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """The warm interpreter of this module."""
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", module, *arguments]
    pipe = subprocess.PIPE
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdin=pipe,
        stdout=pipe,
        text=True,
        bufsize=1,
        start_new_session=True,
    )
    with process:
        try:
            yield process
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)  # it waits for its child, which may be frozen
            raise
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(LONG_S) == 0


def pipes(process: subprocess.Popen[str]) -> tuple[IO[str], IO[str]]:
    """Its standard input and output."""
    assert process.stdin is not None and process.stdout is not None
    return process.stdin, process.stdout


def soon(rng: Random, line: str) -> float:
    """Within a few milliseconds."""
    return rng.random() * rng.choice((0.0003, 0.001, 0.004))


def kill_one(
    process: subprocess.Popen[str],
    order: str,
    rng: Random,
    moment_s: Callable[[Random, str], float] = soon,
) -> int:
    """Has a writer started, and killed at a random moment after its first call: ``moment_s`` after the line
    that announces a call. The number of the last call that it has begun.
    """
    commands, answers = pipes(process)
    commands.write(order + "\n")
    word, pid = answers.readline().split()
    assert word == "pid"
    for _ in range(rng.randrange(2, 5)):
        line = answers.readline()
        assert line.startswith("put "), f"the writer did not open the file: {line}"
    end_s = time.perf_counter() + moment_s(rng, line)
    while time.perf_counter() < end_s:
        pass
    os.kill(int(pid), signal.SIGKILL)
    while line.startswith("put "):
        last, line = line, answers.readline()
    assert line.split() == ["dead", str(int(signal.SIGKILL))]
    return int(last.split()[1])
