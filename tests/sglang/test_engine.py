"""Real SGLang with kvbm: prompts come back from the disk after a flush, and after a restart, to the last bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.sglang.engine import HICACHE, PAGE_TOKENS, WHOLE_PAGES, cached, prompts_of, run_engine, same_answers
from kvbm_core.storage.disk.inspect import find_files

HIT = [WHOLE_PAGES * PAGE_TOKENS] * 3
PLACES = [
    ("page_first", "kernel"),
    ("layer_first", "kernel"),
    ("page_head", "kernel"),
    ("layer_first", "direct"),
    ("page_first_direct", "direct"),
]


def assert_comes_back(folder: Path, model: Path, seed: int, files: int = 1, **engine: Any) -> None:
    """One engine asks, forgets and asks again, then a second one. ``files``: one for each rank that writes."""
    prompts = prompts_of(seed)
    arguments = {"model_path": str(model), **HICACHE, **engine}
    stored = {"stored": files * WHOLE_PAGES * len(prompts)}
    first = run_engine(folder, ["ask", stored, "flush", "ask"], prompts=prompts, **arguments)
    cold, again = first["answers"]
    assert cached(cold) == [0, 0, 0]
    assert len({tuple(answer["tokens"]) for answer in cold}) == 3  # an answer says whose prompt it is
    assert cached(again) == HIT, again[0]["from"]
    assert same_answers(cold, again)
    (warm,) = run_engine(folder, ["ask"], prompts=prompts, **arguments)["answers"]
    assert cached(warm) == HIT, warm[0]["from"]
    assert same_answers(cold, warm)


@pytest.mark.parametrize(("layout", "io"), PLACES)
def test_prompts_come_back(layout: str, io: str, tiny_model: Path, tmp_path: Path, seed: int) -> None:
    assert_comes_back(tmp_path, tiny_model, seed, hicache_mem_layout=layout, hicache_io_backend=io)


@pytest.mark.parametrize("parallel", ["tp_size", "pp_size"])
def test_prompts_come_back_to_two_ranks(parallel: str, tiny_model: Path, tmp_path: Path, seed: int) -> None:
    assert_comes_back(tmp_path, tiny_model, seed, files=2, **{parallel: 2})


def test_a_stage_without_its_pages_makes_no_wrong_answer(tiny_model: Path, tmp_path: Path, seed: int) -> None:
    """SGLang lets its first stage count the hits of all."""
    prompts, arguments = prompts_of(seed), {"model_path": str(tiny_model), **HICACHE, "pp_size": 2}
    stored = {"stored": 2 * WHOLE_PAGES * len(prompts)}
    (cold,) = run_engine(tmp_path, ["ask", stored], prompts=prompts, **arguments)["answers"]
    for number, path in enumerate(sorted(find_files(tmp_path / "disk", lambda error: None))):
        path.rename(path.with_suffix(f".{number}"))
    for missing in (0, 1):
        there = next((tmp_path / "disk").rglob(f"*.{1 - missing}"))
        there.rename(there.with_suffix(".blocks"))
        (after,) = run_engine(tmp_path, ["ask"], prompts=prompts, **arguments)["answers"]
        assert same_answers(cold, after), f"file {missing} was not there"
        for path in find_files(tmp_path / "disk", lambda error: None):
            path.unlink()


@pytest.mark.parametrize("tp_size", [1, 2])
def test_prompts_of_an_mla_model_come_back(
    tp_size: int, tiny: Callable[[str], Path], tmp_path: Path, seed: int
) -> None:
    assert_comes_back(tmp_path, tiny("deepseek"), seed, tp_size=tp_size)
