"""A pytest plugin: processes, sockets and folders that a run of tests has left behind, named above the
closing line.
"""

from __future__ import annotations

import os
import secrets
import tempfile
from pathlib import Path

import pytest

VARIABLE = "KVBM_TEST_RUN"
"""What a run's processes have in their environment, unless somebody has taken it from them."""
PYTESTS_OWN = "pytest-of-"
MOST_NAMES = 10


class Leftovers:
    """The plugin, in the process that reports."""

    def __init__(self) -> None:
        os.environ[VARIABLE] = self._run = secrets.token_hex(8)
        self._temporary = Path(tempfile.gettempdir())
        self._before = self._entries()

    def _entries(self) -> set[str]:
        return {path.name for path in self._temporary.iterdir() if not path.name.startswith(PYTESTS_OWN)}

    def _processes(self) -> list[str]:
        wanted, found = f"{VARIABLE}={self._run}".encode(), list[str]()
        for folder in Path("/proc").glob("[0-9]*"):
            if folder.name == str(os.getpid()):
                continue
            try:
                is_ours = wanted in (folder / "environ").read_bytes().split(b"\0")
                words = (folder / "cmdline").read_bytes().split(b"\0")
            except OSError:  # it has ended, or is somebody else's
                continue
            if is_ours:
                found.append(f"process {folder.name} ({b' '.join(words[:4]).decode(errors='replace')[:60]})")
        return found

    @pytest.hookimpl(trylast=True)
    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """One line, if there is anything. Workers have ended by now."""
        new = [str(self._temporary / name) for name in sorted(self._entries() - self._before)]
        left = [*self._processes(), *new]
        if left:
            more = f" and {len(left) - MOST_NAMES} more" if len(left) > MOST_NAMES else ""
            line = f"LEFT BEHIND: {', '.join(left[:MOST_NAMES])}{more}"
            terminalreporter.write_line(line, yellow=True, bold=True)


def pytest_configure(config: pytest.Config) -> None:
    """Where tests are reported."""
    if not hasattr(config, "workerinput") and not config.pluginmanager.has_plugin("kvbm-leftovers"):
        config.pluginmanager.register(Leftovers(), "kvbm-leftovers")
