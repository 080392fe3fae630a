"""Everything at once, in an order drawn from a seed: the model checks every byte, the end checks for
leaks.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from kvbm_core.errors import Outcome
from kvbm_core.testing import toy_store
from kvbm_core.types import Direction
from tests.vllm.harness import adapter, media
from tests.vllm.kvbm_engine import KvbmEngine

STORE = "toy://soak?latency_ms=1&fails=0.02&loses=0.05&spoils=0.02&is_late=0.01"
SPECS: dict[str, dict[str, Any]] = {
    "plain": {"num_blocks": 40, "host_blocks": 60},
    "async": {"num_blocks": 40, "host_blocks": 60, "async_scheduling": True},
    "two ranks, async": {"num_blocks": 40, "host_blocks": 60, "ranks": 2, "async_scheduling": True},
    "hybrid": {"num_blocks": 80, "host_blocks": 90, "windows": (None, 8)},
    "hybrid, async": {
        "num_blocks": 80,
        "host_blocks": 90,
        "windows": (None, 12, None, 12),
        "async_scheduling": True,
    },
    "window": {"num_blocks": 40, "host_blocks": 60, "windows": (8,), "async_scheduling": True},
    "tiny host": {"num_blocks": 40, "host_blocks": 7, "layout": "BLHNC"},
    "disk": {"num_blocks": 40, "host_blocks": 25, "disk_blocks": 300, "async_scheduling": True},
    "disk, filtered, two ranks": {
        "num_blocks": 40,
        "host_blocks": 25,
        "disk_blocks": 60,
        "ranks": 2,
        "extra": {"disable_disk_offload_filter": False},
    },
    "disk, hybrid": {"num_blocks": 80, "host_blocks": 40, "disk_blocks": 400, "windows": (None, 8)},
    "disk, store, two ranks": {
        "num_blocks": 40,
        "host_blocks": 25,
        "disk_blocks": 30,
        "store": STORE,
        "ranks": 2,
        "extra": {"remote_wait_s": 0.2},
    },
    "store, hybrid": {
        "num_blocks": 80,
        "host_blocks": 40,
        "store": STORE,
        "windows": (None, 8),
        "extra": {"remote_wait_s": 0.2},
    },
    "states": {
        "num_blocks": 120,
        "host_blocks": 150,
        "windows": ("state", "state", "state", None),
        "retain_tokens": None,
    },
    "states, async, disk": {
        "num_blocks": 90,
        "host_blocks": 40,
        "disk_blocks": 400,
        "windows": ("state", None),
        "async_scheduling": True,
        "retain_tokens": 8,
        "extra": {"state_every_tokens": 8},
    },
    "states, drafts": {
        "num_blocks": 100,
        "host_blocks": 90,
        "windows": ("state", None),
        "draft_tokens": 3,
        "retain_tokens": None,
        "extra": {"state_every_tokens": 1},
    },
    "states, drafts, async, two ranks": {
        "num_blocks": 100,
        "host_blocks": 90,
        "windows": ("state", None),
        "draft_tokens": 3,
        "async_scheduling": True,
        "retain_tokens": None,
        "ranks": 2,
    },
    "states, draft head": {
        "num_blocks": 120,
        "host_blocks": 90,
        "windows": ("state", None, None),
        "draft_tokens": 2,
        "has_draft_layer": True,
    },
    "states, checkpoints": {
        "num_blocks": 100,
        "host_blocks": 90,
        "windows": ("state", None),
        "exports_checkpoints": True,
        "retain_tokens": 12,
        "extra": {"state_every_tokens": 1},
    },
    "states, partial hits": {
        "num_blocks": 60,
        "host_blocks": 60,
        "windows": ("state", None),
        "block_size_tokens": 8,
        "match_tokens": 2,
    },
    "drafts, async": {"num_blocks": 40, "host_blocks": 60, "draft_tokens": 3, "async_scheduling": True},
    "draft head, tiny host": {
        "num_blocks": 60,
        "host_blocks": 12,
        "draft_tokens": 2,
        "has_draft_layer": True,
    },
}
STEPS = 300


def draw_prompt(rng: random.Random) -> list[int]:
    """One of a few families, so that prefixes are shared, cut at any place."""
    family = rng.randrange(4) * 1000
    return list(range(family, family + rng.randrange(1, 70)))


def draw_kind(rng: random.Random) -> dict[str, Any]:
    """Mostly plain requests; some with a salt, an adapter or an image."""
    kinds: list[dict[str, Any]] = [
        {},
        {},
        {},
        {"salt": "me"},
        {"lora": adapter("poet", 1)},
        {"images": [media("cat", 0, 1)]},
    ]
    return rng.choice(kinds)


def disturb(engine: KvbmEngine, rng: random.Random, alive: list[str]) -> None:
    """One thing that a client, an operator or bad luck does."""
    executor = rng.choice(engine.executors)
    what = rng.random()
    if what < 0.15 and alive:
        engine.abort(rng.choice(alive))
    elif what < 0.25:
        executor.hold(rng.choice(list(Direction)))
    elif what < 0.45:
        for each in engine.executors:
            for direction in Direction:
                each.release(direction)
    elif what < 0.55:
        executor.fail_next(rng.choice(list(Direction)), rng.choice([Outcome.IO_ERROR, Outcome.TIMED_OUT]))
    elif what < 0.60:
        executor.is_cancellable = not executor.is_cancellable
    elif what < 0.65:
        engine.reset_device()
    elif what < 0.67:
        engine.reset_device(with_connector=True)


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())
def test_soak(spec: dict[str, Any], tmp_path: Path, rng: random.Random) -> None:
    if "store" in spec:
        toy_store.forget_all()
        spec = {**spec, "store": f"{spec['store']}&seed={rng.randrange(1000)}"}
    with KvbmEngine(tmp_path, lora=True, max_model_len=100, max_batched_tokens=48, **spec) as engine:
        answers: dict[tuple[Any, ...], list[int]] = {}
        asked: dict[str, tuple[Any, ...]] = {}
        for turn in range(STEPS):
            alive = [name for name in asked if name in engine.scheduler.requests]
            if len(alive) < 6 and rng.random() < 0.4:
                prompt, kind, length = draw_prompt(rng), draw_kind(rng), rng.randrange(1, 25)
                name = f"r{turn}"
                asked[name] = (tuple(prompt), str(kind), length)
                engine.add(name, prompt, length, **kind)
            if rng.random() < 0.2:
                disturb(engine, rng, alive)
            engine.step()
        for executor in engine.executors:
            for direction in Direction:
                executor.release(direction)
        engine.run()
        for name, question in asked.items():
            output = engine.record.outputs[name]  # of an aborted request, the beginning
            known = answers.setdefault(question, output)
            assert all(mine == theirs for mine, theirs in zip(output, known, strict=False))
            answers[question] = max(known, output, key=len)
        assert engine.metric("kvbm_offload_blocks_d2h") > 0
        engine.assert_clean()
