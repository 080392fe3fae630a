"""A real ``vllm serve`` on loopback.

with VllmServer(ServerOptions(model=folder, device_blocks=280, host_cache_gb=1.0), log_path) as server:
    ...  # server.base_url, server.metrics_url
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from tests.engines import REPOSITORY
from tests.engines.ports import HOST, free_port
from tests.engines.process import Server, ServerError

CONNECTOR_MODULE = "kvbm.vllm_integration.connector"
ONE_THREAD = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
"""For engines that run beside others."""


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


class VllmServer(Server):
    """One ``vllm serve``."""

    name = "vllm serve"

    def __init__(self, options: ServerOptions, log_path: Path) -> None:
        super().__init__(log_path)
        self.options = options
        self.metrics_port = options.metrics_port or free_port()
        self.metrics_url = f"http://{HOST}:{self.metrics_port}/metrics"

    def command(self) -> list[str]:
        options = self.options
        command = [
            *(_vllm_program(), "serve", str(options.model)),
            *("--host", HOST, "--port", self.port),
            *self.engine_arguments(),
            "--disable-uvicorn-access-log",
        ]
        if options.kv_transfer_config is not None:
            command += ["--kv-transfer-config", json.dumps(options.kv_transfer_config)]
        elif options.host_cache_gb is not None:
            command += ["--kv-transfer-config", connector_config(options.connector_module)]
        return [*command, *options.arguments]

    def engine_arguments(self) -> list[str]:
        """What the engine is told, whoever starts it."""
        options = self.options
        arguments = [
            *("--dtype", options.dtype, "--seed", "0", "--generation-config", "vllm", "--enforce-eager"),
            *("--block-size", str(options.block_size_tokens)),
            *("--num-gpu-blocks-override", str(options.device_blocks)),
            *("--max-model-len", str(options.max_model_len_tokens)),
            *("--max-num-batched-tokens", str(options.max_batched_tokens)),
        ]
        if not engine_is_for_cpu():
            arguments += ["--gpu-memory-utilization", "0.3"]
        return arguments

    def environment(self, scratch: Path) -> dict[str, str]:
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
