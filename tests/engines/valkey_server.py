"""A Valkey or Redis server of a test's or a benchmark's own: on a free port of loopback, with a password.

Debian's `redis-server`, or the `valkey-server` that deploy/setup_env.py puts into the environment.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from kvbm_core.config.server_url import server_url
from kvbm_core.storage.remote.login import ServerLogin
from kvbm_core.storage.remote.resp import Deadline, RespConnection
from kvbm_core.storage.remote.valkey import ValkeyEngine
from tests.engines.ports import HOST, free_port

START_S = 20.0
ATTEMPTS = 5
NAMES = ("valkey-server", "redis-server")


def find_server() -> str | None:
    """The program, in this environment or on PATH."""
    places = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    return next((found for name in NAMES if (found := shutil.which(name, path=places))), None)


class ValkeyServer:
    """A context manager. ``arguments``: more of the server's own. Its data are in memory alone."""

    def __init__(self, folder: Path, *arguments: str, password: str | None = None) -> None:
        self.password = secrets.token_hex(16) if password is None else password
        self.port = 0
        self._folder = folder
        self._arguments = arguments
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> ValkeyServer:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def url(self) -> str:
        """As in KVBM_REMOTE_URL."""
        return f"redis://{HOST}:{self.port}"

    @property
    def pid(self) -> int:
        """Of the process."""
        assert self._process is not None
        return self._process.pid

    def engine(self, url: str = "", login: ServerLogin | None = None) -> ValkeyEngine:
        """A client of it."""
        return ValkeyEngine(server_url(url or self.url), login or self.login())

    def login(self, password: str | None = None) -> ServerLogin:
        """With its password, or another one."""
        path = self._folder / f"password-{secrets.token_hex(4)}"
        path.write_text(f"{self.password if password is None else password}\n")
        return ServerLogin(password_file=str(path))

    def start(self, port: int = 0) -> None:
        """Starts it, at ``port`` if given, and waits until it answers and is this very process."""
        for _ in range(ATTEMPTS):
            self.port = port or free_port()
            if self._starts():
                return
        raise RuntimeError(f"no server could be started: {self._log()}")

    def _starts(self) -> bool:
        program = find_server()
        assert program is not None
        settings = ["--bind", HOST, "--port", str(self.port), "--save", "", "--appendonly", "no"]
        settings += ["--dir", str(self._folder), *self._arguments]
        if self.password:
            settings += ["--requirepass", self.password]
        with (self._folder / "valkey.log").open("wb") as log:
            self._process = subprocess.Popen([program, *settings], stdout=log, stderr=log)
        ends_at_s = time.monotonic() + START_S
        while self._process.poll() is None and time.monotonic() < ends_at_s:
            with suppress(OSError):
                if self._answering_pid() == self._process.pid:
                    return True
            time.sleep(0.01)
        self.stop()
        return False

    def _answering_pid(self) -> int | None:
        with socket.create_connection((HOST, self.port), timeout=1.0) as sock:
            connection = RespConnection(sock)
            connection.deadline = Deadline(1.0)
            if self.password:
                connection.ask(b"AUTH", self.password.encode())
            info = connection.ask(b"INFO", b"server")
        if not isinstance(info, bytes):
            return None
        return next(int(line[11:]) for line in info.decode().splitlines() if line.startswith("process_id:"))

    def _log(self) -> str:
        return (self._folder / "valkey.log").read_text(errors="replace")[-500:]

    def freeze(self) -> None:
        """It keeps its connections and answers nothing."""
        os.kill(self.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        """It goes on."""
        os.kill(self.pid, signal.SIGCONT)

    def stop(self) -> None:
        """As a loss of power. Idempotent."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait(10)
