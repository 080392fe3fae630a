"""Plays mutants in a copy of the repository."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

from tests.engines.forks import Forks
from tests.mutants.mutant import ROOT, Mutant

LIMIT_S = 900.0
NO_ASSERTION = ("ImportError", "ModuleNotFoundError", "SyntaxError", "NameError", "IndentationError")
IMPORTED = ("pytest", "hypothesis", "numpy", "pydantic", "zmq", "torch", "vllm.config", "vllm.v1.engine.core")
"""Once for all runs: they cost more than most tests do. Nothing of ours is among them."""


class Run(NamedTuple):
    """How tests ended. ``problem``: why that says nothing; "" if it does."""

    failed: int
    passed: int
    problem: str = ""


class Verdict(NamedTuple):
    """``what``: "dies", "lives: " and the tests that did not notice, or why it cannot be told."""

    mutant: Mutant
    what: str
    seconds: float


class Copy:
    """The repository as it is here, with its compiled module, in ``folder``, and a Python that runs its
    tests. This process works in it from now on.
    """

    def __init__(self, folder: Path) -> None:
        self._report, self.path = folder / "report.xml", folder / "copy"
        listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        found = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout
        compiled = (str(path.relative_to(ROOT)) for path in ROOT.glob("kvbm_core/native/*.so"))
        for name in (*found.split("\0"), *compiled):
            if name and (ROOT / name).is_file():  # a listed file may have been removed
                (self.path / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, self.path / name)
        places = {
            "KVBM_CONTRACT_SOURCES": ".contract",
            "KVBM_SGLANG_PYTHON": ".venv-sglang/bin/python",
            "KVBM_DYNAMO_PYTHON": ".venv-dynamo/bin/python",
        }
        ours = {variable: str(ROOT / place) for variable, place in places.items() if (ROOT / place).exists()}
        paths = os.pathsep.join((str(self.path), str(self.path / "compat")))
        given = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
        self._environ = {**ours, **given, "PYTHONPATH": paths}
        os.chdir(self.path)
        modules = [name for name in IMPORTED if find_spec(name.partition(".")[0])]
        self._forks = Forks(sys.executable, modules, self._environ)

    def close(self) -> None:
        """The Python ends."""
        self._forks.close()

    def run(self, tests: Iterable[str], *options: str, is_mutated: bool = False) -> Run:
        """Runs them."""
        self._report.unlink(missing_ok=True)
        # Plugins are imported by now; that is no error here.
        usual = ["-W", "ignore::pytest.PytestAssertRewriteWarning", "-p", "no:cacheprovider", "-n", "0"]
        usual += ["-q", "--timeout=300", f"--junit-xml={self._report}"]
        # What is compiled of a mutant is not kept.
        environ = self._environ | ({"PYTHONDONTWRITEBYTECODE": "1"} if is_mutated else {})
        with tempfile.TemporaryFile() as said, open(os.devnull, "rb") as nothing:
            files = (nothing.fileno(), said.fileno(), said.fileno())
            child = self._forks.start("pytest", [*usual, *options, *tests], environ, files)
            try:
                child.wait(LIMIT_S)
            except subprocess.TimeoutExpired:
                return Run(0, 0, f"more than {LIMIT_S:.0f} s")
            finally:
                child.kill()
            if self._report.exists():
                return _read(self._report)
            said.seek(0)
            lines = [line.strip() for line in said.read().decode(errors="replace").splitlines()]
            errors = [line for line in lines if "Error" in line or "Warning" in line]
            return Run(0, 0, f"no report: {' / '.join(errors[-3:] or lines[-3:])}")

    def play(self, mutants: Sequence[Mutant]) -> Iterator[Verdict]:
        """One after the other; each file is as it was afterward."""
        for mutant in mutants:
            began_s = time.monotonic()
            path = self.path / mutant.path
            text, status = path.read_text(encoding="utf-8"), path.stat()
            path.write_text(mutant.applied_to(text), encoding="utf-8")
            try:
                runs = {name: self.run([name], "-x", is_mutated=True) for name in mutant.tests}
            finally:
                path.write_text(text, encoding="utf-8")
                os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
            yield Verdict(mutant, _verdict(runs), time.monotonic() - began_s)

    def unmutated(self, mutants: Iterable[Mutant]) -> list[str]:
        """Which of their tests do not pass as things are, and why."""
        names = list(dict.fromkeys(name for mutant in mutants for name in mutant.tests))
        if not _why_not(self.run(names), names):
            return []
        reasons = {name: _why_not(self.run([name]), [name]) for name in names}
        return [f"{name}: {reason}" for name, reason in reasons.items() if reason]


def _why_not(run: Run, names: Collection[str]) -> str:
    if run.problem:
        return run.problem
    if run.failed:
        return "fails as things are"
    return "" if run.passed >= len(names) else "is not run here"


def _verdict(runs: Mapping[str, Run]) -> str:
    problems = [run.problem for run in runs.values() if run.problem]
    unmoved = [name for name, run in runs.items() if not run.failed]
    return problems[0] if problems else f"lives: {' '.join(unmoved)}" if unmoved else "dies"


def _read(report: Path) -> Run:
    failed = passed = 0
    for case in ElementTree.parse(report).iter("testcase"):
        error, failure, skipped = (case.find(kind) for kind in ("error", "failure", "skipped"))
        if error is not None and not failed:
            return Run(failed, passed, f"{case.get('name')} erred: {error.get('message')}")
        if failure is None:
            passed += error is None and skipped is None
        elif str(failure.get("message")).startswith(NO_ASSERTION):
            return Run(failed, passed, f"{case.get('name')}: {failure.get('message')}")
        else:
            failed += 1
    return Run(failed, passed, "" if failed or passed else "no test ran")
