"""Prefill and decode servers that are started one by one, to be ended one by one, and a proxy before them."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.engines import REPOSITORY
from tests.engines.ports import HOST, free_port
from tests.engines.process import Server
from tests.engines.vllm_server import CONNECTOR_MODULE

DEVICE_BLOCKS = 129  # of 32 tokens
HOST_CACHE_GB = 0.2
PROMPT_TOKENS = 1000
ANSWER_TOKENS = 24
PATIENCE_S = 240.0
POLL_S = 0.1
CACHE: dict[str, Any] = {
    "kv_connector": "DynamoConnector",
    "kv_role": "kv_both",
    "kv_connector_module_path": CONNECTOR_MODULE,
}
NIXL = {"kv_connector": "NixlConnector", "kv_connector_module_path": "tests.engines.patient_nixl"}


def wait_for(condition: Callable[[], Any]) -> None:
    """Patiently, until what other processes do has come about."""
    deadline_s = time.monotonic() + PATIENCE_S
    while not condition():
        if time.monotonic() > deadline_s:
            raise AssertionError(f"what was waited for did not come in {PATIENCE_S:.0f} s")
        time.sleep(POLL_S)


def kvbm_and_nixl(role: str) -> dict[str, Any]:
    """The --kv-transfer-config of a server with both; ``role`` is NIXL's."""
    return {
        "kv_connector": "PdConnector",
        "kv_role": "kv_both",
        "kv_connector_module_path": CONNECTOR_MODULE,
        "kv_connector_extra_config": {"connectors": [CACHE, {"kv_role": role, **NIXL}]},
    }


def nixl_environment() -> dict[str, str]:
    """A side channel of its own for each server, and no traffic but on loopback."""
    return {
        "VLLM_NIXL_SIDE_CHANNEL_HOST": HOST,
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()),
        "UCX_NET_DEVICES": "lo",
    }


class Proxy(Server):
    """deploy/launch/pd_proxy.py."""

    name = "pd_proxy.py"

    def __init__(
        self, log_path: Path, prefills: list[str], decodes: list[str], stall_timeout_s: float | None = None
    ) -> None:
        super().__init__(log_path)
        self._workers = [
            *([] if stall_timeout_s is None else ["--stall-timeout", str(stall_timeout_s)]),
            *(argument for url in prefills for argument in ("--prefill", url)),
            *(argument for url in decodes for argument in ("--decode", url)),
        ]

    def command(self) -> list[str]:
        script = REPOSITORY / "deploy" / "launch" / self.name
        return [sys.executable, str(script), "--host", HOST, "--port", self.port, *self._workers]

    def environment(self, scratch: Path) -> dict[str, str]:
        return dict(os.environ)
