"""Real SGLang with kvbm as its direct linker: device pages come back from host memory and disk. Answers equal
those of the engine's own cache to the last bit.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvbm_core.storage.disk.inspect import find_files, identify
from kvbm_core.storage.disk.record import slot_offset_bytes
from tests.engines.sglang.engine import (
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
    same_tokens,
)

pytestmark = pytest.mark.timeout(900)  # engines start for half a minute each

SIZES = {
    "DYN_KVBM_CPU_CACHE_GB": "0.1",
    "DYN_KVBM_DISK_CACHE_GB": "0.2",
    "KVBM_START_WAIT_S": "60",  # or on a busy machine the first request may come before the disk
}


def ask(folder: Path, steps: list[Any], model: Path, seed: int, **engine: Any) -> tuple[list[Any], str]:
    """The answers of each step that asks, and the log."""
    arguments = {"model_path": str(model), **LINKER, **engine}
    found = run_engine(folder, steps, prompts=prompts_of(seed), environment=SIZES, **arguments)
    return found["answers"], found["log"]


def assert_comes_back(answers: list[Any]) -> None:
    """``answers``: of a cold engine, of its own cache, of kvbm alone, and of kvbm all at the same time."""
    cold, own, again, together = answers
    assert [cached(one) for one in answers] == [NOTHING, HIT, HIT, HIT]
    assert same_answers(own, again) and near_answers(cold, again) and same_tokens(cold, together)


def stored_by_an_engine(folder: Path, model: Path, seed: int, ranks: int = 1) -> tuple[list[Any], list[Any]]:
    """Asks, forgets and asks again, until all pages are on the disk in ``folder``, where they go when they
    have been loaded. The answers of the cold engine, and those of its own cache.
    """
    stored = {"stored": ranks * WHOLE_PAGES * NUM_PROMPTS}
    steps = ["ask", "ask", "flush", "ask", stored, "flush", "together", "new_weights", "ask"]
    (*answers, reloaded), _ = ask(folder, steps, model, seed, tp_size=ranks)
    assert_comes_back(answers)
    cold, own = answers[:2]
    # SGLang tells of new weights by nothing but the name of the function that calls: this holds that name.
    assert cached(reloaded) == NOTHING and near_answers(cold, reloaded)
    return cold, own


@pytest.mark.nightly("two engines more, of two ranks each; test_engine.py has two ranks of HiCache")
def test_prompts_come_back_to_two_ranks(tiny_model: Path, tmp_path: Path, seed: int) -> None:
    cold, _ = stored_by_an_engine(tmp_path, tiny_model, seed, ranks=2)
    (warm,), _ = ask(tmp_path, ["together"], tiny_model, seed, tp_size=2)
    assert cached(warm) == HIT, "after a restart, from the disk"
    assert same_tokens(cold, warm)


@pytest.mark.nightly("one engine more; tests/unit/test_sglang_device_pool.py has MLA's pool")
def test_prompts_of_an_mla_model_come_back(tiny: Callable[[str], Path], tmp_path: Path, seed: int) -> None:
    stored = {"stored": WHOLE_PAGES * NUM_PROMPTS}
    steps = ["ask", "ask", "flush", "ask", stored, "flush", "together"]
    answers, _ = ask(tmp_path, steps, tiny("deepseek"), seed)
    assert_comes_back(answers)


@pytest.mark.nightly(
    "two engines of two ranks; tests/unit/test_sglang_linker_ranks.py has the linker's ranks"
)
def test_latents_of_two_ranks_are_stored_once(tiny: Callable[[str], Path], tmp_path: Path, seed: int) -> None:
    """Loaded by one rank and sent to the other; also after a restart."""
    arguments = {"model_path": str(tiny("deepseek")), **LINKER, "tp_size": 2}
    once = SIZES | {"DYN_KVBM_NCCL_MLA_MODE": "true"}
    steps = ["ask", "ask", "flush", "ask", {"stored": WHOLE_PAGES * 3}, "flush", "together"]
    found = run_engine(tmp_path, steps, prompts=prompts_of(seed), environment=once, **arguments)
    assert_comes_back(found["answers"])
    cold = found["answers"][0]
    assert "KV is stored once for ranks [0, 1]" in found["log"]
    assert len(list(find_files(tmp_path / "disk", lambda error: None))) == 1
    found = run_engine(tmp_path, ["together"], prompts=prompts_of(seed), environment=once, **arguments)
    (warm,) = found["answers"]
    assert cached(warm) == HIT and same_tokens(cold, warm), "after a restart, from the disk"


def test_prompts_come_back_after_a_restart_and_a_damaged_page_is_never_used(
    tiny_model: Path, tmp_path: Path, seed: int
) -> None:
    cold, own = stored_by_an_engine(tmp_path, tiny_model, seed)
    (path,) = find_files(tmp_path / "disk", lambda error: None)
    header = identify(path).header
    assert header is not None
    with path.open("r+b") as file:
        file.seek(slot_offset_bytes(5, header.payload_bytes) + 4096 + seed % header.payload_bytes)
        byte = file.read(1)[0]
        file.seek(-1, 1)
        file.write(bytes([byte ^ 1]))
    (first, second, third), _ = ask(tmp_path, ["ask", "ask", "flush", "ask"], tiny_model, seed)
    errors = [answer for answer in first if "error" in answer]
    assert len(errors) == 1, "SGLang gives up a request whose load fails, once"
    # What was given up has been computed, from wherever its hit ended.
    assert near_answers(cold, second) and near_answers(cold, third)
    whole = [number for number, answer in enumerate(first) if "error" not in answer]
    for answers, source in (
        (first, "after a restart, from the disk"),
        (third, "from host memory or the disk"),
    ):
        undamaged = [answers[number] for number in whole]
        assert cached(undamaged) == HIT[1:], source
        assert same_answers([own[number] for number in whole], undamaged), source


@pytest.mark.nightly("an engine of two stages more; test_pools.py has what is said and done")
def test_pipeline_parallelism_is_refused(tiny_model: Path, tmp_path: Path, seed: int) -> None:
    (cold, again), log = ask(tmp_path, ["ask", "flush", "ask"], tiny_model, seed, pp_size=2)
    assert cached(again) == NOTHING and near_answers(cold, again)
    assert "pipeline parallelism (--pp-size) is not supported by the linker" in log
