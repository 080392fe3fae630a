"""What a script of deploy/launch starts, as one server: ``base_url`` is the address before all of them."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from tests.engines import REPOSITORY
from tests.engines.ports import HOST, free_ports
from tests.engines.vllm_server import ServerOptions, VllmServer

LAUNCH = REPOSITORY / "deploy" / "launch"
FIRST_PORTS = (
    "PREFILL_PORT",
    "DECODE_PORT",
    "VLLM_NIXL_SIDE_CHANNEL_PORT",
    "DYN_KVBM_METRICS_PORT",
    "DYN_VLLM_KV_EVENT_PORT",
    "DYN_SYSTEM_PORT",
)
PATIENT_NIXL = '"kv_connector_module_path":"tests.engines.patient_nixl"'


class Launched(VllmServer):
    """``script`` with up to ``workers`` workers, each of which may have kvbm. ``python``: of the environment
    whose programs it finds.
    """

    def __init__(
        self,
        options: ServerOptions,
        log_path: Path,
        script: str,
        *,
        workers: int,
        python: Path | str = sys.executable,
    ) -> None:
        super().__init__(options, log_path)
        self.name = script
        self.workers = range(workers)
        self._python = Path(python)
        self._first_ports = {name: free_ports(workers) for name in FIRST_PORTS}

    def url_of(self, port: str, worker: int) -> str:
        """Of what listens on the worker's port of this name."""
        return f"http://{HOST}:{self._first_ports[port] + worker}"

    def metrics_url_of(self, worker: int) -> str:
        """kvbm's metrics."""
        return self.url_of("DYN_KVBM_METRICS_PORT", worker) + "/metrics"

    def command(self) -> list[str]:
        options = self.options
        return [
            *("bash", str(LAUNCH / self.name), str(options.model)),
            *self.engine_arguments(),
            *options.arguments,
        ]

    def environment(self, scratch: Path) -> dict[str, str]:
        env = super().environment(scratch)
        paths = [env["PYTHONPATH"], str(REPOSITORY), str(REPOSITORY / "compat")]
        return env | {
            "PATH": os.pathsep.join([str(self._python.parent), env["PATH"]]),
            "PYTHONPATH": os.pathsep.join(paths),
            "HOST": HOST,
            "PORT": self.port,
            **{name: str(port) for name, port in self._first_ports.items()},
            "VLLM_NIXL_SIDE_CHANNEL_HOST": HOST,
            "UCX_NET_DEVICES": "lo",
            "NIXL_FIELDS": PATIENT_NIXL,
            "DYN_FILE_KV": str(self.log_path.parent / "discovery"),
            **self.options.env,
        }
