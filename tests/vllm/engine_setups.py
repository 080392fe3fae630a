"""How engines are started that share blocks, and how those that do not: vLLM's own configuration objects."""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import reduce
from pathlib import Path
from typing import Any

from vllm.config import MultiModalConfig, VllmConfig
from vllm.config.diffusion import DiffusionConfig
from vllm.config.quantization import QuantizationConfigArgs, QuantSpec
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.lora.request import LoRARequest
from vllm.model_executor.layers.quantization.fp8 import Fp8Config
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from kvbm_core.identity.roots import NO_ADAPTER, Root, Roots, Stamp
from kvbm_core.identity.weights import WeightsIdentity
from kvbm_vllm import engine_calls
from kvbm_vllm.adapters import AdapterIdentities
from kvbm_vllm.changes import EngineChanges
from kvbm_vllm.identity import describe_engine, namespace_of
from kvbm_vllm.weights import weights_identity
from tests.engines import PATIENCE_S
from tests.vllm.engine_config import settle

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
    "rope_scaling": {
        "rope_type": "longrope",
        "short_factor": [1.0] * 4,
        "long_factor": [2.0] * 4,
        "original_max_position_embeddings": 1024,
    }
}
# Of other kinds than MODEL, with the values that differ: latents, windows, recurrent states.
LATENT = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "q_lora_rank": None,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "greedy",
    "norm_topk_prob": False,
    "routed_scaling_factor": 1.0,
    "num_key_value_heads": 4,
}
WINDOWED = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 64}
HYBRID = {
    "architectures": ["GraniteMoeHybridForCausalLM"],
    "model_type": "granitemoehybrid",
    "layer_types": ["mamba", "attention"],
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_d_state": 8,
    "mamba_n_groups": 1,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "num_local_experts": 0,
    "num_experts_per_tok": 0,
    "shared_intermediate_size": 32,
}
YARN = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 1024}
INDEX = "model.safetensors.index.json"
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
            (folder / name).parent.mkdir(exist_ok=True)
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
        weights = self._weights_of(config, folder)
        roots = Roots(namespace_of(description, 16), weights.stamp, is_lasting=description.is_lasting)
        stamp = NO_ADAPTER
        if setup.lora is not None:
            (folder / "adapter").mkdir()
            (folder / "adapter" / "adapter_model.safetensors").write_bytes(setup.lora)
            stamp = self.stamp_of_adapter(folder / "adapter")
        return roots.of(stamp, None, "the layout")

    def _weights_of(self, config: VllmConfig, folder: Path) -> WeightsIdentity:
        """As an engine has them that begins now, and has found out what they are."""
        settle(folder)
        engine_calls.begin(config)
        weights = weights_identity(config, *engine_calls.loading_began(config))
        weights.start()
        assert weights.wait(PATIENCE_S)
        weights.close()
        return weights

    def stamp_of_adapter(self, folder: Path, **how: Any) -> Stamp:
        """As requests with it have, when its digest is known."""
        settle(folder)
        changes = EngineChanges(WeightsIdentity({}, 0), AdapterIdentities())
        lora = LoRARequest("poet", 1, str(folder), **how)
        deadline_s = time.monotonic() + PATIENCE_S
        while not (stamp := changes.adapter_of(lora)) or not stamp.is_lasting:
            assert time.monotonic() < deadline_s
        changes.close()
        return stamp


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
    return {
        **_of_the_model(rng),
        **_of_other_models(),
        **_of_files(),
        **_of_formats_and_kernels(),
        **_of_the_rest(rng),
    }


def _of_the_model(rng: random.Random) -> dict[str, list[Setup]]:
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
        "load_format": [
            arguments(load_format=name) for name in ("auto", "dummy", "sharded_state", "bitsandbytes")
        ],
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
    }


def _of_other_models() -> dict[str, list[Setup]]:
    return {
        "latents": [model(**LATENT, **more) for more in ({}, {"rope_scaling": YARN}, {"mlp_bias": True})],
        "latent rank": [model(**{**LATENT, "kv_lora_rank": rank}) for rank in (16, 32)],
        "experts": [model(**{**LATENT, "routed_scaling_factor": factor}) for factor in (1.0, 2.0)],
        "mscale": [
            model(**LATENT, rope_scaling={**YARN, "mscale": value, "mscale_all_dim": 1.0})
            for value in (0.7, 1.0)
        ],
        "window": [model(**{**WINDOWED, "sliding_window": tokens}) for tokens in (64, 128, None)],
        "architecture by override": [
            Setup({"hf_overrides": {"architectures": [name]}}, WINDOWED)
            for name in ("MistralForCausalLM", "Qwen3ForCausalLM")
        ],
        "recurrent": [model(**HYBRID, attention_multiplier=value) for value in (1.0, 2.0)],
        "recurrent dtype": [
            Setup({"mamba_ssm_cache_dtype": name}, HYBRID) for name in ("float32", "float16")
        ],
        "yarn": [model(rope_scaling={**YARN, "beta_fast": beta}) for beta in (16, 32)],
        "llama 3's rope": [
            model(
                rope_scaling={**YARN, "rope_type": "llama3", "low_freq_factor": low, "high_freq_factor": 4.0}
            )
            for low in (1.0, 2.0)
        ],
        "rope_parameters by override": [
            arguments(hf_overrides={"rope_parameters": {"rope_type": "default", "rope_theta": theta}})
            for theta in (1e4, 5e5)
        ],
    }


def _of_files() -> dict[str, list[Setup]]:
    """Files beside the weights, and which of them are read."""
    stale = {"stale.safetensors": "a", INDEX: json.dumps({"weight_map": {"a": "model.safetensors"}})}
    other = {**stale, INDEX: json.dumps({"weight_map": {"a": "stale.safetensors"}})}
    return {
        "consolidated": [
            Setup({"load_format": name}, files={"consolidated.safetensors": "a"})
            for name in ("auto", "hf", "mistral")
        ],
        "pickled": [
            Setup({"load_format": name}, files={"a.pt": "a", "a.bin": "b"}) for name in ("pt", "npcache")
        ],
        "streamed": [Setup({"load_format": name}, files=stale) for name in ("auto", "runai_streamer")],
        "index": [Setup(files=stale), Setup(files=other)],
        "quantization's file": [Setup(files={"quantize_config.json": text}) for text in ("{}", '{"a": 1}')],
        "code of the configuration": [
            Setup(
                {"trust_remote_code": True, "hf_config_path": "{folder}/other"},
                files={
                    "other/config.json": json.dumps(MODEL),
                    "other/configuration_mine.py": f"ROPE_THETA = {text}",
                },
            )
            for text in ("1e4", "1e6")
        ],
        "data of the model's code": [
            Setup({"trust_remote_code": True}, files={"table.txt": text}) for text in ("a", "b")
        ],
    }


def _of_formats_and_kernels() -> dict[str, list[Setup]]:
    return {
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
        "expert parallel": fields("parallel_config.enable_expert_parallel", False, True),
        "expert balance": fields("parallel_config.enable_eplb", False, True),
        "replicas of experts": [
            Setup(fields={"parallel_config.is_moe_model": True, "parallel_config.data_parallel_size": number})
            for number in (1, 2, 8)
        ],
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
    }


def _of_the_rest(rng: random.Random) -> dict[str, list[Setup]]:
    return {
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
        "passes in inductor's settings": fields(
            "compilation_config.inductor_compile_config",
            {},
            {"post_grad_custom_post_pass": "mine.a"},
            {"post_grad_custom_post_pass": "mine.b"},
        ),
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
        "fp32 by Triton": [environ(TRITON_F32_DEFAULT=value) for value in ("ieee", "tf32")],
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
    return {**_what_is_sized(rng), **_what_is_elsewhere(rng.randrange(1024, 60000))}


def _what_is_sized(rng: random.Random) -> dict[str, Setup]:
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
        **{
            f"load_format {name}": arguments(load_format=name)
            for name in ("hf", "safetensors", "fastsafetensors", "runai_streamer")
        },
        "threads that read": arguments(
            model_loader_extra_config={"enable_multithread_load": True, "num_threads": 4}
        ),
        "tqdm": arguments(use_tqdm_on_load=False),
        "tokenizer": Setup(fields={"model_config.tokenizer": "another"}),
        "tokenizer_mode": Setup(fields={"model_config.tokenizer_mode": "slow"}),
        "logprobs": arguments(max_logprobs=rng.randrange(5, 50), logprobs_mode="raw_logits"),
    }


def _what_is_elsewhere(port: int) -> dict[str, Setup]:
    return {
        "generation_config": arguments(generation_config="vllm"),
        "override_generation_config": arguments(override_generation_config={"temperature": port / 60000}),
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
        "data parallel size without experts": Setup(
            fields={"parallel_config.is_moe_model": False, "parallel_config.data_parallel_size": 4}
        ),
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
        "what Dynamo adds": arguments(
            additional_config={
                "consolidator_endpoints": (f"tcp://127.0.0.1:{port}", f"tcp://127.0.0.1:{port + 1}"),
                "dynamo_kv_event_block_size": 16,
            }
        ),
        "structured outputs": Setup(fields={"structured_outputs_config.backend": "guidance"}),
        "offload": Setup(fields={"offload_config.uva.cpu_offload_gb": 4.0}),
        "sleep mode": Setup(fields={"model_config.enable_sleep_mode": True}),
        "flash attention's splits": Setup(
            fields={"attention_config.flash_attn_max_num_splits_for_cuda_graph": 16}
        ),
        "shutdown_timeout": Setup(fields={"shutdown_timeout": port % 30}),
        "inductor": Setup(fields={"compilation_config.inductor_compile_config": {"max_autotune": True}}),
        "a tokenizer beside the weights": Setup(files={"spiece.model": f"words {port}"}),
        "a training's results": Setup(files={"all_results.json": f'{{"loss": {port}}}'}),
        "data that no code reads": Setup(files={"words.csv": f"{port}"}),
        "a note beside the weights": Setup(files={"README.md": f"words {port}"}),
    }
