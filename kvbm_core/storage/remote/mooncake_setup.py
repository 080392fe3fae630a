"""How this machine takes part in a Mooncake Store: Mooncake's own configuration, as its other users read it.

A file (MOONCAKE_CONFIG_PATH, JSON), and MOONCAKE_* variables for what is not in it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import NamedTuple

from kvbm_core.config.server_url import ServerUrl
from kvbm_core.errors import ConfigError

FILE_SETTING = "MOONCAKE_CONFIG_PATH"
TIMEOUTS = {
    "MC_RPC_TIMEOUT_MS": "2000",
    "MC_TCP_PROGRESS_TIMEOUT_SEC": "3",
    "MC_TCP_STATUS_TIMEOUT_SEC": "3",
}
"""Mooncake reads these when it is loaded. Its own defaults are 30 s and longer."""
DEFAULT_METRICS_PORT = 9003
_VARIABLES = {
    "local_hostname": "MOONCAKE_LOCAL_HOSTNAME",
    "metadata_server": "MOONCAKE_TE_META_DATA_SERVER",
    "global_segment_size": "MOONCAKE_GLOBAL_SEGMENT_SIZE",
    "local_buffer_size": "MOONCAKE_LOCAL_BUFFER_SIZE",
    "protocol": "MOONCAKE_PROTOCOL",
    "device_name": "MOONCAKE_DEVICE",
    "tenant_id": "MOONCAKE_TENANT_ID",
    "master_metrics_port": "MOONCAKE_MASTER_METRICS_PORT",
}
"""The variable for each field of the file."""
_UNITS = (("kb", 1 << 10), ("mb", 1 << 20), ("gb", 1 << 30), ("tb", 1 << 40), ("b", 1))


class MooncakeSetup(NamedTuple):
    """``local_hostname``: the address at which others reach this machine; empty: that of the interface
    towards the master. ``segment_bytes``: how much memory this process gives to the pool.
    """

    master: str
    local_hostname: str
    metadata_server: str
    segment_bytes: int
    buffer_bytes: int
    protocol: str
    device: str
    tenant: str
    metrics_port: int


def read_setup(master: ServerUrl, environ: Mapping[str, str]) -> MooncakeSetup:
    """Reads the configuration. The master is that of the URL, whatever the file or a variable says.
    ConfigError, one line, for a value that cannot be used.
    """
    in_file = _file(environ.get(FILE_SETTING, ""))

    def value(field: str, default: str) -> str:
        given = in_file.get(field)
        return str(environ.get(_VARIABLES[field]) or default if given in (None, "") else given).strip()

    def size(field: str) -> int:
        text = value(field, "0")
        try:
            return _bytes_of(text)
        except ValueError:
            remedy = "write a number of bytes, or one with a unit, such as 4GB"
            raise ConfigError(_VARIABLES[field], text[:40], remedy) from None

    port = value("master_metrics_port", str(DEFAULT_METRICS_PORT))
    if not port.isdecimal():
        raise ConfigError(_VARIABLES["master_metrics_port"], port[:40], "write a port number")
    return MooncakeSetup(
        master.address,
        value("local_hostname", ""),
        value("metadata_server", "P2PHANDSHAKE"),
        size("global_segment_size"),
        size("local_buffer_size"),
        value("protocol", "tcp").lower(),
        value("device_name", ""),
        value("tenant_id", "default"),
        int(port),
    )


def set_timeouts() -> None:
    """Sets TIMEOUTS in this process's environment, but for those that its user has set. To be called before
    Mooncake is loaded.
    """
    for name, text in TIMEOUTS.items():
        os.environ.setdefault(name, text)


def _file(path: str) -> Mapping[str, object]:
    if not path:
        return {}
    try:
        with open(path, encoding="utf-8") as file:
            found = json.load(file)
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not JSON"
        raise ConfigError(FILE_SETTING, path, f"cannot be read: {why}") from None
    if not isinstance(found, dict):
        raise ConfigError(FILE_SETTING, path, "it is not a JSON object")
    return found


def _bytes_of(text: str) -> int:
    lower = text.lower()
    for unit, factor in _UNITS:
        if lower.endswith(unit):
            number = float(lower.removesuffix(unit)) * factor
            break
    else:
        number = float(lower)
    if not 0 <= number < (1 << 50):
        raise ValueError("out of range")
    return int(number)
