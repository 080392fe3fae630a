"""What routers say of where blocks are: in the words of vLLM, Dynamo and llm-d, and in those of nobody."""

from __future__ import annotations

from typing import Any

import pytest

from kvbm_core.peers.address import address_of_rank, host_of, parse_address
from kvbm_vllm.hints import MAX_ACTIONS, source_of

HERE = "tcp://10.0.0.7:56100"
PAYLOAD = {"source_control_endpoint": HERE, "block_hashes": [1, 2, 2**64 - 1]}
ACTION = {"action_id": "a", "action_type": "kv.fetch", "action_version": "1.0", "payload": PAYLOAD}
ENVELOPE = {"protocol_version": "0.1", "message_id": "m", "actions": [ACTION]}
LLMD = {"kv_request_id": "r", "remote_host": "10.0.0.7", "remote_port": 56100}


@pytest.mark.parametrize(
    "params",
    [
        {"kv_hint": ENVELOPE},
        {"router_hint": PAYLOAD},
        {"remote_kv_source": LLMD},
        {"remote_prefiller": LLMD},
        {"remote_kv_source": {**LLMD, "remote_port": "56100"}},
        {"router_hint": {"source_control_endpoint": "10.0.0.7:56100"}},
        {
            "kv_hint": {**ENVELOPE, "actions": [{**ACTION, "action_type": "kv.evict"}, ACTION]},
            "do_remote_prefill": True,
        },
        {
            "kv_hint": {**ENVELOPE, "actions": ["?", ACTION]},
            "remote_kv_source": {**LLMD, "remote_host": "other"},
        },
    ],
    ids=str,
)
def test_each_way_to_name_an_instance_is_understood(params: dict[str, Any]) -> None:
    assert source_of(params) == HERE


def test_a_hint_in_a_field_of_the_engines_own_goes_first() -> None:
    action = ("kv.fetch", "1.0", {"source_control_endpoint": "tcp://first:1"})
    assert source_of({"router_hint": PAYLOAD}, [action]) == "tcp://first:1"
    assert source_of(None, [action]) == "tcp://first:1"
    assert source_of({"router_hint": PAYLOAD}, [("kv.fetch", "2.0", action[2])]) == HERE
    assert source_of(None, [("kv.fetch", "1.0", None), ("kv.fetch", ["1.0"], action[2])]) == ""


@pytest.mark.parametrize(
    "params",
    [
        None,
        "text",
        [],
        {},
        {"kv_hint": None},
        {"kv_hint": {**ENVELOPE, "protocol_version": "1.0"}},
        {"kv_hint": {**ENVELOPE, "protocol_version": 0.1}},
        {"kv_hint": {**ENVELOPE, "protocol_version": ["0.1"]}},
        {"kv_hint": {"message_id": "m", "actions": [ACTION]}},
        {"kv_hint": {**ENVELOPE, "actions": ACTION}},
        {"kv_hint": {**ENVELOPE, "actions": [{}] * MAX_ACTIONS + [ACTION]}},
        {"kv_hint": {**ENVELOPE, "actions": [{**ACTION, "payload": [HERE]}]}},
        {"kv_hint": {**ENVELOPE, "actions": [{**ACTION, "action_version": "9"}]}},
        {"router_hint": HERE},
        {"router_hint": {"source_control_endpoint": 56100}},
        {"router_hint": {"source_control_endpoint": "ipc:///tmp/socket"}},
        {"router_hint": {"source_control_endpoint": "tcp://host:1\n"}},
        {"router_hint": {"source_control_endpoint": "h" * 10_000 + ":1"}},
        {"remote_kv_source": {**LLMD, "remote_port": True}},
        {"remote_kv_source": {**LLMD, "remote_port": 0}},
        {"remote_kv_source": {**LLMD, "remote_port": 10**400}},
        {"remote_kv_source": {**LLMD, "remote_host": "a b"}},
        {"remote_kv_source": {"remote_host": "10.0.0.7"}},
        {"kvbm": {"skip": True}, "do_remote_prefill": True, "remote_host": "h", "remote_port": 1},
    ],
    ids=lambda params: str(params)[:60],
)
def test_what_cannot_be_read_is_no_hint(params: object) -> None:
    assert source_of(params) == ""


def test_addresses() -> None:
    assert address_of_rank("tcp://host:1000", 3) == "tcp://host:1003"
    assert address_of_rank("[::1]:1000", 1) == "tcp://[::1]:1001"
    assert address_of_rank("tcp://host:65535", 1) is None
    assert parse_address("tcp://host:1:2") is None and parse_address("host") is None
    assert host_of("tcp://[fe80::1]:5") == "fe80::1" and host_of("?") == ""
    assert source_of({"remote_kv_source": {"remote_host": "::1", "remote_port": 5}}) == "tcp://[::1]:5"
