"""Why an engine does not start is the last line, below the tracebacks of the processes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PROGRAM = """
import multiprocessing, sys
from kvbm_vllm.last_words import leave, say_at_the_end

LINE = "kvbm: SIZE=1: too little; take more"

def rank():
    leave(LINE)
    raise ValueError(LINE)

def core(is_alone):
    if is_alone:
        rank()
    child = spawn.Process(target=rank)
    child.start()
    child.join()
    raise RuntimeError("a rank failed")

spawn = multiprocessing.get_context("spawn")
if __name__ == "__main__":
    say_at_the_end()
    child = spawn.Process(target=core, args=(sys.argv[1] == "core",))
    child.start()
    child.join()
    if sys.argv[1] != "nothing wrong":
        raise RuntimeError("engine core initialization failed")
"""


def run(folder: Path, who: str) -> list[str]:
    """The lines that a user sees."""
    (folder / "program.py").write_text(PROGRAM)
    command = [sys.executable, str(folder / "program.py"), who]
    root = str(Path(__file__).resolve().parents[2])
    environment = {"TMPDIR": str(folder), "PYTHONPATH": root, "PATH": "/usr/bin:/bin"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    return done.stderr.splitlines()


def test_the_reason_stands_below_the_last_traceback(tmp_path: Path) -> None:
    for who in ("core", "rank"):
        *above, last = run(tmp_path, who)
        assert last == "kvbm: SIZE=1: too little; take more"
        assert "RuntimeError: engine core initialization failed" in above
    assert not list(tmp_path.rglob("*.last")), "nothing is left, not even for a core that has ended"


def test_a_process_that_ends_well_says_nothing(tmp_path: Path) -> None:
    assert run(tmp_path, "nothing wrong")[-1].startswith("RuntimeError: a rank failed")
