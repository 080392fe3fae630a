"""The tables of mutants and the code agree: each can be applied, and its tests exist."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest

from tests.mutants.mutant import ROOT
from tests.mutants.playing import Copy
from tests.mutants.tables import MUTANTS, NOT_SHOWN


def test_each_text_stands_once_in_its_file() -> None:
    assert len(MUTANTS) > 150
    for mutant in MUTANTS:
        text = (ROOT / mutant.path).read_text(encoding="utf-8")
        mutated = mutant.applied_to(text)
        assert mutated != text, mutant.seen
        if mutant.path.endswith(".py"):
            ast.parse(mutated)


@functools.cache
def functions_of(path: str) -> frozenset[str]:
    """Names of the tests in a file, and in the contracts that its classes inherit."""
    text = (ROOT / path).read_text(encoding="utf-8")
    bases = re.findall(r"^from kvbm_core\.testing\.(\w+_contract) import", text, re.MULTILINE)
    texts = [text, *((ROOT / "kvbm_core" / "testing" / f"{base}.py").read_text("utf-8") for base in bases)]
    return frozenset(
        name for text in texts for name in re.findall(r"^ *def (test_\w+)\(", text, re.MULTILINE)
    )


def test_each_test_exists() -> None:
    for mutant in MUTANTS:
        for name in mutant.tests:
            path, *_, test = name.split("::")
            assert test.partition("[")[0] in functions_of(path), name


def test_each_row_says_something_of_its_own() -> None:
    seen = [mutant.seen for mutant in MUTANTS]
    assert len(set(seen)) == len(seen)
    assert all(one.what and one.why for one in NOT_SHOWN)


@pytest.mark.nightly("each mutant is a run of pytest: half an hour")
@pytest.mark.timeout(4 * 3600)
def test_each_mutant_dies_and_only_then_its_test_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # what plays them goes on in its copy
    copy = Copy(tmp_path)
    try:
        assert not copy.unmutated(MUTANTS)
        alive = [f"{what}: {mutant.seen}" for mutant, what, _ in copy.play(MUTANTS) if what != "dies"]
    finally:
        copy.close()
    assert not alive, "\n".join(alive)
