"""A tier of a third kind, which only tests have, below host and disk under vLLM's own scheduler: every byte
is checked.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import third_kind
from tests.vllm.kvbm_engine import KvbmEngine, specs_to_try
from tests.vllm.test_scheduler_disk import ALL, ask_anew, push_out
from tests.vllm.test_scheduler_stores import FROM_STORE, TIGHT, TO_STORE

URL = "shelf://blocks"


@pytest.fixture(autouse=True)
def _empty_shelves() -> Iterator[None]:
    third_kind.register()
    yield
    third_kind.SHELVES.clear()


@pytest.mark.parametrize("spec", specs_to_try().values(), ids=specs_to_try().keys())
def test_what_host_and_disk_have_lost_comes_back(spec: dict[str, Any], tmp_path: Path) -> None:
    with KvbmEngine(tmp_path, **{**TIGHT, "store": URL, **spec}) as engine:
        block = engine.spec.block_size_tokens
        first = engine.ask("a", ALL, 8)
        engine.forget_device()
        push_out(engine)
        assert engine.metric(TO_STORE) > 0
        before = engine.metric(FROM_STORE)
        assert engine.ask("b", ALL, 8) == first
        assert engine.external_tokens("b") == 49 // block * block
        from_shelf = engine.metric(FROM_STORE)
        assert from_shelf > before
        engine.forget_device()
        assert engine.ask("c", ALL, 8) == first
        assert engine.metric(FROM_STORE) == from_shelf, "what came up was not kept in the host"
        engine.assert_clean()


def test_another_engine_finds_what_the_first_one_stored(tmp_path: Path) -> None:
    with KvbmEngine(tmp_path, host_blocks=60, store=URL) as engine:
        first = engine.ask("a", ALL, 8)
        engine.settle()
    with KvbmEngine(tmp_path, host_blocks=60, disk_blocks=40, store=URL) as engine:
        assert engine.ask("b", ALL, 8) == first
        assert engine.external_tokens("b") == 48
        engine.settle()
        rates = [engine.metric(f"kvbm_{tier}_cache_hit_rate") for tier in ("host", "disk", "object")]
        assert rates == [0.0, 0.0, 1.0]
        engine.assert_clean()


def test_of_two_ranks_each_has_its_own_part(tmp_path: Path) -> None:
    with KvbmEngine(tmp_path, **TIGHT, store=URL, ranks=2) as engine:
        ask_anew(engine)
        assert engine.metric(FROM_STORE) > 0
        engine.assert_clean()
