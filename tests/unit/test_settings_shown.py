"""Every setting does what its row of the table says: some test that always runs is marked as showing it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from kvbm_core.config import KvbmSettings
from tests.ignoring import EXEMPT, NOTICED
from tests.shown import TESTS, Shown, promised, shown
from tests.unit.test_config import clean_environment

__all__ = ["clean_environment"]


@pytest.fixture(scope="module")
def marks() -> list[Shown]:
    return shown()


def test_each_setting_is_shown_by_a_test_that_always_runs(marks: list[Shown]) -> None:
    always = {mark.env for mark in marks if not mark.is_nightly}
    missing = [env for env in KvbmSettings.env_names().values() if env not in always]
    assert not missing, f"no test is marked pytest.mark.shows(...) for: {', '.join(missing)}"


def test_each_value_that_the_table_names_is_shown(marks: list[Shown]) -> None:
    always = {mark.word for mark in marks if not mark.is_nightly}
    assert len([env for env, words in promised().items() if words]) > 15
    missing = [word for words in promised().values() for word in sorted(words - always)]
    assert not missing, f"no test is marked pytest.mark.shows(...) for: {', '.join(missing)}"


def test_each_name_that_is_shown_is_a_setting(marks: list[Shown]) -> None:
    words = promised()
    wrong = [
        f"{mark.where}: {mark.word}"
        for mark in marks
        if mark.word not in words and mark.word not in words.get(mark.env, ())
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.nightly("what shows a setting runs once more for each: a quarter of an hour")
@pytest.mark.timeout(3600)
def test_a_setting_that_nobody_heeds_would_be_noticed(tmp_path: Path, marks: list[Shown]) -> None:
    files = sorted({f"tests/{mark.where.partition(':')[0]}" for mark in marks if not mark.is_nightly})
    found = tmp_path / "found"
    options = ["-n", "0", "-q", "-p", "tests.ignoring", "--ignoring", str(found), "-m", "shows"]
    options.append("--timeout=0")  # what waits in vain does so once for each setting
    command = [sys.executable, "-m", "pytest", *options, *files]
    done = subprocess.run(command, cwd=TESTS.parent, capture_output=True, text=True)
    assert found.exists(), done.stdout[-2000:]
    told = dict(line.split() for line in found.read_text().splitlines())
    wrong = [f"{env}: {told.get(env)}" for env in KvbmSettings.env_names().values() if env not in EXEMPT]
    assert not [line for line in wrong if not line.endswith(f" {NOTICED}")]
