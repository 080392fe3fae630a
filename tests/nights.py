"""A pytest plugin for `make nightly`: tests that were run longest ago come first, and none begins after the
time is used up.

The file that NIGHTLY_STATE names holds the day on which each test was run last; without one, the day of the
week decides which files come first. Those that were not reached are counted above the closing line.
"""

from __future__ import annotations

import datetime
import json
import os
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import pytest

NIGHTLY_OPTION = "--nightly"
MINUTES_OPTION = "--minutes"
STATE_VARIABLE = "NIGHTLY_STATE"
DAY_VARIABLE = "KVBM_TEST_DAY"
END_VARIABLE = "KVBM_TEST_END_S"
"""When no test begins any more, by the machine's monotonic clock. Workers have it, and the day, from the
process that started them.
"""
DAYS = 7
NOT_REACHED = "the night is over"
MOST_FILES = 20


class Nights:
    """The plugin, in the process that reports as in its workers. ``minutes``: 0 is no limit."""

    def __init__(self, minutes: float) -> None:
        state = os.environ.get(STATE_VARIABLE)
        self._state = None if not state else Path(state)
        self._last = {} if self._state is None else _read(self._state)
        self._day = int(os.environ.setdefault(DAY_VARIABLE, str(datetime.date.today().toordinal())))
        end_s = time.monotonic() + 60 * minutes if minutes else float("inf")
        self._end_s = float(os.environ.setdefault(END_VARIABLE, str(end_s)))
        self._run: set[str] = set()
        self._not_reached: dict[str, None] = {}

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """The file with the test that was run longest ago comes first, and in each file that test."""
        files: dict[str, list[pytest.Item]] = {}
        for item in items:
            files.setdefault(item.nodeid.split("::")[0], []).append(item)
        names = list(files)
        first = self._day % DAYS * len(names) // DAYS
        names = names[first:] + names[:first]
        if self._state is not None:
            names.sort(key=lambda name: min(map(self._last_day, files[name])))
        items[:] = [item for name in names for item in sorted(files[name], key=self._last_day)]

    def _last_day(self, item: pytest.Item) -> int:
        return self._last.get(item.nodeid, 0)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """A test is about to begin."""
        if time.monotonic() > self._end_s:
            pytest.skip(NOT_REACHED)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A part of a test has ended, or was not begun."""
        if report.skipped and NOT_REACHED in report.longreprtext:
            self._not_reached[report.nodeid] = None
        else:
            self._run.add(report.nodeid)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """What was not reached; and the days, for the next night."""
        run = self._run - self._not_reached.keys()
        if self._not_reached:
            left = Counter(test.split("::")[0] for test in self._not_reached)
            files = ", ".join(f"{file}: {count}" for file, count in left.most_common(MOST_FILES))
            more = f" and {len(left) - MOST_FILES} files more" if len(left) > MOST_FILES else ""
            line = f"NOT RUN ({left.total()} tests, as the night is over; first next time): {files}{more}"
            terminalreporter.write_line(line, yellow=True, bold=True)
        if self._state is not None:
            _write(self._state, {**self._last, **dict.fromkeys(run, self._day)})


def _read(path: Path) -> dict[str, int]:
    """The day of each test; of none if there is no such file yet."""
    if not path.exists():
        return {}
    found = json.loads(path.read_text(encoding="utf-8"))
    return {str(test): int(day) for test, day in found.items()}


def _write(path: Path, days: Mapping[str, int]) -> None:
    aside = path.with_name(f"{path.name}.new")
    aside.write_text(json.dumps(days, indent=0, sort_keys=True), encoding="utf-8")
    aside.replace(path)


def pytest_addoption(parser: pytest.Parser) -> None:
    """What `make nightly` says."""
    parser.addoption(
        NIGHTLY_OPTION, action="store_true", help="run the tests marked nightly and the random ones, longer"
    )
    parser.addoption(
        MINUTES_OPTION, type=float, default=0, metavar="N", help="no nightly test begins after N minutes"
    )


def pytest_configure(config: pytest.Config) -> None:
    """One for each process, if nightly tests are run."""
    if config.getoption(NIGHTLY_OPTION):
        config.pluginmanager.register(Nights(config.getoption(MINUTES_OPTION)), "kvbm-nights")
