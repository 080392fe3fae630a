"""A server that tests, benchmarks and the demo start on loopback: it answers, or says why not, and leaves no
process behind. Linux only, as the engines are.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType, TracebackType
from typing import TypeVar

import httpx

from tests.engines.ports import HOST, free_port, listens

START_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 20.0
POLL_S = 0.2
TEST_RUN = "KVBM_TEST_RUN"
"""The variable that a run of tests has: its temporary folder, where nothing may be left."""
# The last line of a traceback, alone or in a log line of vLLM.
RAISED = re.compile(r"^(?:\(.*?\) ERROR .*?\] )?((?:\w+\.)*\w*(?:Error|Exception): .+)$", re.MULTILINE)

Progress = Callable[[float, str], None]  # seconds since the start, the last line of the log
Self = TypeVar("Self", bound="Server")


class ServerError(RuntimeError):
    """The server did not start or did not stop; the first line says why, the end of the log follows."""


class PortTaken(ServerError):
    """It runs, and another process answers at its port."""


class Server:
    """One server with all its processes, a session of their own; a context manager. ``base_url`` has its
    /health. Not to be shared between threads. ``left``: sockets, locks and secrets of kvbm's that were there
    when all had ended.
    """

    name = "the server"
    health_path = "/health"

    def __init__(self, log_path: Path) -> None:
        self.log_path = log_path
        self.base_url = f"http://{HOST}:{free_port()}"
        self.start_s = 0.0
        self.left: list[str] = []
        self._process: subprocess.Popen[bytes] | None = None
        self._scratch: tempfile.TemporaryDirectory[str] | None = None

    def __enter__(self: Self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def port(self) -> str:
        """Of ``base_url``."""
        return self.base_url.rpartition(":")[2]

    def command(self) -> list[str]:
        """The whole command line."""
        raise NotImplementedError

    def environment(self, scratch: Path) -> dict[str, str]:
        """All variables; ``scratch`` is a folder that is there until the server stops. In a run of tests a
        TMPDIR in it is used unless this names one: engines leave sockets there, also when they end well.
        """
        raise NotImplementedError

    def start(self, timeout_s: float = START_TIMEOUT_S, progress: Progress | None = None) -> None:
        """Start and wait until the server answers; ServerError (and nothing runs) if it ends or is late."""
        self._scratch = tempfile.TemporaryDirectory(prefix="kvbm-server-")
        scratch = Path(self._scratch.name)
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        started_s = time.monotonic()
        try:
            with self.log_path.open("wb") as log:
                self._process = subprocess.Popen(
                    self.command(),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=in_folder(self.environment(scratch), scratch / "tmp"),
                    start_new_session=True,
                )
            self._wait_until_healthy(self._process, started_s, timeout_s, progress)
        except BaseException:
            self.stop()
            raise
        self.start_s = time.monotonic() - started_s

    def stop(self) -> None:
        """End every process of this server, kindly and then not; ServerError if one survives. Idempotent."""
        process = self._process
        if process is not None:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
            if not _wait(lambda: not self.processes(), STOP_TIMEOUT_S):
                for pid in self.processes():
                    _kill(pid)
            process.wait(timeout=STOP_TIMEOUT_S)
            if not _wait(lambda: not self.processes(), STOP_TIMEOUT_S):
                raise ServerError(f"{self.name} left processes that cannot be killed: {self.processes()}")
        if self._scratch is not None:
            private = Path(self._scratch.name).glob("tmp/kvbm-*/*")
            self.left = sorted(f"{path.parent.name}/{path.name}" for path in private)
            self._scratch.cleanup()
            self._scratch = None

    def kill(self) -> None:
        """SIGKILL to every process of this server, as power loss or an out-of-memory killer would; then
        ``stop``.
        """
        for pid in self.processes():
            _kill(pid)

    def tell(self, number: signal.Signals) -> None:
        """A signal to the process that was started, not to those that it has started."""
        if self._process is not None:
            self._process.send_signal(number)

    def processes(self) -> list[int]:
        """Ids of the processes of this server (its session) that still run."""
        if self._process is None:
            return []
        self._process.poll()  # reaps it when it has ended
        session = self._process.pid
        return [int(entry.name) for entry in Path("/proc").glob("[0-9]*") if runs_in(entry, session)]

    def cpu_s(self) -> float:
        """CPU time that its processes have used so far, in steps of a clock tick."""
        used = [_cpu_ticks(Path("/proc") / str(pid)) for pid in self.processes()]
        return sum(used) / os.sysconf("SC_CLK_TCK")

    def log_tail(self, lines: int = 25) -> str:
        """The end of the server's log."""
        try:
            return "\n".join(self.log_path.read_text(errors="replace").splitlines()[-lines:])
        except OSError:
            return ""

    def _wait_until_healthy(
        self, process: subprocess.Popen[bytes], started_s: float, timeout_s: float, progress: Progress | None
    ) -> None:
        with httpx.Client(base_url=self.base_url, timeout=5.0, trust_env=False) as client:
            while not _is_healthy(client, self.health_path):
                elapsed_s = time.monotonic() - started_s
                code = process.poll()
                if code is not None:
                    raise self._failure(f"ended with status {code} after {elapsed_s:.0f} s")
                if elapsed_s > timeout_s:
                    raise self._failure(f"did not answer within {timeout_s:.0f} s")
                if progress is not None:
                    progress(elapsed_s, self.log_tail(1))
                time.sleep(POLL_S)
        if not self._has_the_port():
            raise PortTaken(f"{self.name} runs, but another process answers at {self.base_url}")

    def _has_the_port(self) -> bool:
        """Whether what listens there is one of its processes: anybody's server may answer."""
        return any(listens(pid, int(self.port)) for pid in self.processes())

    def _failure(self, what: str) -> ServerError:
        text = self.log_path.read_text(errors="replace")
        errors = [match[1] for match in RAISED.finditer(text)]
        ours = [error for error in errors if "kvbm: " in error]
        reason = f": {(ours or errors)[0]}" if errors else ""
        return ServerError(f"{self.name} {what}{reason}\n--- end of {self.log_path}\n{self.log_tail()}")


def in_folder(environment: Mapping[str, str], folder: Path) -> dict[str, str]:
    """In a run of tests with ``folder``, which is made, as the temporary one, unless the environment has
    another than ours.
    """
    if TEST_RUN not in os.environ or environment.get("TMPDIR") != os.environ.get("TMPDIR"):
        return dict(environment)
    folder.mkdir()
    return {**environment, "TMPDIR": str(folder)}


def exit_on_sigterm() -> None:
    """Turn SIGTERM into SystemExit, so that ``with VllmServer`` cleans up when a program is told to end."""

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, leave)


def _is_healthy(client: httpx.Client, path: str) -> bool:
    try:
        return bool(client.get(path).status_code == httpx.codes.OK)
    except httpx.TransportError:
        return False


def runs_in(entry: Path, session: int) -> bool:
    """Whether a process, by its folder in /proc, is of this session and has not ended."""
    try:
        state, _parent, _group, its_session = (entry / "stat").read_text().rpartition(")")[2].split()[:4]
    except OSError:  # it has just ended
        return False
    return int(its_session) == session and state not in "ZX"


def _cpu_ticks(entry: Path) -> int:
    """User and system time, of the process and of children that it has waited for."""
    try:
        fields = (entry / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    return sum(map(int, fields[11:15]))


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def _wait(condition: Callable[[], bool], timeout_s: float) -> bool:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline_s:
            return False
        time.sleep(POLL_S)
    return True
