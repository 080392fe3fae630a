"""Bad input and unsupported engines: one line with the setting, its value and the remedy, before anything
runs.
"""

from __future__ import annotations

import http.client
import logging
import pickle
import socket
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from vllm.config import PoolerConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole

from kvbm_core.errors import ConfigError, StuckCopyError, UnsupportedError
from kvbm_core.types import Direction
from kvbm_vllm import assembly, config, versions
from kvbm_vllm.connector import DynamoConnector, PdConnector
from tests.engines.ports import free_port
from tests.vllm.engine_config import EngineSpec, make_kv_cache_configs, make_vllm_config
from tests.vllm.kvbm_engine import KvbmEngine


def _connector(
    folder: Path, extra: dict[str, Any], role: KVConnectorRole = KVConnectorRole.SCHEDULER
) -> DynamoConnector:
    spec = EngineSpec(extra_config={"start_wait_s": 0, **extra})
    vllm_config = make_vllm_config(spec, folder)
    _, kv_cache_config = make_kv_cache_configs(spec, vllm_config)
    return DynamoConnector(vllm_config, role, kv_cache_config)


def _one_line(error: pytest.ExceptionInfo[Exception], *parts: str) -> None:
    line = str(error.value)
    assert "\n" not in line
    for part in parts:
        assert part in line, line


@pytest.mark.parametrize(
    ("extra", "parts"),
    [
        ({}, ("DYN_KVBM_CPU_CACHE_GB", "(unset)", "set it")),
        ({"cpu_cache_gb": "four"}, ("DYN_KVBM_CPU_CACHE_GB", "four")),
        ({"cpu_cache_gb": -1}, ("DYN_KVBM_CPU_CACHE_GB", "-1")),
        ({"cpu_cache_gb": 1_000_000}, ("DYN_KVBM_CPU_CACHE_GB", "1000000", "available", "lower it")),
        ({"cpu_cache_override_num_blocks": 10**12}, ("DYN_KVBM_CPU_CACHE_OVERRIDE_NUM_BLOCKS", "available")),
        ({"disk_cache_gb": 0}, ("DYN_KVBM_CPU_CACHE_GB", "(unset)", "set it")),
        ({"disk_cache_gb": -2}, ("DYN_KVBM_DISK_CACHE_GB", "-2")),
        (
            {"cpu_cache_gb": 1, "leader_zmq_host": "0.0.0.0"},
            ("DYN_KVBM_LEADER_ZMQ_HOST", "0.0.0.0", "loopback"),
        ),
        ({"cpu_cach_gb": 4, "cpu_cache_gb": 1}, ("cpu_cach_gb", "did you mean cpu_cache_gb")),
    ],
)
def test_settings_that_cannot_be_used(extra: dict[str, Any], parts: tuple[str, ...], tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        _connector(tmp_path, extra)
    _one_line(error, *parts)


def test_a_vllm_outside_the_range(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "installed_version", lambda: "0.25.1")
    for role in KVConnectorRole:
        with pytest.raises(UnsupportedError) as error:
            _connector(tmp_path, {"cpu_cache_override_num_blocks": 8}, role)
        _one_line(error, "0.25.1", versions.SUPPORTED, "install")


@pytest.mark.parametrize("version", ["0.34.0", "1.0.0", "unknown"])
def test_a_newer_vllm_is_served_with_one_warning(
    version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(versions, "installed_version", lambda: version)
    with caplog.at_level(logging.WARNING, "kvbm"), KvbmEngine(tmp_path, ranks=2) as engine:
        first = engine.ask("a", range(50), 2)
        engine.forget_device()
        assert engine.ask("b", range(50), 2) == first
        assert engine.external_tokens("b") == 48
        engine.assert_clean()
    lines = [record.getMessage() for record in caplog.records if version in record.getMessage()]
    assert len(lines) == 1 and versions.SUPPORTED in lines[0]


def test_a_newer_vllm_that_calls_otherwise_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def request_finished(self: Any, request: Any, block_ids: list[int], reason: str) -> Any: ...

    monkeypatch.setattr(versions, "installed_version", lambda: "0.34.0")
    monkeypatch.setattr(KVConnectorBase_V1, "request_finished", request_finished)
    with pytest.raises(UnsupportedError) as error:
        _connector(tmp_path, {"cpu_cache_override_num_blocks": 8})
    _one_line(error, "0.34.0", versions.SUPPORTED, "request_finished(request, block_ids, reason)")


@pytest.mark.parametrize("mode", ["none", "all"])
def test_states_of_which_vllm_hands_none_off(mode: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError) as error:
        KvbmEngine(tmp_path, windows=("state", None), mamba_mode=mode, extra={"start_wait_s": 0})
    _one_line(error, f"mamba_cache_mode={mode}", "--mamba-cache-mode align", "run this model without kvbm")


def test_a_vllm_that_does_not_say_where_states_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assembly, "probe", lambda: replace(versions.probe(), hands_off_states=False))
    with pytest.raises(UnsupportedError) as error:
        KvbmEngine(tmp_path, windows=("state", None), extra={"start_wait_s": 0})
    _one_line(error, "states", "0.31", "run this model without kvbm")


@pytest.mark.parametrize(
    ("retain_tokens", "said"),
    [(0, "and of answers none (--prefix-cache"), (8, "and one every 8 tokens"), (None, "each that it has")],
)
def test_a_line_says_what_a_state_costs(
    retain_tokens: int | None, said: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="kvbm")
    with KvbmEngine(tmp_path, windows=("state",) * 9 + (None,) * 3, retain_tokens=retain_tokens, ranks=2):
        pass
    (line,) = [message for message in caplog.messages if "with a state" in message]
    # 9 layers of 96 bytes on 2 ranks; a token has 3 times 128 bytes of KV on each.
    assert "as much as the KV of 2 tokens" in line and "a multiple of 4 tokens" in line and said in line
    caplog.clear()
    with KvbmEngine(tmp_path):
        pass
    assert not any("with a state" in message for message in caplog.messages)
    with KvbmEngine(tmp_path, windows=("state",)):
        pass
    (line,) = [message for message in caplog.messages if "with a state" in message]
    assert "the KV of" not in line


def test_a_vllm_that_cannot_recover_hybrid_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assembly, "probe", lambda: replace(versions.probe(), transfer_results=False))
    with pytest.raises(UnsupportedError) as error:
        KvbmEngine(tmp_path, windows=(None, 8), extra={"start_wait_s": 0})
    _one_line(error, "several KV cache groups", "0.31", "--disable-hybrid-kv-cache-manager")


def test_context_parallel_is_refused(tmp_path: Path) -> None:
    vllm_config = make_vllm_config(EngineSpec(), tmp_path)
    vllm_config.parallel_config.decode_context_parallel_size = 2
    with pytest.raises(UnsupportedError) as error:
        config.check_supported(vllm_config, versions.probe())
    _one_line(error, "decode_context_parallel_size=2", "set it to 1")


def test_routed_experts_are_returned_where_vllm_takes_no_hit_without_them(tmp_path: Path) -> None:
    vllm_config = make_vllm_config(EngineSpec(), tmp_path)
    limits, takes_all = (
        replace(versions.probe(), limits_hits_to_rows=limits_hits) for limits_hits in (True, False)
    )
    config.check_supported(vllm_config, takes_all)
    outputs = getattr(vllm_config, "aux_output_config", vllm_config.model_config)
    outputs.enable_return_routed_experts = True
    config.check_supported(vllm_config, limits)
    with pytest.raises(UnsupportedError) as error:
        config.check_supported(vllm_config, takes_all)
    _one_line(error, "--enable-return-routed-experts", "use vLLM 0.33 or newer")


@pytest.mark.parametrize(("pooling", "is_refused"), [("LAST", False), ("MEAN", True), ("CLS", True)])
def test_pooling_of_every_token_is_refused(pooling: Any, is_refused: bool, tmp_path: Path) -> None:
    vllm_config = make_vllm_config(EngineSpec(), tmp_path)
    vllm_config.model_config.pooler_config = PoolerConfig(seq_pooling_type=pooling)
    with pytest.raises(UnsupportedError) if is_refused else nullcontext() as error:
        config.check_supported(vllm_config, versions.probe())
    if error is not None:
        _one_line(error, "pooling", "run it without kvbm")


def test_a_layout_in_doubt_is_not_cached_and_the_engine_serves(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR, logger="kvbm")
    with KvbmEngine(tmp_path) as engine:
        worker_side = engine.ranks[0].connector.worker_side
        tensors = {name: tensor[0] for name, tensor in engine.ranks[0].kv_caches.items()}
        worker_side.register_kv_caches(tensors)
        lines = [
            record.getMessage() for record in caplog.records if "nothing is cached" in record.getMessage()
        ]
        assert len(lines) == 1 and "\n" not in lines[0]
        engine.wait_for(lambda: engine.leader.disabled_reason is not None)
        assert engine.ask("a", range(40), 4)
        assert engine.promised("a") == [0]


def test_a_host_tier_smaller_than_the_device_tier_warns_with_both_sizes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, logger="kvbm")
    with KvbmEngine(tmp_path, host_blocks=16) as engine:
        engine.ask("a", range(8))
    (line,) = [
        record.getMessage() for record in caplog.records if "smaller than the device" in record.getMessage()
    ]
    assert "16 blocks" in line and "64 blocks" in line and "DYN_KVBM_CPU_CACHE_GB" in line


def test_a_metrics_port_in_use_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, logger="kvbm")
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with KvbmEngine(tmp_path, extra={"metrics": True, "metrics_port": port}) as engine:
            first = engine.ask("a", range(40), 4)
            engine.forget_device()
            assert engine.ask("b", range(40), 4) == first
            engine.assert_clean()
    (line,) = [
        record.getMessage() for record in caplog.records if "DYN_KVBM_METRICS_PORT" in record.getMessage()
    ]
    assert str(port) in line and "\n" not in line


def test_sleep_waits_for_copies_and_serves_again_afterwards(tmp_path: Path) -> None:
    with KvbmEngine(tmp_path) as engine:
        engine.hold(Direction.OFFLOAD)
        first = engine.ask_until_done("a", range(40), 4)
        connector = engine.ranks[0].connector
        connector.unregister_kv_caches()
        assert all(executor.held == 0 for executor in engine.executors)
        connector.restore_kv_caches()
        engine.release(Direction.OFFLOAD)
        engine.run()
        engine.forget_device()
        assert engine.ask("b", range(40), 4) == first
        assert engine.external_tokens("b") == 36
        engine.assert_clean()


def test_a_vllm_that_does_not_tell_of_sleep(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with KvbmEngine(tmp_path) as engine:
        assert not [message for message in caplog.messages if "sleep" in message]
        vllm_config = engine.config
    silent, telling = (replace(versions.probe(), tells_of_sleep=tells) for tells in (False, True))
    vllm_config.model_config.enable_sleep_mode = True
    config.tell_sleep(vllm_config, telling)
    assert not [message for message in caplog.messages if "sleep" in message]
    config.tell_sleep(vllm_config, silent)
    (line,) = [message for message in caplog.messages if "sleep" in message]
    assert "sleep mode is on" in line and "idle" in line


@pytest.mark.parametrize("direction", list(Direction))
def test_no_sleep_while_a_copy_hangs(direction: Direction, tmp_path: Path) -> None:
    """vLLM would unmap memory, and map other memory there, that a GPU still reads or writes."""
    with KvbmEngine(tmp_path) as engine:
        first = engine.ask("a", range(40), 4)
        engine.forget_device()
        engine.hold(direction)
        engine.add("b", range(40) if direction is Direction.ONBOARD else range(100, 140), 4)
        engine.run(until=lambda: all(executor.held for executor in engine.executors))
        connector = engine.ranks[0].connector
        for executor in engine.executors:
            executor.hangs = True
        with pytest.raises(StuckCopyError, match="must not go on"):
            connector.unregister_kv_caches()
        for executor in engine.executors:
            executor.hangs = False
        connector.unregister_kv_caches()
        assert all(executor.held == 0 for executor in engine.executors)
        connector.restore_kv_caches()
        engine.release(direction)
        engine.run()
        engine.forget_device()
        assert engine.ask("c", range(40), 4) == first


@pytest.mark.parametrize(
    "children",
    [
        [],
        ["DynamoConnector"],
        ["NixlConnector", "DynamoConnector"],
        ["DynamoConnector", "NixlConnector", "NixlConnector"],
    ],
)
def test_pd_connector_takes_a_cache_and_nixl(children: list[str], tmp_path: Path) -> None:
    spec = EngineSpec(
        extra_config={"connectors": [{"kv_connector": name, "kv_role": "kv_both"} for name in children]}
    )
    vllm_config = make_vllm_config(spec, tmp_path)
    _, kv_cache_config = make_kv_cache_configs(spec, vllm_config)
    with pytest.raises(ConfigError) as error:
        PdConnector(vllm_config, KVConnectorRole.SCHEDULER, kv_cache_config)
    _one_line(error, "connectors", "exactly two")


# ---------------------------------------------------------------- two engines on one machine


class _Second(KvbmEngine):
    """One that may fail to start; ``close`` ends what had been made of it by then, as its process would."""

    made: list[Any]

    def prepare_worker(self, rank: int, connector: Any) -> None:
        _Second.made.append(connector)
        super().prepare_worker(rank, connector)


@pytest.mark.shows("DYN_KVBM_LEADER_ZMQ_ACK_PORT")
def test_a_second_engine_with_the_same_port_fails_and_the_first_goes_on_untouched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_Second, "made", [], raising=False)
    (tmp_path / "second").mkdir()
    extra = {"leader_zmq_ack_port": free_port()}
    with KvbmEngine(tmp_path, extra=extra) as first:
        answer = first.ask("a", range(50), 8)
        with pytest.raises(ConfigError) as error:
            _Second(tmp_path / "second", extra=extra)
        _one_line(error, "DYN_KVBM_LEADER_ZMQ_ACK_PORT", str(extra["leader_zmq_ack_port"]), "of its own")
        channel = first.connector.scheduler_side.process.channel
        first.wait_for(lambda: channel.refused_connections_total > 0)  # its worker had said hello by then
        for connector in _Second.made:
            connector.shutdown()
        first.forget_device()
        assert first.ask("b", range(50), 8) == answer and first.external_tokens("b") == 48
        assert (
            first.leader.readiness().is_ready and first.metric('kvbm_failures_total{kind="handshake"}') == 0
        )
        assert first.metric('kvbm_failures_total{kind="bad_message"}') >= 1
        first.assert_clean()


@pytest.mark.parametrize("by_port", [False, True], ids=["ipc", "tcp"])
def test_engines_with_one_engine_id_do_not_meet(tmp_path: Path, by_port: bool) -> None:
    (tmp_path / "second").mkdir()
    named = {**EngineSpec().connector, "engine_id": "the same"}
    extras = [{"leader_zmq_ack_port": free_port()} if by_port else {} for _ in range(2)]
    with (
        KvbmEngine(tmp_path, connector=named, extra=extras[0]) as first,
        KvbmEngine(tmp_path / "second", connector=named, extra=extras[1]) as second,
    ):
        answer = first.ask("a", range(50), 8)
        first.forget_device()
        second.ask("a", range(50), 8)
        assert second.promised("a") == [0]
        assert first.ask("b", range(50), 8) == answer and first.external_tokens("b") == 48
        first.assert_clean()
        second.assert_clean()


@pytest.mark.parametrize("engine_id", [None, "a user's"])
def test_the_processes_of_one_engine_have_one_secret_and_no_other_engine_has_it(
    tmp_path: Path, engine_id: str | None
) -> None:
    spec = EngineSpec(connector={**EngineSpec().connector, "engine_id": engine_id})
    scheduler = make_vllm_config(spec, tmp_path)
    worker = pickle.loads(pickle.dumps(scheduler))  # as vLLM's executors hand it to their processes
    other = make_vllm_config(spec, tmp_path)
    settings = config.read_settings(scheduler)
    endpoints = [config.endpoint_of(each, settings) for each in (scheduler, worker, other)]
    assert endpoints[0] == endpoints[1] != endpoints[2]
    assert endpoints[0].secret != endpoints[2].secret and endpoints[0].address != endpoints[2].address
    for endpoint in endpoints:
        endpoint.release()


def test_engines_of_one_data_parallel_group_take_neighbouring_ports(tmp_path: Path) -> None:
    vllm_config = make_vllm_config(EngineSpec(extra_config={"leader_zmq_ack_port": 6000}), tmp_path)
    settings, addresses = config.read_settings(vllm_config), []
    for rank in range(2):
        vllm_config.parallel_config.data_parallel_index = rank
        endpoint = config.endpoint_of(vllm_config, settings)
        addresses.append(endpoint.address)
        endpoint.release()
    assert addresses == ["tcp://127.0.0.1:6000", "tcp://127.0.0.1:6001"]


def test_health_says_whether_the_tier_is_in_service(tmp_path: Path) -> None:
    def health(port: int) -> tuple[int, str]:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
        connection.request("GET", "/health")
        answer = connection.getresponse()
        said = answer.status, answer.read().decode()
        connection.close()
        return said

    port = free_port()
    with KvbmEngine(tmp_path, extra={"metrics": True, "metrics_port": port}) as engine:
        assert health(port) == (200, "ok\n")
        engine.ranks[0].connector.worker_side.worker.refuse("its memory is gone")
        engine.wait_for(lambda: engine.leader.disabled_reason is not None)
        status, text = health(port)
        assert status == 503 and "its memory is gone" in text
