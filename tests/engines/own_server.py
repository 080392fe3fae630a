"""A server of a test's own: one process on a free port, which can be frozen, killed and brought back."""

from __future__ import annotations

import subprocess
import time
from abc import ABC, abstractmethod
from pathlib import Path

from typing_extensions import Self

from tests.engines import PATIENCE_S
from tests.engines.freeze import freeze, thaw
from tests.engines.ports import free_port
from tests.engines.process import ServerError

ATTEMPTS = 5
LOOK_S = 0.01


class OwnServer(ABC):
    """A context manager. ``log_path``: of what it writes; its folder is made."""

    start_timeout_s = PATIENCE_S

    def __init__(self, log_path: Path) -> None:
        self.port = 0
        self._log_path = log_path
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @abstractmethod
    def _command(self) -> list[str]:
        """The whole command line, for ``port``."""

    @abstractmethod
    def _answers(self) -> bool:
        """Whether it serves, and is this very process: somebody else may have been given its port."""

    @property
    def pid(self) -> int:
        """Of its process, while it runs."""
        assert self._process is not None
        return self._process.pid

    def start(self, port: int = 0) -> None:
        """Starts it, at ``port`` if given, else where it was; waits until it answers."""
        for _ in range(ATTEMPTS):
            self.port = port or self.port or free_port()
            if self._starts():
                return
            self.port = port
        log = self._log_path.read_text(errors="replace")[-800:]
        raise ServerError(f"no server could be started: {log}")

    def _starts(self) -> bool:
        self._log_path.parent.mkdir(parents=True, exist_ok=True)
        with self._log_path.open("ab") as log:
            self._process = subprocess.Popen(self._command(), stdout=log, stderr=log)
        ends_at_s = time.monotonic() + self.start_timeout_s
        while self._process.poll() is None and time.monotonic() < ends_at_s:
            if self._answers():
                return True
            time.sleep(LOOK_S)
        self.stop()
        return False

    def freeze(self) -> None:
        """It keeps its connections and answers nothing."""
        freeze(self.pid)

    def thaw(self) -> None:
        """It goes on."""
        thaw(self.pid)

    def stop(self) -> None:
        """As a loss of power. Idempotent."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait(PATIENCE_S)
