"""A NATS server of a test's own: on a free port of loopback, with a user and a password.

Debian's `nats-server`, or the one that deploy/setup_env.py puts into the environment.
"""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import sys
from contextlib import suppress
from pathlib import Path

from kvbm_core.events.nats_sink import NatsLogin
from tests.engines.own_server import OwnServer
from tests.engines.ports import HOST, listens


def find_server() -> str | None:
    """The program, in this environment or on PATH."""
    places = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    return shutil.which("nats-server", path=places)


class NatsServer(OwnServer):
    """A context manager. ``arguments``: more of the server's own. ``authorization``: who is let in, in the
    words of its configuration; else one user with a password.
    """

    def __init__(self, folder: Path, *arguments: str, scheme: str = "nats", authorization: str = "") -> None:
        super().__init__(folder / "nats.log")
        self._authorization = authorization
        self.user, self.password = "kvbm", secrets.token_hex(16)
        self._scheme = scheme
        self._folder = folder
        self._arguments = arguments

    @property
    def url(self) -> str:
        """As in NATS_SERVER."""
        return f"{self._scheme}://{HOST}:{self.port}"

    def login(self, password: str | None = None) -> NatsLogin:
        """With its password, or another one."""
        return NatsLogin(self.url, self.user, self.password if password is None else password)

    def _command(self) -> list[str]:
        program = find_server()
        assert program is not None
        settings = ["-a", HOST, "-p", str(self.port), *self._arguments]
        if self._authorization:
            (path := self._folder / "nats.conf").write_text(f"authorization {{ {self._authorization} }}\n")
            settings += ["-c", str(path)]
        else:
            settings += ["--user", self.user, "--pass", self.password]
        return [program, *settings]

    def _answers(self) -> bool:
        with suppress(OSError), socket.create_connection((HOST, self.port), 1):
            return listens(self.pid, self.port)
        return False
