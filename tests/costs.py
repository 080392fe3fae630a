"""A pytest plugin: what the tests cost: seconds of their workers, by folder and by file, and CPU minutes."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import pytest

OPTION = "--costs"
CPU_S = "kvbm_cpu_s"
"""What a worker and the processes that it has started and ended have used."""


class Costs:
    """The plugin, in the process that reports. ``most``: so many of the most expensive files are named."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._cpu_s = 0.0

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Set-up, call or end of a test."""
        self._seconds[report.nodeid.split("::")[0]] += report.duration

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """A worker has ended."""
        self._cpu_s += getattr(node, "workeroutput", {}).get(CPU_S, 0.0)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Two paragraphs."""
        folders: defaultdict[str, float] = defaultdict(float)
        for file, seconds in self._seconds.items():
            folders[file.rpartition("/")[0].removeprefix("tests/")] += seconds
        cpu_s = self._cpu_s + _cpu_s()
        total_s = sum(folders.values())
        terminalreporter.section(f"{total_s:.0f} worker seconds, {cpu_s / 60:.1f} CPU minutes")
        parts = [f"{folder} {folders[folder]:.0f}" for folder in _dearest(folders)]
        terminalreporter.write_line(", ".join(parts))
        for file in _dearest(self._seconds)[: self._most]:
            terminalreporter.write_line(f"{self._seconds[file]:6.0f}  {file}")


def _cpu_s() -> float:
    return sum(os.times()[:4])


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


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A worker tells what it has used."""
    told = getattr(session.config, "workeroutput", None)
    if told is not None:
        told[CPU_S] = _cpu_s()
