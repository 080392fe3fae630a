"""Processes whose imports are done when they begin: they are forked out of one that has done nothing else.

Of what the start of an engine costs, imports are the greater part. vLLM forks its own workers the same way.

    python -m tests.engines.forks SOCKET MODULE...
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

MAX_ORDER_BYTES = 1 << 20
END_TIMEOUT_S = 60.0


class Child:
    """One process, of a session of its own."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._ends = os.pidfd_open(pid)

    def wait(self, timeout_s: float) -> None:
        """Until it has ended; TimeoutExpired."""
        if not select.select([self._ends], [], [], timeout_s)[0]:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout_s)

    def abort(self) -> None:
        """It and its session. With faulthandler in it, it writes before where its threads are."""
        with suppress(ProcessLookupError, subprocess.TimeoutExpired):
            signal.pidfd_send_signal(self._ends, signal.SIGABRT)
            self.wait(END_TIMEOUT_S)
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)  # its workers, or it too

    def kill(self) -> None:
        """It and its session, if it still runs. What is not used any more, in any case."""
        if self._ends >= 0:
            if not select.select([self._ends], [], [], 0)[0]:
                os.killpg(self.pid, signal.SIGKILL)
                self.wait(END_TIMEOUT_S)
            os.close(self._ends)
            self._ends = -1
            with suppress(ChildProcessError):  # another process has forked it
                os.waitpid(self.pid, 0)


Start = Callable[[str, Sequence[str], Mapping[str, str], Sequence[int]], Child]
"""``start(module, arguments, environment, files)``: as ``python -m module arguments``. ``files`` are the
numbers of its input, its output and its errors.
"""


def python(program: str | Path) -> Start:
    """A new process of this Python."""

    def start(
        module: str, arguments: Sequence[str], environment: Mapping[str, str], files: Sequence[int]
    ) -> Child:
        command = [str(program), "-m", module, *arguments]
        actions = [(os.POSIX_SPAWN_DUP2, file, number) for number, file in enumerate(files)]
        return Child(os.posix_spawn(command[0], command, environment, file_actions=actions, setsid=True))

    return start


class Forks:
    """Where they come from: ``python`` with ``modules`` imported."""

    def __init__(self, python: str | Path, modules: Sequence[str], environment: Mapping[str, str]) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [str(python), "-m", __name__, str(theirs.fileno()), *modules]
        fds = [theirs.fileno()]
        self._process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, pass_fds=fds, env=dict(environment)
        )
        theirs.close()

    def start(
        self, module: str, arguments: Sequence[str], environment: Mapping[str, str], files: Sequence[int]
    ) -> Child:
        """See Start."""
        order = {"module": module, "arguments": list(arguments), "environment": dict(environment)}
        socket.send_fds(self._socket, [json.dumps(order).encode()], list(files))
        pid = self._socket.recv(64)
        assert pid, f"the process that forks ended with {self._process.wait()}"
        return Child(int(pid))

    def close(self) -> None:
        """No more of them; those that run go on."""
        self._socket.close()
        self._process.wait(END_TIMEOUT_S)


def serve(orders: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """Forks for each order; in the new process its order and files, here None in the end."""
    while True:
        message, files, _, _ = socket.recv_fds(orders, MAX_ORDER_BYTES, 3)
        if not message:
            return None
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass  # not before: until somebody has looked at it, its number must not be another's
        pid = os.fork()
        if not pid:
            return json.loads(message), list(files)
        for file in files:
            os.close(file)
        orders.send(str(pid).encode())


def main(number: str, *modules: str) -> None:
    """The process that forks, and then those that it has forked."""
    before = dict(os.environ)
    for name in modules:
        importlib.import_module(name)
    set_by_imports = {name: value for name, value in os.environ.items() if before.get(name) != value}
    gc.collect()
    gc.freeze()
    with socket.socket(fileno=int(number)) as orders:
        found = serve(orders)
    if found is None:
        os._exit(0)  # or what it has imported would be taken apart, and some of that says what it leaks
    order, files = found
    os.setsid()
    for number_here, file in enumerate(files):
        os.dup2(file, number_here)
        os.close(file)
    os.environ.clear()
    os.environ.update(order["environment"] | set_by_imports)
    if os.environ.get("PYTHONFAULTHANDLER"):
        faulthandler.enable()  # read at a start, and this process was forked
    tempfile.tempdir = None  # so is TMPDIR
    sys.argv = [order["module"], *order["arguments"]]
    runpy.run_module(order["module"], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
