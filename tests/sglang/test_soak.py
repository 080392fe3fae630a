"""The soak of tests.engines.sglang.soak, short: a real SGLang server, clients at once, flushes, clears,
detachments.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.engines.sglang.soak import RULES, Options, soak_model
from tests.engines.sglang.soak_prompts import ROUNDING, Answer, runner_up

SEED = 0
"""One round of so many of these prompts, however fast the machine is. Those of its first half, some 480
pages, fit kvbm's file of some 540, and come back in its second half; with those of the second it is full.
"""


@pytest.mark.nightly("a minute of a real server; test_engine.py has its answers")
@pytest.mark.timeout(900)
def test_a_short_soak_has_no_complaint(tiny_model: Path, tmp_path: Path) -> None:
    heard: list[str] = []
    clients, prompts = 4, 6
    short: dict[str, Any] = {"minutes": 0, "round_s": 0, "clients": clients, "fewest_prompts": prompts}
    soak = soak_model(tiny_model, Options(tmp_path, seed=SEED, **short), heard.append)
    assert not soak.complaints(), heard
    assert len(soak.rounds) == 1
    assert soak.tally.answers >= 2 * clients * prompts


def test_growth_is_seen() -> None:
    rule = RULES["handles"]
    assert not rule.has_grown([9, 9, 9, 9, 9, 9, 9, 9])
    assert not rule.has_grown([1, 9, 9, 9, 9, 9, 9, 11])
    assert rule.has_grown([1, 2, 3, 4, 5, 6, 7, 8])
    assert not rule.has_grown([1, 2, 30])  # too few


def test_only_rounding_is_excused() -> None:
    first = Answer([5, 6, 7], [-1.0, -2.0, -3.0], 0, [(8, 2.0), (9, ROUNDING / 2), (3, 2.0)])

    def excused(tokens: list[int], logprobs: list[float]) -> bool:
        return first.is_rounded(Answer(tokens, logprobs, 0, []))

    assert excused([5, 6, 7], [-1.0, -2.0, -3.0])
    assert excused([5, 6, 7], [-1.0, -2.0, -3.0 - ROUNDING / 2])
    assert excused([5, 9, 1], [-1.0, -2.0, -9.0])  # the near tie; its follower has another prompt
    assert not excused([5, 6, 7], [-1.0, -2.0, -3.0 - ROUNDING * 2])
    assert not excused([5, 9, 1], [-1.0, -2.0 - ROUNDING * 2, -3.0])
    assert not excused([5, 8, 7], [-1.0, -2.0, -3.0])  # another token than the runner-up
    assert not excused([8, 6, 7], [-1.0, -2.0, -3.0])  # the runner-up, but no tie


def test_a_runner_up_is_not_what_was_chosen() -> None:
    assert runner_up(5, [-1.0, 5, None], [-1.5, 8, None]) == (8, 0.5)
    assert runner_up(5, [-1.0, 8, None], [-1.0, 5, None]) == (8, 0.0)  # a tie, in either order
