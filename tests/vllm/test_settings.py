"""Each setting works under vLLM, or its user is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvbm_core.config import Adapter
from kvbm_core.events import ports
from kvbm_vllm.consolidator_config import get_consolidator_endpoints
from tests import settings_walk
from tests.vllm.kvbm_engine import KvbmEngine


def _ends() -> tuple[str, str, str]:
    engine, published = (f"tcp://127.0.0.1:{settings_walk.free_port()}" for _ in range(2))
    return engine, published, published


def test_each_setting_is_read_or_its_user_is_told(short_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ports, "KEPT", kept := ports.KeptPorts())
    runs = []
    for in_blocks in (True, False):
        folder = short_path / str(in_blocks)
        folder.mkdir()
        port = settings_walk.free_port()
        with (
            settings_walk.everything_set(
                str(folder / "disk"), port, in_blocks=in_blocks, has_fleet=False
            ) as seen,
            KvbmEngine(folder, host_blocks=24, consolidated=_ends()) as engine,
        ):  # started, which is when most of them are read; what is left dynamo.vllm asks for
            assert get_consolidator_endpoints(engine.config) is not None
        runs.append(seen)
    kept.close()
    runs.append(settings_walk.apart(str(short_path)))
    assert settings_walk.neither_read_nor_told(Adapter.VLLM, runs) == []
