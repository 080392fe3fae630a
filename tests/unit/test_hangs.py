"""Tests that hang: each fails alone where an alarm can interrupt it, and where not, it is said what was not
run.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.engines import REPOSITORY

INTERRUPTED = """
import threading

def test_an_endless_loop():
    while True:
        pass

def test_a_lock_that_is_never_freed():
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()

def test_what_comes_after():
    pass
"""
IN_C = """
import ctypes

def test_a_call_that_never_returns():
    here, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(64)
    here.pthread_mutex_lock(mutex)
    here.pthread_mutex_lock(mutex)

def test_what_comes_after():
    pass
"""


def run(folder: Path, text: str) -> str:
    (folder / "test_planted.py").write_text(text)
    (folder / "pytest.ini").write_text("[pytest]\n")
    options = ["--timeout=1", "--timeout-method=signal", "--numprocesses=1", "--max-worker-restart=0"]
    found = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "tests.hangs", *options, str(folder)],
        cwd=REPOSITORY,
        env={**os.environ, "KVBM_TEST_HANG_GRACE_S": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 1, found.stdout + found.stderr
    return found.stdout


def test_a_test_that_hangs_fails_alone(tmp_path: Path) -> None:
    told = run(tmp_path, INTERRUPTED)
    assert "2 failed, 1 passed" in told and told.count("Timeout (>1.0s)") >= 2, told


def test_a_hang_in_c_ends_its_worker_and_what_was_not_run_is_said(tmp_path: Path) -> None:
    told = run(tmp_path, IN_C)
    assert "crashed while running 'test_planted.py::test_a_call_that_never_returns'" in told, told
    assert "NOT RUN (1 tests, as a worker ended): test_planted.py: 1" in told, told
