"""Which models' blocks are kept by heads, and the line that a user gets for all others."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVQuantMode,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

from kvbm_core.config import KvbmSettings
from kvbm_core.layout.heads import HeadShards
from kvbm_vllm.heads import heads_of

NUM_BLOCKS, TOKENS, HEAD_SIZE = 6, 16, 8
FULL = FullAttentionSpec(block_size=TOKENS, num_kv_heads=4, head_size=HEAD_SIZE, dtype=torch.bfloat16)
WINDOW = SlidingWindowSpec(
    block_size=TOKENS, num_kv_heads=4, head_size=HEAD_SIZE, dtype=torch.bfloat16, sliding_window=32
)
LATENT = MLAAttentionSpec(block_size=TOKENS, num_kv_heads=1, head_size=HEAD_SIZE, dtype=torch.bfloat16)
MAMBA = MambaSpec(block_size=TOKENS, shapes=((4,),), dtypes=(torch.float32,))
SETTINGS = {"cpu_cache_gb": 1, "remote_url": "file:///nowhere", "remote_cache_gb": 0, "remote_head_shards": 4}


def config_of(*, ranks: int = 2, rank: int = 0, heads: int = 8, stages: int = 1, **more: Any) -> Any:
    """What is read of vLLM's configuration."""
    text = SimpleNamespace(**{"num_key_value_heads": heads, "num_hidden_layers": 2, **more.pop("text", {})})
    return SimpleNamespace(
        parallel_config=SimpleNamespace(tensor_parallel_size=ranks, pipeline_parallel_size=stages, rank=rank),
        model_config=SimpleNamespace(get_total_num_kv_heads=lambda: heads, hf_text_config=text),
        speculative_config=more.pop("speculative_config", None),
    )


def divided(config: Any, *specs: Any, shape: tuple[int, ...] | None = None, **settings: Any) -> Any:
    """With one group for each of ``specs``; all tensors are as vLLM makes them, or of ``shape``."""
    groups = [KVCacheGroupSpec([f"layer {n}"], spec) for n, spec in enumerate(specs)]
    caches = {
        f"layer {n}": torch.zeros(
            shape or (NUM_BLOCKS, getattr(spec, "num_kv_heads", 1), TOKENS, 2 * HEAD_SIZE),
            dtype=getattr(spec, "dtype", torch.float32),
        )
        for n, spec in enumerate(specs)
    }
    cache_config = KVCacheConfig(NUM_BLOCKS, [], groups)
    return heads_of(caches, cache_config, config, KvbmSettings.from_env({**SETTINGS, **settings}))


@pytest.mark.parametrize("spec", [FULL, WINDOW], ids=["full", "window"])
def test_each_rank_has_its_shards(spec: Any) -> None:
    found = [divided(config_of(rank=rank), spec) for rank in range(2)]
    assert [list(heads.own) for heads in found] == [[0, 1], [2, 3]]
    assert found[0].meaning == found[1].meaning and found[0].is_keeper and found[1].is_keeper


def test_ranks_with_the_same_latent_have_one_keeper() -> None:
    found = [divided(config_of(rank=rank), LATENT) for rank in range(2)]
    assert [(list(heads.own), heads.is_keeper) for heads in found] == [([0], True), ([0], False)]


REFUSED: dict[str, tuple[Any, tuple[Any, ...], str]] = {
    "pipeline": (config_of(stages=2), (FULL,), "pipeline parallelism"),
    "speculation": (config_of(speculative_config=object()), (FULL,), "speculative decoding"),
    "Mamba": (config_of(), (FULL, MAMBA), "FullAttentionSpec, MambaSpec"),
    "latent and heads": (config_of(), (FULL, LATENT), "FullAttentionSpec, MLAAttentionSpec"),
    "other heads in some layers": (
        config_of(text={"num_global_key_value_heads": 2}),
        (FULL,),
        "differ in KV heads (num_global_key_value_heads=2)",
    ),
    "heads by layer": (config_of(text={"num_kv_heads": [8, 4]}), (FULL,), "differ in KV heads"),
    "scales by head": (
        config_of(),
        (replace(FULL, kv_quant_mode=KVQuantMode.FP8_PER_TOKEN_HEAD),),
        "quantized as FP8_PER_TOKEN_HEAD",
    ),
    "slots that are no heads": (config_of(), (replace(FULL, num_head_slots=2),), "in a way of its own"),
    "another division": (config_of(), (replace(FULL, max_tp_shards=4),), "into 4 shards, and not into 8"),
    "heads that are not the model's": (config_of(heads=4), (FULL,), "has 4 KV heads here, not 2"),
    "a size that does not divide": (config_of(ranks=3), (FULL,), "3 ranks do not share 8 KV heads evenly"),
    "a configuration of another form": (
        SimpleNamespace(**{**vars(config_of()), "model_config": None}),
        (FULL,),
        "AttributeError",
    ),
}


@pytest.mark.parametrize(("config", "specs", "why"), REFUSED.values(), ids=REFUSED.keys())
def test_what_is_not_known_is_refused_with_one_line(
    config: Any, specs: tuple[Any, ...], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert divided(config, *specs) is None
    (line,) = caplog.messages
    assert line.startswith("kvbm: KVBM_REMOTE_HEAD_SHARDS=4: ") and why in line and "\n" not in line


@pytest.mark.parametrize(
    "shape",
    [
        (NUM_BLOCKS, 2, TOKENS, 4, HEAD_SIZE),
        (NUM_BLOCKS, TOKENS, 4, 2 * HEAD_SIZE),
        (NUM_BLOCKS, 4, TOKENS, HEAD_SIZE),
        (NUM_BLOCKS, 4, 512),
    ],
)
def test_a_tensor_of_another_form_is_refused(
    shape: tuple[int, ...], caplog: pytest.LogCaptureFixture
) -> None:
    assert divided(config_of(), FULL, shape=shape) is None
    assert f"a layer of shape {shape} is not [blocks, heads, tokens, K and V]" in caplog.text


@pytest.mark.parametrize("shards", [0, 4])
def test_float8_is_for_numbers_that_it_makes_smaller(shards: int, caplog: pytest.LogCaptureFixture) -> None:
    made = divided(config_of(), FULL, remote_codec="fp8", remote_head_shards=shards)
    exact = divided(config_of(), FULL, remote_head_shards=4)
    assert made.codec == "fp8" and made.meaning != exact.meaning
    assert made.num_shards == (shards or 2), "as many as ranks"
    assert made.shard_bytes == 8 // made.num_shards * (TOKENS * 2 * HEAD_SIZE + 4 * 4)
    assert not caplog.messages
    for spec in (
        replace(FULL, dtype=torch.uint8, kv_quant_mode=KVQuantMode.FP8_PER_TENSOR),
        replace(FULL, dtype=torch.float8_e4m3fn),
    ):
        caplog.clear()
        assert divided(config_of(), spec, remote_codec="fp8", remote_head_shards=shards) is None
        (line,) = caplog.messages
        settings = "KVBM_REMOTE_CODEC=fp8" + (", KVBM_REMOTE_HEAD_SHARDS=4" if shards else "")
        assert line.startswith(f"kvbm: {settings}: layer 0 is ")
        assert "only bfloat16, float16, float32 can be made smaller; nothing is kept in the shared" in line


def test_other_ranks_say_nothing_and_without_the_setting_nobody_does(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert divided(config_of(stages=2, rank=1), FULL) is None
    assert divided(config_of(), FULL, remote_head_shards=0) is None
    assert not caplog.messages


def test_kernel_blocks_that_make_up_a_block_are_one_block() -> None:
    shape = (2 * NUM_BLOCKS, 4, TOKENS // 2, 2 * HEAD_SIZE)
    heads: HeadShards = divided(config_of(), FULL, shape=shape)
    assert heads.shard_bytes == 2 * TOKENS * 2 * HEAD_SIZE * 2
