"""A store from an installed package, the one of docs/extending.md, below host and disk under vLLM's own
scheduler: every byte is checked.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.outside import sqlite_store
from tests.vllm.kvbm_engine import KvbmEngine, specs_to_try
from tests.vllm.test_scheduler_disk import ALL, ask_anew, push_out
from tests.vllm.test_scheduler_stores import FROM_STORE, TIGHT, TO_STORE


@pytest.fixture(name="url")
def url_fixture(tmp_path: Path) -> Iterator[str]:
    """Of a new store."""
    with sqlite_store(tmp_path / "site"):
        yield f"sqlite://{tmp_path}/objects.db"


@pytest.mark.parametrize("spec", specs_to_try().values(), ids=specs_to_try().keys())
def test_what_host_and_disk_have_lost_comes_back(spec: dict[str, Any], url: str, tmp_path: Path) -> None:
    with KvbmEngine(tmp_path, **{**TIGHT, "store": url, **spec}) as engine:
        block = engine.spec.block_size_tokens
        first = engine.ask("a", ALL, 8)
        engine.forget_device()
        push_out(engine)
        assert engine.metric(TO_STORE) > 0
        before = engine.metric(FROM_STORE)
        assert engine.ask("b", ALL, 8) == first
        assert engine.external_tokens("b") == 49 // block * block
        assert engine.metric(FROM_STORE) > before
        engine.assert_clean()


def test_another_engine_finds_what_the_first_one_stored(url: str, tmp_path: Path) -> None:
    with KvbmEngine(tmp_path, host_blocks=60, store=url) as engine:
        first = engine.ask("a", ALL, 8)
        engine.settle()
    with KvbmEngine(tmp_path, host_blocks=60, disk_blocks=40, store=url) as engine:
        assert engine.ask("b", ALL, 8) == first
        assert engine.external_tokens("b") == 48
        engine.settle()
        rates = [engine.metric(f"kvbm_{tier}_cache_hit_rate") for tier in ("host", "disk", "object")]
        assert rates == [0.0, 0.0, 1.0]
        engine.assert_clean()


def test_of_two_ranks_each_has_its_own_part(url: str, tmp_path: Path) -> None:
    with KvbmEngine(tmp_path, **TIGHT, store=url, ranks=2) as engine:
        ask_anew(engine)
        assert engine.metric(FROM_STORE) > 0
        engine.assert_clean()
