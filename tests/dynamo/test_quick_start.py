"""The first lines of docs/dynamo.md, pasted by a new user with the wheel, without the checkout and a GPU."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from tests.conftest import DYNAMO_PYTHON
from tests.engines.disaggregated import wait_for
from tests.engines.ports import free_port
from tests.engines.stranger import Pasted, Stranger, blocks_of, build_wheel

MODEL = "Qwen/Qwen3-0.6B"
HEADING = "On one machine"


@pytest.mark.timeout(900)
@pytest.mark.nightly("the wheel, a frontend and an engine: minutes; test_router.py has Dynamo's own classes")
def test_the_page_as_it_is(tiny_model: Path, tmp_path: Path, short_path: Path) -> None:
    stranger = Stranger(tmp_path, DYNAMO_PYTHON, build_wheel(tmp_path / "wheel"), short_path)
    names = ("DYN_SYSTEM_PORT", "DYN_VLLM_KV_EVENT_PORT", "VLLM_NIXL_SIDE_CHANNEL_PORT")
    stranger.variables |= {name: str(free_port()) for name in names}
    launch, see = blocks_of("docs/dynamo.md", HEADING)[:2]
    first = launch.splitlines()[0].partition("#")[0].replace(MODEL, str(tiny_model))
    for_cpu = "export VLLM_CPU_KVCACHE_SPACE=1 DYN_KVBM_CPU_CACHE_GB=2"
    lines = f"cd {stranger.home}\n{for_cpu} PORT=PORT_NUMBER\n{first}\n"
    with Pasted(stranger, lines, tmp_path / "dynamo.log") as server:
        wait_for(lambda: httpx.get(f"{server.base_url}/v1/models", trust_env=False).json()["data"])
        shown = stranger.run(server.here(see.replace(MODEL, str(tiny_model)), 8000))
        assert "never_seen" in shown and "device to host" in shown
        again, first_one = stranger.requests()
        assert first_one["missed_tokens"] > 1000 and again["device_tokens"] > 1000
