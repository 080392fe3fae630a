"""kvbm beside others: as a child of vLLM's MultiConnector, two engines in one process, another failure
policy.
"""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorLogging
from vllm.v1.engine import FinishReason

from kvbm_core.types import Direction
from kvbm_vllm.connector import DynamoConnector, PdConnector, register_names
from tests.vllm import null_connector
from tests.vllm.engine_config import DYNAMO, EngineSpec
from tests.vllm.harness import PATIENCE_S, Engine
from tests.vllm.kvbm_engine import KvbmEngine

NULL = {
    "kv_connector": "NullConnector",
    "kv_connector_module_path": "tests.vllm.null_connector",
    "kv_role": "kv_both",
}
KVBM = {**DYNAMO, "kv_role": "kv_both", "kv_connector_extra_config": {"cpu_cache_override_num_blocks": 64}}


@pytest.mark.parametrize("children", [[KVBM, NULL], [NULL, KVBM]], ids=["first", "second"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_as_a_child_of_multi_connector(children: list[dict[str, Any]], ranks: int, tmp_path: Path) -> None:
    spec = EngineSpec(
        connector={"kv_connector": "MultiConnector"}, extra_config={"connectors": children}, ranks=ranks
    )
    with Engine(spec, tmp_path) as engine:
        (ours,) = [child for child in engine.connector._connectors if isinstance(child, DynamoConnector)]
        leader = ours.scheduler_side.hooks.leader
        deadline_s = time.monotonic() + PATIENCE_S
        while leader.chain.host.capacity_blocks == 0 or leader.pending_jobs:
            assert time.monotonic() < deadline_s
            leader.poll()
        first = engine.ask("a", range(50), 8)
        while leader.pending_jobs:
            assert time.monotonic() < deadline_s
            leader.poll()
        assert engine.reset_device()
        assert engine.ask("b", range(50), 8) == first
        assert engine.external_tokens("b") == 48
        engine.run()
        engine.assert_idle()


def test_a_childs_stats_reach_vllms_log_and_its_metrics(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The API server's process knows a child's stats by its class name only; it ended with the first report.
    monkeypatch.setattr("kvbm_vllm.stats.REPORT_INTERVAL_S", 0.0)
    spec = EngineSpec(connector={"kv_connector": "MultiConnector"}, extra_config={"connectors": [KVBM, NULL]})
    with Engine(spec, tmp_path) as engine:
        leader = engine.connector._connectors[0].scheduler_side.hooks.leader
        deadline_s = time.monotonic() + PATIENCE_S
        while leader.chain.host.capacity_blocks == 0 or leader.pending_jobs:
            assert time.monotonic() < deadline_s
            leader.poll()
        engine.ask("a", range(50), 8)
        while leader.pending_jobs:
            assert time.monotonic() < deadline_s
            leader.poll()
        engine.ask("b", range(200, 206), 2)
        stored_blocks = sum(
            report["DynamoConnector"].get("offloaded_blocks", 0) for report in engine.record.stats
        )
        assert stored_blocks >= 12
        registry = CollectorRegistry()
        metric_types = {kind: partial(kind, registry=registry) for kind in (Counter, Gauge, Histogram)}
        metrics = type(engine.connector).build_prom_metrics(
            engine.config, metric_types, ["engine"], {0: ["0"]}
        )
        log = KVConnectorLogging(engine.config.kv_transfer_config)
        lines: list[str] = []
        for report in engine.record.stats:
            log.observe(report)
            metrics.observe(report)
        log.log(lambda form, *values: lines.append(form % values))
        assert f"'offloaded_blocks': {stored_blocks}" in lines[0]
        assert f'vllm:kvbm_offloaded_blocks_total{{engine="0"}} {stored_blocks}' in str(
            generate_latest(registry)
        )


def test_a_name_that_vllm_knows_already_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KVConnectorFactory, "_registry", {})
    KVConnectorFactory.register_connector(
        "DynamoConnector", null_connector.__name__, null_connector.NullConnector.__name__
    )
    register_names()
    register_names()
    by_name = KVConnectorFactory.get_connector_class_by_name
    assert by_name("DynamoConnector") is null_connector.NullConnector
    assert by_name("PdConnector") is PdConnector


def test_two_engines_do_not_meet(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    with KvbmEngine(tmp_path) as engine, KvbmEngine(tmp_path / "other") as other:
        first = engine.ask("a", range(50), 8)
        engine.forget_device()
        other.ask("a", range(50), 8)
        assert other.promised("a") == [0]
        assert engine.ask("b", range(50), 8) == first
        assert engine.external_tokens("b") == 48
        engine.assert_clean()
        other.assert_clean()


@pytest.mark.shows("KVBM_LOAD_FAILURE_POLICY", "KVBM_LOAD_FAILURE_POLICY=fail")
def test_a_user_can_choose_that_a_failed_load_fails_the_request(tmp_path: Path) -> None:
    with KvbmEngine(tmp_path, extra={"load_failure_policy": "fail"}) as engine:
        first = engine.ask("a", range(50), 8)
        engine.forget_device()
        engine.executors[0].fail_next(Direction.ONBOARD)
        engine.add("b", range(50), 8)
        engine.add("c", range(500, 520), 8)
        engine.run()
        assert engine.record.reasons["b"] == FinishReason.ERROR
        assert engine.record.reasons["c"] == FinishReason.LENGTH
        assert engine.ask("d", range(50), 8) == first
        engine.assert_clean()
