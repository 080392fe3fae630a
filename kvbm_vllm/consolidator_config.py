"""What ``python -m dynamo.vllm`` asks about the KV event consolidator when it finds our connector."""

from __future__ import annotations

import logging
import re
from typing import Any

from kvbm_core.events import ports
from kvbm_core.events.ports import LOOPBACK, wanted_port
from kvbm_core.events.service import ConsolidatedEnds
from kvbm_vllm.config import read_settings

log = logging.getLogger("kvbm")

_TCP_PORT = re.compile(r"tcp://\*:[1-9]\d*")
_OURS, _PAIR = "DynamoConnector", "PdConnector"


def should_enable_consolidator(vllm_config: Any) -> bool:
    """Whether kvbm is to merge the device's events and its own into one stream, which dynamo.vllm reads.

    Without it kvbm hands its events to vLLM, which publishes them beside the device's.
    """
    why_not = _why_not(vllm_config)
    if why_not:
        log.info("kvbm: KV events are not consolidated: %s", why_not)
    return not why_not


def get_consolidator_endpoints(vllm_config: Any) -> tuple[str, str, str] | None:
    """(where vLLM publishes, where the consolidator is to, where readers find it), or None if it is not to
    be. ConfigError, one line, if DYN_KVBM_LEADER_ZMQ_PUB_PORT leaves no port for it.
    """
    if not should_enable_consolidator(vllm_config):
        return None
    engine = str(vllm_config.kv_events_config.endpoint).replace("*", LOOPBACK)
    wanted = wanted_port(read_settings(vllm_config))
    port = ports.KEPT.keep(wanted) or ports.KEPT.keep(0) or wanted
    published = f"tcp://{LOOPBACK}:{port}"
    return engine, published, published


def consolidated_ends(vllm_config: Any) -> ConsolidatedEnds | None:
    """What dynamo.vllm was told, in the engine's process; None if it was told nothing."""
    extra = vllm_config.additional_config
    endpoints = extra.get("consolidator_endpoints") if isinstance(extra, dict) else None
    return None if not endpoints else ConsolidatedEnds(endpoints[0], endpoints[1], same_hashes=True)


def _why_not(vllm_config: Any) -> str:
    """Empty if nothing is against it."""
    transfer = getattr(vllm_config, "kv_transfer_config", None)
    if transfer is None or not _has_ours(transfer):
        return "the connector is not DynamoConnector"
    if not read_settings(vllm_config).kv_events_enable_consolidator:
        return "DYN_KVBM_KV_EVENTS_ENABLE_CONSOLIDATOR=false"
    if not vllm_config.cache_config.enable_prefix_caching:
        return "prefix caching is off"
    unread = _why_unread(vllm_config.kv_events_config)
    if unread:
        return unread
    if vllm_config.parallel_config.data_parallel_size > 1:
        return "of several data-parallel ranks each publishes its own, kvbm's among them"
    return ""


def _why_unread(events: Any) -> str:
    """Why vLLM's own events cannot be read; empty if they can."""
    if events is None or not events.enable_kv_cache_events or events.publisher != "zmq":
        return "vLLM publishes no KV events over ZMQ (--kv-events-config)"
    endpoint = str(events.endpoint)
    if endpoint.startswith("ipc://") or _TCP_PORT.fullmatch(endpoint):
        return ""
    # To other addresses vLLM connects, or it chooses a port of its own.
    return f"vLLM's endpoint {endpoint} is not tcp://*:PORT (--kv-events-config)"


def _has_ours(transfer: Any) -> bool:
    if transfer.kv_connector == _PAIR:
        pair = (transfer.kv_connector_extra_config or {}).get("connectors", [])
        return any(one.get("kv_connector") == _OURS for one in pair)
    return bool(transfer.kv_connector == _OURS)
