"""The harness over vLLM's scheduler: right runs pass, and a connector that lies is caught."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.vllm.engine_config import EngineSpec
from tests.vllm.harness import Engine, media

NULL = {"kv_connector": "NullConnector", "kv_connector_module_path": "tests.vllm.null_connector"}
LYING = {"kv_connector": "LyingConnector", "kv_connector_module_path": "tests.vllm.null_connector"}


@pytest.mark.parametrize(
    "spec",
    [
        {},
        {"async_scheduling": True},
        {"max_batched_tokens": 16},
        {"ranks": 2},
        {"windows": (None, 8, None, 8)},
        {"layout": "BLHNC"},
        {"windows": ("state", "state", "state", None)},
        {"windows": ("state", None), "async_scheduling": True},
        {"windows": ("state", None), "draft_tokens": 3},
        {"windows": ("state", None, None), "num_blocks": 80, "draft_tokens": 2, "has_draft_layer": True},
        {"windows": ("state", None), "exports_checkpoints": True, "match_tokens": 2},
        {"draft_tokens": 3, "async_scheduling": True},
    ],
    ids=str,
)
def test_answers_depend_on_the_prefix_only(spec: dict[str, Any], tmp_path: Path) -> None:
    with Engine(EngineSpec(connector=NULL, **spec), tmp_path) as engine:
        first = engine.ask("a", range(50), 8)
        assert engine.ask("b", range(50), 8) == first  # from the device's prefix cache
        engine.add("c", [*range(50), *first], 4)
        engine.add("d", range(1, 50), 8)
        engine.add("e", range(50), 8, images=[media("cat", 4, 6)])
        engine.run()
        outputs = engine.record.outputs
        assert outputs["d"] != first and outputs["e"] != first
        assert len(outputs["c"]) == 4
        engine.assert_idle()


def test_preempted_requests_give_the_same_answer(tmp_path: Path) -> None:
    (tmp_path / "wide").mkdir()
    (tmp_path / "narrow").mkdir()
    prompts = {name: range(start, start + 40) for name, start in (("a", 0), ("b", 100), ("c", 200))}
    with Engine(EngineSpec(connector=NULL), tmp_path / "wide") as engine:
        expected = {name: engine.ask(name, prompt, 30) for name, prompt in prompts.items()}
    with Engine(EngineSpec(connector=NULL, num_blocks=40), tmp_path / "narrow") as engine:
        for name, prompt in prompts.items():
            engine.add(name, prompt, 30)
        engine.run()
        assert engine.record.preemptions > 0
        assert engine.record.outputs == expected
        engine.assert_idle()


def test_wrong_bytes_are_caught(tmp_path: Path) -> None:
    with (
        Engine(EngineSpec(connector=LYING), tmp_path) as engine,
        pytest.raises(AssertionError, match="never written"),
    ):
        engine.ask("a", range(20))
