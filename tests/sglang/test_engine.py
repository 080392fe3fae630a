"""Real SGLang with kvbm: prompts come back from the disk after a flush, and after a restart, and from what
engines share. Answers equal those of the engine's own cache to the last bit.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvbm_core.storage.disk.inspect import find_files
from tests.engines import REPOSITORY
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
    same_tokens,
    served_metrics,
)
from tests.engines.shared_stores import directory
from tests.engines.worker import Worker

pytestmark = pytest.mark.timeout(900)  # engines start for half a minute each

PLACES = [
    ("layer_first", "kernel"),
    ("page_head", "kernel"),
    ("layer_first", "direct"),
    ("page_first_direct", "direct"),
]


def assert_comes_back(
    folder: Path, model: Path, seed: int, files: int = 1, **engine: Any
) -> tuple[list[Any], str]:
    """One engine asks, forgets and asks again, then a second one asks. The answers of a cold one, and its
    log.

    ``files``: of pages, one for each rank that writes.
    """
    prompts = prompts_of(seed)
    arguments = {"model_path": str(model), **HICACHE, **engine}
    stored = {"stored": files * WHOLE_PAGES * len(prompts)}
    first = run_engine(folder, ["ask", stored, "ask", "flush", "ask"], prompts=prompts, **arguments)
    cold, own, again = first["answers"]
    assert [cached(cold), cached(own)] == [NOTHING, HIT]
    assert len({tuple(answer["tokens"]) for answer in cold}) == 3  # an answer says whose prompt it is
    assert cached(again) == HIT, again[0]["from"]
    assert same_answers(own, again) and near_answers(cold, again)
    (warm,) = run_engine(folder, ["ask"], prompts=prompts, **arguments)["answers"]
    assert cached(warm) == HIT, warm[0]["from"]
    assert same_answers(own, warm)
    return cold, first["log"]


def test_prompts_come_back(tiny_model: Path, tmp_path: Path, seed: int) -> None:
    """To the engine that has computed them from its disk, to another one from the first one's disk, and from
    a directory when the disk has been cleared. Set up by the file that is there to be copied.
    """
    prompts, pages = prompts_of(seed), WHOLE_PAGES * NUM_PROMPTS
    engine: dict[str, Any] = {"prompts": prompts, "model_path": str(tiny_model), **HICACHE}
    engine |= {"hicache_mem_layout": "page_first", "hicache_io_backend": "kernel"}
    config = REPOSITORY / "deploy" / "launch" / "sglang_hicache.yaml"
    engine["hicache_storage_backend_extra_config"] = f"@{config}"
    with directory(tmp_path) as share:
        steps = ["ask", {"stored": pages}, {"shared": pages}, "ask", "flush", "ask"]
        first = run_engine(tmp_path, steps, environment={**share, **served_metrics()}, **engine)
        steps = ["ask", "clear", "flush", "ask"]
        second = run_engine(tmp_path, steps, environment={**share, **served_metrics()}, **engine)
    (cold, own, flushed), (warm, shared) = first["answers"], second["answers"]
    assert [cached(cold), cached(own)] == [NOTHING, HIT]
    assert len({tuple(answer["tokens"]) for answer in cold}) == 3  # an answer says whose prompt it is
    assert near_answers(cold, own)
    for answers in (flushed, warm, shared):
        assert cached(answers) == HIT, answers[0]["from"]
        assert same_answers(own, answers)
    metrics = second["metrics"]
    assert all(metrics[f"kvbm_onboard_blocks_{way}"] >= pages for way in ("d2d", "o2d")), metrics
    assert metrics["kvbm_object_read_failures"] == 0 and metrics["kvbm_guarded_errors_total"] == 0


@pytest.mark.nightly("two engines more of each kind; test_pools.py has their layouts")
@pytest.mark.parametrize(("layout", "io"), PLACES)
def test_prompts_come_back_in_other_layouts(
    layout: str, io: str, tiny_model: Path, tmp_path: Path, seed: int
) -> None:
    place = {"hicache_mem_layout": layout, "hicache_io_backend": io}
    assert_comes_back(tmp_path, tiny_model, seed, **place)


@pytest.mark.nightly("two engines of two ranks; test_pools.py: ranks find their own pages alone")
def test_prompts_come_back_to_two_ranks(tiny_model: Path, tmp_path: Path, seed: int) -> None:
    assert_comes_back(tmp_path, tiny_model, seed, files=2, tp_size=2)


@pytest.mark.nightly("two engines more of two stages; test_pools.py: a stage finds its own pages alone")
def test_prompts_come_back_to_two_stages(tiny_model: Path, tmp_path: Path, seed: int) -> None:
    """SGLang lets its first stage count the hits of all: one without its pages must make no wrong answer."""
    cold, log = assert_comes_back(tmp_path, tiny_model, seed, files=2, pp_size=2)
    (line,) = [line for line in log.splitlines() if "kvbm: pool kv" in line and "PP1" in line]
    (path,) = find_files(Path(line.split(" in ")[-1]), lambda error: None)
    path.unlink()
    arguments = {"model_path": str(tiny_model), **HICACHE, "pp_size": 2}
    (after,) = run_engine(tmp_path, ["ask"], prompts=prompts_of(seed), **arguments)["answers"]
    assert near_answers(cold, after)


@pytest.mark.nightly("an engine more of each; test_pools.py has latents, and ranks that read one writer's")
@pytest.mark.parametrize("tp_size", [1, 2])
def test_prompts_of_an_mla_model_come_back(
    tp_size: int, tiny: Callable[[str], Path], tmp_path: Path, seed: int
) -> None:
    assert_comes_back(tmp_path, tiny("deepseek"), seed, tp_size=tp_size)


@pytest.mark.nightly(
    "two engines more of each; test_pools.py, tests/unit/test_sglang_weights.py have flushes"
)
@pytest.mark.parametrize("way", [HICACHE, LINKER], ids=["hicache", "linker"])
def test_after_a_restart_no_answer_is_of_weights_that_somebody_wrote(
    way: dict[str, Any], tiny_model: Path, tmp_path: Path, seed: int
) -> None:
    environment = {"KVBM_TEST_WRITE": str(tmp_path / "write"), "DYN_KVBM_CPU_CACHE_GB": "0.1"}
    environment |= {"KVBM_START_WAIT_S": "60"}
    arguments = {
        "prompts": prompts_of(seed),
        "environment": environment,
        "model_path": str(tiny_model),
        **way,
    }
    early, late, on_disk = {"ask": [0]}, {"ask": [1]}, {"stored": WHOLE_PAGES}
    # The linker writes what has come back from host memory once, HiCache what SGLang backs up.
    begins = [early, on_disk, "flush", early] if way is HICACHE else [early, "flush", early, on_disk]
    steps = [*begins, "write", early, late, "flush", late]
    cold, again, *changed = run_engine(tmp_path, steps, **arguments)["answers"]
    assert cached(cold) == [0] and cached(again) == HIT[:1] and near_answers(cold, again)
    assert [cached(answers) for answers in changed] == [[0]] * 3
    assert not same_tokens(cold, changed[0]) and same_tokens(changed[1], changed[2])
    (warm,) = run_engine(tmp_path, ["ask"], **arguments)["answers"]
    assert cached(warm) == [HIT[0], 0, 0] and near_answers(cold, warm[:1])
    assert not same_tokens(warm[1:2], changed[1])


@pytest.mark.nightly("three engines more; test_hybrid.py has SGLang's own pools, tree and controller")
def test_a_hybrid_models_next_turn_comes_back_after_a_restart(
    sglang: Worker, tmp_path: Path, seed: int
) -> None:
    """Its states are where a request ended; what comes after that is computed from there."""
    model = tmp_path / "model"
    sglang.run("tests.sglang.hybrid:build_model", folder=str(model), seed=seed)
    engine: dict[str, Any] = {"model_path": str(model), **HICACHE, "page_size": 1, "hicache_ratio": 2.0}
    engine |= {
        "max_mamba_cache_size": 32,
        "max_running_requests": 4,
        "mamba_radix_cache_strategy": "no_buffer",
    }
    engine |= {"json_model_override_args": '{"full_attention_interval": 2}'}
    first = prompts_of(seed, 2, 400)
    known = [len(first[0]) + 7] * 2  # all but the answer's last token
    stored = {"stored": sum(known)}
    (answers,) = run_engine(tmp_path / "a", ["ask", stored], prompts=first, **engine)["answers"]
    second = [[*asked, *answer["tokens"], *asked[:50]] for asked, answer in zip(first, answers, strict=True)]
    (warm,) = run_engine(tmp_path / "a", ["ask"], prompts=second, **engine)["answers"]
    (cold,) = run_engine(tmp_path / "b", ["ask"], prompts=second, **engine)["answers"]
    assert cached(warm) == known and cached(cold) == [0, 0], warm[0]["from"]
    assert same_tokens(cold, warm)
