"""The --kv-transfer-config of vLLM's servers, alone and as a pair.

Of a pair, one computes prompts, with kvbm first and NIXL second; the other answers, with NIXL alone.
"""

from __future__ import annotations

from typing import Any

from tests.engines.ports import HOST, free_port
from tests.engines.vllm_server import CONNECTOR_MODULE

CACHE: dict[str, Any] = {
    "kv_connector": "DynamoConnector",
    "kv_role": "kv_both",
    "kv_connector_module_path": CONNECTOR_MODULE,
}
NIXL = {"kv_connector": "NixlConnector", "kv_connector_module_path": "tests.engines.patient_nixl"}
PREFILL: dict[str, Any] = {
    "kv_connector": "PdConnector",
    "kv_role": "kv_both",
    "kv_connector_module_path": CONNECTOR_MODULE,
    "kv_connector_extra_config": {"connectors": [CACHE, {"kv_role": "kv_producer", **NIXL}]},
}
DECODE: dict[str, Any] = {"kv_role": "kv_consumer", **NIXL}


def nixl_environment() -> dict[str, str]:
    """A side channel of its own for each server, and no traffic but on loopback."""
    return {
        "VLLM_NIXL_SIDE_CHANNEL_HOST": HOST,
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()),
        "UCX_NET_DEVICES": "lo",
    }
