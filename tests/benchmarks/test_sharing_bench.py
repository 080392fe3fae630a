"""The table of docs/remote.md is what its command prints."""

from __future__ import annotations

import pytest

from benchmarks.remote.sharing import STORES, row
from tests.engines import REPOSITORY

pytestmark = pytest.mark.timeout(900)


@pytest.mark.nightly("six engines with each store; tests/vllm/test_sharing.py has a store in memory")
@pytest.mark.parametrize("kind", STORES)
def test_the_page_says_what_a_second_engine_finds(kind: str) -> None:
    _, can_start = STORES[kind]
    if not can_start():
        pytest.skip(f"NOT RUN: what a second engine finds in {kind}; its server is not installed")
    page = (REPOSITORY / "docs" / "remote.md").read_text(encoding="utf-8")
    (line,) = [line for line in page.splitlines() if line.startswith(f"| `{kind}` |")]
    assert [cell.strip() for cell in line.strip("|").split("|")] == row(kind)
