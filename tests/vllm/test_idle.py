"""An engine that makes no step: what workers say meanwhile is taken in by the channel's thread."""

from __future__ import annotations

import time
from pathlib import Path

from tests.vllm.harness import PATIENCE_S
from tests.vllm.kvbm_engine import KvbmEngine

PROMPT = range(70)


def test_what_went_to_the_disk_is_known_before_the_next_step(tmp_path: Path) -> None:
    with KvbmEngine(tmp_path, disk_blocks=64) as engine:
        engine.ask("a", PROMPT, 8)
        host, deadline_s = engine.leader.chain.host, time.monotonic() + PATIENCE_S
        assert host.resident_blocks > 0
        while engine.disk.slots.resident_blocks < host.resident_blocks:
            assert time.monotonic() < deadline_s, "an idle engine has not heard what was written"
        with engine.leader.lock:
            assert not engine.leader.chain.storing_blocks
        engine.assert_clean()
