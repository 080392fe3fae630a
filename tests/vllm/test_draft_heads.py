"""Draft heads (EAGLE, MTP), whose KV at a position depends on the token behind it too: what audits compare,
and that the fake model sees what came of a rejected draft.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.vllm.fake_model import FakeRank, RunnerRequest
from tests.vllm.kvbm_engine import KvbmEngine

AUDITED = {"audit_rate": 1.0}
HEAD: dict[str, Any] = {"draft_tokens": 2, "has_draft_layer": True, "kv_numbers": "float32"}
KINDS: dict[str, dict[str, Any]] = {
    "one group": {"windows": (None, None)},
    "a group of its own": {"windows": (None, 8)},
    "blocks outermost": {"windows": (None, None, None), "layout": "BLHNC"},
    "two ranks": {"windows": (None, None), "ranks": 2},
    "states": {"windows": ("state", None, None), "num_blocks": 160, "retain_tokens": None},
}
every_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())
PROMPT = list(range(50))


def other_end(engine: KvbmEngine) -> list[int]:
    """PROMPT up to where a hit ends, and then other tokens. vLLM leaves the last state one block earlier."""
    shared = 44 if engine.spec.has_states else 48
    return [*PROMPT[:shared], 400, 401, 402]


def counted(engine: KvbmEngine) -> dict[str, float]:
    """Blocks that were audited."""
    engine.settle()
    return {
        result: engine.metric(f'kvbm_audited_blocks_total{{result="{result}"}}')
        for result in ("equal", "wrong", "not_compared")
    }


@every_kind
def test_another_next_token_is_no_wrong_block(kind: dict[str, Any], tmp_path: Path) -> None:
    with KvbmEngine(tmp_path, extra=AUDITED, **HEAD, **kind) as engine:
        engine.ask("a", PROMPT)
        engine.forget_device()
        engine.ask("b", other_end(engine))
        found = counted(engine)
        assert found["equal"] > 0 and not found["wrong"] and not found["not_compared"]
        engine.forget_device()
        engine.leader._sampler._rate = 0.0
        engine.ask("c", other_end(engine))
        assert engine.external_tokens("c") > 0, "it was forgotten"
        engine.assert_clean()


@every_kind
def test_a_wrong_block_of_the_model_is_found(kind: dict[str, Any], tmp_path: Path) -> None:
    """What the model computes changes, and nobody can see it."""
    with KvbmEngine(tmp_path, extra=AUDITED, **HEAD, **kind) as engine:
        engine.ask("a", PROMPT)
        engine.forget_device()
        for rank in engine.ranks:
            rank.change_weights("others", shows=False)
        engine.ask("b", other_end(engine))
        assert counted(engine)["wrong"] > 0
        assert not engine.leader.chain.host.resident_blocks


def test_kv_of_a_rejected_draft_at_the_end_of_a_block_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control of all tests with a draft head: KV there may be that of another request's next token, and
    not of a token that no request had.
    """
    run = FakeRank._run_draft_layer

    def run_and_spoil(self: FakeRank, name: str, runner: RunnerRequest, step: Any) -> None:
        run(self, name, runner, step)
        layer, size = self._spec.layer_names[-1], self._spec.block_size_tokens
        group = next(i for i, group in enumerate(self._groups) if layer in group.layer_names)
        for block in runner.block_ids[group][step.start // size : runner.num_computed_tokens // size]:
            self._bytes[layer][block, :, size - 1] ^= 0x55

    with KvbmEngine(tmp_path, **HEAD, **KINDS["one group"]) as engine:
        monkeypatch.setattr(FakeRank, "_run_draft_layer", run_and_spoil)
        engine.ask("a", PROMPT)
        monkeypatch.undo()
        engine.forget_device()
        with pytest.raises(AssertionError, match="wrong KV at"):
            engine.ask("b", PROMPT)
