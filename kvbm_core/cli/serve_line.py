"""The command line that serves a model with kvbm; the one that the KVBM guides show."""

from __future__ import annotations

import json
import shlex

KV_TRANSFER_CONFIG = {
    "kv_connector": "DynamoConnector",
    "kv_role": "kv_both",
    "kv_connector_module_path": "kvbm.vllm_integration.connector",
}


def vllm_serve_line(model: str, *, cpu_cache_gb: float, metrics: bool) -> str:
    """Environment and ``vllm serve`` for ``model`` with a host tier of ``cpu_cache_gb`` over all ranks.

    Two shell lines, quoted, to be pasted as they are.
    """
    variables = {"DYN_KVBM_CPU_CACHE_GB": f"{cpu_cache_gb:g}"}
    if metrics:
        variables["DYN_KVBM_METRICS"] = "true"
    environment = " ".join(f"{name}={shlex.quote(value)}" for name, value in variables.items())
    config = shlex.quote(json.dumps(KV_TRANSFER_CONFIG, separators=(",", ":")))
    return f"{environment} \\\n  vllm serve {shlex.quote(model)} --kv-transfer-config {config}"
