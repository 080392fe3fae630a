"""What docs/dynamo.md starts by hand, as it is written, with the wheel, without the checkout and a GPU."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from tests.conftest import DYNAMO_PYTHON
from tests.engines.etcd_server import find_etcd
from tests.engines.page_servers import beside_server
from tests.engines.reader import Reader, lines_of, why_no_machine
from tests.engines.stranger import build_wheel
from tests.page_commands import SERVES, told

BEFORE = """export VLLM_CPU_KVCACHE_SPACE=1 ETCD_ENDPOINTS=http://127.0.0.1:2379
{etcd} --data-dir "$HOME/etcd" >etcd.log 2>&1 &
until curl -sf 127.0.0.1:2379/health >/dev/null; do sleep 0.2; done"""


@pytest.mark.etcd
@pytest.mark.timeout(2500)
@pytest.mark.nightly("the wheel, a frontend and an engine: minutes; test_command_lines.py parses them")
def test_by_hand(tiny_model: Path, tmp_path: Path, short_path: Path) -> None:
    if reason := why_no_machine():
        pytest.skip(f"NOT RUN: servers of the pages: {reason}")
    reader = Reader(tmp_path / "home", DYNAMO_PYTHON, build_wheel(tmp_path / "wheel"), short_path)
    reader.has_models(tiny_model)
    reader.new_machine()
    frontend, *worker = (command for command, how in told("docs/dynamo.md") if how == SERVES)
    in_background = frontend._replace(text=f"{frontend.text} &")
    lines = "".join(lines_of(command) for command in (in_background, *worker))
    etcd = find_etcd()
    assert etcd is not None
    before = BEFORE.format(etcd=shlex.quote(str(etcd)))
    done = beside_server(reader, f"{before}\n{lines}", port=8000, model="MODEL")
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
