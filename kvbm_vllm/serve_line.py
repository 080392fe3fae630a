"""``kvbm serve-line``: the command line that serves a model with kvbm; the one that the KVBM guides show."""

from __future__ import annotations

import json
import shlex
from typing import Annotated

import typer

KV_TRANSFER_CONFIG = {
    "kv_connector": "DynamoConnector",
    "kv_role": "kv_both",
    "kv_connector_module_path": "kvbm.vllm_integration.connector",
}


def serve_line(
    model: Annotated[str, typer.Argument(help="Model name or path, as for vllm serve.")],
    cpu_cache_gb: Annotated[
        float,
        typer.Option(
            help="Host tier in GB (1e9 bytes), over all ranks; more than the device's cache.", min=0.001
        ),
    ] = 20.0,
    metrics: Annotated[bool, typer.Option(help="Also serve metrics on port 6880.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON, for programs.")] = False,
) -> None:
    """The command line that serves MODEL on vLLM with kvbm, ready to paste."""
    variables = {"DYN_KVBM_CPU_CACHE_GB": f"{cpu_cache_gb:g}"}
    if metrics:
        variables["DYN_KVBM_METRICS"] = "true"
    line = json.dumps(KV_TRANSFER_CONFIG, separators=(",", ":"))
    if as_json:
        command = ["vllm", "serve", model, "--kv-transfer-config", line]
        typer.echo(json.dumps({"environment": variables, "command": command}, indent=2))
        return
    environment = " ".join(f"{name}={shlex.quote(value)}" for name, value in variables.items())
    config = shlex.quote(line)
    typer.echo(f"{environment} \\\n  vllm serve {shlex.quote(model)} --kv-transfer-config {config}")
