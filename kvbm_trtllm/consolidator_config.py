"""What ``python -m dynamo.trtllm`` asks about the KV event consolidator when kvbm is installed.

Its process is not the leader's: both find the ports in the same settings. So there is a consolidator only if
DYN_KVBM_TRTLLM_ZMQ_PORT says where TensorRT-LLM's events are to be published.
"""

from __future__ import annotations

import logging
from typing import Any

from kvbm_core.config import KvbmSettings
from kvbm_core.errors import ConfigError
from kvbm_core.events import ports
from kvbm_core.events.ports import LOOPBACK, wanted_port

log = logging.getLogger("kvbm")

_MODULES = ("kvbm.trtllm_integration", "dynamo.llm.trtllm_integration", "kvbm_trtllm")


def should_enable_consolidator(arg_map: Any) -> bool:
    """Whether kvbm is to merge the device's events and its own into one stream. ``arg_map``: the arguments of
    TensorRT-LLM's engine, as a dict.
    """
    why_not = _why_not(arg_map)
    if why_not:
        log.info("kvbm: KV events are not consolidated: %s", why_not)
    return not why_not


def get_consolidator_endpoints() -> tuple[str, str, str]:
    """(where dynamo.trtllm is to publish the device's events, where the consolidator publishes, where readers
    find that). ConfigError, one line, if the settings leave no port for it.
    """
    ends = endpoints_of(KvbmSettings.from_env())
    if ends is None:
        remedy = "is not set: say where the device's events are to be published, such as 20081"
        raise ConfigError("DYN_KVBM_TRTLLM_ZMQ_PORT", "(unset)", remedy)
    return ends[0], ends[1], ends[1]


def endpoints_of(settings: KvbmSettings) -> tuple[str, str] | None:
    """(the device's events, the consolidator's); None if there is to be none. ConfigError as above."""
    if settings.trtllm_zmq_port is None or not settings.kv_events_enable_consolidator:
        return None
    port = wanted_port(settings)
    return f"tcp://{LOOPBACK}:{settings.trtllm_zmq_port}", f"tcp://{LOOPBACK}:{port}"


def _why_not(arg_map: Any) -> str:
    """Empty if nothing is against it."""
    connector = arg_map.get("kv_connector_config") if isinstance(arg_map, dict) else None
    module = (
        connector.get("connector_module")
        if isinstance(connector, dict)
        else getattr(connector, "connector_module", None)
    )
    if not str(module or "").startswith(_MODULES):
        return "the connector is not kvbm's"
    settings = KvbmSettings.from_env()
    if not settings.kv_events_enable_consolidator:
        return "DYN_KVBM_KV_EVENTS_ENABLE_CONSOLIDATOR=false"
    if settings.trtllm_zmq_port is None:
        return "DYN_KVBM_TRTLLM_ZMQ_PORT is not set"
    if arg_map.get("enable_attention_dp"):
        return "with attention DP each rank would have one of its own"
    if ports.KEPT.keep(wanted_port(settings)) is None:
        return (
            f"port {wanted_port(settings)} is another engine's; set another DYN_KVBM_LEADER_ZMQ_PUB_PORT for "
            "this one, in its process and in TensorRT-LLM's"
        )
    return ""
