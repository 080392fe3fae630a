"""A pytest plugin: what the tests cost, in seconds of their workers, by folder and by file."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import pytest

OPTION = "--costs"


class Costs:
    """The plugin, in the process that reports. ``most``: so many of the most expensive files are named."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._seconds: defaultdict[str, float] = defaultdict(float)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Set-up, call or end of a test."""
        self._seconds[report.nodeid.split("::")[0]] += report.duration

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Two paragraphs."""
        folders: defaultdict[str, float] = defaultdict(float)
        for file, seconds in self._seconds.items():
            folders[file.rpartition("/")[0].removeprefix("tests/")] += seconds
        terminalreporter.section(f"{sum(folders.values()):.0f} worker seconds")
        parts = [f"{folder} {folders[folder]:.0f}" for folder in _dearest(folders)]
        terminalreporter.write_line(", ".join(parts))
        for file in _dearest(self._seconds)[: self._most]:
            terminalreporter.write_line(f"{self._seconds[file]:6.0f}  {file}")


def _dearest(seconds: Mapping[str, float]) -> list[str]:
    return sorted(seconds, key=lambda name: -seconds[name])


def pytest_addoption(parser: pytest.Parser) -> None:
    """What `make test` says."""
    parser.addoption(
        OPTION, type=int, default=0, metavar="N", help="what tests cost, and the N dearest files"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Where tests are reported, if asked for."""
    most = config.getoption(OPTION)
    if most and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Costs(most), "kvbm-costs")
