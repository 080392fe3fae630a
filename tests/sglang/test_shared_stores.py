"""Stores that engines share, on real SGLang: what one engine has computed is a hit in another one. Answers
equal those of the first engine's own cache to the last bit. By HiCache, and by the linker.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from tests.engines.sglang.engine import (
    HICACHE,
    HIT,
    LINKER,
    NOTHING,
    NUM_PROMPTS,
    PAGE_TOKENS,
    WHOLE_PAGES,
    cached,
    near_answers,
    prompts_of,
    run_engine,
    same_answers,
    same_tokens,
    served_metrics,
)
from tests.engines.shared_stores import bucket, directory, mooncake, valkey

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.nightly("two engines more of each; test_engine.py has a directory"),
]
STORES = [
    directory,
    bucket,
    pytest.param(valkey, marks=pytest.mark.valkey),
    pytest.param(mooncake, marks=pytest.mark.mooncake),
]

NUM_PAGES = NUM_PROMPTS * WHOLE_PAGES
HOST_TIER = {
    "DYN_KVBM_CPU_CACHE_GB": "0.1",
    "DYN_KVBM_DISK_CACHE_GB": "0",
    "KVBM_REMOTE_DEADLINE_S": "20",
}
LATE = "set --schedule-policy lpm"
LONG_PROMPT_TOKENS = 2000

Store = Callable[[Path], AbstractContextManager[dict[str, str]]]


def ask(
    folder: Path, steps: list[Any], prompts: list[list[int]], environment: dict[str, str], **engine: Any
) -> dict[str, Any]:
    """One engine, with kvbm's metrics."""
    folder.mkdir()
    environment = {**environment, **served_metrics()}
    return run_engine(folder, steps, prompts=prompts, environment=environment, **engine)


@pytest.mark.parametrize("store", STORES)
def test_what_one_engine_has_computed_is_a_hit_in_another(
    store: Store, tiny_model: Path, tmp_path: Path, seed: int
) -> None:
    """A bucket has what was computed twice: SGLang does not tell what its own caches serve."""
    prompts, engine = prompts_of(seed), {"model_path": str(tiny_model), **HICACHE}
    twice = ["ask", "flush"] if store is bucket else []
    with store(tmp_path) as settings:
        steps = [*twice, "ask", {"shared": NUM_PAGES}, "ask"]
        first = ask(tmp_path / "first", steps, prompts, settings, **engine)
        second = ask(tmp_path / "second", ["ask", {"stored": NUM_PAGES}], prompts, settings, **engine)
    (*computed, own), (warm,) = first["answers"], second["answers"]
    assert [*map(cached, computed)] == [NOTHING] * len(computed)
    assert [cached(own), cached(warm)] == [HIT, HIT]
    assert same_answers(own, warm) and all(near_answers(cold, warm) for cold in computed)
    assert_brought(second)


@pytest.mark.parametrize("store", STORES)
def test_the_linker_finds_what_another_engine_has_computed(
    store: Store, tiny_model: Path, tmp_path: Path, seed: int
) -> None:
    """While a long prompt is computed in chunks, those of the requests behind it come: with this policy they
    are looked up as they wait. A bucket has what came back from host memory.
    """
    prompts = prompts_of(seed)
    (other,) = prompts_of(seed + 1, how_many=1, num_tokens=LONG_PROMPT_TOKENS)
    engine = {"model_path": str(tiny_model), **LINKER, "chunked_prefill_size": 2 * PAGE_TOKENS}
    with store(tmp_path) as of_store:
        settings = {**HOST_TIER, **of_store}
        steps = ["ask", "flush", "ask", {"shared": NUM_PAGES}, "ask"]
        first = ask(tmp_path / "first", steps, prompts, settings, **engine)
        engine["schedule_policy"] = "lpm"
        steps = ["together", "flush", {"ask": [1, 2, 3]}]
        second = ask(tmp_path / "second", steps, [other, *prompts], settings, **engine)
    assert [LATE in one["log"] for one in (first, second)] == [True, False]
    (cold, back, own), ((long, *warm), alone) = first["answers"], second["answers"]
    assert [cached(cold), cached(back), cached(own)] == [NOTHING, HIT, HIT]
    assert [cached([long]), cached(warm)] == [[0], HIT]
    assert same_tokens(cold, warm), "beside others in a batch"
    assert cached(alone) == HIT and same_answers(own, alone)
    assert_brought(second)


def assert_brought(engine: dict[str, Any]) -> None:
    """All pages came from the store, and none was bad."""
    metrics = engine["metrics"]
    assert metrics["kvbm_onboard_blocks_o2d"] >= NUM_PAGES
    assert metrics["kvbm_object_read_failures"] == 0 and metrics["kvbm_guarded_errors_total"] == 0
