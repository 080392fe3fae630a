"""What README and pages show a new user, pasted, with the wheel and without the checkout: the library, kvbm
plan, and vLLM.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from tests.engines import REPOSITORY
from tests.engines.reader import LLAMA_8B
from tests.engines.stranger import Pasted, Stranger, blocks_of, build_wheel

MODEL = "Qwen/Qwen3-0.6B"
TOKENIZE = re.compile(r"^curl -s localhost:8000/tokenize .*$", re.MULTILINE)

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.nightly("the wheel, and an engine twice: minutes; test_serve_line.py has the page's line"),
]


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Stranger:
    home, scratch = tmp_path_factory.mktemp("stranger"), tmp_path_factory.mktemp("s")
    return Stranger(home, sys.executable, build_wheel(tmp_path_factory.mktemp("wheel")), scratch)


def test_nothing_of_the_checkout_is_used(stranger: Stranger) -> None:
    names = "kvbm, kvbm_core, kvbm_vllm, kvbm_sglang, kvbm_trtllm"
    program = f"import sys, {names}; print(*sys.path, *(m.__file__ for m in ({names})), sep='\\n')"
    found = stranger.run(f'python -c "{program}"').splitlines()
    checkout = [str(REPOSITORY), str(REPOSITORY / "compat")]
    assert not set(checkout) & set(found) and str(stranger.home) in found[-1]
    assert "is ours" in stranger.run("kvbm version")


def test_the_librarys_programs(stranger: Stranger) -> None:
    text = (REPOSITORY / "docs" / "library.md").read_text(encoding="utf-8")
    programs = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert programs
    for program in programs:
        (stranger.home / "program.py").write_text(program, encoding="utf-8")
        assert "True" in stranger.run("python program.py")


def test_plan_and_replay(stranger: Stranger) -> None:
    (stranger.home / "my-model").mkdir()
    (stranger.home / "my-model" / "config.json").write_text(json.dumps(LLAMA_8B))
    by_load, by_trace = blocks_of("docs/sizing.md", "In short")[0].splitlines()
    by_load = by_load.replace("meta-llama/Llama-3.1-8B", "./my-model")
    assert "export DYN_KVBM_CPU_CACHE_GB=" in stranger.run(f"{by_load} --hours 0.1 --save-trace trace.jsonl")
    stranger.run(by_trace)
    assert (stranger.home / "plan.png").stat().st_size
    in_gb, in_tokens = blocks_of("docs/sizing.md", "Replay")[0].splitlines()
    stranger.run(in_gb)
    assert "any tier" in stranger.run(in_tokens) and (stranger.home / "replay.png").stat().st_size


def test_vllm(stranger: Stranger, tiny_model: Path, tmp_path: Path) -> None:
    serve, for_cpu, *_ = blocks_of("docs/vllm.md", "Serve")
    more, see = blocks_of("docs/vllm.md", "See that it works")[:2]
    disk = re.findall(r"`(DYN_KVBM_DISK_CACHE_\w+=\S+?)`", (REPOSITORY / "docs/vllm.md").read_text())
    assert len(disk) == 2
    lines = f"export {' '.join(disk)}\n{serve.rstrip()} --port PORT_NUMBER\n".replace(MODEL, str(tiny_model))
    size, _, line = lines.partition("\nvllm serve")
    lines = f"cd {stranger.home}\n{size}\n{for_cpu}\n{more}\nvllm serve{line}"
    server = Pasted(stranger, lines, tmp_path / "vllm.log")
    see = server.here(see.replace(MODEL, str(tiny_model)), 8000)
    with server:
        shown = stranger.run(see)
        assert '"success":true' in shown and "never_seen" in shown and "device to host" in shown
        again, first = stranger.requests()
        assert first["reason"] == "never_seen" and not again["reason"]
        assert int(again["host_tokens"]) > 0.9 * int(again["prompt_tokens"]) > 1000
        (ask_engine,) = TOKENIZE.findall((REPOSITORY / "docs/fleet.md").read_text(encoding="utf-8"))
        stranger.run(server.here(ask_engine, 8000))
        assert "would be found" in stranger.run("kvbm lookup --tokens tokens.json --json")
        pinned = stranger.run("kvbm pin system --all --tokens tokens.json")
        assert "kvbm pin" in pinned and "stay" in pinned
        server.kill()
    with server:
        stranger.run(see.partition("\nask ")[0] + "\nask")
        (warm,) = stranger.requests()
        assert warm["disk_tokens"] == again["host_tokens"]
        stranger.run(
            "kvbm top --once; kvbm status --json; kvbm fleet status; kvbm doctor --json || test $? = 1"
        )
