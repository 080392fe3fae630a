"""Every field of TorchLlmArgs (1.1 to September 2026): in the key, or irrelevant, or of one process only.

The line between the two first is that of kvbm_vllm/config_tables.py: a field is in the key if it can change
which function of the tokens K and V are, or the formats of the numbers they are computed and stored in; not
if it changes at most the order in which the same numbers are added up. In doubt it is in the key.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from kvbm_core.identity.environment import WORDS_OF_LIBRARIES
from kvbm_core.identity.fields import ConfigTable, InKey, Irrelevant, Nested, Rule, ThisProcessOnly

READ_FORMATS = frozenset({"HF", "mistral", "mistral_large_3"})
"""Checkpoint formats whose loaders read what is in the model's folder, and nothing else."""


def _name(value: Any) -> str:
    """Of an enum or a text: 1.1 and later spell some of them differently."""
    return str(getattr(value, "name", value)).rpartition(".")[2].upper()


def _dump(value: Any) -> object:
    """All fields of a nested configuration: each of them is in the key."""
    if hasattr(value, "model_dump"):
        return [type(value).__name__, value.model_dump()]
    plain = value is None or isinstance(value, bool | int | float | str | dict | list | tuple)
    return value if plain else [type(value).__name__, dict(vars(value))]


def _format(value: Any) -> object:
    if value is not None and value not in READ_FORMATS:
        raise ValueError(f"the loader of checkpoint_format={value} may read from anywhere")
    return value


def _lowers_precision(value: Any) -> bool:
    return bool(value == "LOWPRECISION")


def _has_lora_dir(value: Any) -> bool:
    return bool(getattr(value, "lora_dir", None))


def _rules(
    irrelevant: dict[str, Iterable[str]], in_key: Iterable[str] = (), rules: dict[str, Rule] | None = None
) -> dict[str, Rule]:
    found: dict[str, Rule] = dict(rules or {})
    found.update((name, InKey(_dump)) for name in in_key)
    for reason, names in irrelevant.items():
        found.update((name, Irrelevant(reason)) for name in names)
    return found


SIZES = "how much there is room for, not what is in it"
SCHEDULING = "when a request runs, and with which others"
OUTPUT = "what becomes of logits and tokens"
TOKENS = "tokens are in the key themselves"
REPORTS = "measurements and logs"
PROCESSES = "how processes are started and find each other"
KERNELS = "which kernel computes the same"
FOLDER = "what is in the model's folder is in the weights' stamp"
IN_LAYOUT = "the layout of the memory is in the key"
OTHERS_CACHE = "another cache's reuse, not what is computed"
MAMBA = "models with recurrent states are refused with connectors"

KV_CACHE = ConfigTable(
    "KvCacheConfig",
    _rules(
        {
            SIZES: [
                "max_tokens",
                "free_gpu_memory_fraction",
                "host_cache_size",
                "disk_cache_size",
                "disk_cache_path",
                "cross_kv_cache_fraction",
                "max_gpu_total_bytes",
                "use_uvm",
                "pool_ratio",
                "avg_seq_len",
                "max_util_for_resume",
                "enable_kv_pool_rebalance",
            ],
            OTHERS_CACHE: [
                "enable_block_reuse",
                "enable_partial_reuse",
                "copy_on_partial_reuse",
                "onboard_blocks",
                "secondary_offload_min_priority",
                "disk_prefetch_num_reqs",
                "block_reuse_policy",
            ],
            REPORTS: [
                "event_buffer_max_size",
                "attention_dp_events_gather_period_ms",
                "iteration_stats_interval",
                "kv_cache_event_hash_algo",
            ],
            IN_LAYOUT: ["use_kv_cache_manager_v2"],
            "refused at the start": ["enable_swa_scratch_reuse"],
            MAMBA: [
                "mamba_ssm_cache_dtype",
                "mamba_ssm_stochastic_rounding",
                "mamba_ssm_philox_rounds",
                "mamba_state_cache_interval",
            ],
        },
        ["dtype", "max_attention_window", "sink_token_length", "tokens_per_block"],
    ),
)
QUANTIZATION = ConfigTable(
    "QuantConfig",
    _rules(
        {MAMBA: ["mamba_ssm_cache_dtype", "mamba_ssm_stochastic_rounding", "mamba_ssm_philox_rounds"]},
        [
            "quant_algo",
            "kv_cache_quant_algo",
            "group_size",
            "smoothquant_val",
            "clamp_val",
            "use_meta_recipe",
            "has_zero_point",
            "pre_quant_scale",
            "exclude_modules",
        ],
    ),
)
MX = ConfigTable(
    "ModelExpressConfig",
    _rules(
        {PROCESSES: ["server_query_timeout_s", "preshard_strategy"]},
        rules={"server_url": ThisProcessOnly("weights come from another server's memory")},
    ),
)
MULTIMODAL = "requests with images are not cached"
TORCH_LLM_ARGS = ConfigTable(
    "TorchLlmArgs",
    _rules(
        {
            FOLDER: ["model", "revision"],
            TOKENS: [
                "tokenizer",
                "tokenizer_mode",
                "custom_tokenizer",
                "skip_tokenizer_init",
                "tokenizer_revision",
                "postprocess_tokenizer_dir",
            ],
            OUTPUT: [
                "post_processor_hook",
                "guided_decoding_backend",
                "batched_logits_processor",
                "gather_generation_logits",
                "num_postprocess_workers",
                "reasoning_parser",
                "sampler_type",
                "sampler_force_async_worker",
                "enable_speculative_beam_history_d2h",
                "enable_early_first_token_response",
                "stream_interval",
                "disable_flashinfer_sampling",
                "max_beam_width",
                "enable_lm_head_tp_in_adp",
                "decoding_config",
            ],
            SCHEDULING: [
                "enable_chunked_prefill",
                "scheduler_config",
                "attention_dp_config",
                "disable_overlap_scheduler",
                "batch_wait_timeout_ms",
                "batch_wait_timeout_iters",
                "batch_wait_max_tokens_ratio",
                "reorder_policy_config",
                "enable_resource_governor",
                "fail_fast_on_attention_window_too_large",
            ],
            SIZES: [
                "max_batch_size",
                "max_input_len",
                "max_num_tokens",
                "peft_cache_config",
                "enable_lora",
                "encoder_max_batch_size",
                "encoder_max_num_tokens",
                "max_stats_len",
                "build_config",
            ],
            REPORTS: [
                "iter_stats_max_iterations",
                "request_stats_max_iterations",
                "otlp_traces_endpoint",
                "return_perf_metrics",
                "perf_metrics_max_requests",
                "prometheus_metrics_config",
                "enable_energy_metrics",
                "telemetry_config",
                "enable_iter_perf_stats",
                "enable_iter_req_stats",
                "print_iter_log",
                "enable_layerwise_nvtx_marker",
                "layer_wise_benchmarks_config",
            ],
            PROCESSES: [
                "gpus_per_node",
                "mpi_session",
                "orchestrator_type",
                "backend",
                "ray_placement_config",
                "ray_worker_nsight_options",
                "garbage_collection_gen0_threshold",
                "cache_transceiver_config",
                "kv_connector_config",
            ],
            KERNELS: [
                "cuda_graph_config",
                "nvfp4_gemm_config",
                "enable_autotuner",
                "use_cute_dsl_blockscaling_mm",
                "use_cute_dsl_blockscaling_bmm",
                "use_cute_dsl_bf16_bmm",
                "use_cute_dsl_bf16_gemm",
                "enable_low_latency_host_dispatch",
                "dwdp_config",
            ],
            MULTIMODAL: ["multimodal_config"],
            "read when load_format is GMS": ["gms_config"],
        },
        [
            "trust_remote_code",
            "tensor_parallel_size",
            "dtype",
            "model_kwargs",
            "pipeline_parallel_size",
            "context_parallel_size",
            "moe_cluster_parallel_size",
            "moe_tensor_parallel_size",
            "moe_expert_parallel_size",
            "enable_attention_dp",
            "pp_partition",
            "cp_config",
            "sparse_attention_config",
            "kv_cache_compression_config",
            "speculative_config",
            "max_seq_len",
            "env_overrides",
            "moe_config",
            "attn_backend",
            "torch_compile_config",
            "enable_min_latency",
            "force_dynamic_quantization",
            "mm_encoder_only",
            "encode_only",
        ],
        {
            "kv_cache_config": Nested((KV_CACHE,)),
            # What else is in it is about requests with a LoRA, whose blocks keep to this process in any case.
            "lora_config": ThisProcessOnly(
                "lora_dir's embeddings replace the model's, and may change", _has_lora_dir
            ),
            "mx_config": Nested((MX,)),
            "allreduce_strategy": InKey(_lowers_precision),
            "checkpoint_format": InKey(_format),
            "load_format": ThisProcessOnly(
                "the weights are not those of the model's folder", lambda value: _name(value) != "AUTO"
            ),
            "checkpoint_loader": ThisProcessOnly(
                "a loader of the user's own", lambda value: value is not None
            ),
            "enable_sleep": ThisProcessOnly("weights may be others after a wake-up"),
            "sleep_config": ThisProcessOnly(
                "weights may be others after a wake-up", lambda value: value is not None
            ),
            "ray_worker_extension_cls": ThisProcessOnly("an extension of the worker may change weights"),
        },
    ),
)
TABLES = (TORCH_LLM_ARGS, KV_CACHE, QUANTIZATION, MX)

# ---------------------------------------------------------------- the environment

ENVIRONMENT = re.compile(
    r"T(RT)?LLM_\w+|OVERRIDE_QUANT_ALGO|FORCE_LOW_PRECISION_ALL_REDUCE_STRATEGY|ENABLE_CONFIGURABLE_MOE"
    r"|ENABLE_PERFECT_ROUTER"
)
"""Variables that may change what TensorRT-LLM computes."""

ENVIRONMENT_WORDS = (
    "Every variable that is set and begins with `TRTLLM_` or `TLLM_` is in the name with its text, and so\n"
    "are `OVERRIDE_QUANT_ALGO`, `FORCE_LOW_PRECISION_ALL_REDUCE_STRATEGY`, `ENABLE_CONFIGURABLE_MOE` and\n"
    "`ENABLE_PERFECT_ROUTER`.\n"
    f"{WORDS_OF_LIBRARIES}\n"
    "Not those that Kubernetes sets for a Service (`TRTLLM_..._SERVICE_HOST`, `TRTLLM_..._PORT_8000_TCP`),\n"
    "and not these (`*` stands for any end):"
)

IRRELEVANT_ENVIRONMENT: dict[str, str] = {
    **dict.fromkeys(
        (
            "TLLM_LOG_FIRST_RANK_ONLY",
            "TLLM_LOG_LEVEL",
            "TLLM_LOG_LEVEL_BY_MODULE",
            "TLLM_NVTX_DEBUG",
            "TLLM_LLM_ENABLE_DEBUG",
            "TLLM_LLM_ENABLE_TRACER",
            "TLLM_PROFILE_RECORD_GC",
            "TLLM_PROFILE_START_STOP",
            "TLLM_TORCH_PROFILE_TRACE",
            "TLLM_TRACE_*",
            "TRTLLM_KVCACHE_TIME_OUTPUT_PATH",
            "TRTLLM_PRINT_*",
            "TRTLLM_WORKER_PRINT_STACKS_PERIOD",
        ),
        REPORTS,
    ),
    **dict.fromkeys(
        (
            "TLLM_DISABLE_MPI",
            "TLLM_LLMAPI_ZMQ_*",
            "TLLM_NUMA_AWARE_WORKER_AFFINITY",
            "TLLM_SPAWN_PROXY_PROCESS",
            "TLLM_SPAWN_PROXY_PROCESS_IPC_ADDR",
            "TLLM_SPAWN_PROXY_PROCESS_IPC_HMAC_KEY",
            "TLLM_WORKER_USE_SINGLE_PROCESS",
            "TRTLLM_RAY_*",
            "TRTLLM_SERVER_DISABLE_GC",
            "TRTLLM_WORKER_DISABLE_GC",
        ),
        PROCESSES,
    ),
    **dict.fromkeys(
        (
            "TRTLLM_KVCACHE_*",
            "TRTLLM_MOONCAKE_*",
            "TRTLLM_NIXL_*",
            "TRTLLM_UCX_INTERFACE",
            "TRTLLM_USE_*_KVCACHE",
        ),
        "how blocks reach other engines",
    ),
    **dict.fromkeys(("TLLM_ALLOW_LONG_MAX_MODEL_LEN", "TLLM_BENCHMARK_REQ_QUEUES_SIZE"), SIZES),
    **dict.fromkeys(("TLLM_INCREMENTAL_DETOKENIZATION_BACKEND", "TLLM_STREAM_INTERVAL_THRESHOLD"), OUTPUT),
    "TLLM_AUTOTUNER_CACHE_PATH": KERNELS,
    "TRTLLM_ENABLE_PDL": "when a kernel begins",
}
"""Those of them that do not -> why. Any other that is set is in the key with its text."""

PROCESS_ONLY_ENVIRONMENT = {"ENABLE_PERFECT_ROUTER": "experts are not those that the model chooses"}
"""Those that, if set to anything but "0" or "false", mean nothing in another process -> why."""
