"""The benchmark of KVBM_REMOTE_CODEC=fp8: what it counts, and that a real engine has what it counts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("httpx")

from benchmarks.fp8 import answers, speed
from benchmarks.fp8.answers import Asked, effect_of
from benchmarks.suite import WrongAnswer


def test_what_is_counted_of_answers() -> None:
    told = [[(5, -1.0, 5, -1.5), (6, -2.0, 7, -2.25)], [(8, -0.5, 8, -0.5), (9, -1.0, 9, -0.75)]]
    effect = effect_of("a", "fp8", {"tokens": told, "again": [[5, 7], [8, 9]]})
    assert (effect.num_tokens, effect.agreed, effect.same_answers) == (4, 0.75, 0.5)
    assert (effect.mean_off, effect.max_off) == (0.25, 0.5)


def test_a_prompt_that_did_not_come_from_the_store_counts_as_a_failure(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    found: dict[str, Any] = {"cached_tokens": [96, 32], "tokens": [], "again": []}
    monkeypatch.setattr(answers, "run_job", lambda *args, **more: found)
    with pytest.raises(WrongAnswer, match="a, fp8: only 32 tokens came from the store"):
        answers.measure("a", tmp_path, "fp8", Asked("float32", 2, 100, 4, 1), tmp_path)


def test_speeds_are_of_what_float8_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed, "ROUNDS", 1)
    monkeypatch.setattr(speed, "NUM_BLOCKS", 1)
    measured = [speed.measure(dtype, 1) for dtype in speed.ITEM_BYTES]
    assert [round(one.stored, 2) for one in measured] == [0.5, 0.5, 0.25]
    assert all(one.to_store > 0 < one.from_store for one in measured)


@pytest.mark.nightly("a real engine for a minute; tests/vllm/test_head_codec.py has the same on a fake model")
@pytest.mark.timeout(600)
def test_a_real_engine_s_answers_after_rounding(tiny_model: Path, tmp_path: Path) -> None:
    """In float32, where a hit alone changes nothing that counts."""
    asked = Asked("float32", 4, 528, 8, 1)
    exact, rounded = (
        answers.measure("tiny", tiny_model, codec, asked, tmp_path / codec) for codec in ("none", "fp8")
    )
    assert (exact.agreed, exact.same_answers) == (1.0, 1.0) and exact.max_off < 0.01
    assert rounded.agreed > 0.5 and 0.01 < rounded.mean_off < 1.0
