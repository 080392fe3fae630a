"""Bad input and unsupported engines: one line with the setting, its value and the remedy, before anything
runs.
"""

from __future__ import annotations

import logging
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.kv_cache_interface import KVCacheGroupSpec, MambaSpec

from kvbm_core.errors import ConfigError, UnsupportedError
from kvbm_core.types import Direction
from kvbm_vllm import assembly, config, versions
from kvbm_vllm.connector import DynamoConnector, PdConnector
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
    monkeypatch.setattr(assembly, "installed_version", lambda: "0.25.1")
    for role in KVConnectorRole:
        with pytest.raises(UnsupportedError) as error:
            _connector(tmp_path, {"cpu_cache_override_num_blocks": 8}, role)
        _one_line(error, "0.25.1", versions.SUPPORTED, "install")


def test_a_kind_of_cache_that_is_not_attention(tmp_path: Path) -> None:
    spec = EngineSpec(extra_config={"cpu_cache_override_num_blocks": 8, "start_wait_s": 0})
    vllm_config = make_vllm_config(spec, tmp_path)
    _, kv_cache_config = make_kv_cache_configs(spec, vllm_config)
    state = MambaSpec(
        block_size=4, shapes=((2, 2),), dtypes=(kv_cache_config.kv_cache_groups[0].kv_cache_spec.dtype,)
    )
    kv_cache_config.kv_cache_groups.append(KVCacheGroupSpec(["state"], state))
    with pytest.raises(UnsupportedError) as error:
        DynamoConnector(vllm_config, KVConnectorRole.SCHEDULER, kv_cache_config)
    _one_line(error, "group 1", "MambaSpec", "run this model without kvbm")


def test_a_vllm_that_cannot_recover_hybrid_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assembly, "probe", lambda: replace(versions.probe(), transfer_results=False))
    with pytest.raises(UnsupportedError) as error:
        KvbmEngine(tmp_path, windows=(None, 8), extra={"start_wait_s": 0})
    _one_line(error, "several KV cache groups", "0.31", "--disable-hybrid-kv-cache-manager")


def test_context_parallel_is_refused(tmp_path: Path) -> None:
    vllm_config = make_vllm_config(EngineSpec(), tmp_path)
    vllm_config.parallel_config.decode_context_parallel_size = 2
    with pytest.raises(UnsupportedError) as error:
        config.check_supported(vllm_config)
    _one_line(error, "decode_context_parallel_size=2", "set it to 1")


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
