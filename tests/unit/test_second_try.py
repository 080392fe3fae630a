"""A test that failed beside others has a second try, alone, and nothing that judges what kvbm did has."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.engines import REPOSITORY

BUSY = """
from pathlib import Path

SEEN = Path(__file__).with_name("seen")

def test_that_was_late():
    was_seen = SEEN.exists()
    SEEN.touch()
    assert was_seen, "too late"

def test_that_is_well():
    pass
"""
WRONG = """
from pathlib import Path

SEEN = Path(__file__).with_name("seen")

def test_of_bytes():
    was_seen = SEEN.exists()
    SEEN.touch()
    assert was_seen, "a byte is another"
"""
LEAK = """
from pathlib import Path

SEEN = Path(__file__).with_name("seen")

def look():
    was_seen = SEEN.exists()
    SEEN.touch()
    found = {} if was_seen else {"open requests": 1}
    assert not found, f"{found}"

def test_of_a_leak():
    look()
"""
JUDGES = """
from pathlib import Path

from kvbm_core.testing.verdicts import judges

SEEN = Path(__file__).with_name("seen")

@judges
def look():
    was_seen = SEEN.exists()
    SEEN.touch()
    if not was_seen:
        raise AssertionError("it never came to be")

def test_of_a_judge():
    look()
"""
LIMIT = """
import time
from pathlib import Path

SEEN = Path(__file__).with_name("seen")

def wait_until_no_lease_is_left():
    was_seen = SEEN.exists()
    SEEN.touch()
    end_s = time.monotonic() + (60.0 if was_seen else 0.0)
    assert time.monotonic() < end_s, "a byte is left"

def test_of_time():
    wait_until_no_lease_is_left()
"""
WEATHER = """
import subprocess
from pathlib import Path

SEEN = Path(__file__).with_name("seen")

def test_of_time():
    was_seen = SEEN.exists()
    SEEN.touch()
    if not was_seen:
        raise subprocess.TimeoutExpired("the answer's tokens", 60.0)
"""
ALWAYS = """
def test_that_fails():
    assert 1 == 2
"""
MANY = """
import pytest

@pytest.mark.parametrize("number", range(4))
def test_that_fails(number):
    assert number == 7
"""


def run(folder: Path, text: str) -> tuple[int, str]:
    (folder / "test_planted.py").write_text(text)
    (folder / "pytest.ini").write_text("[pytest]\n")
    options = ["-p", "tests.second_try", "--second-try", "--numprocesses=1", "--dist=loadfile"]
    found = subprocess.run(
        [sys.executable, "-m", "pytest", *options, str(folder)],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    return found.returncode, found.stdout


def test_what_passes_alone_is_named_with_what_it_said_and_counted(tmp_path: Path) -> None:
    status, told = run(tmp_path, BUSY)
    assert status == 0, told
    assert "PASSED ONLY ALONE: test_planted.py::test_that_was_late" in told and "too late" in told
    assert "1 passed, 1 passed only alone in" in told.splitlines()[-1]


@pytest.mark.parametrize("text", [LIMIT, WEATHER])
def test_a_limit_of_time_has_a_second_try_whatever_its_words(text: str, tmp_path: Path) -> None:
    status, told = run(tmp_path, text)
    assert status == 0 and "PASSED ONLY ALONE: test_planted.py::test_of_time" in told, told


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (JUDGES, "test_of_a_judge was not run again"),
        (WRONG, "test_of_bytes was not run again"),
        (LEAK, "test_of_a_leak was not run again"),
        (ALWAYS, "test_that_fails failed again, alone"),
        (MANY, "4 tests failed, more than 3: none was run again"),
    ],
)
def test_what_says_that_kvbm_is_wrong_stays_red(text: str, said: str, tmp_path: Path) -> None:
    status, told = run(tmp_path, text)
    assert status == 1 and said in told and " failed in" in told.splitlines()[-1], told
