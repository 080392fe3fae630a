"""A Mooncake Store of a test's or a benchmark's own: a master, and machines that give memory, on loopback."""

from __future__ import annotations

import ctypes.util
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

from kvbm_core.config.server_url import server_url
from kvbm_core.storage.remote.mooncake import MooncakeEngine
from kvbm_core.storage.remote.mooncake_setup import TIMEOUTS
from tests.engines.freeze import freeze, thaw
from tests.engines.ports import HOST, free_port, listens
from tests.engines.process import ServerError

START_S = 30.0
ATTEMPTS = 5
SEGMENT_BYTES = 128 << 20
NODE = """
import sys, time
from mooncake.store import MooncakeDistributedStore
client = MooncakeDistributedStore()
code = client.setup(sys.argv[1], "P2PHANDSHAKE", int(sys.argv[2]), 1 << 20, "tcp", "", sys.argv[3])
print("joined", code, flush=True)
sys.stdin.read()
"""


def find_mooncake() -> Path | None:
    """The package's folder, if it can be loaded: it needs a library of RDMA's also where there is none."""
    spec = find_spec("mooncake")
    if spec is None or spec.origin is None:
        return None
    folder = Path(spec.origin).parent
    beside = any(folder.parent.glob("mooncake_transfer_engine*.libs/libibverbs.so.1"))
    return folder if beside or ctypes.util.find_library("ibverbs") else None


class Node:
    """A process that gives memory to the pool."""

    def __init__(self, folder: Path, master: str, num_bytes: int) -> None:
        self._log = folder / f"node-{time.monotonic_ns()}.log"
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", NODE, HOST, str(num_bytes), master],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=os.environ | TIMEOUTS,
            )

    def wait(self) -> None:
        """Until it has joined."""
        ends_at_s = time.monotonic() + START_S
        while "joined 0" not in (text := self._log.read_text(errors="replace")):
            if self.process.poll() is not None or time.monotonic() > ends_at_s:
                raise ServerError(f"no node could be started: {text[-500:]}")
            time.sleep(0.02)

    def freeze(self) -> None:
        """It keeps its connections and answers nothing."""
        freeze(self.process.pid)

    def thaw(self) -> None:
        """It goes on."""
        thaw(self.process.pid)

    def kill(self) -> None:
        """As a loss of power; idempotent."""
        self.process.kill()
        self.process.communicate()


class MooncakePool:
    """A context manager. ``num_nodes`` machines of ``segment_bytes`` each. ``options``: more of the
    master's own.
    """

    def __init__(
        self,
        folder: Path,
        num_nodes: int = 1,
        segment_bytes: int = SEGMENT_BYTES,
        options: Sequence[str] = (),
    ) -> None:
        self._folder = folder
        self._options = options
        self._segment_bytes = segment_bytes
        self._num_nodes = num_nodes
        self._master: subprocess.Popen[bytes] | None = None
        self.port = self.metrics_port = 0
        self.nodes: list[Node] = []

    def __enter__(self) -> MooncakePool:
        try:
            self.start_master()
            self.add_nodes(self._num_nodes)
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def address(self) -> str:
        """The master's."""
        return f"{HOST}:{self.port}"

    def engine(self) -> MooncakeEngine:
        """A client of it, which lists by the master's port of metrics."""
        os.environ["MOONCAKE_MASTER_METRICS_PORT"] = str(self.metrics_port)
        try:
            return MooncakeEngine(server_url(f"mooncake://{self.address}"))
        finally:
            del os.environ["MOONCAKE_MASTER_METRICS_PORT"]

    def allocated_bytes(self) -> int:
        """What objects take, and what is half written."""
        with urllib.request.urlopen(f"http://{HOST}:{self.metrics_port}/metrics", timeout=10.0) as answer:
            lines = answer.read().decode().splitlines()
        (number,) = [line.split()[1] for line in lines if line.startswith("master_allocated_bytes ")]
        return int(number)

    def add_nodes(self, count: int) -> None:
        """Each has its memory in the pool when this returns."""
        added = [Node(self._folder, self.address, self._segment_bytes) for _ in range(count)]
        self.nodes += added
        for node in added:
            node.wait()

    def start_master(self) -> None:
        """At the same ports if it was there before; waits until it answers and is this very process. One that
        was never there takes others if somebody has just taken its ports.
        """
        was_there = bool(self.port)
        for left in reversed(range(1 if was_there else ATTEMPTS)):
            if not was_there:
                self.port, self.metrics_port = free_port(), free_port()
            if self._starts_master():
                return
            self.kill_master()
            if not left:
                raise ServerError("no master could be started")

    def _starts_master(self) -> bool:
        folder = find_mooncake()
        assert folder is not None
        ports = [f"--rpc_port={self.port}", f"--metrics_port={self.metrics_port}"]
        options = [f"--rpc_address={HOST}", "--enable_metric_reporting=false", "--client_ttl=10"]
        with (self._folder / "master.log").open("ab") as log:
            command = [str(folder / "mooncake_master"), *ports, *options, *self._options]
            self._master = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        ends_at_s = time.monotonic() + START_S
        while True:
            if self._master.poll() is not None or time.monotonic() > ends_at_s:
                return False
            with suppress(OSError):
                url = f"http://{HOST}:{self.metrics_port}/health"
                with urllib.request.urlopen(url, timeout=1.0) as answer:
                    if answer.status == 200 and listens(self._master.pid, self.port):
                        return True
            time.sleep(0.02)

    def freeze_master(self) -> None:
        """It keeps its connections and answers nothing."""
        assert self._master is not None
        freeze(self._master.pid)

    def thaw_master(self) -> None:
        """It goes on."""
        assert self._master is not None
        thaw(self._master.pid)

    def kill_master(self) -> None:
        """As a loss of power; idempotent."""
        if self._master is not None:
            self._master.kill()
            self._master.wait(10)
            self._master = None

    def stop(self) -> None:
        """Idempotent."""
        for node in self.nodes:
            node.kill()
        self.nodes.clear()
        self.kill_master()
