"""Each setting works under TensorRT-LLM, or its user is told."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch", reason="NOT RUN: TensorRT-LLM's connector against its double; torch is missing")

from kvbm_core.config import Adapter
from tests import settings_walk
from tests.trtllm.double import RELEASED, World
from tests.trtllm.harness import kinds, serve


def test_each_setting_is_read_or_its_user_is_told(short_path: Path) -> None:
    kind = next(kind for kind in kinds(1) if kind.version == RELEASED)
    runs = []
    for in_blocks in (True, False):
        port = settings_walk.free_port()
        with (
            settings_walk.everything_set(str(short_path), port, in_blocks=in_blocks) as seen,
            World(kind.version),
            serve(0, kind, host_blocks=None) as serving,
        ):
            serving.ask(range(40))
        runs.append(seen)
    assert settings_walk.neither_read_nor_told(Adapter.TRTLLM, runs) == []
