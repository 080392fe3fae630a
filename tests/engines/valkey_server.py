"""A Valkey or Redis server of a test's or a benchmark's own: on a free port of loopback, with a password.

Debian's `redis-server`, or the `valkey-server` that deploy/setup_env.py puts into the environment.
"""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import sys
from contextlib import suppress
from pathlib import Path

from kvbm_core.config.server_url import server_url
from kvbm_core.storage.remote.login import ServerLogin
from kvbm_core.storage.remote.resp import Deadline, RespConnection
from kvbm_core.storage.remote.valkey import ValkeyEngine
from tests.engines.own_server import OwnServer
from tests.engines.ports import HOST

NAMES = ("valkey-server", "redis-server")


def find_server() -> str | None:
    """The program, in this environment or on PATH."""
    places = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    return next((found for name in NAMES if (found := shutil.which(name, path=places))), None)


class ValkeyServer(OwnServer):
    """A context manager. ``arguments``: more of the server's own. Its data are in memory alone."""

    def __init__(self, folder: Path, *arguments: str, password: str | None = None) -> None:
        super().__init__(folder / "valkey.log")
        self.password = secrets.token_hex(16) if password is None else password
        self._folder = folder
        self._arguments = arguments

    @property
    def url(self) -> str:
        """As in KVBM_REMOTE_URL."""
        return f"redis://{HOST}:{self.port}"

    def engine(self, url: str = "", login: ServerLogin | None = None) -> ValkeyEngine:
        """A client of it."""
        return ValkeyEngine(server_url(url or self.url), login or self.login())

    def login(self, password: str | None = None) -> ServerLogin:
        """With its password, or another one."""
        path = self._folder / f"password-{secrets.token_hex(4)}"
        path.write_text(f"{self.password if password is None else password}\n")
        return ServerLogin(password_file=str(path))

    def _command(self) -> list[str]:
        program = find_server()
        assert program is not None
        settings = ["--bind", HOST, "--port", str(self.port), "--save", "", "--appendonly", "no"]
        settings += ["--dir", str(self._folder), *self._arguments]
        if self.password:
            settings += ["--requirepass", self.password]
        return [program, *settings]

    def _answers(self) -> bool:
        with suppress(OSError):
            return self._answering_pid() == self.pid
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
