"""``max_load_tokens`` and ``max_offload_tokens`` of a request, on vLLM's own scheduler, with a model that
checks what is brought back.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from kvbm_core.observe.labels import MissReason
from kvbm_core.testing import toy_store
from tests.vllm.kvbm_engine import KvbmEngine
from tests.vllm.test_why import OTHER, PROMPT, account

HITS = 48
"""Of PROMPT, in blocks of 4 tokens; one token of its 50 is always computed."""
KINDS = [(None,), (8, None), ("state", None), ("state", "state", 12, None)]


def limits(**what: Any) -> dict[str, Any]:
    """What vLLM makes of a client's kv_transfer_params."""
    return {"extra_args": {"kv_transfer_params": what}}


CUTS = [(20, 20), (23, 20), (4, 4), (3, 0), (0, 0), (HITS, HITS), (2**63, HITS), (None, HITS)]


def kind_of(windows: tuple[Any, ...]) -> dict[str, Any]:
    """An engine of this kind; steps of 12 tokens, as states are where steps end."""
    step = {"max_batched_tokens": 12, "retain_tokens": None, "extra": {"state_every_tokens": 1}}
    return {"windows": windows, "num_blocks": 400, "host_blocks": 600, **step}


@pytest.mark.parametrize(("most", "promised"), CUTS)
def test_at_most_so_many_tokens_are_loaded(most: int | None, promised: int, tmp_path: Path) -> None:
    with KvbmEngine(tmp_path) as engine:
        first = engine.ask("first", PROMPT, 8)
        engine.forget_device()
        assert engine.ask("again", PROMPT, 8, **limits(max_load_tokens=most)) == first
        assert engine.promised("again") == [promised]
        found = account(engine, "again")
        assert (found.host_tokens, found.missed_tokens) == (promised, HITS - promised)
        if promised < HITS:
            assert found.reason is MissReason.LIMITED
            said = f"it lets {most} tokens be loaded (max_load_tokens)"
            assert found.text == f"from token {promised} on: {said}"
        else:
            assert found.reason is None
        engine.settle()
        limited = engine.metric('kvbm_missed_tokens_total{reason="limited"}')
        assert limited == HITS - promised
        engine.assert_clean()


def test_what_the_device_has_is_not_counted(tmp_path: Path) -> None:
    with KvbmEngine(tmp_path) as engine:
        first = engine.ask("first", PROMPT, 8)
        engine.forget_device()
        engine.ask("head", PROMPT[:17], 1)
        assert engine.ask("again", PROMPT, 8, **limits(max_load_tokens=8)) == first
        assert account(engine, "again").device_tokens == 16 and engine.promised("again") == [8]
        engine.assert_clean()


@pytest.mark.parametrize("windows", KINDS)
def test_a_hit_is_cut_where_a_hit_may_end(windows: tuple[Any, ...], tmp_path: Path) -> None:
    with KvbmEngine(tmp_path, **kind_of(windows)) as engine:
        first = engine.ask("first", PROMPT, 8)
        engine.forget_device()
        assert engine.ask("whole", PROMPT, 8) == first
        (whole,) = engine.promised("whole")
        assert whole > 30
        engine.forget_device()
        assert engine.ask("again", PROMPT, 8, **limits(max_load_tokens=30)) == first
        (promised,) = engine.promised("again")
        assert promised == (24 if "state" in windows else 28)
        assert account(engine, "again").reason is MissReason.LIMITED
        engine.assert_clean()


def test_what_is_not_there_is_missed_for_that(tmp_path: Path) -> None:
    with KvbmEngine(tmp_path) as engine:
        engine.ask("first", PROMPT[:21], 1)
        engine.forget_device()
        engine.ask("longer", PROMPT, 1, **limits(max_load_tokens=40))
        assert account(engine, "longer").reason is MissReason.NEVER_SEEN and engine.promised("longer") == [20]
        engine.ask("new", OTHER, 1, **limits(max_load_tokens=0))
        assert account(engine, "new").reason is MissReason.NEVER_SEEN
        engine.assert_clean()


def test_a_shared_store_is_not_asked_for_more(tmp_path: Path) -> None:
    toy_store.forget_all()
    extra = {"remote_wait_s": 30.0, "remote_load": "always"}
    kind: dict[str, Any] = {"host_blocks": 60, "store": "toy://blocks?seed=1", "extra": extra}
    with KvbmEngine(tmp_path, **kind) as engine:
        first = engine.ask("first", PROMPT, 8)
        engine.settle()
        engine.forget_device()
        engine.leader.chain.host.reset()
        assert engine.ask("again", PROMPT, 8, **limits(max_load_tokens=20)) == first
        assert engine.external_tokens("again") == 20
        found = account(engine, "again")
        assert found.reason is MissReason.LIMITED and found.missed_tokens == HITS - 20
        engine.assert_clean()
    toy_store.forget_all()


@pytest.mark.parametrize("windows", KINDS)
@pytest.mark.parametrize("most", [0, 3, 21, 30])
def test_of_the_first_tokens_alone_something_is_stored(
    windows: tuple[Any, ...], most: int, tmp_path: Path
) -> None:
    with KvbmEngine(tmp_path, **kind_of(windows)) as engine:
        first = engine.ask("first", PROMPT, 30, **limits(max_offload_tokens=most))
        engine.settle()
        stored = engine.leader.chain.host.resident_blocks
        assert bool(stored) is (most >= 4)
        engine.forget_device()
        engine.ask("again", [*PROMPT, *first], 8)
        (promised,) = engine.promised("again")
        align = 12 if "state" in windows else 4
        assert promised == most // align * align
        engine.forget_device()
        engine.ask("whole", [*PROMPT, *first], 8)  # the one before has stored the rest
        assert engine.promised("whole")[0] > 60
        engine.assert_clean()


@pytest.mark.parametrize("value", [-1, True, "9", 1.5, [8] * 99])
@pytest.mark.parametrize("name", ["max_load_tokens", "max_offload_tokens"])
def test_what_is_no_number_of_tokens_is_ignored_in_one_line(
    name: str, value: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "kvbm"), KvbmEngine(tmp_path) as engine:
        for request_id in ("first", "again"):
            engine.ask(request_id, PROMPT, 2, **limits(**{name: value}))
            engine.forget_device()
        assert engine.promised("again") == [HITS]
        assert engine.errors == 0
        engine.assert_clean()
    (line,) = [
        record.getMessage() for record in caplog.records if "kv_transfer_params" in record.getMessage()
    ]
    assert name in line and repr(value)[:15] in line and "ignored" in line and len(line) < 250
