"""Models that keep compressed tokens, and windows of tokens that are not compressed yet (DeepSeek V4): groups
with blocks of different sizes, on vLLM's own scheduler.
"""

from __future__ import annotations

from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from vllm.v1.kv_cache_interface import KVCacheSpec, MLAAttentionSpec, SlidingWindowMLASpec

from tests.vllm import engine_config, harness
from tests.vllm.fake_model import FakeRank, Sequence, Step
from tests.vllm.kvbm_engine import KvbmEngine

RATIO, BLOCK = 4, 16
WINDOW, OPEN_TOKENS = 12, 8
SHAPE: dict[str, Any] = {"num_kv_heads": 1, "dtype": torch.float32}
LAYERS: tuple[tuple[KVCacheSpec, int | None], ...] = (
    (MLAAttentionSpec(block_size=BLOCK, head_size=16, tokens_per_state=RATIO, **SHAPE), None),
    (SlidingWindowMLASpec(block_size=8, head_size=8, sliding_window=WINDOW, **SHAPE), WINDOW),
    (SlidingWindowMLASpec(block_size=4, head_size=16, sliding_window=OPEN_TOKENS, **SHAPE), OPEN_TOKENS),
)
"""Compressed tokens; the last tokens; those that the next compressed one is made of. A page has 256 bytes."""
PROMPT = list(range(70))


class CompressingRank(FakeRank):
    """Keeps of each group of ``tokens_per_state`` tokens what its last token has."""

    def _rows(self, layer_name: str, positions: Any, table: list[int]) -> tuple[Any, Any, Any]:
        (spec,) = [group.kv_cache_spec for group in self._groups if layer_name in group.layer_names]
        kept = positions[(positions + 1) % spec.tokens_per_state == 0]
        return kept, np.array(table)[kept // spec.block_size], kept % spec.block_size // spec.tokens_per_state

    def _check(
        self, name: str, layer_name: str, table: list[int], sequence: Sequence, start: int, *_: Any, **__: Any
    ) -> None:
        window = self._window(layer_name)
        first = 0 if window is None else max(0, start - window + 1)
        kept, blocks, rows = self._rows(layer_name, np.arange(first, start), table)
        assert (blocks != 0).all(), f"{name}: {layer_name}: null block inside tokens {first}..{start}"
        if kept.size:
            right = self._kv(sequence.seeds(start)[kept], layer_name)
            is_wrong = (self._bytes[layer_name][blocks, :, rows, :] != right).any(axis=(1, 2))
            assert not is_wrong.any(), f"{name}: {layer_name}: wrong at tokens {kept[is_wrong]} of {start}"

    def _write(self, layer_name: str, table: list[int], seeds: Any, step: Step) -> None:
        kept, blocks, rows = self._rows(layer_name, np.arange(step.start, step.stop), table)
        there = blocks != 0
        fresh = self._kv(seeds[kept[there]], layer_name)
        self._bytes[layer_name][blocks[there], :, rows[there], :] = fresh


@pytest.fixture(autouse=True)
def layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines are made of these layers, in turn."""
    specs = cycle(spec for spec, _ in LAYERS)
    monkeypatch.setattr(engine_config, "_layer_spec", lambda spec, window: next(specs))
    monkeypatch.setattr(harness, "FakeRank", CompressingRank)


def engine_of(folder: Path, **more: Any) -> KvbmEngine:
    windows = tuple(window for _, window in LAYERS) * 2
    return KvbmEngine(folder, is_mla=True, windows=windows, block_size_tokens=BLOCK, num_blocks=256, **more)


@pytest.mark.parametrize(
    "more", [{}, {"ranks": 2}, {"max_batched_tokens": 24}], ids=["one rank", "two ranks", "chunks"]
)
def test_prompts_and_second_turns_come_back(more: dict[str, Any], tmp_path: Path) -> None:
    with engine_of(tmp_path, **more) as engine:
        assert sorted({group.block_size_tokens for group in engine.leader.groups}) == [4, 8, 16]
        first = engine.ask("a", PROMPT, 20)
        engine.forget_device()
        before = engine.record.computed_tokens
        assert engine.ask("b", PROMPT, 20) == first
        assert engine.external_tokens("b") == 64
        assert engine.record.computed_tokens - before == 70 - 64 + 19  # no load has failed
        engine.forget_device()
        before = engine.record.computed_tokens
        engine.ask("c", PROMPT + first + [7] * 9)
        assert engine.external_tokens("c") == 80
        assert engine.record.computed_tokens - before == 99 - 80
        engine.assert_clean()


def test_they_come_back_from_the_disk(tmp_path: Path) -> None:
    with engine_of(tmp_path, disk_blocks=256) as engine:
        first = engine.ask("a", PROMPT, 4)
        engine.settle()
        engine.assert_clean()
    with engine_of(tmp_path, disk_blocks=256) as engine:
        assert engine.ask("b", PROMPT, 4) == first
        assert engine.external_tokens("b") == 64
        assert engine.record.computed_tokens == 70 - 64 + 3
        engine.assert_clean()


def test_latents_are_stored_once_for_two_ranks(tmp_path: Path) -> None:
    with engine_of(tmp_path, ranks=2, extra={"nccl_mla_mode": True}) as engine:
        first = engine.ask("a", PROMPT, 4)
        engine.forget_device()
        assert engine.ask("b", PROMPT, 4) == first and engine.external_tokens("b") == 64
        slabs = [rank.connector.worker_side.worker._memory is not None for rank in engine.ranks]
        assert slabs == [True, False]
        engine.assert_clean()
