"""A run that leaves a file or a process is red, and says which; what others leave counts for nothing."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

from tests.engines import REPOSITORY
from tests.engines.process import TEST_RUN

FILE = """
import tempfile

def test_that_leaves_a_file():
    tempfile.mkdtemp(suffix="-planted")
"""
PROCESS = """
import subprocess, sys

def test_that_leaves_a_process():
    process = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause() # planted"])
    process.returncode = 0  # nobody complains of it
"""
NOTHING = """
from pathlib import Path

def test_that_leaves_nothing(tmp_path):
    (tmp_path / "file").touch()
    (Path(__file__).parent / "others" / "a-file").touch()
"""


def run(folder: Path, text: str, patience_s: str = "60") -> tuple[int, str]:
    (folder / "test_planted.py").write_text(text)
    (folder / "pytest.ini").write_text("[pytest]\n")
    (folder / "others").mkdir()
    others = {name: value for name, value in os.environ.items() if name != TEST_RUN}
    options = ["-p", "tests.leftovers", "--numprocesses=1", "--dist=loadfile"]
    found = subprocess.run(
        [sys.executable, "-m", "pytest", *options, str(folder)],
        cwd=REPOSITORY,
        env={**others, "TMPDIR": str(folder / "others"), "KVBM_TEST_LEFTOVERS_S": patience_s},
        capture_output=True,
        text=True,
        check=False,
    )
    return found.returncode, found.stdout


def test_a_file_that_is_left_makes_the_run_red_and_is_kept(tmp_path: Path) -> None:
    status, told = run(tmp_path, FILE)
    (left,) = re.findall(r"^LEFT BEHIND: (\S+-planted)$", told, re.MULTILINE)
    assert status == 1 and "1 passed" in told and Path(left).is_dir()
    assert Path(left).parent.parent == tmp_path / "others"


def test_a_process_that_is_left_makes_the_run_red(tmp_path: Path) -> None:
    status, told = run(tmp_path, PROCESS, patience_s="0.5")
    ((pid, words),) = re.findall(r"^LEFT BEHIND: process (\d+) \((.*)\)$", told, re.MULTILINE)
    os.kill(int(pid), signal.SIGKILL)
    assert status == 1 and "1 passed" in told and "signal.pause() # planted" in words


def test_what_others_leave_counts_for_nothing(tmp_path: Path) -> None:
    status, told = run(tmp_path, NOTHING)
    assert status == 0 and "LEFT BEHIND" not in told, told
    assert [path.name for path in (tmp_path / "others").iterdir()] == ["a-file"], "its own folder has gone"
