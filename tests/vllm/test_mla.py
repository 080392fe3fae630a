"""MLA under DYN_KVBM_NCCL_MLA_MODE: rank 0 alone stores and loads, and sends the bytes (over gloo here)."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from kvbm_vllm.connector import DynamoConnector
from tests.vllm.kvbm_engine import KvbmEngine

PROMPT = range(50)
MODE = {"nccl_mla_mode": True}


def slabs(engine: KvbmEngine) -> list[bool]:
    """Which ranks have host memory."""
    connectors = [rank.connector for rank in engine.ranks]
    assert all(isinstance(connector, DynamoConnector) for connector in connectors)
    return [connector.worker_side.worker._memory is not None for connector in connectors]


@pytest.mark.parametrize("disk_blocks", [0, 100], ids=["host", "disk"])
def test_rank_0_alone_has_host_memory_and_all_get_its_bytes(disk_blocks: int, tmp_path: Path) -> None:
    with KvbmEngine(
        tmp_path,
        ranks=2,
        is_mla=True,
        extra=MODE,
        host_blocks=16 if disk_blocks else 64,
        disk_blocks=disk_blocks,
    ) as engine:
        first = engine.ask("a", PROMPT, 8)
        engine.settle()
        for number in range(3 if disk_blocks else 0):
            engine.ask(f"other {number}", range(100 * number + 100, 100 * number + 150), 1)
            engine.settle()
        engine.forget_device()
        assert engine.ask("b", PROMPT, 8) == first
        assert engine.external_tokens("b") == 48
        assert slabs(engine) == [True, False]
        engine.assert_clean()


@pytest.mark.parametrize(("is_mla", "extra"), [(False, MODE), (True, {})], ids=["shards", "not asked for"])
def test_elsewhere_each_rank_keeps_its_own(
    is_mla: bool, extra: dict[str, bool], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        caplog.at_level(logging.WARNING, "kvbm"),
        KvbmEngine(tmp_path, ranks=2, is_mla=is_mla, extra=extra) as engine,
    ):
        first = engine.ask("a", PROMPT, 8)
        engine.forget_device()
        assert engine.ask("b", PROMPT, 8) == first
        assert engine.external_tokens("b") == 48
        assert slabs(engine) == [True, True]
        engine.assert_clean()
    said = [record.getMessage() for record in caplog.records if "NCCL_MLA" in record.getMessage()]
    assert len(said) == len(extra) and all("its own" in line for line in said)
