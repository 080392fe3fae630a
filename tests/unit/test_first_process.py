"""The process that began an engine: the last line of one that did not start, and what a killed one leaves."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PROGRAM = """
import multiprocessing, sys
from kvbm_vllm.first_process import leave, watch

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
    watch()
    child = spawn.Process(target=core, args=(sys.argv[1] == "core",))
    child.start()
    child.join()
    if sys.argv[1] != "nothing wrong":
        raise RuntimeError("engine core initialization failed")
"""


def run_program(folder: Path, program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """With ``folder`` as the place for what is temporary."""
    (folder / "program.py").write_text(program)
    command = [sys.executable, str(folder / "program.py"), *arguments]
    root = str(Path(__file__).resolve().parents[2])
    environment = {"TMPDIR": str(folder), "PYTHONPATH": root, "PATH": "/usr/bin:/bin"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)


def run(folder: Path, who: str) -> list[str]:
    """The lines that a user sees."""
    return run_program(folder, PROGRAM, who).stderr.splitlines()


def test_the_reason_stands_below_the_last_traceback(tmp_path: Path) -> None:
    for who in ("core", "rank"):
        *above, last = run(tmp_path, who)
        assert last == "kvbm: SIZE=1: too little; take more"
        assert "RuntimeError: engine core initialization failed" in above
    assert not list(tmp_path.rglob("*.last")), "nothing is left, not even for a core that has ended"


def test_a_process_that_ends_well_says_nothing(tmp_path: Path) -> None:
    assert run(tmp_path, "nothing wrong")[-1].startswith("RuntimeError: a rank failed")


KILLED = """
import multiprocessing, os, signal
from kvbm_vllm.first_process import watch

def core(ready):
    from kvbm_core.runtime.endpoint import EndpointLock, SecretFile, ipc_endpoint
    held = SecretFile("an engine")
    lock = EndpointLock(ipc_endpoint("an engine", held.secret))
    lock._path.touch()
    ready.set()
    signal.pause()

spawn = multiprocessing.get_context("spawn")
if __name__ == "__main__":
    watch()
    ready = spawn.Event()
    child = spawn.Process(target=core, args=(ready,))
    child.start()
    ready.wait()
    print(len(list(__import__("pathlib").Path(os.environ["TMPDIR"]).glob("kvbm-*/*"))))
    child.kill()
"""


def test_what_a_killed_core_has_left_is_removed(tmp_path: Path) -> None:
    """A secret, a socket and its lock: young, and of a process that nobody has waited for."""
    done = run_program(tmp_path, KILLED)
    assert (done.stdout, done.stderr, done.returncode) == ("3\n", "", 0)
    assert not list(tmp_path.glob("kvbm-*/*"))
