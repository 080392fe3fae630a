"""`make nightly`: the tests that were run longest ago come first, and what is not reached is counted."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

from tests import nights
from tests.engines import REPOSITORY

TESTS = "def test_one(): pass\ndef test_two(): pass\n"


def run(folder: Path, *options: str, day: int = 700_000) -> str:
    """One night; ``folder/state`` has the days."""
    for name in "abc":
        (folder / f"test_{name}.py").write_text(TESTS)
    (folder / "pytest.ini").write_text("[pytest]\n")
    ours = {name: value for name, value in os.environ.items() if name != nights.END_VARIABLE}
    ours |= {nights.STATE_VARIABLE: str(folder / "state"), nights.DAY_VARIABLE: str(day)}
    command = [sys.executable, "-m", "pytest", "-p", "tests.nights", "--nightly", "-v", *options, str(folder)]
    found = subprocess.run(command, cwd=REPOSITORY, env=ours, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout + found.stderr
    return found.stdout


def run_in_order(told: str) -> list[str]:
    return re.findall(r"test_(\w\.py::test_\w+) PASSED", told)


def test_what_was_run_longest_ago_comes_first(tmp_path: Path) -> None:
    assert len(run_in_order(run(tmp_path))) == 6
    days = json.loads((tmp_path / "state").read_text())
    assert set(days.values()) == {700_000}
    days["test_b.py::test_two"] -= 2
    days["test_c.py::test_one"] -= 1
    (tmp_path / "state").write_text(json.dumps(days))
    order = run_in_order(run(tmp_path, day=700_001))
    assert order[:4] == ["b.py::test_two", "b.py::test_one", "c.py::test_one", "c.py::test_two"]
    assert set(json.loads((tmp_path / "state").read_text()).values()) == {700_001}


def test_without_days_another_file_comes_first_on_another_day(tmp_path: Path) -> None:
    firsts = set()
    for day in range(nights.DAYS):
        (tmp_path / "state").unlink(missing_ok=True)
        firsts.add(run_in_order(run(tmp_path, day=day))[0])
    assert firsts == {f"{name}.py::test_one" for name in "abc"}


def test_what_is_not_reached_is_counted_and_comes_first_next_time(tmp_path: Path) -> None:
    told = run(tmp_path, "--minutes=1e-9", "--numprocesses=1", "--dist=loadfile")
    assert "NOT RUN (6 tests, as the night is over; first next time)" in told
    assert json.loads((tmp_path / "state").read_text()) == {}
