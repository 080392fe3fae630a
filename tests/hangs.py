"""A pytest plugin for tests that hang, and for what a dead worker leaves behind.

A test that meets its time limit is interrupted by pytest-timeout's alarm, and its worker goes on. Where that
cannot work, in a call in C that never returns, the process is ended a little later; tests that were not run
because of that are counted above the closing line.
"""

from __future__ import annotations

import faulthandler
import os
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from xdist.workermanage import WorkerController

GRACE_S = float(os.environ.get("KVBM_TEST_HANG_GRACE_S", "60"))
"""After a test's time limit, until its process is ended."""
MOST_FILES = 20


class Hangs:
    """The plugin, in the process that reports as in its workers."""

    def __init__(self, config: pytest.Config) -> None:
        self._default_s = float(config.getoption("timeout", None) or config.getini("timeout") or 0)
        self._stderr = os.dup(sys.__stderr__.fileno()) if sys.__stderr__ is not None else 2
        self._collected: dict[str, None] = {}
        self._reported: set[str] = set()

    # ------------------------------------------------------------------ where tests run

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Iterator[None]:
        """See ``_watched``."""
        with self._watched(item):
            yield

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        """See ``_watched``."""
        with self._watched(item):
            yield

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> Iterator[None]:
        """See ``_watched``."""
        with self._watched(item):
            yield

    @contextmanager
    def _watched(self, item: pytest.Item) -> Iterator[None]:
        """Ends the process, from a thread in C, if this part of a test lasts longer than its alarm allows."""
        marker = item.get_closest_marker("timeout")
        limit_s = self._default_s
        if marker is not None:
            limit_s = float(marker.args[0] if marker.args else marker.kwargs["timeout"])
        if not limit_s:
            yield
            return
        faulthandler.dump_traceback_later(limit_s + GRACE_S, exit=True, file=self._stderr)
        try:
            yield
        finally:
            faulthandler.cancel_dump_traceback_later()

    # ------------------------------------------------------------------ where they are reported

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, node: WorkerController, ids: Sequence[str]) -> None:
        """All workers collect the same."""
        self._collected = dict.fromkeys(ids)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A test that has ended in some way."""
        self._reported.add(report.nodeid)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """The files of tests that were not run; none if all were."""
        left = Counter(test.split("::")[0] for test in self._collected if test not in self._reported)
        if left:
            files = ", ".join(f"{file}: {count}" for file, count in left.most_common(MOST_FILES))
            more = f" and {len(left) - MOST_FILES} files more" if len(left) > MOST_FILES else ""
            line = f"NOT RUN ({left.total()} tests, as a worker ended): {files}{more}"
            terminalreporter.write_line(line, red=True, bold=True)


def pytest_configure(config: pytest.Config) -> None:
    """One for each process."""
    if not config.pluginmanager.has_plugin("kvbm-hangs"):
        config.pluginmanager.register(Hangs(config), "kvbm-hangs")
