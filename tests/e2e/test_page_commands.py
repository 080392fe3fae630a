"""The pages' commands that start vLLM, and those for beside it, run as they are written, with the wheel and
without the checkout (``tests/page_commands.py`` names them).
"""

from __future__ import annotations

import sys
from itertools import groupby
from pathlib import Path

import pytest

from tests.engines.page_servers import beside_server
from tests.engines.reader import Reader, lines_of, why_no_machine
from tests.engines.stranger import build_wheel
from tests.page_commands import BESIDE, SERVES, TABLE, told

FOR_CPU = "export VLLM_CPU_KVCACHE_SPACE=1 DYN_KVBM_CPU_CACHE_GB=1"  # docs/vllm.md
ALL_ON = """export KVBM_INSTANCE=node-1 KVBM_EVENTS=zmq DYN_KVBM_METRICS_PORT=6881
export DYN_KVBM_DISK_CACHE_GB=1 DYN_KVBM_DISK_CACHE_DIR=/mnt/nvme
"""
CONTROL = ("(umask 077; openssl", "export KVBM_CONTROL=socket,http")

pytestmark = [
    pytest.mark.timeout(2500),
    pytest.mark.nightly(
        "the wheel, and four engines: minutes; tests/vllm/test_page_commands.py has the rest"
    ),
]


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Reader:
    if reason := why_no_machine():
        pytest.skip(f"NOT RUN: servers of the pages: {reason}")
    folder = tmp_path_factory.mktemp("reader")
    made = Reader(folder / "home", sys.executable, build_wheel(folder / "wheel"), folder)
    made.has_models(tiny_model)
    return made


@pytest.mark.parametrize(
    ("page", "model"),
    [
        ("README.md", "Qwen/Qwen3-0.6B"),
        ("docs/configuration.md", "MODEL"),
        ("docs/remote.md", "Qwen/Qwen3-0.6B"),
    ],
)
def test_a_pages_server(page: str, model: str, reader: Reader) -> None:
    served = [command for command, how in told(page) if how == SERVES]
    block = next(command.block for command in served if "vllm serve" in command.text)
    lines = "".join(lines_of(command) for command in served if command.block == block)
    reader.new_machine()
    done = beside_server(reader, f"{FOR_CPU}\n{lines}", port=8000, model=model)
    assert done.returncode == 0, f"{page}\n{done.stdout}\n{done.stderr}"


def test_what_runs_beside_a_server(reader: Reader) -> None:
    (served,) = (command for command, how in told("docs/metrics.md") if how == SERVES)
    control = [one.text for one, _ in told("docs/fleet.md") if one.text.startswith(CONTROL)]
    assert len(control) == len(CONTROL)
    before = "\n".join([FOR_CPU, ALL_ON, *control])
    beside = 'failed=""\n'  # all are run, whatever one says
    for page in TABLE:
        for _, commands in groupby(told(page), lambda pair: pair[0].block):
            chosen = [(command, how) for command, how in commands if how.place == BESIDE.place]
            beside += "ask\n" if chosen else ""  # a step of the engine: what was pending is done
            for command, how in chosen:
                beside += f'{{ {how.lines(command)}}} || failed+=" {page}:{command.line}"\n'
    beside += 'test -z "$failed" || { echo "failed:$failed" >&2; false; }\n'
    reader.new_machine()
    lines = f"{before}\n{lines_of(served)}"
    done = beside_server(reader, lines, port=8000, model="Qwen/Qwen3-0.6B", beside=beside)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert "'CPU_TIER1', 0" in done.stdout, "docs/events.md: the reader has seen nothing"
    assert "would be found" in done.stdout, "docs/fleet.md: kvbm lookup"
    assert "Traceback" not in done.stderr
