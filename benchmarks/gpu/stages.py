"""A stage is a process of its own: what it hangs in, or breaks on the GPU, ends with it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TextIO

from benchmarks.gpu.rows import Cell, Goal, Result, Row

REPOSITORY = Path(__file__).resolve().parents[2]
STOP_S = 30.0
"""How long a stage that has used up its time may take to stop its servers."""
FAILURE_CHARACTERS = 200


@dataclass(frozen=True)
class Options:
    """One run. ``is_dry``: a few bytes on the CPU, to find mistakes in the script; no figure of it means
    anything.
    """

    output: Path
    is_dry: bool = False
    minutes: float = 10.0
    seed: int = 1
    wheels: tuple[Path, ...] = ()

    def choose(self, dry: int, real: int) -> int:
        """A number that differs in a dry run."""
        return dry if self.is_dry else real


class Stage(Protocol):
    """``share`` is the part of the run's time that it may take; ``goals`` are the rows that must come out."""

    name: str
    help: str
    share: float

    def goals(self, options: Options) -> Sequence[Goal]:
        """All rows."""

    def run(self, options: Options) -> Iterator[Result]:
        """Measures, and gives each result as soon as it is there. Whatever it raises is the stage's
        failure.
        """


def result_path(options: Options, name: str) -> Path:
    """Where a stage's process leaves its results."""
    return options.output / f"{name}.jsonl"


def run_here(stage: Stage, options: Options, sink: TextIO) -> bool:
    """Runs a stage in this process and writes a line per result, at last why it failed, if it did; False
    then.
    """
    failure = ""
    try:
        for result in stage.run(options):
            _write(sink, {"row": result.plain()} if isinstance(result, Row) else {"cell": vars(result)})
    except Exception as error:  # the report says what, the log says where
        failure = told_by(error)
        sys.excepthook(type(error), error, error.__traceback__)
    _write(sink, {"failure": failure})
    return not failure


def run_apart(stage: Stage, options: Options, arguments: Sequence[str], *, timeout_s: float) -> list[Result]:
    """Runs a stage in a child of this Python and returns all its rows: those that did not come out say
    why.
    """
    path, log_path = result_path(options, stage.name), options.output / f"{stage.name}.log"
    path.unlink(missing_ok=True)
    command = [sys.executable, "-m", "benchmarks.gpu", "--stage", stage.name, *arguments]
    paths = [str(REPOSITORY), str(REPOSITORY / "compat"), *filter(None, [os.environ.get("PYTHONPATH")])]
    with log_path.open("wb") as log:
        child = subprocess.Popen(
            command,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            start_new_session=True,
        )
        failure = _wait(child, timeout_s)
    return complete(stage.goals(options), *_read(path), failure)


def complete(goals: Sequence[Goal], results: list[Result], told: str | None, failure: str) -> list[Result]:
    """``results``, and a failed row for each goal that has none.

    ``told`` is what the stage itself said at its end, None if it did not get there; ``failure`` is what its
    parent saw.
    """
    reason = failure or told or ("the stage ended without it" if told is not None else "the stage broke off")
    there = {result.goal.name for result in results if isinstance(result, Row)}
    return [*results, *(Row(goal, failure=reason) for goal in goals if goal.name not in there)]


def _wait(child: subprocess.Popen[bytes], timeout_s: float) -> str:
    """Why the stage failed, as seen from outside, or an empty string. Nothing of it runs afterwards."""
    failure = ""
    try:
        code = child.wait(timeout_s)
        if code < 0:
            failure = f"ended by signal {-code}"
    except subprocess.TimeoutExpired:
        failure = f"out of time after {timeout_s:.0f} s"
    finally:
        if child.poll() is None:
            child.send_signal(
                signal.SIGTERM
            )  # the stage stops its servers, which are not in its process group
            try:
                child.wait(STOP_S)
            except subprocess.TimeoutExpired:
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()
    return failure


def _read(path: Path) -> tuple[list[Result], str | None]:
    results: list[Result] = []
    told: str | None = None
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    for line in lines:
        try:
            raw = json.loads(line)
        except json.JSONDecodeError:  # the process was killed while it wrote
            break
        if "row" in raw:
            results.append(Row.read(raw["row"]))
        elif "cell" in raw:
            results.append(Cell(**raw["cell"]))
        else:
            told = str(raw["failure"])
    return results, told


def _write(sink: TextIO, raw: dict[str, object]) -> None:
    sink.write(json.dumps(raw) + "\n")
    sink.flush()


def told_by(error: Exception) -> str:
    """What a row says of an exception: one line, not too long."""
    return f"{type(error).__name__}: {error}".partition("\n")[0][:FAILURE_CHARACTERS]


def median_of(work: Callable[[], float], rounds: int) -> list[float]:
    """``rounds`` results of ``work``, after one that is left out."""
    work()
    return [work() for _ in range(rounds)]


def now_s() -> float:
    """Seconds of a clock that only goes forward."""
    return time.perf_counter()
