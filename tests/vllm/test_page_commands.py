"""The pages' commands that need no engine, run as they are written, with the wheel and without the checkout
(``tests/page_commands.py`` names them).
"""

from __future__ import annotations

import sys
from itertools import groupby
from pathlib import Path

import pytest

from tests.engines.reader import Reader, why_no_machine
from tests.engines.stranger import build_wheel
from tests.page_commands import CHECKOUT, PAGES, told

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.nightly("a process for each command of sixteen pages: minutes"),
]
PLACES = ("home", "checkout")
TRACE = "kvbm plan --model ./my-model --gpu h100 --users 20 --hours 0.1 --save-trace trace.jsonl >/dev/null\n"
WALKED = [page for page in PAGES if any(how.place in PLACES for _, how in told(page))]


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Reader:
    if reason := why_no_machine():
        pytest.skip(f"NOT RUN: commands of the pages: {reason}")
    folder = tmp_path_factory.mktemp("reader")
    made = Reader(folder / "home", sys.executable, build_wheel(folder / "wheel"), folder)
    made.has_models(tiny_model)
    made.copy_checkout()
    made.new_machine()
    done = made.work(TRACE + 'cp trace.jsonl "$HOME/../checkout/TRACE.jsonl"')
    assert done.returncode == 0, done.stderr
    return made


@pytest.mark.parametrize("page", WALKED)
def test_the_pages_commands(page: str, reader: Reader) -> None:
    """In one shell, as who reads the page from above."""
    reader.new_machine()
    script = "set -eu -o pipefail\n"
    for _, commands in groupby(told(page), lambda pair: pair[0].block):
        chosen = [(command, how) for command, how in commands if how.place in PLACES]
        for command, how in chosen:
            folder = reader.checkout if how.place == CHECKOUT.place else reader.home
            script += f"cd {folder}\n{how.lines(command)}"
        if any("export " in command.text for command, _ in chosen):
            script += "cd\nkvbm config >/dev/null\n"  # which refuses what cannot be read
    done = reader.work(script)
    assert done.returncode == 0, f"{page}\n{done.stdout}\n{done.stderr}"
    assert "Traceback" not in done.stderr
