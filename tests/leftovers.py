"""A pytest plugin: a run has its own temporary folder, and is red if it leaves a file there or a process.

Files of others in the machine's temporary folder count for nothing.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from multiprocessing.util import Finalize, get_temp_dir
from pathlib import Path

import pytest
from xdist.workermanage import NodeManager

from kvbm_core.control.place import private_place
from tests.engines.process import TEST_RUN

PYTESTS_ROOT = "PYTEST_DEBUG_TEMPROOT"
END_WITH_THEIR_PARENT = (b"from multiprocessing.", b"tests.engines.forks")
"""What is in the command lines of processes that wait for the end of a pipe."""
PATIENCE_S = float(os.environ.get("KVBM_TEST_LEFTOVERS_S", "60"))
"""For processes that end as what they belong to has ended."""
AFTER_MULTIPROCESSING = -101
"""When this process ends: multiprocessing removes its own folder with -100."""
POLL_S = 0.1
MOST_NAMES = 10
MOST_LETTERS = 100


class Leftovers:
    """The plugin, in the process that reports."""

    def __init__(self) -> None:
        shared = tempfile.gettempdir()
        os.environ.setdefault(PYTESTS_ROOT, shared)  # what failed tests leave is kept there
        # What torch compiles is kept for the next run; its headers would be in TMPDIR whatever is said.
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", f"{shared}/torchinductor_{os.getuid()}")
        os.environ["TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS"] = "0"
        # Short, for the paths of sockets; a run within a run has its own in that one's.
        self._folder = Path(tempfile.mkdtemp(prefix="kt-", dir=os.environ.get(TEST_RUN)))
        self._folder.chmod(0o711)  # tests become other users
        # Two, as a test may set one of them anew, or take it from a process.
        os.environ["TMPDIR"] = os.environ[TEST_RUN] = str(self._folder)
        tempfile.tempdir = None
        self._left: list[str] = []

    def _files(self) -> list[str]:
        swept = private_place()  # an engine that was killed leaves there what the next one removes
        until_the_end = Path(get_temp_dir())  # of this process, if tests run in it
        return [str(path) for path in sorted(self._folder.iterdir()) if path not in (swept, until_the_end)]

    def _processes(self) -> list[str]:
        found = list[str]()
        for folder in Path("/proc").glob("[0-9]*"):
            if folder.name == str(os.getpid()):
                continue
            try:
                is_ours = os.fsencode(self._folder) in (folder / "environ").read_bytes()
                command = (folder / "cmdline").read_bytes()
                parent = (folder / "stat").read_text().rpartition(")")[2].split()[1]
            except OSError:  # it has ended, or is somebody else's
                continue
            ends_with_us = parent == str(os.getpid()) and any(
                map(command.__contains__, END_WITH_THEIR_PARENT)
            )
            if is_ours and not ends_with_us:
                words = b" ".join(command.split(b"\0")).decode(errors="replace")
                found.append(f"process {folder.name} ({words[:MOST_LETTERS].strip()})")
        return found

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Workers have ended by now."""
        ends_s = time.monotonic() + PATIENCE_S
        while (processes := self._processes()) and time.monotonic() < ends_s:
            time.sleep(POLL_S)
        files = self._files()
        if not files:
            Finalize(None, shutil.rmtree, (self._folder, True), exitpriority=AFTER_MULTIPROCESSING)
        self._left = [*processes, *files]
        if self._left and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    @pytest.hookimpl(trylast=True)
    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """One line, if there is anything."""
        if self._left:
            hidden = len(self._left) - MOST_NAMES
            more = f" and {hidden} more" if hidden > 0 else ""
            line = f"LEFT BEHIND: {', '.join(self._left[:MOST_NAMES])}{more}"
            terminalreporter.write_line(line, red=True, bold=True)


def pytest_configure(config: pytest.Config) -> None:
    """Where tests are reported."""
    if not hasattr(config, "workerinput") and not config.pluginmanager.has_plugin("kvbm-leftovers"):
        config.pluginmanager.register(Leftovers(), "kvbm-leftovers")
        # A worker that is killed removes nothing, and on a busy machine its end takes more than ten seconds.
        NodeManager.EXIT_TIMEOUT = PATIENCE_S
