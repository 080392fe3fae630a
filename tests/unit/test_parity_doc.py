"""docs/parity.md names tests that exist, and leaves no row without a test or a word on what will bring it."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "parity.md"
TEST = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")
LATER = re.compile(r"\blater: \w")


def rows() -> list[str]:
    """The rows of all tables without their heads."""
    lines = [*PAGE.read_text(encoding="utf-8").splitlines(), ""]
    return [
        line
        for number, line in enumerate(lines)
        if line.startswith("|") and not line.startswith("|---") and not lines[number + 1].startswith("|---")
    ]


def names_in(path: Path) -> set[str]:
    """Names of the test functions of a file; none if it is not there."""
    if not path.is_file():
        return set()
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {
        node.name
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }


def test_every_test_on_the_page_exists() -> None:
    named = TEST.findall(PAGE.read_text(encoding="utf-8"))
    assert len(named) > 80
    missing = [f"{file}::{name}" for file, name in named if name not in names_in(ROOT / file)]
    assert not missing


def test_every_row_has_a_test_or_says_what_will_bring_it() -> None:
    assert len(rows()) > 60
    empty = [row for row in rows() if not TEST.search(row) and not LATER.search(row)]
    assert not empty


def test_nothing_is_named_in_another_form() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert text.count("::") == len(TEST.findall(text))
