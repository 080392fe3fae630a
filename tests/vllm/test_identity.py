"""Which configurations of vLLM share blocks: real configuration objects, each with a folder of its own."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
from vllm.config import MultiModalConfig, VllmConfig
from vllm.config.diffusion import DiffusionConfig
from vllm.config.quantization import QuantizationConfigArgs, QuantSpec
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.lora.request import LoRARequest
from vllm.model_executor.layers.quantization.fp8 import Fp8Config
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from kvbm_core.identity.fields import Irrelevant
from kvbm_core.identity.roots import NO_ADAPTER, Root, Roots, Stamp
from kvbm_vllm import config_tables
from kvbm_vllm.identity import describe_engine, namespace_of, tell, weights_of
from kvbm_vllm.keys import adapter_of, has_lasting_names
from tests.vllm.harness import adapter, media
from tests.vllm.kvbm_engine import KvbmEngine

NUM_PAIRS, NUM_SAME = 200, 50
MODEL = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_hidden_layers": 2,
    "vocab_size": 512,
    "max_position_embeddings": 4096,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-6,
    "dtype": "float32",
}
LONGROPE = {
    "architectures": ["Phi3ForCausalLM"],
    "model_type": "phi3",
    "pad_token_id": 0,
    "original_max_position_embeddings": 1024,
    "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4},
}
NGRAM = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}


@dataclass(frozen=True)
class Setup:
    """How one engine is started. ``model``: of config.json. ``fields``: by path, where the command line of a
    machine without a GPU has no way to set them.
    """

    arguments: Mapping[str, Any] = field(default_factory=dict)
    model: Mapping[str, Any] = field(default_factory=dict)
    environ: Mapping[str, str] = field(default_factory=dict)
    fields: Mapping[str, Any] = field(default_factory=dict)
    weights: bytes = b"the weights"
    files: Mapping[str, str] = field(default_factory=dict)
    lora: bytes | None = None

    def over(self, other: Setup) -> Setup:
        """This one where it says something, ``other`` for the rest."""
        return Setup(
            {**other.arguments, **self.arguments},
            {**other.model, **self.model},
            {**other.environ, **self.environ},
            {**other.fields, **self.fields},
            self.weights if self.weights != Setup().weights else other.weights,
            {**other.files, **self.files},
            self.lora if self.lora is not None else other.lora,
        )


class Engines:
    """Makes configurations, each from a new folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._num_made = 0

    def config(self, setup: Setup) -> tuple[VllmConfig, Path]:
        """As vLLM makes it from the command line, then the fields."""
        folder = self._folder / f"engine {self._num_made}"
        self._num_made += 1
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps({**MODEL, **setup.model}))
        (folder / "model.safetensors").write_bytes(setup.weights)
        for name, text in setup.files.items():
            (folder / name).write_text(text)
        arguments = {
            name: value.format(folder=folder) if isinstance(value, str) else value
            for name, value in setup.arguments.items()
        }
        config = EngineArgs(
            model=str(folder), **{"skip_tokenizer_init": True, "dtype": "float32", **arguments}
        ).create_engine_config()
        for path, value in setup.fields.items():
            *above, name = path.split(".")
            setattr(reduce(getattr, above, config), name, value)
        return config, folder

    def root(self, setup: Setup) -> Root:
        """The parent of a request's first block."""
        config, folder = self.config(setup)
        description = describe_engine(config, {**os.environ, **setup.environ})
        roots = Roots(namespace_of(description, 16), weights_of(config), is_lasting=description.is_lasting)
        stamp = NO_ADAPTER
        if setup.lora is not None:
            (folder / "adapter").mkdir()
            (folder / "adapter" / "adapter_model.safetensors").write_bytes(setup.lora)
            stamp = self.stamp_of_adapter(folder / "adapter")
        return roots.of(stamp, None, "the layout")

    def stamp_of_adapter(self, folder: Path) -> Stamp:
        """As a request with it has."""
        request: Any = type("R", (), {"lora_request": LoRARequest("poet", 1, str(folder))})
        return adapter_of(request)


@pytest.fixture
def engines(tmp_path: Path) -> Engines:
    return Engines(tmp_path)


def arguments(**values: Any) -> Setup:
    return Setup(arguments=values)


def model(**values: Any) -> Setup:
    return Setup(model=values)


def environ(**values: str) -> Setup:
    return Setup(environ=values)


def fields(path: str, *values: Any) -> list[Setup]:
    return [Setup(fields={path: value}) for value in values]


def multimodal(**values: Any) -> Setup:
    return Setup(fields={"model_config.multimodal_config": MultiModalConfig(**values)})


def shaping(rng: random.Random) -> dict[str, list[Setup]]:
    """Things that shape K and V -> values of each that all differ from each other."""
    thetas = [rng.uniform(1e3, 1e6) for _ in range(4)]
    return {
        "weights": [Setup(weights=rng.randbytes(100)) for _ in range(4)],
        "lora": [Setup(lora=rng.randbytes(100)) for _ in range(4)],
        "rope_theta": [model(rope_theta=theta) for theta in thetas],
        "hf_overrides": [arguments(hf_overrides={"rope_theta": theta + 1}) for theta in thetas],
        "hf_overrides by a function": [arguments(hf_overrides=one) for one in (_quarter, _half)],
        "rms_norm_eps": [model(rms_norm_eps=rng.uniform(1e-9, 1e-3)) for _ in range(3)],
        "hidden_act": [model(hidden_act=act) for act in ("silu", "gelu")],
        "layers": [model(num_hidden_layers=number) for number in (2, 3, 4)],
        "rope_scaling": [
            model(rope_scaling={"rope_type": "linear", "factor": rng.uniform(2, 8)}) for _ in range(3)
        ],
        "max_model_len with longrope": [
            Setup({"max_model_len": length}, LONGROPE) for length in (512, 1024, 2048)
        ],
        "dtype": [arguments(dtype=name) for name in ("float32", "bfloat16", "float16")],
        "kv_cache_dtype": [arguments(kv_cache_dtype=name) for name in ("auto", "fp8", "fp8_e5m2")],
        "load_format": [arguments(load_format=name) for name in ("auto", "dummy", "safetensors", "pt")],
        "runner": [arguments(runner=name) for name in ("generate", "pooling")],
        "convert": fields("model_config.convert", "none", "embed", "classify"),
        "model_impl": fields("model_config.model_impl", "auto", "vllm", "transformers"),
        "trust_remote_code": [arguments(trust_remote_code=value) for value in (False, True)],
        "code_revision": [arguments(code_revision=rng.randbytes(20).hex()) for _ in range(3)],
        "disable_sliding_window": fields("model_config.disable_sliding_window", False, True),
        "enable_prompt_embeds": [arguments(enable_prompt_embeds=value) for value in (False, True)],
        "model_class_overrides": fields(
            "model_config.model_class_overrides", {}, {"Qwen3ForCausalLM": "mine:A"}, {"Q": "mine:B"}
        ),
        "quantization": fields("model_config.quantization", None, "fp8", "awq", "bitsandbytes"),
        "quantization_config": fields(
            "model_config.quantization_config",
            None,
            QuantizationConfigArgs(ignore=["lm_head"]),
            QuantizationConfigArgs(linear=QuantSpec()),
        ),
        "quant_config": fields(
            "quant_config",
            None,
            Fp8Config(True, "dynamic"),
            Fp8Config(True, "static"),
            Fp8Config(True, "dynamic", weight_block_size=[128, 128]),
        ),
        "tensor_parallel_size": [arguments(tensor_parallel_size=size) for size in (1, 2)],
        "pipeline_parallel_size": [arguments(pipeline_parallel_size=size) for size in (1, 2)],
        "decode context": fields("parallel_config.decode_context_parallel_size", 1, 2, 4),
        "all2all": fields("parallel_config.all2all_backend", "naive", "deepep_low_latency"),
        "worker": fields("parallel_config.worker_cls", "auto", "mine.Worker"),
        "skipped layers": fields("cache_config.kv_cache_dtype_skip_layers", [], ["0"], ["sliding_window"]),
        "kv_sharing_fast_prefill": fields("cache_config.kv_sharing_fast_prefill", False, True),
        "swa_bounded_replay": fields("cache_config.swa_bounded_replay", False, True),
        "mamba_ssm_cache_dtype": fields("cache_config.mamba_ssm_cache_dtype", "auto", "float32", "float16"),
        "mamba_cache_mode": fields("cache_config.mamba_cache_mode", "none", "align", "all"),
        "sliding_window": fields("cache_config.sliding_window", None, 64, 128),
        "kv layout": fields("cache_config.kv_cache_layout", "LBNHC", "LBHNC"),
        "indexer_kv_dtype": fields("attention_config.indexer_kv_dtype", "auto", "fp8", "mxfp4"),
        "attention": fields("attention_config.backend", None, AttentionBackendEnum.FLASH_ATTN),
        "query": fields("attention_config.use_prefill_query_quantization", False, True),
        "flashinfer query": fields("attention_config.disable_flashinfer_q_quantization", False, True),
        "non-causal": fields("attention_config.use_non_causal", False, True),
        "moe_backend": fields("kernel_config.moe_backend", "auto", "triton", "marlin"),
        "stochastic rounding": fields("mamba_config.enable_stochastic_rounding", False, True),
        "lora_dtype": [
            arguments(enable_lora=True, lora_dtype=name) for name in ("auto", "bfloat16", "float16")
        ],
        "lora modules": [
            arguments(enable_lora=True, lora_target_modules=names)
            for names in (None, ["o_proj"], ["qkv_proj"])
        ],
        "tower lora": [
            Setup({"enable_lora": True}, fields={"lora_config.enable_tower_connector_lora": value})
            for value in (False, True)
        ],
        "speculative method": [arguments(), arguments(speculative_config=NGRAM)],
        "additional_config": [arguments(additional_config={"a": rng.random()}) for _ in range(3)],
        "inductor_passes": fields("compilation_config.inductor_passes", {}, {"post": "mine.f"}),
        "compiler": fields("compilation_config.backend", "inductor", "mine.compiler"),
        "diffusion": fields("diffusion_config", None, DiffusionConfig(canvas_length=8)),
        "weight transfer": fields("weight_transfer_config", None, WeightTransferConfig()),
        "ignore_patterns": fields("load_config.ignore_patterns", [], ["*.bin"]),
        "loader's configuration": [
            arguments(model_loader_extra_config=value)
            for value in ({}, {"a": 1}, {"tensorizer_uri": "s3://b/c"})
        ],
        "mm_processor_kwargs": [
            multimodal(mm_processor_kwargs=v) for v in (None, {"num_crops": 4}, {"n": 5})
        ],
        "media_io_kwargs": [
            multimodal(media_io_kwargs=value) for value in ({}, {"video": {"num_frames": 40}})
        ],
        "video pruning": [multimodal(video_pruning_rate=value) for value in (None, 0.25, 0.5)],
        "video pruning by": [
            multimodal(video_pruning_rate=0.5, video_pruning_method=name) for name in ("evs", "vidcom2")
        ],
        "encoder dtype": [multimodal(mm_encoder_attn_dtype=value) for value in (None, "fp8")],
        "matmul": [environ(VLLM_FLOAT32_MATMUL_PRECISION=name) for name in ("highest", "high", "medium")],
        "int4": [environ(VLLM_CPU_INT4_W4A8=value) for value in ("0", "1")],
        "mla": [environ(VLLM_MLA_DISABLE=value) for value in ("0", "1")],
        "routing": [environ(VLLM_MOE_ROUTING_SIMULATION_STRATEGY=value) for value in ("uniform_random", "")],
        "a variable that nobody knows": [environ(VLLM_OF_TOMORROW=value) for value in ("", "0", "1")],
        "scale constants": [environ(K_SCALE_CONSTANT=value) for value in ("100", "200")],
    }


def _quarter(config: Any) -> Any:
    config.rms_norm_eps = 0.25
    return config


def _half(config: Any) -> Any:
    config.rms_norm_eps = 0.5
    return config


def irrelevant(rng: random.Random) -> dict[str, Setup]:
    """What users change between two starts and what shapes no K or V."""
    port = rng.randrange(1024, 60000)
    return {
        "another folder": arguments(),
        "served_model_name": arguments(served_model_name=[f"name {port}"]),
        "gpu_memory_utilization": arguments(gpu_memory_utilization=rng.uniform(0.2, 0.9)),
        "max_num_seqs": arguments(max_num_seqs=rng.randrange(1, 64)),
        "max_num_batched_tokens": arguments(max_num_batched_tokens=rng.randrange(4096, 9000)),
        "max_model_len": arguments(max_model_len=rng.randrange(128, 4096)),
        "seed": arguments(seed=port),
        "enforce_eager": arguments(enforce_eager=True),
        "optimization_level": arguments(optimization_level=0),
        "compilation": arguments(compilation_config={"mode": 0, "custom_ops": ["all"]}),
        "cudagraphs": arguments(compilation_config={"cudagraph_capture_sizes": [1, 2, 4]}),
        "chunked prefill": arguments(long_prefill_token_threshold=rng.randrange(1, 100)),
        "async scheduling": arguments(async_scheduling=False),
        "policy": arguments(scheduling_policy="priority"),
        "prefix caching": arguments(enable_prefix_caching=False),
        "hash": arguments(prefix_caching_hash_algo="sha256_cbor"),
        "num_gpu_blocks_override": arguments(num_gpu_blocks_override=rng.randrange(100, 900)),
        "kv_cache_memory_bytes": arguments(kv_cache_memory_bytes=rng.randrange(10**9)),
        "block size in the layout": arguments(block_size=32),
        "revision": arguments(revision="main"),
        "hf_config_path": Setup({"hf_config_path": "{folder}"}),
        "hf_overrides that change nothing": arguments(hf_overrides={"rms_norm_eps": MODEL["rms_norm_eps"]}),
        "download_dir": arguments(download_dir=f"/somewhere/{port}"),
        "load_format": arguments(load_format="hf"),
        "tqdm": arguments(use_tqdm_on_load=False),
        "tokenizer": Setup(fields={"model_config.tokenizer": "another"}),
        "tokenizer_mode": Setup(fields={"model_config.tokenizer_mode": "slow"}),
        "logprobs": arguments(max_logprobs=rng.randrange(5, 50), logprobs_mode="raw_logits"),
        "generation_config": arguments(generation_config="vllm"),
        "override_generation_config": arguments(override_generation_config={"temperature": rng.random()}),
        "logits_processors": Setup(fields={"model_config.logits_processors": ["mine:P"]}),
        "media path": arguments(allowed_local_media_path="/"),
        "otlp": Setup(fields={"observability_config.otlp_traces_endpoint": f"http://localhost:{port}"}),
        "metrics": Setup(fields={"observability_config.kv_cache_metrics": True}),
        "log level": environ(VLLM_LOGGING_LEVEL="DEBUG"),
        "cpu space": environ(VLLM_CPU_KVCACHE_SPACE=str(port % 40)),
        "threads": environ(VLLM_CPU_OMP_THREADS_BIND="0-1"),
        "port": environ(VLLM_PORT=str(port)),
        "host": environ(VLLM_HOST_IP="127.0.0.2"),
        "key": environ(VLLM_API_KEY="secret"),
        "cache root": environ(VLLM_CACHE_ROOT=f"/cache/{port}"),
        "statistics": environ(VLLM_NO_USAGE_STATS="1"),
        "other programs": environ(PATH="/bin", HOME=f"/home of {port}"),
        "data parallel port": Setup(fields={"parallel_config.data_parallel_rpc_port": port}),
        "data parallel rank": Setup(fields={"parallel_config.data_parallel_rank": 1}),
        "master port": Setup(fields={"parallel_config.master_port": port}),
        "executor": arguments(distributed_executor_backend="mp"),
        "custom all-reduce": arguments(disable_custom_all_reduce=True),
        "instance": Setup(fields={"instance_id": f"{port}"}),
        "connector": arguments(
            kv_transfer_config={
                "kv_connector": "DynamoConnector",
                "kv_role": "kv_both",
                "kv_connector_module_path": "kvbm.vllm_integration.connector",
                "kv_connector_extra_config": {"a": port},
            }
        ),
        "structured outputs": Setup(fields={"structured_outputs_config.backend": "guidance"}),
        "offload": Setup(fields={"offload_config.uva.cpu_offload_gb": 4.0}),
        "sleep mode": Setup(fields={"model_config.enable_sleep_mode": True}),
        "flash attention's splits": Setup(
            fields={"attention_config.flash_attn_max_num_splits_for_cuda_graph": 16}
        ),
        "shutdown_timeout": Setup(fields={"shutdown_timeout": port % 30}),
        "a note beside the weights": Setup(files={"README.md": f"words {port}"}),
    }


# ---------------------------------------------------------------- in bulk


def test_no_pair_that_differs_in_one_thing_that_shapes_k_and_v_shares_a_key(
    engines: Engines, rng: random.Random
) -> None:
    for _ in range(NUM_PAIRS):
        name, setups = rng.choice(list(shaping(rng).items()))
        around = reduce(Setup.over, rng.sample(list(irrelevant(rng).values()), 2), Setup())
        first, second = (setup.over(_with_room(around, setup)) for setup in rng.sample(setups, 2))
        roots = engines.root(first), engines.root(second)
        assert roots[0].hash != roots[1].hash, f"{name}: {first}, {second}"


def _with_room(around: Setup, inner: Setup) -> Setup:
    """Without what would hide the difference, or is refused together with it."""
    taken = {"hf_overrides", "hf_config_path", "load_format", "enforce_eager", "max_model_len", "block_size"}
    kept = {name: value for name, value in around.arguments.items() if name not in taken}
    return dataclasses.replace(around, arguments=kept)


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


@pytest.mark.parametrize(
    ("name", "is_kept"),
    [
        (DIGEST, True),
        (f"{DIGEST}{DIGEST}", True),
        (f"poet:{DIGEST}", True),
        ("renderer0-mm-5-image-0", False),
        ("chatcmpl-1-image-0", False),
        ("my picture", False),
        (DIGEST[1:], False),
        (DIGEST.upper(), False),
    ],
)
def test_items_named_by_anything_but_a_digest_stay_off_the_disk(
    tmp_path: Path, name: str, is_kept: bool
) -> None:
    with KvbmEngine(tmp_path, **DISK) as engine:
        assert serve_twice(engine, images=[media(name, 4, 8)]) > 0
        assert (stored_blocks(engine) > 0) == is_kept
        engine.assert_clean()


def test_one_item_with_a_counted_name_is_enough(tmp_path: Path) -> None:
    with KvbmEngine(tmp_path, **DISK) as engine:
        images = [media(DIGEST, 4, 8), media("renderer0-mm-5-image-1", 20, 8)]
        request = engine.add("a", PROMPT, images=images)
        assert not has_lasting_names(request)
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
    tell(description)
    assert "load_config.load_format" in caplog.text and "\n" not in caplog.messages[0]


@pytest.mark.parametrize(
    "setup",
    [
        arguments(load_format="dummy"),
        arguments(load_format="tensorizer"),
        arguments(load_format="runai_streamer", model_loader_extra_config={"uri": "s3://bucket/model"}),
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
    ids=repr,
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
    request: Any = type(
        "R", (), {"lora_request": LoRARequest("poet", 1, str(folder), is_3d_lora_weight=True)}
    )
    assert adapter_of(request).is_lasting and adapter_of(request) != stamp
    request.lora_request = adapter("nowhere", 2)
    assert not adapter_of(request).is_lasting


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
