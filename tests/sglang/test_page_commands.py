"""The pages' commands that start SGLang, run as they are written, with the wheel and without the checkout."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engines.page_servers import beside_server
from tests.engines.reader import Reader, lines_of, why_no_machine
from tests.engines.sglang.environment import PYTHON
from tests.engines.stranger import blocks_of, build_wheel
from tests.page_commands import SERVES, told

pytestmark = pytest.mark.timeout(2500)


@pytest.mark.nightly("the wheel, and an engine for each: minutes; test_engine.py has the same arguments")
@pytest.mark.parametrize("page", ["README.md", "docs/sglang.md"])
def test_a_pages_server(page: str, tiny_model: Path, tmp_path: Path, short_path: Path) -> None:
    if reason := why_no_machine():
        pytest.skip(f"NOT RUN: servers of the pages: {reason}")
    reader = Reader(tmp_path / "home", PYTHON, build_wheel(tmp_path / "wheel"), short_path)
    reader.has_models(tiny_model)
    reader.new_machine()
    served = [command for command, how in told(page) if how == SERVES]
    (serve,) = (command for command in served if "sglang.launch_server" in command.text)
    for_cpu = " ".join(blocks_of("docs/sglang.md", "As HiCache's storage backend")[1].split())
    lines = "".join(lines_of(command) for command in served if command.block == serve.block)
    lines = f"export SGLANG_USE_CPU_ENGINE=1\n{lines.rstrip()} {for_cpu}\n"
    done = beside_server(reader, lines, port=30000, model="MODEL")
    assert done.returncode == 0, f"{page}\n{done.stdout}\n{done.stderr}"
