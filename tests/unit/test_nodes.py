"""Engines of several nodes: by which name and where their ranks meet. vLLM's and TensorRT-LLM's arguments are
doubles with the fields that are read; `tests/e2e/test_apart.py` has a real vLLM.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvbm_core.config import KvbmSettings
from kvbm_core.errors import ConfigError
from kvbm_core.fleet.keys import new_keys
from kvbm_trtllm import config as trtllm
from kvbm_vllm import config as vllm


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in KvbmSettings.env_names().values():
        monkeypatch.delenv(variable, raising=False)


@pytest.fixture
def apart(tmp_path: Path) -> Mapping[str, object]:
    """Settings of engines whose ranks may be on several machines."""
    _, secret = new_keys(tmp_path, "node")
    return {
        "curve_key_file": str(secret),
        "curve_allowed": str(tmp_path),
        "etcd_endpoints": "http://127.0.0.1:1",
    }


def node(rank: int, engine_id: str = "", nodes: int = 2) -> Any:
    """One node's configuration: what is made up is made up by each."""
    parallel = SimpleNamespace(
        nnodes_within_dp=nodes,
        node_rank=rank,
        master_addr="10.0.0.1",
        master_port=29501,
        data_parallel_index=0,
    )
    transfer = SimpleNamespace(engine_id=engine_id or str(uuid.uuid4()))
    return SimpleNamespace(
        parallel_config=parallel, kv_transfer_config=transfer, instance_id=uuid.uuid4().hex[:5]
    )


@pytest.mark.parametrize("engine_id", ["", "the-users"])
def test_nodes_of_one_vllm_have_one_name(engine_id: str, apart: Mapping[str, object]) -> None:
    settings = KvbmSettings.from_env(apart)
    first, second = (vllm.endpoint_of(node(rank, engine_id), settings) for rank in range(2))
    assert first.apart is not None and first.engine == second.engine != ""
    assert (engine_id or "10.0.0.1:29501") in first.engine
    alone = vllm.endpoint_of(node(0, nodes=1), settings), vllm.endpoint_of(node(0, nodes=1), settings)
    assert alone[0].engine != alone[1].engine, "engines that share nothing"


def test_nodes_without_keys_are_refused_and_one_node_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = KvbmSettings.from_env({"etcd_endpoints": "http://127.0.0.1:1"})
    with pytest.raises(ConfigError, match="KVBM_CURVE_KEY_FILE"):
        vllm.endpoint_of(node(1), settings)
    with pytest.raises(ConfigError, match="KVBM_CURVE_KEY_FILE"):
        trtllm.endpoint_of("engine", settings, 0, is_spread=True)
    here = vllm.endpoint_of(node(0, nodes=1), settings)
    here.release()
    assert here.apart is None and here.address.startswith("ipc://")
    assert trtllm.endpoint_of("engine", settings, 0).apart is None


def test_what_others_may_read_in_etcd_is_not_trtllms_secret(apart: Mapping[str, object]) -> None:
    settings = KvbmSettings.from_env(apart)
    found = trtllm.endpoint_of("trtllm 7 0 hidden-word", settings, 0, is_spread=True)
    assert found.apart is not None and "hidden-word" not in found.engine
    assert found.engine == trtllm.endpoint_of("trtllm 7 0 hidden-word", settings, 0).engine
