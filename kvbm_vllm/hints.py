"""What a router says of where blocks of a request are, in the words of vLLM, Dynamo and llm-d.

A hint names an instance. What else is in it is not used: identity is ours, the owner is asked for our own
keys. What cannot be read is no hint.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from kvbm_core.peers.address import MAX_CHARACTERS, parse_address

FETCH = "kv.fetch"
VERSIONS = frozenset({"1.0"})
"""Of the action that are understood."""
PROTOCOLS = frozenset({"0.1"})
"""Of the envelope; each has to name one."""
MAX_ACTIONS = 64
_ENVELOPE, _PAYLOAD, _SOURCES = "kv_hint", "router_hint", ("remote_kv_source", "remote_prefiller")


def source_of(params: object, actions: Sequence[tuple[object, object, object]] = ()) -> str:
    """Where to ask: tcp://HOST:PORT, or an empty string. ``params``: the request's kv_transfer_params.
    ``actions``: (type, version, payload) of those that the engine has for it in a field of its own.
    """
    return next(_addresses(params, actions), "")


def _addresses(params: object, actions: Sequence[tuple[object, object, object]]) -> Iterator[str]:
    for endpoint in _endpoints(params, actions):
        if isinstance(endpoint, str) and len(endpoint) <= MAX_CHARACTERS:
            address = parse_address(endpoint)
            if address is not None:
                yield address.text


def _endpoints(params: object, actions: Sequence[tuple[object, object, object]]) -> Iterator[object]:
    for kind, version, payload in actions[:MAX_ACTIONS]:
        yield _of_action(kind, version, payload)
    if not isinstance(params, Mapping):
        return
    envelope = params.get(_ENVELOPE)
    listed = None
    if isinstance(envelope, Mapping) and is_understood(envelope.get("protocol_version")):
        listed = envelope.get("actions")
    for action in listed[:MAX_ACTIONS] if isinstance(listed, list) else ():
        if isinstance(action, Mapping):
            yield _of_action(action.get("action_type"), action.get("action_version"), action.get("payload"))
    hint = params.get(_PAYLOAD)
    if isinstance(hint, Mapping):
        yield hint.get("source_control_endpoint")
    for name in _SOURCES:
        source = params.get(name)
        if isinstance(source, Mapping):
            host, port = source.get("remote_host"), source.get("remote_port")
            if isinstance(host, str) and isinstance(port, int | str) and not isinstance(port, bool):
                yield f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_understood(protocol: object) -> bool:
    """Whether an envelope of this ``protocol_version`` is heeded."""
    return isinstance(protocol, str) and protocol in PROTOCOLS


def _of_action(kind: object, version: object, payload: object) -> object:
    is_fetch = kind == FETCH and isinstance(version, str) and version in VERSIONS
    return payload.get("source_control_endpoint") if is_fetch and isinstance(payload, Mapping) else None
