"""Each setting works under vLLM, or its user is told."""

from __future__ import annotations

from pathlib import Path

from kvbm_core.config import Adapter
from tests import settings_walk
from tests.vllm.kvbm_engine import KvbmEngine


def test_each_setting_is_read_or_its_user_is_told(short_path: Path) -> None:
    runs = []
    for in_blocks in (True, False):
        folder = short_path / str(in_blocks)
        folder.mkdir()
        port = settings_walk.free_port()
        with (
            settings_walk.everything_set(str(folder / "disk"), port, in_blocks=in_blocks) as seen,
            KvbmEngine(folder, host_blocks=24),
        ):
            pass  # started, which is when all of them are read
        runs.append(seen)
    assert settings_walk.neither_read_nor_told(Adapter.VLLM, runs) == []
