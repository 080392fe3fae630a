"""Real SGLang that forgets and asks again, fifty times: what kvbm brings back gives the answers that the
engine's own cache gives, to the last bit each time, whatever runs beside it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.engines.sglang.engine import (
    HICACHE,
    HIT,
    LINKER,
    NOTHING,
    NUM_PROMPTS,
    WHOLE_PAGES,
    cached,
    near_answers,
    prompts_of,
    run_engine,
    same_answers,
)

ROUNDS = 50

pytestmark = [
    pytest.mark.timeout(3600),
    pytest.mark.nightly("minutes each; test_engine.py and test_linker.py have one such round"),
]


STORED = {"stored": WHOLE_PAGES * NUM_PROMPTS}
ROUND = ["flush", "ask", "ask"]


@pytest.mark.parametrize(
    ("engine", "steps"),
    [
        pytest.param(HICACHE, ["ask", STORED, "ask", *ROUND], id="hicache"),
        pytest.param(LINKER, ["ask", "ask", *ROUND, STORED], id="linker"),  # what was loaded goes to the disk
    ],
)
def test_each_round_answers_alike(
    engine: dict[str, Any], steps: list[Any], tiny_model: Path, tmp_path: Path, seed: int
) -> None:
    found = run_engine(
        tmp_path,
        [*steps, *ROUND * (ROUNDS - 1)],
        prompts=prompts_of(seed),
        environment={"KVBM_START_WAIT_S": "60"},
        timeout_s=3000,
        model_path=str(tiny_model),
        **engine,
    )
    cold, own, *others = found["answers"]
    assert [cached(cold), cached(own)] == [NOTHING, HIT] and near_answers(cold, own)
    assert [cached(other) for other in others] == [HIT] * (2 * ROUNDS)
    unlike = [number for number, other in enumerate(others) if not same_answers(own, other)]
    assert not unlike, "answers that are not those of the engine's own cache, by their number"
