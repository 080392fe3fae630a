"""MLA under DYN_KVBM_NCCL_MLA_MODE: rank 0 alone stores and loads, and sends the bytes (over gloo here)."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from vllm.v1.kv_cache_interface import MLAAttentionSpec

from kvbm_core.config import KvbmSettings
from kvbm_core.transfer.executors.broadcast_group import Group, GroupError
from kvbm_vllm.config import KvShard, shard_of
from kvbm_vllm.connector import DynamoConnector
from tests.vllm.kvbm_engine import KvbmEngine

PROMPT = range(50)
MODE = {"nccl_mla_mode": True}
SIZED = MODE | {"cpu_cache_gb": 1}


def slabs(engine: KvbmEngine) -> list[bool]:
    """Which ranks have host memory."""
    connectors = [rank.connector for rank in engine.ranks]
    assert all(isinstance(connector, DynamoConnector) for connector in connectors)
    return [connector.worker_side.worker._memory is not None for connector in connectors]


@pytest.mark.shows("DYN_KVBM_NCCL_MLA_MODE")
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


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_ranks_of_any_number_find_it_again_on_the_disk(ranks: int, tmp_path: Path) -> None:
    with KvbmEngine(tmp_path, ranks=2, kv_heads=4, is_mla=True, extra=MODE, disk_blocks=100) as engine:
        first = engine.ask("a", PROMPT, 8)
        engine.settle()
        engine.wait_for(lambda: not engine.leader.chain.storing_blocks)
        assert [path.name for path in (tmp_path / "disk").glob("**/*.blocks")] == ["rank-0-of-1.blocks"]
    with KvbmEngine(tmp_path, ranks=ranks, kv_heads=4, is_mla=True, extra=MODE, disk_blocks=100) as engine:
        engine.wait_for(lambda: engine.disk.slots.resident_blocks)
        assert engine.ask("b", PROMPT, 8) == first and engine.external_tokens("b") == 48
        assert slabs(engine) == [rank == 0 for rank in range(ranks)]
        engine.assert_clean()


def test_heads_are_found_by_ranks_of_the_same_number_only(tmp_path: Path) -> None:
    """What every rank has another part of is not the same for ranks of another number."""
    for ranks, external in ((2, 0), (4, 0), (2, 48)):
        with KvbmEngine(tmp_path, ranks=ranks, kv_heads=4, extra=MODE, disk_blocks=100) as engine:
            if external:
                engine.wait_for(lambda engine=engine: engine.disk.slots.resident_blocks)
            engine.ask("a", PROMPT, 8)
            engine.settle()
            engine.wait_for(lambda engine=engine: not engine.leader.chain.storing_blocks)
            assert engine.external_tokens("a") == external


def test_where_it_cannot_be_stored_once_each_rank_has_a_copy(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    connect = Group.connect

    def connect_first(group: Group, device: object) -> None:
        if group.rank:
            raise GroupError("this torch has no NCCL")
        connect(group, device)

    monkeypatch.setattr(Group, "connect", connect_first)
    with (
        caplog.at_level(logging.WARNING, "kvbm"),
        KvbmEngine(tmp_path, ranks=2, is_mla=True, extra=MODE) as engine,
    ):
        first = engine.ask("a", PROMPT, 8)
        engine.forget_device()
        assert engine.ask("b", PROMPT, 8) == first and engine.external_tokens("b") == 48
        assert slabs(engine) == [True, True]
        engine.assert_clean()
    said = [record.getMessage() for record in caplog.records if "NCCL_MLA" in record.getMessage()]
    assert len(said) == 1 and "rank 1: this torch has no NCCL" in said[0]


@pytest.mark.parametrize(
    ("parallel", "rank", "shard"),
    [
        ({"tensor_parallel_size": 2}, 1, KvShard(0, 1, "stage 0")),
        ({"tensor_parallel_size": 2, "pipeline_parallel_size": 2}, 1, KvShard(0, 2, "stage 0")),
        ({"tensor_parallel_size": 2, "pipeline_parallel_size": 2}, 2, KvShard(1, 2, "stage 1")),
        ({"tensor_parallel_size": 2, "pipeline_parallel_size": 2}, 6, KvShard(1, 2, "stage 1")),
        ({"tensor_parallel_size": 1, "pipeline_parallel_size": 2}, 1, KvShard(1, 2)),
        ({"tensor_parallel_size": 2, "decode_context_parallel_size": 2}, 1, KvShard(1, 2)),
        ({"tensor_parallel_size": 2, "prefill_context_parallel_size": 2}, 1, KvShard(1, 2)),
    ],
    ids=["ranks", "first stage", "second stage", "of another replica", "stages", "by tokens", "prefill"],
)
def test_which_ranks_have_the_same_latents(parallel: dict[str, int], rank: int, shard: KvShard) -> None:
    """With decode-context parallelism each rank has the latents of other tokens."""
    names = ("pipeline", "decode_context", "prefill_context")
    sizes = {f"{name}_parallel_size": 1 for name in names} | parallel
    config = SimpleNamespace(parallel_config=SimpleNamespace(rank=rank, **sizes))
    spec = MLAAttentionSpec(block_size=4, num_kv_heads=1, head_size=8, dtype=torch.float32)
    cache = SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec)])
    assert shard_of(config, cache, KvbmSettings.from_env(SIZED)) == shard
