"""A pytest plugin: a test that failed beside others is run again when they have ended, once, in a fresh
process.

One that passes then is named above the closing line, with what it had said unless CONTRIBUTING.md lists it,
and the closing line counts it apart. What says that kvbm is wrong has no second try: a wrong byte, a leak, a
hang, a worker that died. The class of what was raised tells; of a plain assertion its words do. With more
failures than a few the run is red as it is: then it is not the machine.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

OPTION = "--second-try"
MOST_TESTS = 3
ALONE = "passed only alone"
"""The category of the closing line."""
LISTED = re.compile(r"^\* `(tests/\S+?)`", re.MULTILINE)
CONTRIBUTING = Path(__file__).resolve().parents[1] / "CONTRIBUTING.md"
VERDICTS = {"Wrong", "WrongAnswer", "IntegrityError"}
"""Classes of exceptions that judge what kvbm did."""
WEATHER = {
    "TimeoutError",
    "TimeoutExpired",
    "ConnectionError",
    "TransportError",
    "Again",
    "Empty",
    "ServerError",
}
"""Those that say when, or that something else did not start or answer."""
HANGS = "Timeout (>"
# The line that failed is a limit of time and nothing else, whatever was waited for.
IS_LIMIT = re.compile(r">\s+assert time\.monotonic\(\)( - \w+)? < [\w.+*/ ]+(,.*)?(#.*)?$")
# Words of any other assertion that judge what kvbm did: it has none of these classes.
IS_VERDICT = re.compile(
    r"answer|token|byte|content|payload|digest|same_|equal|wrong"
    r"|leak|lease|left|clean|guarded|open requests|integrity|open_files|descriptor",
    re.IGNORECASE,
)


class Classes:
    """The plugin where tests run: a report has the classes of what was raised."""

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
        """A part of a test has ended."""
        report = yield
        if call.excinfo is not None:
            report.raised = [kind.__name__ for kind in call.excinfo.type.__mro__]
        return report


class SecondTry:
    """The plugin, in the process that reports."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._failed: dict[str, list[pytest.TestReport]] = {}
        self._passed: list[str] = []
        self._told: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A part of a test has ended."""
        if report.failed:
            self._failed.setdefault(report.nodeid, []).append(report)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtestloop(self, session: pytest.Session) -> Generator[None, object, object]:
        """All tests; when this is over, no worker runs any more."""
        result = yield
        if self._failed:
            self._try_again(session)
        return result

    def _try_again(self, session: pytest.Session) -> None:
        if len(self._failed) > MOST_TESTS:
            self._told.append(f"{len(self._failed)} tests failed, more than {MOST_TESTS}: none was run again")
            return
        for test, reports in self._failed.items():
            if any(map(_is_verdict, reports)):
                self._told.append(f"{test} was not run again: it judges what was done, not when")
            elif self._passes_alone(test):
                self._passed.append(test)
                session.testsfailed -= len(reports)
            else:
                self._told.append(f"{test} failed again, alone")

    def _passes_alone(self, test: str) -> bool:
        command = [sys.executable, "-m", "pytest", "-n0", "-q", f"{self._config.rootpath}/{test}"]
        folder = self._config.invocation_params.dir
        ours = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
        with tempfile.TemporaryDirectory() as base:  # else pytest's own stays in TMPDIR, as left behind
            command.append(f"--basetemp={base}/alone")
            found = subprocess.run(command, cwd=folder, env=ours, stdin=subprocess.DEVNULL, check=False)
        return found.returncode == 0

    @pytest.hookimpl(tryfirst=True)
    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """What became of each; the others are reported as they were."""
        for line in self._told:
            terminalreporter.write_line(line, red=True)
        listed = LISTED.findall(CONTRIBUTING.read_text(encoding="utf-8")) if CONTRIBUTING.is_file() else []
        for test in self._passed:
            terminalreporter.write_line(f"{ALONE.upper()}: {test}", yellow=True, bold=True)
            if not any(map(test.startswith, listed)):
                for report in self._failed[test]:
                    terminalreporter.write_line(report.longreprtext)
        stats = terminalreporter.stats
        for category in ("failed", "error"):
            kept = [report for report in stats.pop(category, []) if report.nodeid not in self._passed]
            if kept:
                stats[category] = kept
        if self._passed:
            stats[ALONE] = [self._failed[test][0] for test in self._passed]
            terminalreporter._set_main_color()


def _is_verdict(report: pytest.TestReport) -> bool:
    """Whether what failed judges what kvbm did."""
    raised = set(getattr(report, "raised", ()))
    if not raised or raised & VERDICTS or HANGS in report.longreprtext:
        return True  # without a class: its worker died
    lines = [line for line in report.longreprtext.splitlines() if line.startswith((">", "E "))]
    where = [line for line in lines if line.startswith(">")]
    if raised & WEATHER or (where and IS_LIMIT.match(where[-1])):
        return False
    return any(map(IS_VERDICT.search, lines))


def pytest_addoption(parser: pytest.Parser) -> None:
    """What `make test` says."""
    parser.addoption(OPTION, action="store_true", help="run a test that failed beside others again, alone")


def pytest_configure(config: pytest.Config) -> None:
    """If asked for."""
    if config.getoption(OPTION) and not config.pluginmanager.has_plugin("kvbm-classes"):
        config.pluginmanager.register(Classes(), "kvbm-classes")
        if not hasattr(config, "workerinput"):
            config.pluginmanager.register(SecondTry(config), "kvbm-second-try")
