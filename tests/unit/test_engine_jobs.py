"""What is said of an engine's process that ends without a result."""

from __future__ import annotations

import os
import select
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from tests.engines import REPOSITORY
from tests.engines.forks import Child, Forks, Start, python
from tests.engines.job import EngineFailed, run_job

WAIT_S = 60.0
CRASHES = """
import ctypes
def somewhere():
    ctypes.string_at(0)
somewhere()
"""
STAYS = """
import signal, subprocess, sys
def somewhere():
    worker = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    with open("READY", "w") as ready:
        ready.write(str(worker.pid))
    signal.pause()
somewhere()
"""
IS_KILLED = """
import os, signal
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture(params=["forked", "new"])
def start(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Start]:
    if request.param == "new":
        yield python(sys.executable)
        return
    forks = Forks(sys.executable, (), variables(tmp_path))
    yield forks.start
    forks.close()


def variables(folder: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(REPOSITORY), str(folder)])}


def said_of(start: Start, program: str, folder: Path, timeout_s: float = WAIT_S) -> str:
    (folder / "program.py").write_text(program.replace("READY", str(folder / "ready")))
    with pytest.raises(EngineFailed) as failed:
        run_job(start, "program", {}, folder, environment=variables(folder), timeout_s=timeout_s)
    return str(failed.value)


def test_where_it_crashed(start: Start, tmp_path: Path) -> None:
    said = said_of(start, CRASHES, tmp_path)
    assert "ended without a result" in said and "Segmentation fault" in said and "in somewhere" in said


def test_of_one_that_was_killed_there_is_nothing(start: Start, tmp_path: Path) -> None:
    assert said_of(start, IS_KILLED, tmp_path).splitlines() == ["the engine ended without a result:"]


def test_where_it_was_when_its_time_was_over(start: Start, tmp_path: Path) -> None:
    """Its workers end with it."""
    ready = tmp_path / "ready"
    os.mkfifo(ready)
    workers: list[int] = []

    def start_until_ready(
        module: str, arguments: Sequence[str], environment: Mapping[str, str], files: Sequence[int]
    ) -> Child:
        child = start(module, arguments, environment, files)
        workers.append(os.pidfd_open(int(ready.read_text())))
        return child

    said = said_of(start_until_ready, STAYS, tmp_path, timeout_s=0.1)
    assert "had 0.1 s, and was ended without a result" in said and "in somewhere" in said
    (worker,) = workers
    assert select.select([worker], [], [], WAIT_S)[0], "its worker still runs"
    os.close(worker)
