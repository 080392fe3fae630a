"""The first lines of docs/sglang.md, pasted by a new user with the wheel, without the checkout and a GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.engines.sglang.environment import PYTHON
from tests.engines.stranger import Pasted, Stranger, blocks_of, build_wheel

pytestmark = pytest.mark.timeout(900)


@pytest.mark.nightly("the wheel, and an engine: minutes; test_engine.py has the same arguments")
def test_the_page_as_it_is(tiny_model: Path, tmp_path: Path, short_path: Path) -> None:
    stranger = Stranger(tmp_path, PYTHON, build_wheel(tmp_path / "wheel"), short_path)
    serve, for_cpu, see = blocks_of("docs/sglang.md", "As HiCache's storage backend")[:3]
    _, settings, serve = serve.split("\n", 2)  # pip install stands before them
    settings = settings.replace("/var/cache/kvbm", str(tmp_path / "disk")).replace("_GB=100", "_GB=1")
    arguments = " ".join(for_cpu.split())
    lines = f"{settings} DYN_KVBM_METRICS=true SGLANG_USE_CPU_ENGINE=1\ncd {stranger.home}\n"
    lines += f"{serve.rstrip()} {arguments} --port PORT_NUMBER\n".replace("MODEL", str(tiny_model))
    with Pasted(stranger, lines, tmp_path / "sglang.log") as server:
        shown = stranger.run(server.here(see.replace("MODEL", str(tiny_model)), 30000))
        assert "Cache flushed" in shown and "disk to device" in shown
        moved = {row["name"]: row["value"] for row in json.loads(stranger.run("kvbm status --json"))}
        loaded, written = moved["kvbm_onboard_blocks_d2d"], moved["kvbm_offload_blocks_h2d"]
        assert 100 < loaded <= written < 1.1 * loaded, "the warm-up and the answer are written too"
