"""NVIDIA Dynamo's frontend and its vLLM workers as processes, all on loopback, found through files.

Dynamo keeps what it discovers in etcd by default; with its file backend nothing but these processes runs.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.conftest import DYNAMO_PYTHON
from tests.engines import REPOSITORY
from tests.engines.disaggregated import nixl_environment
from tests.engines.ports import HOST, free_port
from tests.engines.vllm_server import ONE_THREAD, ServerOptions, VllmServer

DEVICE_BLOCKS = 129  # of 32 tokens
BLOCK_TOKENS = 32
MODEL_NAME = "tiny"
START_TIMEOUT_S = 240.0
ON_LOOPBACK = (
    "DYN_SYSTEM_HOST",
    "DYN_EVENT_PLANE_HOST",
    "DYN_TCP_RESPONSE_STREAM_HOST",
    "DYN_TCP_RPC_HOST",
    "DYN_HTTP_RPC_HOST",
)


class DynamoProcess(VllmServer):
    """One of Dynamo's processes in place of ``vllm serve``; ``base_url`` has its /health."""

    def __init__(self, options: ServerOptions, log_path: Path, arguments: Sequence[str]) -> None:
        super().__init__(options, log_path)
        self.base_url = f"http://{HOST}:{free_port()}"
        self._arguments = arguments

    def command(self) -> list[str]:
        return [str(DYNAMO_PYTHON), "-m", *self._arguments]


class Frontend(DynamoProcess):
    """``python -m dynamo.frontend``."""

    def command(self) -> list[str]:
        return [*super().command(), "--http-host", HOST, "--http-port", self.port]


class Worker(DynamoProcess):
    """``python -m dynamo.vllm``, with the arguments of a user's ``vllm serve`` behind it."""

    def command(self) -> list[str]:
        options = self.options
        config = options.kv_transfer_config
        return [
            *super().command(),
            *("--model", str(options.model), "--served-model-name", MODEL_NAME),
            *("--dtype", options.dtype, "--seed", "0", "--generation-config", "vllm", "--enforce-eager"),
            *("--block-size", str(options.block_size_tokens)),
            *("--num-gpu-blocks-override", str(options.device_blocks)),
            *("--max-model-len", str(options.max_model_len_tokens)),
            *(("--kv-transfer-config", json.dumps(config)) if config is not None else ()),
            *options.arguments,
        ]

    def environment(self, scratch: Path) -> dict[str, str]:
        return super().environment(scratch) | {
            "DYN_SYSTEM_PORT": self.port,
            **nixl_environment(),
        }


@dataclass(frozen=True)
class Dynamo:
    """A frontend and its workers."""

    frontend: Frontend
    workers: tuple[Worker, ...]


@contextmanager
def dynamo(
    model: Path, logs: Path, workers: Sequence[tuple[float | None, Mapping[str, Any] | None, tuple[str, ...]]]
) -> Iterator[Dynamo]:
    """A frontend and a worker for each of (host cache in GB, --kv-transfer-config, further arguments)."""
    environment = {
        **dict.fromkeys(ON_LOOPBACK, HOST),
        **ONE_THREAD,
        "DYN_DISCOVERY_BACKEND": "file",
        "DYN_FILE_KV": str(logs / "discovery"),
        "PYTHONPATH": os.pathsep.join(
            [str(REPOSITORY), str(REPOSITORY / "compat"), *filter(None, [os.environ.get("PYTHONPATH")])]
        ),
    }

    def options(host_cache_gb: float | None = None, **more: Any) -> ServerOptions:
        return ServerOptions(
            model, DEVICE_BLOCKS, host_cache_gb, max_model_len_tokens=4096, env=environment, **more
        )

    frontend = Frontend(options(), logs / "frontend.log", ["dynamo.frontend"])
    running = tuple(
        Worker(
            options(gb, kv_transfer_config=config, arguments=more),
            logs / f"worker{index}.log",
            ["dynamo.vllm"],
        )
        for index, (gb, config, more) in enumerate(workers)
    )
    with ExitStack() as stack:
        for process in (frontend, *running):
            process.start(START_TIMEOUT_S)
            stack.callback(process.stop)
        yield Dynamo(frontend, running)
    assert [process.processes() for process in (frontend, *running)] == [[]] * (1 + len(running))
