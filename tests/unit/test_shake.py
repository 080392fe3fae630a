"""Runs of the same test again and again: what failed is counted, and said."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.engines import REPOSITORY

EVERY_SECOND = """
from pathlib import Path

SEEN = Path(__file__).with_name("seen")

def test_now_and_then():
    was_seen = SEEN.exists()
    SEEN.unlink() if was_seen else SEEN.touch()
    assert was_seen, "too late"

def test_always():
    pass
"""


def shake(folder: Path, *options: str) -> tuple[int, str]:
    command = [sys.executable, "-m", "tests.shake", str(folder), *options]
    (folder / "logs").mkdir()
    env = {**os.environ, "TMPDIR": str(folder / "logs")}
    found = subprocess.run(command, cwd=REPOSITORY, env=env, capture_output=True, text=True, check=False)
    return found.returncode, found.stdout


def test_a_test_that_fails_now_and_then_is_counted(tmp_path: Path) -> None:
    (tmp_path / "test_planted.py").write_text(EVERY_SECOND)
    status, told = shake(tmp_path, "--runs", "3", "--beside", "1", "--core", "0")
    assert status == 1 and "2 of 3 runs were red, beside 1 busy loops, on one core" in told, told
    (row,) = [line for line in told.splitlines() if "2 of 3 │" in line]
    assert "test_now_and_then" in row


@pytest.mark.parametrize(("text", "status"), [("def test_well(): pass", 0), ("", 1)])
def test_the_status_says_whether_all_were_green(text: str, status: int, tmp_path: Path) -> None:
    (tmp_path / "test_planted.py").write_text(text)
    assert shake(tmp_path, "--runs", "1")[0] == status
