"""Which configurations of vLLM share blocks: real configuration objects, each with a folder of its own."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import json
import logging
import random
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from PIL import Image
from vllm._custom_ops import cpu_attn_reshape_and_cache
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.model_executor.models import ModelRegistry
from vllm.model_executor.models.registry import _RegisteredModel
from vllm.multimodal.parse import MultiModalDataParser
from vllm.multimodal.processing.inputs import ProcessorInputs
from vllm.platforms import current_platform
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

from kvbm_core.identity import environment
from kvbm_core.identity.fields import Irrelevant
from kvbm_core.identity.weights import WeightsIdentity
from kvbm_vllm import config_tables, engine_calls, identity
from kvbm_vllm.adapters import AdapterIdentities
from kvbm_vllm.changes import EngineChanges
from kvbm_vllm.identity import describe_engine, describe_environment
from kvbm_vllm.keys import has_lasting_names
from kvbm_vllm.weights import weight_sources, weights_identity
from tests.vllm.engine_config import settle
from tests.vllm.engine_setups import (
    LONGROPE,
    MODEL,
    Engines,
    Setup,
    arguments,
    environ,
    irrelevant,
    model,
    multimodal,
    shaping,
)
from tests.vllm.harness import adapter, media
from tests.vllm.kvbm_engine import KvbmEngine

NUM_SAME = 50


@pytest.fixture
def engines(tmp_path: Path) -> Engines:
    return Engines(tmp_path)


# ---------------------------------------------------------------- in bulk


def test_all_values_of_all_things_have_keys_of_their_own(engines: Engines, rng: random.Random) -> None:
    plain = engines.root(Setup())
    assert plain.is_lasting
    for name, setups in shaping(rng).items():
        hashes = [engines.root(setup).hash for setup in setups]
        assert len(set(hashes)) == len(hashes), name
        assert hashes.count(plain.hash) <= 1, f"{name}: more than one value does not count"


def test_all_that_differ_in_what_shapes_nothing_share_their_key(engines: Engines, rng: random.Random) -> None:
    plain = engines.root(Setup())
    changes = list(irrelevant(rng).items())
    assert len(changes) >= NUM_SAME
    differing = [name for name, setup in changes if engines.root(setup) != plain]
    assert not differing


def test_what_the_default_is_does_not_matter_only_what_is_computed_with(
    engines: Engines, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text(json.dumps({**MODEL, "rms_norm_eps": 0.75}))
    ways = (
        arguments(hf_config_path=str(other)),
        arguments(hf_overrides={"rms_norm_eps": 0.75}),
        arguments(hf_overrides=_three_quarters),
    )
    roots = [engines.root(setup) for setup in ways]
    assert roots[0] == roots[1] == roots[2] != engines.root(Setup())
    assert roots[0].is_lasting


def _three_quarters(config: Any) -> Any:
    config.rms_norm_eps = 0.75
    return config


# ---------------------------------------------------------------- what means nothing in another process

DISK: dict[str, Any] = {"host_blocks": 64, "disk_blocks": 1000}
PROMPT = range(50)
DIGEST = "0123456789abcdef" * 4


def stored_blocks(engine: KvbmEngine) -> float:
    """Blocks that went to the disk by now."""
    engine.settle()
    return engine.metric("kvbm_offload_blocks_h2d")


def serve_twice(engine: KvbmEngine, **request: Any) -> int:
    """Tokens that came from the host tier when the same was asked again."""
    first = engine.ask("a", PROMPT, 4, **request)
    engine.forget_device()
    assert engine.ask("b", PROMPT, 4, **request) == first
    return engine.external_tokens("b")


NAMES = (DIGEST, f"{DIGEST}{DIGEST}", f"poet:{DIGEST}", "renderer0-mm-5-image-0", "my picture")


@pytest.mark.parametrize("name", NAMES)
def test_requests_with_items_stay_off_the_disk_whatever_the_items_are_named(
    tmp_path: Path, name: str
) -> None:
    with KvbmEngine(tmp_path, **DISK) as engine:
        assert serve_twice(engine, images=[media(name, 4, 8)]) > 0
        assert stored_blocks(engine) == 0
        engine.assert_clean()


def test_requests_without_items_go_to_the_disk(tmp_path: Path) -> None:
    with KvbmEngine(tmp_path, **DISK) as engine:
        assert serve_twice(engine) > 0
        assert stored_blocks(engine) > 0
        engine.assert_clean()


def name_of_item(color: str, **how: Any) -> str:
    """What vLLM calls an image of that color that a client calls "avatar"."""
    items = MultiModalDataParser().parse_mm_data({"image": [Image.new("RGB", (8, 8), color)]})
    inputs = ProcessorInputs([1], items, mm_uuid_items={"image": ["avatar"]}, **how)
    return inputs.get_mm_hashes("model", "blake3")["image"][0]


def test_what_vllm_makes_of_a_clients_name_is_not_trusted(tmp_path: Path) -> None:
    """It has the form of a digest of content, and is the same for another image."""
    name = name_of_item("red", hf_processor_mm_kwargs={"max_pixels": 1000})
    assert name == name_of_item("blue", hf_processor_mm_kwargs={"max_pixels": 1000})
    assert re.fullmatch("[0-9a-f]{64}", name)
    with KvbmEngine(tmp_path, **DISK) as engine:
        assert not has_lasting_names(engine.add("a", PROMPT, images=[media(name, 4, 8)]))
        engine.run()
        assert stored_blocks(engine) == 0


def test_a_field_that_nobody_has_classified_keeps_blocks_in_this_process_and_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delitem(config_tables.CACHE.rules, "swa_bounded_replay")
    with caplog.at_level(logging.WARNING, "kvbm"), KvbmEngine(tmp_path, **DISK) as engine:
        assert serve_twice(engine) > 0, "the host tier works"
        assert stored_blocks(engine) == 0
        engine.assert_clean()
    said = [record.getMessage() for record in caplog.records if "settings of vLLM" in record.getMessage()]
    assert len(said) == 1 and "cache_config.swa_bounded_replay" in said[0] and "\n" not in said[0]


def test_what_is_said_of_made_up_weights(engines: Engines, caplog: pytest.LogCaptureFixture) -> None:
    config, _ = engines.config(arguments(load_format="dummy"))
    description = describe_engine(config)
    assert not description.is_lasting and not description.unknown
    description.tell("vLLM", "nothing is kept on disk")
    assert "load_config.load_format" in caplog.text and "\n" not in caplog.messages[0]


STREAMED = arguments(load_format="runai_streamer", model_loader_extra_config={"uri": "s3://bucket/model"})


@pytest.mark.parametrize(
    ("setup", "field"),
    [(arguments(load_format="dummy"), "load_format"), (STREAMED, "model_loader_extra_config")],
    ids=["dummy", "elsewhere"],
)
def test_configuration_and_weights_each_say_what_cannot_be_told_apart(
    engines: Engines, setup: Setup, field: str
) -> None:
    config, _ = engines.config(setup)
    assert [said.partition(":")[0] for said in describe_engine(config).process_only] == [
        f"load_config.{field}"
    ]
    assert weight_sources(config)["model"].unknown


@pytest.mark.parametrize(
    "setup",
    [
        arguments(load_format="dummy"),
        arguments(load_format="tensorizer"),
        STREAMED,
        Setup(fields={"load_config.load_format": "ipc_cache"}),
        Setup(fields={"load_config.load_format": "a plugin's"}),
        Setup(fields={"model_config.model_weights": "s3://bucket/model"}),
        Setup(fields={"weight_transfer_config": WeightTransferConfig()}),
        Setup(fields={"additional_config": object()}),
        Setup(fields={"compilation_config.inductor_passes": {"a": lambda graph: graph}}),
        multimodal(mm_encoder_attn_dtype="fp8"),
        environ(VLLM_USE_MODELSCOPE="1"),
        environ(VLLM_MOE_ROUTING_SIMULATION_STRATEGY="uniform_random"),
    ],
    ids=lambda setup: re.sub(" at 0x[0-9a-f]+", "", repr(setup)),  # the same in all processes
)
def test_what_cannot_be_told_from_others_is_of_this_process(engines: Engines, setup: Setup) -> None:
    assert not engines.root(setup).is_lasting


def test_scales_of_the_encoder_are_read_from_their_file(engines: Engines, tmp_path: Path) -> None:
    path, hashes = tmp_path / "scales.json", set()
    for text in ("{}", '{"a": 1}'):
        path.write_text(text)
        root = engines.root(multimodal(mm_encoder_attn_dtype="fp8", mm_encoder_fp8_scale_path=str(path)))
        assert root.is_lasting
        hashes.add(root.hash)
    assert len(hashes) == 2


def test_a_quantization_file_named_by_an_override_is_read(engines: Engines, tmp_path: Path) -> None:
    path, hashes = tmp_path / "quantization.json", set()
    for text in ("{}", '{"bits": 4}'):
        path.write_text(text)
        hashes.add(engines.root(arguments(hf_overrides={"quantization_config_file": str(path)})).hash)
    assert len(hashes) == 2


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "longrope"},
        {"full_attention": {"rope_type": "default"}, "sliding_attention": {"rope_type": "longrope"}},
        {"rope_type": "of tomorrow"},
    ],
)
def test_the_length_counts_where_the_rope_depends_on_it(engines: Engines, rope: dict[str, Any]) -> None:
    config, _ = engines.config(Setup())
    counts = config_tables.length_that_counts
    assert counts(config.model_config) is None
    config.model_config.hf_text_config.rope_parameters = rope
    assert counts(config.model_config) == 4096


class Quantization:
    def __init__(self, scheme: object) -> None:
        self.bits, self.scheme = 4, scheme


def test_all_that_a_quantization_object_holds_counts_or_is_not_known(engines: Engines) -> None:
    def described(scheme: object) -> Any:
        config, _ = engines.config(Setup())
        config.quant_config = Quantization(scheme)  # type: ignore[assignment]
        return describe_engine(config)

    schemes = (QuantizationArgs(num_bits=4), QuantizationArgs(num_bits=8), Quantization(1), Quantization(2))
    found = [described(scheme) for scheme in schemes]
    assert len({each.pairs for each in found}) == len(schemes) and all(each.is_lasting for each in found)
    assert described(object()).unknown == ("quant_config",)


def test_the_class_that_is_registered_for_the_architecture_counts(
    engines: Engines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, _ = engines.config(Setup())
    found = [describe_engine(config)]
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(ModelRegistry, "models", dict(ModelRegistry.models))
    ModelRegistry.register_model("Qwen3ForCausalLM", "model_of_mine:Mine")
    assert describe_engine(config).unknown == ("model class",), "there is no such module"
    for code in ("class Mine: theta = 1", "class Mine: theta = 2"):
        (tmp_path / "model_of_mine.py").write_text(code)
        importlib.invalidate_caches()
        found.append(describe_engine(config))
    assert len({each.pairs for each in found}) == 3 and all(each.is_lasting for each in found)
    ModelRegistry.models["Qwen3ForCausalLM"] = _RegisteredModel(None, Mine)  # type: ignore[arg-type]
    assert ("model class tests.vllm.test_identity.Mine", sha256(Path(__file__))) in describe_engine(
        config
    ).pairs


class Mine:
    """A model of the user's own."""


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.parametrize(
    "fields",
    [
        {"parallel_config.worker_extension_cls": "code_of_mine.Mine"},
        {"parallel_config.worker_cls": "code_of_mine.Mine"},
        {"model_config.model_class_overrides": {"Qwen3ForCausalLM": "code_of_mine:Mine"}},
    ],
)
def test_the_code_of_classes_that_settings_name_counts(
    engines: Engines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any]
) -> None:
    assert not engines.root(Setup(fields=fields)).is_lasting, "there is no such module"
    monkeypatch.syspath_prepend(tmp_path)
    hashes = set()
    for code in ("class Mine: A = 1", "class Mine: A = 2"):
        (tmp_path / "code_of_mine.py").write_text(code)
        importlib.invalidate_caches()
        root = engines.root(Setup(fields=fields))
        assert root.is_lasting
        hashes.add(root.hash)
    assert len(hashes) == 2


@pytest.mark.parametrize("is_editable", [False, True])
def test_a_plugin_that_is_installed_editable_keeps_blocks_in_this_process(
    engines: Engines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_editable: bool
) -> None:
    info = tmp_path / "my_plugin-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my-plugin\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[vllm.general_plugins]\nmine = os:getcwd\n")
    origin = {"url": "file:///a", "dir_info": {"editable": is_editable}}
    (info / "direct_url.json").write_text(json.dumps(origin))
    config, _ = engines.config(Setup())
    monkeypatch.syspath_prepend(tmp_path)
    identity._editable_plugins.cache_clear()
    try:
        found = describe_engine(config).process_only
    finally:
        identity._editable_plugins.cache_clear()
    assert found == (("plugin mine: it is installed editable",) if is_editable else ())


def test_the_devices_capability_counts(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    config, _ = engines.config(Setup())
    found = set()
    for capability in (None, DeviceCapability(9, 0), DeviceCapability(10, 0)):
        monkeypatch.setattr(type(current_platform), "get_device_capability", lambda *_, of=capability: of)
        found.add(describe_engine(config).pairs)
    assert len(found) == 3


def test_what_a_cpu_can_compute_with_counts(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    config, _ = engines.config(Setup())
    found = set()
    for units in ("avx2", "amx_fp8 avx2"):
        monkeypatch.setattr(environment, "vector_units", lambda units=units: units)
        for has_tiles in (False, True):
            monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda has_tiles=has_tiles: has_tiles)
            found.add(describe_engine(config).pairs)
    assert len(found) == 4


@pytest.mark.skipif(
    not torch.cpu._is_amx_tile_supported(), reason="NOT RUN: vLLM's order of K and V: this CPU has no AMX"
)
def test_vllm_orders_k_and_v_by_what_torch_says_of_amx(
    monkeypatch: pytest.MonkeyPatch, rng: random.Random
) -> None:
    """The same numbers in a cache of the same shape, by vLLM's own kernels."""
    shape, slots = (32, 1, 64), torch.arange(32)
    key, value = (torch.tensor(rng.sample(range(256 * 16), 2048)).view(shape).bfloat16() for _ in "kv")
    found = set()
    for has_tiles in (False, True):
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda has_tiles=has_tiles: has_tiles)
        cache = torch.zeros(1, 1, 64, 64, dtype=torch.bfloat16)
        keys, values = cache.chunk(2, dim=2)
        isa = _get_attn_isa(torch.bfloat16, 32, 64)
        cpu_attn_reshape_and_cache(key, value, keys, values, slots, isa)
        found.add(cache.view(torch.uint8).numpy().tobytes())
    assert len(found) == 2


def test_the_tokenizer_counts_where_the_model_computes_with_it(engines: Engines) -> None:
    for names, is_lasting in (
        ({}, True),
        ({"engram_layer_ids": []}, True),
        ({"engram_layer_ids": [1]}, False),
    ):
        config, _ = engines.config(model(**names))
        assert describe_engine(config).is_lasting is is_lasting, names


def test_weights_and_code_of_a_draft_model_are_sources(engines: Engines) -> None:
    config, _ = engines.config(Setup())
    drafts_config = SimpleNamespace(auto_map={"AutoModel": "org/code--module.Class"})
    draft = SimpleNamespace(
        model="draft", revision=None, code_revision="1", hf_config=drafts_config, trust_remote_code=True
    )
    config.speculative_config = SimpleNamespace(draft_model_config=draft)  # type: ignore[assignment]
    assert weight_sources(config)["draft"].name == "draft"
    source = weight_sources(config)["draft code org/code"]
    assert (source.name, source.revision, source.is_code) == ("org/code", "1", True)
    draft.trust_remote_code = False
    assert "draft code org/code" not in weight_sources(config)


def test_a_length_that_is_fitted_to_the_memory_does_not_last_where_it_counts(engines: Engines) -> None:
    """vLLM builds the model with the full length, then lowers it."""
    config, _ = engines.config(Setup({"max_model_len": -1}, LONGROPE))
    config.model_config.max_model_len = 1000
    assert [name[:27] for name in describe_engine(config).process_only] == ["model_config.max_model_len:"]
    without, _ = engines.config(arguments(max_model_len=-1))
    assert describe_engine(without).is_lasting


def test_variables_that_kubernetes_sets_for_a_service_change_no_key() -> None:
    ends = "SERVICE_HOST SERVICE_PORT SERVICE_PORT_HTTP PORT PORT_8000_TCP PORT_8000_UDP_ADDR"
    for service in ("VLLM", "VLLM_ROUTER", "AITER_7"):
        assert not describe_environment({f"{service}_{end}": "10.0.0.1" for end in ends.split()}).pairs
    for name in ("VLLM_PORT_OF_TOMORROW", "VLLM_USE_SERVICE", "VLLM_TCP_ADDR"):
        assert describe_environment({name: "1"}).pairs, name


def test_llama_4_scales_its_queries_by_the_length_and_by_the_generation_configuration(
    engines: Engines,
) -> None:
    config, _ = engines.config(Setup())
    of = config.model_config
    tuned = config_tables.temperature_tuning
    of.override_generation_config = {"attn_temperature_tuning": True}
    assert tuned(of) is None and config_tables.length_that_counts(of) is None
    of.hf_text_config.model_type = "llama4_text"
    assert tuned(of) is True and config_tables.length_that_counts(of) == 4096
    of.override_generation_config = {}
    assert tuned(of) is None


def test_adapters_are_told_apart_by_what_is_in_them_and_how_it_is_read(
    engines: Engines, tmp_path: Path
) -> None:
    folder = tmp_path / "poet"
    folder.mkdir()
    (folder / "adapter_model.safetensors").write_bytes(b"verse")
    stamp = engines.stamp_of_adapter(folder)
    assert stamp.is_lasting
    assert engines.stamp_of_adapter(folder, is_3d_lora_weight=True) != stamp
    changes = EngineChanges(WeightsIdentity({}, 0), AdapterIdentities(digests=False))
    # vLLM up to 0.31 reads that in place of the path.
    tensorizer = {"tensorizer_config_dict": {"tensorizer_dir": str(tmp_path)}}
    elsewhere: Any = SimpleNamespace(lora_int_id=3, lora_path=str(folder), **tensorizer)
    assert changes.adapter_of(elsewhere) is None
    nowhere = changes.adapter_of(adapter("nowhere", 2))
    assert nowhere is not None and not nowhere.is_lasting


def test_other_weights_put_in_place_after_vllm_began_to_load_are_not_what_it_has(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        config, folder = Engines(tmp_path / name).config(Setup())
        settle(folder)
        if name == "one":
            loads = config
    engine_calls.begin(loads)
    (tmp_path / "one").rename(tmp_path / "old")
    (tmp_path / "two").rename(tmp_path / "one")
    weights = weights_identity(loads, *engine_calls.loading_began(loads))
    weights.start()
    assert weights.wait(20.0)
    weights.close()
    assert not weights.stamp().is_lasting


# ---------------------------------------------------------------- the installed version


def test_every_field_of_the_installed_version_is_classified() -> None:
    """By reflection: also what reading sources would miss."""
    import vllm.config

    for table in config_tables.TABLES:
        kind = getattr(vllm.config, table.class_name)
        missing = {each.name for each in dataclasses.fields(kind)} - set(table.rules)
        assert not missing, f"{table.class_name}: say in kvbm_vllm/config_tables.py what {missing} are"


def test_every_load_format_of_this_version_is_seen_or_known_to_come_from_elsewhere() -> None:
    from vllm.model_executor.model_loader import _LOAD_FORMAT_TO_MODEL_LOADER as loaders

    elsewhere = {"dummy", "ipc_cache", "modelexpress", "tensorizer"}
    assert set(loaders) - set(config_tables.SEEN_LOAD_FORMATS) == elsewhere


def test_irrelevant_fields_do_not_reach_the_key(engines: Engines) -> None:
    """Whatever their value is, also one without a text."""
    config, _ = engines.config(Setup())
    plain = describe_engine(config)
    parts: dict[str, Callable[[], Any]] = {
        "CacheConfig": lambda: config.cache_config,
        "ModelConfig": lambda: config.model_config,
        "LoadConfig": lambda: config.load_config,
        "ParallelConfig": lambda: config.parallel_config,
        "SchedulerConfig": lambda: config.scheduler_config,
    }
    num_changed = 0
    for table in config_tables.TABLES:
        for name, rule in table.rules.items():
            if isinstance(rule, Irrelevant) and table.class_name in parts:
                setattr(parts[table.class_name](), name, object())
                num_changed += 1
    assert num_changed > 100
    assert describe_engine(config) == plain
