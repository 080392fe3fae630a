"""Kinds of KV caches other than plain attention: served with the right bytes, or refused in one line that
names the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1 import kv_cache_interface
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    KVQuantMode,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    UniformTypeKVCacheSpecs,
)

from kvbm_core.errors import UnsupportedError
from kvbm_vllm import kinds
from kvbm_vllm.connector import DynamoConnector
from kvbm_vllm.layout import Audited, device_memory
from tests.vllm import engine_config
from tests.vllm.engine_config import EngineSpec, make_kv_cache_configs, make_vllm_config
from tests.vllm.kvbm_engine import KvbmEngine

PROMPT = list(range(50))
SHAPE: dict[str, Any] = {"block_size": 4, "num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}
MORE: dict[str, dict[str, Any]] = {
    "ChunkedLocalAttentionSpec": {"attention_chunk_size": 8},
    "RSWASpec": {"rswa_window": 8},
    "SinkFullAttentionSpec": {"sink_len": 4},
}
OTHER: dict[str, dict[str, Any]] = {
    "HiSparseHotSpec": {"block_size": 4, "page_size": 256, "blocks_per_request": 2},
    "HiSparseResidentSpec": {"block_size": 4, "page_size": 256},
}
HERE = sorted(name for name in kinds.REFUSED if hasattr(kv_cache_interface, name))


def of_kind(name: str) -> KVCacheSpec:
    """A spec of vLLM's class ``name``."""
    spec: KVCacheSpec = getattr(kv_cache_interface, name)(**(OTHER.get(name) or SHAPE | MORE.get(name, {})))
    return spec


def refused(folder: Path, change: Callable[[KVCacheConfig], None]) -> str:
    """The line with which an engine is refused after ``change``."""
    spec = EngineSpec(extra_config={"cpu_cache_override_num_blocks": 8, "start_wait_s": 0})
    vllm_config = make_vllm_config(spec, folder)
    _, kv_cache_config = make_kv_cache_configs(spec, vllm_config)
    change(kv_cache_config)
    with pytest.raises(UnsupportedError) as error:
        DynamoConnector(vllm_config, KVConnectorRole.SCHEDULER, kv_cache_config)
    line = str(error.value)
    assert "\n" not in line and line.startswith(f"kvbm: {folder / 'model'} (Qwen3ForCausalLM): ")
    return line


def test_kinds_that_are_not_served_here_are_all_tried() -> None:
    assert len(HERE) > 7 and not (MORE | OTHER).keys() - set(HERE)


@pytest.mark.parametrize("name", HERE)
def test_a_kind_that_is_not_served_is_refused_by_name(name: str, tmp_path: Path) -> None:
    group = KVCacheGroupSpec(["other"], of_kind(name))
    line = refused(tmp_path, lambda config: config.kv_cache_groups.append(group))
    assert f"group 1 is a {name}, {kinds.REFUSED[name].why}: {kinds.REFUSED[name].remedy}" in line


def test_a_kind_that_nobody_knows_is_refused(tmp_path: Path) -> None:
    class OfAPlugin(FullAttentionSpec):
        """Derived from a kind that is served: it may need more."""

    group = KVCacheGroupSpec(["other"], OfAPlugin(**SHAPE))
    line = refused(tmp_path, lambda config: config.kv_cache_groups.append(group))
    assert "OfAPlugin, which kvbm does not know" in line and "MLAAttentionSpec" in line


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("non_causal", True, "tokens see later ones"),
        ("kv_quant_mode", KVQuantMode.INT8_PER_TOKEN_HEAD, "INT8_PER_TOKEN_HEAD"),
        ("kv_quant_mode", KVQuantMode.FP8_PER_TOKEN_HEAD, "use another --kv-cache-dtype"),
    ],
)
def test_full_attention_that_cannot_be_restored_is_refused(
    field: str, value: Any, words: str, tmp_path: Path
) -> None:
    def change(config: KVCacheConfig) -> None:
        group = config.kv_cache_groups[0]
        group.kv_cache_spec = replace(group.kv_cache_spec, **{field: value})

    line = refused(tmp_path, change)
    assert "group 0 is a FullAttentionSpec" in line and words in line


def test_windows_that_are_computed_anew_are_refused(tmp_path: Path) -> None:
    spec = SlidingWindowMLASpec(sliding_window=8, bounded_replay=True, **SHAPE)
    line = refused(tmp_path, lambda config: config.kv_cache_groups.append(KVCacheGroupSpec(["other"], spec)))
    assert "group 1 is a SlidingWindowMLASpec, whose last tokens vLLM computes anew" in line


def test_one_such_layer_among_others_is_enough(tmp_path: Path) -> None:
    def change(config: KVCacheConfig) -> None:
        plain = config.kv_cache_groups[0].kv_cache_spec
        layers = {"a": plain, "b": replace(plain, non_causal=True)}
        config.kv_cache_groups[0].kv_cache_spec = UniformTypeKVCacheSpecs(
            block_size=plain.block_size, kv_cache_specs=layers
        )

    assert "tokens see later ones" in refused(tmp_path, change)


@pytest.mark.parametrize("field", ["enable_kv_transfer", "host_resident"])
def test_groups_that_vllm_keeps_to_itself_are_refused(field: str, tmp_path: Path) -> None:
    def change(config: KVCacheConfig) -> None:
        setattr(config.kv_cache_groups[0], field, field == "host_resident")

    line = refused(tmp_path, change)
    assert "group 0 is not meant for transfer" in line and "turn it off" in line


@pytest.mark.parametrize("role", KVConnectorRole)
def test_a_model_without_a_cache_starts_and_is_told_once(
    role: KVConnectorRole, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """An encoder in a fleet whose engines all have the connector."""
    spec = EngineSpec(extra_config={"cpu_cache_override_num_blocks": 8})
    vllm_config = make_vllm_config(spec, tmp_path)
    _, kv_cache_config = make_kv_cache_configs(spec, vllm_config)
    kv_cache_config.kv_cache_groups.clear()
    connector: Any = KVConnectorFactory.create_connector(vllm_config, role, kv_cache_config)
    said = [record.getMessage() for record in caplog.records if record.name == "kvbm"]
    is_scheduler = role == KVConnectorRole.SCHEDULER
    line = f"kvbm: {tmp_path / 'model'} (Qwen3ForCausalLM) keeps no KV cache: nothing is cached"
    assert said == [line] * is_scheduler
    if is_scheduler:
        assert connector.get_num_new_matched_tokens(None, 0) == (0, False)
        assert connector.request_finished_all_groups(None, ()) == (False, None)
        assert list(connector.take_events()) == [] and not connector.reset_cache()
    connector.shutdown()


# ---------------------------------------------------------------- served


def latents(head_size: int, dtype: torch.dtype = torch.float32) -> MLAAttentionSpec:
    """One layer's: of MLA, or the keys of an indexer."""
    return MLAAttentionSpec(block_size=4, num_kv_heads=1, head_size=head_size, dtype=dtype)


LAYERS: dict[str, tuple[KVCacheSpec, ...]] = {
    "an indexer's keys beside latents": (latents(16), latents(32, torch.uint8)),
    "latents of different ranks": (latents(16), latents(8), latents(24)),
    "heads of different sizes": (
        FullAttentionSpec(block_size=4, num_kv_heads=1, head_size=16, dtype=torch.float32),
        FullAttentionSpec(block_size=4, num_kv_heads=1, head_size=8, head_size_v=4, dtype=torch.float32),
    ),
}


@pytest.fixture(params=LAYERS)
def layers(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Engines are made of layers of these kinds, in turn; how many there are."""
    specs = LAYERS[request.param]
    each = cycle(specs)
    monkeypatch.setattr(engine_config, "_layer_spec", lambda spec, window: next(each))
    yield len(specs)


def test_layers_that_keep_different_things_come_back(layers: int, tmp_path: Path) -> None:
    """The model checks each byte of each layer that it reads."""
    with KvbmEngine(tmp_path, is_mla=True, windows=(None,) * (2 * layers)) as engine:
        sizes = {tensor.shape[3] * tensor.element_size() for tensor in engine.ranks[0].kv_caches.values()}
        assert len(sizes) == layers or layers == 2
        assert len(engine.leader.groups) == 1
        first = engine.ask("a", PROMPT, 8)
        engine.forget_device()
        assert engine.ask("b", PROMPT, 8) == first and engine.external_tokens("b") == 48
        engine.assert_clean()


def test_layers_that_share_a_cache_are_stored_once() -> None:
    """vLLM gives the layer that shares (Gemma3n, YOCO) the tensor of the layer whose KV it reads."""
    names = ["layers.0.attn", "layers.1.attn"]
    spec = FullAttentionSpec(**SHAPE)
    caches = {
        name: torch.arange(512, dtype=torch.float32).view(8, 1, 4, 16) + i for i, name in enumerate(names)
    }
    alone, name_alone = device_memory(
        caches, KVCacheConfig(8, [], [KVCacheGroupSpec(names, spec)]), Audited("auto"), 0, 1
    )
    shared = caches | {"layers.2.attn": caches[names[1]]}
    both, name_both = device_memory(
        shared, KVCacheConfig(8, [], [KVCacheGroupSpec(list(shared), spec)]), Audited("auto"), 0, 1
    )
    assert both.views == alone.views and name_both == name_alone
    assert both.views[0].block_bytes == 2 * 4 * 16 * 4


@pytest.mark.parametrize("number", range(3))
def test_each_layer_shapes_the_name_of_the_layout(number: int) -> None:
    """One of another dtype, size, number of heads or order of memory."""
    num_blocks, spec = 8, FullAttentionSpec(**SHAPE)

    def name_of(layer: torch.Tensor) -> str:
        caches = {
            f"layers.{i}.attn": torch.zeros(num_blocks, 2, 4, 16, dtype=torch.float16) for i in range(3)
        }
        caches[f"layers.{number}.attn"] = layer
        config = KVCacheConfig(num_blocks, [], [KVCacheGroupSpec(list(caches), spec)])
        return device_memory(caches, config, Audited("auto"), 0, 1)[1]

    plain = torch.zeros(num_blocks, 2, 4, 16, dtype=torch.float16)
    others = [
        plain.bfloat16(),
        torch.zeros(num_blocks, 2, 4, 32, dtype=torch.float16),
        torch.zeros(num_blocks, 4, 2, 16, dtype=torch.float16),
        torch.zeros(num_blocks, 4, 2, 16, dtype=torch.float16).transpose(1, 2),
    ]
    assert len({name_of(layer) for layer in (plain, *others)}) == 5
    assert name_of(plain.clone()) == name_of(plain)
