"""`python -m tests.shake PATH ... [--runs N] [--beside N] [--core N] [--seeds]`: runs tests again and again.

It is how a test that fails now and then is found, and how its cure is shown: a table of how often each test
failed, and what it said. Exit status 1 if one did. The output of runs that failed is kept.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, NamedTuple

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tests.conftest import SEED_VARIABLE
from tests.engines import REPOSITORY

BUSY = [sys.executable, "-c", "while True: pass"]
NOTHING_RUN = 5
"""pytest's exit status when it has found no test."""
MOST_WORDS = 160
WIDTH = 160
"""Where there is no terminal."""


class Run(NamedTuple):
    """One run: which tests failed and what each said, how many did not, and how long it took."""

    failed: dict[str, str]
    passed: int
    seconds: float


@contextmanager
def busy_loops(count: int, core: int | None) -> Iterator[None]:
    """Processes that compute, beside the tests, and on the same core if there is one."""
    loops = [subprocess.Popen(BUSY) for _ in range(count)]
    try:
        for loop in loops:
            if core is not None:
                os.sched_setaffinity(loop.pid, {core})
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def run_once(tests: Sequence[str], core: int | None, seed: int | None, log: Path) -> Run:
    """Runs the tests in a process of their own; its output is in ``log``."""
    report = log.with_suffix(".xml")
    base = log.with_suffix("")  # of its own: pytest removes those of runs beside it
    report.unlink(missing_ok=True)
    seeds = {} if seed is None else {SEED_VARIABLE: str(seed)}
    started_s = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "pytest",
                "-n0",
                "-q",
                f"--junitxml={report}",
                f"--basetemp={base}",
                *tests,
            ],
            cwd=REPOSITORY,
            env={**os.environ, "PYTHONHASHSEED": "0", **seeds},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            preexec_fn=None if core is None else lambda: os.sched_setaffinity(0, {core}),  # noqa: PLW1509
        )
        try:
            status = process.wait()
        except BaseException:
            process.send_signal(signal.SIGINT)  # tests have processes of their own to end
            process.wait()
            raise
    seconds = time.monotonic() - started_s
    shutil.rmtree(base, ignore_errors=True)
    if status == NOTHING_RUN:
        raise SystemExit(f"no test was found: {' '.join(tests)}")
    if not report.is_file():
        return Run({"(the run itself)": f"ended with status {status}"}, 0, seconds)
    failed, passed = {}, 0
    for case in ET.parse(report).iter("testcase"):
        bad = next((part for part in case if part.tag in ("failure", "error")), None)
        if bad is None:
            passed += all(part.tag != "skipped" for part in case)
        else:
            name = f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name')}"
            failed[name] = " ".join((bad.get("message") or bad.text or "").split())[:MOST_WORDS]
    return Run(failed, passed, seconds)


def table_of(runs: Sequence[Run]) -> Table:
    """Each test that failed: how often, and the most frequent thing that it said."""
    said: dict[str, Counter[str]] = {}
    for run in runs:
        for name, words in run.failed.items():
            said.setdefault(name, Counter())[words] += 1
    table = Table("test", "failed", "what it said")
    table.columns[0].overflow = "fold"
    for name, words in sorted(said.items(), key=lambda item: -item[1].total()):
        table.add_row(escape(name), f"{words.total()} of {len(runs)}", escape(words.most_common(1)[0][0]))
    return table


def main(
    tests: Annotated[list[str], typer.Argument(help="Paths and other arguments of pytest.")],
    runs: Annotated[int, typer.Option(help="How often.")] = 20,
    beside: Annotated[int, typer.Option(help="Processes that compute meanwhile.")] = 0,
    core: Annotated[int | None, typer.Option(help="The only core that tests and loops may use.")] = None,
    seeds: Annotated[bool, typer.Option("--seeds", help="A new seed for each run, instead of ours.")] = False,
) -> None:
    """Runs tests again and again, and says how often each failed."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=WIDTH)
    folder = Path(tempfile.mkdtemp(prefix="kvbm-shake-"))
    done: list[Run] = []
    try:
        with busy_loops(beside, core):
            for number in range(1, runs + 1):
                seed = random.SystemRandom().randrange(2**32) if seeds else None
                log = folder / f"{number}.log"
                run = run_once(tests, core, seed, log)
                done.append(run)
                drawn = "" if seed is None else f", {SEED_VARIABLE}={seed}"
                bad = f"{len(run.failed)} failed ({log})" if run.failed else "green"
                console.print(
                    f"{number}/{runs}: {bad}, {run.passed} passed, {run.seconds:.0f} s{drawn}", soft_wrap=True
                )
                if not run.failed:
                    log.unlink()
    except KeyboardInterrupt:
        console.print("interrupted")
    red = sum(bool(run.failed) for run in done)
    if not red:
        shutil.rmtree(folder)
    else:
        console.print(table_of(done))
    where = "one core" if core is not None else f"{os.cpu_count()} cores"
    console.print(f"{red} of {len(done)} runs were red, beside {beside} busy loops, on {where}")
    raise SystemExit(1 if red else 0)


if __name__ == "__main__":
    typer.run(main)
