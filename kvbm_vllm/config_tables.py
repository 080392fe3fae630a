"""Every field of vLLM's configuration (0.26 to 0.33): in the key, or irrelevant, or of one process only.

The line between the two first: a field is in the key if it can change which function of the tokens K and V
are, or the formats of the numbers they are computed and stored in. It is irrelevant if it changes at most the
order in which the same numbers are added up (kernels' tiles, batches, graphs, overlap): vLLM's own prefix
cache mixes those too. In doubt a field that hardly anybody changes between two starts is in the key.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvbm_core.identity.effective import effective_config, file_digest
from kvbm_core.identity.environment import WORDS_OF_LIBRARIES, content_of_file
from kvbm_core.identity.fields import (
    MAX_DEPTH,
    ConfigTable,
    InKey,
    Irrelevant,
    Nested,
    Rule,
    ThisProcessOnly,
    UnstableValueError,
)
from kvbm_core.identity.fields import canonical as text_of

if TYPE_CHECKING:
    from vllm.config import LoadConfig, ModelConfig, MultiModalConfig, ParallelConfig

ROPE_OF_ANY_LENGTH = frozenset(
    {
        "default",
        "deepseek_llama_scaling",
        "deepseek_yarn",
        "dynamic",
        "linear",
        "llama3",
        "mllama4",
        "mrope",
        "ntk",
        "proportional",
        "yarn",
    }
)
"""Kinds of rotary embedding whose angles do not depend on max_model_len. "longrope" has two sets of factors,
and max_model_len chooses (phi3_long_rope_scaled_rope.py); of others nothing is known.
"""
READS_MAX_MODEL_LEN = ("llama4",)
"""Model types that scale the queries if max_model_len is above a limit (llama4.py)."""
SEEN_LOAD_FORMATS = frozenset(
    {
        "auto",
        "bitsandbytes",
        "fastsafetensors",
        "gguf",
        "hf",
        "instanttensor",
        "mistral",
        "npcache",
        "pt",
        "runai_streamer",
        "runai_streamer_sharded",
        "safetensors",
        "sharded_state",
    }
)
"""Load formats that read what is in the model's folder, and nothing else: the weights' stamp sees it."""
READING_SETTINGS = frozenset(
    {
        "concurrency",
        "distributed",
        "enable_multithread_load",
        "enable_weights_track",
        "memory_limit",
        "num_threads",
    }
)
"""Of ``model_loader_extra_config``: how fast files are read, and by whom."""
ADDED_BY_DYNAMO = frozenset({"benchmark", "consolidator_endpoints", "dynamo_kv_event_block_size"})
"""Of additional_config: addresses, and what Dynamo's own scheduler and router read."""

# Reasons that many fields share.
ELSEWHERE = "where the engine runs and listens"
ROUNDING = "changes at most the order of the same additions"
CAPACITY = "how much is computed or kept at a time"
OUTPUT = "what is made of the model's output"
ROWS = "what is made of every token; kvbm does not start, or vLLM takes no hit, where a hit would lack it"
OBSERVED = "what is logged, measured or traced"
MOVED = "where weights lie and how they get there"
FROM_OTHERS = "derived from fields that are in the key"
INPUT = "how requests become tokens; the tokens are in the key"
IN_LAYOUT = "in the layout's fingerprint"
REMOTE = "blocks of other engines and processes are not ours to name"


def _irrelevant(reason: str, names: str) -> dict[str, Rule]:
    return dict.fromkeys(names.split(), Irrelevant(reason))


def _in_key(names: str) -> dict[str, Rule]:
    return dict.fromkeys(names.split(), InKey())


def _variables(reason: str, names: str) -> dict[str, str]:
    return {f"VLLM_{name}": reason for name in names.split()}


# ---------------------------------------------------------------- what counts of a value


def length_that_counts(model_config: ModelConfig) -> object:
    """max_model_len if K or V may depend on it, else None."""
    config = model_config.hf_text_config
    kinds = set(
        _rope_kinds(getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None))
    )
    model_types = {str(getattr(of, "model_type", "")) for of in (config, model_config.hf_config)}
    reads = any(name.startswith(READS_MAX_MODEL_LEN) for name in model_types)
    return model_config.max_model_len if reads or kinds - ROPE_OF_ANY_LENGTH else None


def length_is_fitted(model_config: ModelConfig) -> bool:
    """Whether it counts, and vLLM lowers it to what fits into memory, after the model was built with another
    one (``--max-model-len auto``): which one that was, nothing says any more.
    """
    original = getattr(model_config, "original_max_model_len", None)
    return original == -1 and length_that_counts(model_config) is not None


def _rope_kinds(rope: Any) -> list[str]:
    """Of one set of parameters, or of one for each kind of layer."""
    if not isinstance(rope, Mapping):
        return []
    below = [kind for value in rope.values() for kind in _rope_kinds(value)]
    kind = rope.get("rope_type", rope.get("type"))
    return [*below, str(kind)] if kind is not None else below


def reads_tokenizer(model_config: ModelConfig) -> bool:
    """Whether K and V depend on the tokenizer's files: Engram's table of n-grams is made from its words
    (deepseek_v41).
    """
    configs = (model_config.hf_text_config, model_config.hf_config)
    return any(getattr(config, "engram_layer_ids", None) for config in configs)


def replicas_that_count(parallel_config: ParallelConfig) -> object:
    """data_parallel_size of a model with experts: some kernels for them refuse it, and others with other
    formats take their place. None of one that is known to have none.
    """
    return None if parallel_config.is_moe_model is False else parallel_config.data_parallel_size


def temperature_tuning(model_config: ModelConfig) -> object:
    """What the generation configuration says of attn_temperature_tuning: Llama 4 scales its queries by it."""
    if not str(getattr(model_config.hf_text_config, "model_type", "")).startswith(READS_MAX_MODEL_LEN):
        return None
    settings = {**model_config.try_get_generation_config(), **model_config.override_generation_config}
    return settings.get("attn_temperature_tuning")


def overrides(value: Any) -> object:
    """What hf_overrides says of quantization; all else that it does is in the effective configuration."""
    found = value if isinstance(value, Mapping) else {}
    return file_digest(found.get("quantization_config_file")), found.get("quantization_config_dict_json")


def quantization_object(value: Any) -> object:
    """vLLM's quantization object: its class and attributes. UnstableValueError if one of them has no text."""
    return None if value is None else _with_attributes(value, 0)


def _with_attributes(value: Any, depth: int) -> object:
    found: dict[str, object] = {}
    for name, item in vars(value).items():
        try:
            found[name] = text_of(item)
        except UnstableValueError:
            if depth == MAX_DEPTH or callable(item) or not hasattr(item, "__dict__"):
                raise
            found[name] = _with_attributes(item, depth + 1)
    return (f"{type(value).__module__}.{type(value).__qualname__}", found)


def additional(value: Any) -> object:
    """A dictionary without what Dynamo puts there; an object of a platform's plugin as the hash that it makes
    of itself.
    """
    if value is None or isinstance(value, Mapping):
        return {key: item for key, item in (value or {}).items() if key not in ADDED_BY_DYNAMO}
    return value.compute_hash()


def _has_dynamic_vit_scales(config: MultiModalConfig) -> bool:
    return config.mm_encoder_attn_dtype == "fp8" and config.mm_encoder_fp8_scale_path is None


def _compiler_of_the_user(value: Any) -> object:
    return value if "." in str(value) else None


def load_format_of(load: LoadConfig) -> str:
    """Of an enum or a text."""
    return str(getattr(load.load_format, "value", load.load_format))


def _loads_elsewhere(load: LoadConfig) -> bool:
    return load_format_of(load) not in SEEN_LOAD_FORMATS


def _without_reading(value: Any) -> object:
    if isinstance(value, Mapping):
        return {key: item for key, item in value.items() if key not in READING_SETTINGS}
    return value


def _passes_of_the_user(value: Any) -> object:
    """Of inductor's settings those that name code which changes what is compiled."""
    return {key: item for key, item in (value or {}).items() if "pass" in key or "custom" in key}


def _names_a_place(value: Any) -> bool:
    """Whether a string in it is a path or a URI; also in an object in place of the dictionary."""
    items = value.values() if isinstance(value, Mapping) else vars(value).values()
    return any("/" in str(item) for item in items if isinstance(item, str | Path))


# ---------------------------------------------------------------- model

MULTIMODAL = ConfigTable(
    "MultiModalConfig",
    {
        **_in_key(
            "enable_mm_embeds language_model_only media_io_kwargs mm_device_do_normalize"
            " mm_encoder_attn_backend mm_encoder_only mm_processor_kwargs video_pruning_method"
            " video_pruning_rate"
        ),
        "mm_encoder_attn_dtype": ThisProcessOnly(
            "the encoder's scales come from the images seen so far",
            applies=_has_dynamic_vit_scales,
            otherwise=InKey(),
            whole=True,
        ),
        "mm_encoder_fp8_scale_path": InKey(file_digest, "the file's content"),
        **_irrelevant(
            "how items are named: see the names of multimodal items",
            "mm_hasher_algorithm mm_processor_cache_gb",
        ),
        **_irrelevant(
            CAPACITY,
            "limit_per_prompt mm_encoder_tp_mode mm_ipc_gpu_memory_gb mm_processor_cache_type"
            " mm_shm_cache_max_object_size_mb mm_tensor_ipc skip_mm_profiling",
        ),
        **_irrelevant(INPUT, "allow_missing_mm_embeddings interleave_mm_strings"),
        **_irrelevant(OUTPUT, "mm_encoder_fp8_scale_save_margin mm_encoder_fp8_scale_save_path"),
    },
)

MODEL = ConfigTable(
    "ModelConfig",
    {
        "hf_config": InKey(effective_config, "as vLLM computes with it, after all overrides"),
        "hf_text_config": InKey(effective_config, "as vLLM computes with it, after all overrides"),
        "hf_overrides": InKey(overrides, "a quantization's file; the rest is in hf_config"),
        "max_model_len": ThisProcessOnly(
            "it is fitted to the memory, and the rope or the model depends on it",
            applies=length_is_fitted,
            otherwise=InKey(length_that_counts, "if the rope or the model depends on it", whole=True),
            whole=True,
        ),
        "generation_config": InKey(temperature_tuning, "attn_temperature_tuning of Llama 4", whole=True),
        "override_generation_config": InKey(
            temperature_tuning, "attn_temperature_tuning of Llama 4", whole=True
        ),
        "multimodal_config": Nested((MULTIMODAL,)),
        **_in_key(
            "code_revision config_format convert disable_sliding_window dtype enable_prompt_embeds"
            " is_submodel_config model_class_overrides model_impl override_attention_dtype quantization"
            " quantization_config runner trust_remote_code word_embeddings_untied_by_checkpoint"
        ),
        **_irrelevant("the stamp of the weights' content says more", "model model_weights revision"),
        **_irrelevant("its effect is in hf_config, and its code in the weights' stamp", "hf_config_path"),
        "tokenizer": ThisProcessOnly(
            "the model computes with the tokenizer's words (Engram)",
            applies=reads_tokenizer,
            otherwise=Irrelevant(INPUT),
            whole=True,
        ),
        **_irrelevant(
            INPUT,
            "allowed_local_media_path allowed_media_domains io_processor_plugin renderer_num_workers"
            " skip_tokenizer_init tokenizer_mode tokenizer_revision",
        ),
        **_irrelevant(
            OUTPUT,
            "enable_trace_replay logits_processors logprobs_mode max_logprobs return_sampling_mask"
            " use_fp64_gumbel",
        ),
        **_irrelevant(ROWS, "enable_return_routed_experts pooler_config"),
        **_irrelevant("of sampling; made-up weights and stochastic rounding are marked themselves", "seed"),
        **_irrelevant(ROUNDING, "disable_cascade_attn enforce_eager"),
        **_irrelevant(
            MOVED,
            "enable_cumem_allocator enable_nccl_comm_suspend enable_sleep_mode sleep_mode_backend"
            " sleep_mode_offload_cudagraph sleep_preserve_parameter_names",
        ),
        **_irrelevant(ELSEWHERE, "hf_token served_model_name"),
        **_irrelevant("lets quantization through or not", "allow_deprecated_quantization"),
        **_irrelevant(CAPACITY, "spec_target_max_model_len"),
    },
)

LOAD = ConfigTable(
    "LoadConfig",
    {
        "load_format": ThisProcessOnly(
            "weights that are made up, or come from where they cannot be looked at",
            applies=_loads_elsewhere,
            whole=True,
            otherwise=Irrelevant("which files are read is in the weights' stamp"),
        ),
        "model_loader_extra_config": ThisProcessOnly(
            "it names a place outside the model's folder",
            applies=_names_a_place,
            otherwise=InKey(_without_reading, "without how fast is read"),
        ),
        **_in_key("ignore_patterns"),
        "safetensors_load_strategy": InKey(lambda value: value == "torchao", "whether torchao"),
        **_irrelevant(
            MOVED,
            "device download_dir pt_load_map_location safetensors_prefetch_block_size"
            " safetensors_prefetch_num_threads use_tqdm_on_load",
        ),
    },
)

LORA = ConfigTable(
    "LoRAConfig",
    {
        **_in_key(
            "default_mm_loras enable_mixed_moe_lora_format enable_moe_shared_loras"
            " enable_tower_connector_lora lora_dtype target_modules"
        ),
        **_irrelevant(CAPACITY, "max_cpu_loras max_lora_rank max_loras"),
        **_irrelevant(OUTPUT, "max_lora_cls_labels"),
        **_irrelevant(ROUNDING, "fully_sharded_loras specialize_active_lora"),
    },
)

# ---------------------------------------------------------------- cache, attention, kernels

CACHE = ConfigTable(
    "CacheConfig",
    {
        "calculate_kv_scales": ThisProcessOnly("the scales come from the first tokens that were seen"),
        **_in_key(
            "cache_dtype enable_mamba_fine_grained_prefix_cache enable_mamba_shared_prefix_checkpoint"
            " is_attention_free kv_cache_dtype_skip_layers kv_cache_layout kv_sharing_fast_prefill"
            " mamba_cache_dtype mamba_cache_mode mamba_ssm_cache_dtype replayssm_buffer_len sliding_window"
            " swa_bounded_replay use_kda_recoverssm use_replayssm"
        ),
        **_irrelevant(
            IN_LAYOUT,
            "_block_size_resolved block_size effective_attention_block_size mamba_block_size"
            " mamba_page_size_padded skip_page_size_padded user_specified_block_size"
            " user_specified_mamba_block_size",
        ),
        **_irrelevant(
            CAPACITY,
            "gpu_memory_utilization kv_cache_max_concurrency kv_cache_memory_bytes kv_cache_size_tokens"
            " kv_offloading_backend kv_offloading_size num_cpu_blocks num_gpu_blocks num_gpu_blocks_override"
            " simple_cpu_offload_num_blocks",
        ),
        **_irrelevant(
            "what vLLM's own prefix cache keeps and how it names it",
            "cache_hit_alignment_tokens enable_prefix_caching hash_block_size prefix_cache_retention_interval"
            " prefix_caching_hash_algo prefix_match_unit",
        ),
    },
)

ATTENTION = ConfigTable(
    "AttentionConfig",
    {
        **_in_key(
            "backend backend_per_kind disable_flashinfer_q_quantization indexer_kv_dtype"
            " indexer_sparse_logits mla_prefill_backend sparse_mla_force_mqa trtllm_ragged_backend"
            " use_fp4_indexer_cache use_non_causal use_prefill_query_quantization use_trtllm_attention"
        ),
        **_irrelevant(
            ROUNDING,
            "flash_attn_max_num_splits_for_cuda_graph flash_attn_version flex_attn_block_m flex_attn_block_n"
            " flex_attn_kv_block_size flex_attn_q_block_size indexer_tp_shard_min_rows minimax_m3_indexer_cp"
            " minimax_m3_msa_decode_backend tokenspeed_mla_min_split_kv tq_max_kv_splits_for_cuda_graph"
            " use_prefill_decode_attention",
        ),
        **_irrelevant(CAPACITY, "hisparse_config sparse_mla_prefill_workspace_factor"),
    },
)

MAMBA = ConfigTable(
    "MambaConfig",
    {
        "enable_stochastic_rounding": InKey(),
        **_in_key("backend ssu_algorithm stochastic_rounding_philox_rounds"),
    },
)

KERNEL = ConfigTable(
    "KernelConfig",
    {
        **_in_key("linear_backend linear_backend_per_quant moe_backend monokernel"),
        **_irrelevant(
            ROUNDING,
            "enable_bf16x3_router_gemm enable_cutedsl_warmup enable_flashinfer_autotune enable_jit_warmup"
            " enable_rocm_segmented_attn_autotune ir_op_priority sparse_indexer_topk_backend",
        ),
    },
)

COMPILATION = ConfigTable(
    "CompilationConfig",
    {
        "backend": InKey(_compiler_of_the_user, "a compiler named by its module"),
        "inductor_passes": InKey(),
        "inductor_compile_config": InKey(_passes_of_the_user, "passes of the user's own"),
        **_irrelevant(
            ROUNDING,
            "compile_cache_save_format compile_mm_encoder compile_ranges_endpoints compile_sizes"
            " cudagraph_capture_sizes cudagraph_copy_inputs cudagraph_decoder_replay cudagraph_mm_encoder"
            " cudagraph_mode cudagraph_num_of_warmups cudagraph_specialize_lora custom_ops"
            " decoder_replay_cudagraph_capture_sizes decoder_replay_trim_threshold disabled_custom_ops"
            " dynamic_shapes_config enabled_custom_ops encoder_cudagraph_max_frames_per_batch"
            " encoder_cudagraph_max_vision_items_per_batch encoder_cudagraph_token_budgets"
            " fast_moe_cold_start ir_enable_torch_wrap max_cudagraph_capture_size"
            " mode pass_config splitting_ops static_all_moe_layers static_forward_context"
            " use_inductor_graph_partition",
        ),
        **_irrelevant(
            OBSERVED,
            "cache_dir compilation_time debug_dump_path encoder_compilation_time"
            " local_cache_dir traced_files",
        ),
    },
)

# ---------------------------------------------------------------- parallel, speculative

PARALLEL = ConfigTable(
    "ParallelConfig",
    {
        # Kernels for experts refuse some of these, and others with other formats take their place.
        **_in_key("all2all_backend enable_eplb enable_expert_parallel is_moe_model"),
        "data_parallel_size": InKey(replicas_that_count, "if the model has experts", whole=True),
        **_in_key(
            "cp_kv_cache_interleave_size dcp_kv_cache_interleave_size"
            " decode_context_parallel_size pipeline_parallel_size prefill_context_parallel_size"
            " tensor_parallel_size worker_cls worker_extension_cls"
        ),
        **_irrelevant(
            ELSEWHERE,
            "_api_process_count _api_process_rank _coord_store_port _data_parallel_master_port_list"
            " assigned_physical_gpu_ids cpu_distributed_timeout_seconds data_parallel_backend"
            " data_parallel_external_lb data_parallel_hybrid_lb data_parallel_index data_parallel_master_ip"
            " data_parallel_master_port data_parallel_rank data_parallel_rank_local data_parallel_rpc_port"
            " data_parallel_size_local distributed_executor_backend"
            " distributed_timeout_seconds dp_sync_interval elastic_ep_max_dp_size enable_elastic_ep"
            " enable_fault_tolerance enable_shm_tensor_arena fault_tolerance_config master_addr master_port"
            " nnodes node_rank numa_bind numa_bind_cpus numa_bind_nodes placement_group rank"
            " ray_runtime_env ray_workers_use_nsight sd_worker_cls world_size",
        ),
        **_irrelevant(
            ROUNDING,
            "dbo_decode_token_threshold dbo_prefill_token_threshold dcp_comm_backend dcp_q_replicate"
            " disable_custom_all_reduce disable_nccl_for_dp_synchronization enable_batch_sharded_sampling"
            " enable_dbo enable_ep_weight_filter enable_hc_sp eplb_config"
            " expert_placement_strategy ubatch_size",
        ),
        **_irrelevant(MOVED, "max_parallel_loading_workers"),
        **_irrelevant(FROM_OTHERS, "_allow_auto_resolve_cp_interleave_size"),
    },
)

SPECULATIVE = ConfigTable(
    "SpeculativeConfig",
    {
        "draft_model_config": Nested((MODEL,)),
        "draft_load_config": Nested((LOAD,)),
        **_in_key(
            "attention_backend code_revision draft_tensor_parallel_size index_share_for_mtp_iteration"
            " kv_cache_dtype method moe_backend num_speculative_tokens parallel_drafting quantization"
        ),
        "use_heterogeneous_vocab": ThisProcessOnly("the draft's tokens are found by both tokenizers' words"),
        **_irrelevant("the stamp of the draft's weights says more", "model revision"),
        **_irrelevant(
            "which drafts are tried and kept; K and V are those of the tokens kept",
            "disable_eagle_block_drop disable_lookahead_block_hashes disable_padded_drafter_batch"
            " draft_lm_head_quantization draft_sample_method dspark_draft_topk enable_adaptive_verification"
            " fly_entropy_threshold fly_entropy_top_k fly_window_size max_model_len"
            " num_speculative_tokens_per_batch_size prompt_lookup_max prompt_lookup_min"
            " rejection_sample_method suffix_decoding_max_cached_requests suffix_decoding_max_spec_factor"
            " suffix_decoding_max_tree_depth suffix_decoding_min_token_prob synthetic_acceptance_length"
            " synthetic_acceptance_rates use_local_argmax_reduction xpress_topc",
        ),
        **_irrelevant(ROUNDING, "enforce_eager"),
        **_irrelevant(FROM_OTHERS, "draft_parallel_config target_model_config target_parallel_config"),
        **_irrelevant("only to tell of a misspelled setting", "tensor_parallel_size"),
    },
)

# ---------------------------------------------------------------- the rest

SCHEDULER = ConfigTable(
    "SchedulerConfig",
    {
        **_in_key("disable_hybrid_kv_cache_manager is_multimodal_model runner_type"),
        **_irrelevant(
            CAPACITY,
            "async_scheduling disable_chunked_mm_input enable_chunked_prefill encoder_cache_size"
            " long_prefill_token_threshold long_prefill_token_threshold_adaptive max_long_partial_prefills"
            " max_num_active_seqs max_num_batched_tokens max_num_encoder_input_tokens"
            " max_num_partial_prefills max_num_queued_reqs max_num_queued_tokens max_num_scheduled_tokens"
            " max_num_seqs policy prefill_schedule_interval scheduler_cls scheduler_reserve_full_isl"
            " stream_interval watermark",
        ),
    },
)

DEVICE = ConfigTable("DeviceConfig", {**_in_key("device_type"), **_irrelevant(ELSEWHERE, "device")})

VLLM = ConfigTable(
    "VllmConfig",
    {
        "model_config": Nested((MODEL,)),
        "cache_config": Nested((CACHE,)),
        "parallel_config": Nested((PARALLEL,)),
        "scheduler_config": Nested((SCHEDULER,)),
        "device_config": Nested((DEVICE,)),
        "load_config": Nested((LOAD,)),
        "attention_config": Nested((ATTENTION,)),
        "mamba_config": Nested((MAMBA,)),
        "kernel_config": Nested((KERNEL,)),
        "lora_config": Nested((LORA,)),
        "speculative_config": Nested((SPECULATIVE,)),
        "compilation_config": Nested((COMPILATION,)),
        "quant_config": InKey(quantization_object, "its class and attributes"),
        "additional_config": InKey(additional, "without Dynamo's; of an object the hash that it makes"),
        "diffusion_config": InKey(),
        "weight_transfer_config": ThisProcessOnly(
            "a trainer sends the weights", applies=lambda value: value is not None
        ),
        **_irrelevant(MOVED, "engram_config offload_config"),
        **_irrelevant(OUTPUT, "reasoning_config structured_outputs_config watermark_config"),
        **_irrelevant(ROWS, "aux_output_config"),
        **_irrelevant(OBSERVED, "logging_config observability_config profiler_config watchdog_config"),
        **_irrelevant(REMOTE, "ec_transfer_config kv_events_config kv_transfer_config"),
        **_irrelevant(ELSEWHERE, "instance_id shutdown_timeout"),
        **_irrelevant(CAPACITY, "ec_manager_config"),
        **_irrelevant("sets fields that are classified themselves", "optimization_level performance_mode"),
    },
)

TABLES = (
    VLLM,
    MODEL,
    MULTIMODAL,
    CACHE,
    LOAD,
    LORA,
    PARALLEL,
    ATTENTION,
    MAMBA,
    KERNEL,
    COMPILATION,
    SPECULATIVE,
    SCHEDULER,
    DEVICE,
)

# ---------------------------------------------------------------- the environment

ENVIRONMENT = re.compile(r"VLLM_\w+|[QKV]_SCALE_CONSTANT|USE_FLAGOS")
"""Variables that may change what vLLM computes."""

ENVIRONMENT_WORDS = (
    "Every variable that is set and begins with `VLLM_` is in the name with its text, and so are\n"
    "`Q_SCALE_CONSTANT`, `K_SCALE_CONSTANT`, `V_SCALE_CONSTANT` and `USE_FLAGOS`. So is the content of a\n"
    "file that `VLLM_HUMMING_ONLINE_QUANT_CONFIG` or `VLLM_HUMMING_INPUT_QUANT_CONFIG` names; if it cannot\n"
    "be read, blocks are of this process only.\n"
    f"{WORDS_OF_LIBRARIES}\n"
    "Not those that Kubernetes sets for a Service (`VLLM_..._SERVICE_HOST`, `VLLM_..._PORT_8000_TCP`), and\n"
    "not these:"
)

IRRELEVANT_ENVIRONMENT: dict[str, str] = {
    **_variables(
        ELSEWHERE,
        "API_KEY DISABLE_REQUEST_ID_RANDOMIZATION DISTRIBUTED_USE_SPLIT_GROUP DIST_IDENT DP_MASTER_IP "
        "DP_MASTER_PORT DP_RANK DP_RANK_LOCAL DP_SIZE EC_SIDE_CHANNEL_HOST EC_SIDE_CHANNEL_PORT "
        "ELASTIC_EP_DRAIN_REQUESTS ELASTIC_EP_SCALE_UP_LAUNCH ENABLE_V1_MULTIPROCESSING "
        "ENGINE_ITERATION_TIMEOUT_S ENGINE_READY_TIMEOUT_S EXECUTE_MODEL_TIMEOUT_SECONDS "
        "GPU_NIC_PCIE_MAPPING HOST_IP HTTP_TIMEOUT_KEEP_ALIVE KEEP_ALIVE_ON_ENGINE_DEATH LOOPBACK_IP "
        "MOONCAKE_ABORT_REQUEST_TIMEOUT MOONCAKE_BOOTSTRAP_PORT MOONCAKE_CONNECTOR_TIMEOUT "
        "MOONCAKE_DISK_STAGING_USABLE_RATIO MOONCAKE_LOAD_RECV_THREADS NIC_SELECTION_VARS "
        "NIXL_EP_MAX_NUM_RANKS NIXL_SIDE_CHANNEL_HOST NIXL_SIDE_CHANNEL_PORT "
        "OBJECT_STORAGE_SHM_BUFFER_NAME P2P_HANDSHAKE_TIMEOUT_S P2P_IDLE_TIMEOUT_S P2P_MAX_PEERS "
        "P2P_SIDE_CHANNEL_HOST P2P_SIDE_CHANNEL_PORT PORT PROCESS_NAME_PREFIX RAY_BUNDLE_INDICES "
        "RAY_DP_PACK_STRATEGY RAY_DP_PLACEMENT_NODE_IPS RAY_EXTRA_ENV_VARS_TO_COPY "
        "RAY_EXTRA_ENV_VAR_PREFIXES_TO_COPY RAY_PER_WORKER_GPUS RPC_BASE_PATH SERVER_DEV_MODE "
        "SKIP_MODEL_NAME_VALIDATION SKIP_P2P_CHECK USE_RAY_COMPILED_DAG_CHANNEL_TYPE "
        "USE_RAY_COMPILED_DAG_OVERLAP_COMM USE_RAY_V2_EXECUTOR_BACKEND USE_RAY_WRAPPED_PP_COMM "
        "WORKER_MULTIPROC_METHOD WORKER_SHUTDOWN_TIMEOUT_SECONDS",
    ),
    **_variables(
        OBSERVED,
        "BUILD_COMMIT BUILD_PIPELINE BUILD_URL COMPUTE_NANS_IN_LOGITS CONFIGURE_LOGGING "
        "CUSTOM_SCOPES_FOR_PROFILING DEBUG_DUMP_PATH DEBUG_LOG_API_SERVER_RESPONSE DEBUG_MFU_METRICS "
        "DEBUG_WORKSPACE DISABLE_LOG_LOGO DO_NOT_TRACK GC_DEBUG GPU_SYNC_CHECK IMAGE_TAG LOGGING_COLOR "
        "LOGGING_CONFIG_PATH LOGGING_LEVEL LOGGING_PREFIX LOGGING_STREAM LOG_BATCHSIZE_INTERVAL "
        "LOG_MODEL_INSPECTION LOG_STATS_INTERVAL MOONCAKE_STORE_TIER_LOG NO_USAGE_STATS "
        "NVTX_SCOPES_FOR_PROFILING PATTERN_MATCH_DEBUG RAISE_ON_LOGIT_NANS REQUEST_BODY_LOG_LEVEL "
        "RINGBUFFER_WARNING_INTERVAL TRACE_FUNCTION USAGE_SOURCE USAGE_STATS_SERVER",
    ),
    **_variables(
        MOVED,
        "ASSETS_CACHE ASSETS_CACHE_MODEL_CLEAN CACHE_ROOT COMPILE_CACHE_SAVE_FORMAT CONFIG_ROOT "
        "CUDART_SO_PATH CUDA_COMPATIBILITY_PATH DISABLE_COMPILE_CACHE ENABLE_CUDA_COMPATIBILITY "
        "FASTSAFETENSORS_QUEUE_SIZE FLASHINFER_AUTOTUNE_CACHE_DIR FORCE_AOT_LOAD HAS_FLASHINFER_CUBIN "
        "MEDIA_CACHE MEDIA_CACHE_MAX_SIZE_MB MEDIA_CACHE_TTL_HOURS MODEL_REDIRECT_PATH NCCL_INCLUDE_PATH "
        "NCCL_SO_PATH PLE_CPU_OFFLOAD USE_AOT_COMPILE USE_MEGA_AOT_ARTIFACT "
        "WEIGHT_OFFLOADING_DISABLE_PIN_MEMORY WEIGHT_OFFLOADING_DISABLE_UVA WSL2_ENABLE_PIN_MEMORY "
        "XLA_CACHE_PATH XLA_CHECK_RECOMPILATION",
    ),
    **_variables(
        CAPACITY,
        "ALLOW_LONG_MAX_MODEL_LEN CPU_CI_ENV CPU_KVCACHE_SPACE CPU_NUM_OF_RESERVED_CPU "
        "CPU_OMP_THREADS_BIND DEEPEP_BUFFER_SIZE_MB ENABLE_STARTUP_PLAN FLASHINFER_WORKSPACE_BUFFER_SIZE "
        "KV_OFFLOAD_MAX_BATCH_DESCRIPTORS MAX_TOKENS_PER_EXPERT_FP4_MOE "
        "MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS MQ_MAX_CHUNK_BYTES_MB MSGPACK_ZERO_COPY_THRESHOLD "
        "PREFIX_CACHE_RETENTION_INTERVAL RANDOMIZE_DP_DUMMY_INPUTS ROCM_SLEEP_MEM_CHUNK_SIZE "
        "SPARSE_INDEXER_MAX_LOGITS_MB USE_SIMPLE_KV_OFFLOAD XGRAMMAR_CACHE_MB",
    ),
    **_variables(
        INPUT,
        "ALLOW_INSECURE_SERIALIZATION AUDIO_FETCH_TIMEOUT CHAT_TEMPLATE_FUEL CHAT_TEMPLATE_RENDER_TIMEOUT "
        "ENABLE_COHERE_API ENABLE_RESPONSES_API_STORE GPT_OSS_HARMONY_SYSTEM_INSTRUCTIONS "
        "GPT_OSS_SYSTEM_TOOL_MCP_LABELS HTTP_MAX_REQUEST_BODY_SIZE IMAGE_FETCH_TIMEOUT "
        "MAX_AUDIO_CLIP_FILESIZE_MB MAX_AUDIO_DECODE_BYTES MAX_AUDIO_DECODE_DURATION_S "
        "MAX_AUDIO_PREPROCESS_WORKERS MAX_EMBED_DECODE_BYTES MAX_IMAGE_PIXELS MAX_MEDIA_DOWNLOAD_SIZE_MB "
        "MAX_MEDIA_REQUEST_DECODE_BYTES MAX_MEDIA_REQUEST_DOWNLOAD_SIZE_MB MEDIA_FETCH_MAX_RETRIES "
        "MEDIA_LOADING_THREAD_COUNT MEDIA_URL_ALLOW_REDIRECTS MM_HASHER_ALGORITHM RUST_FRONTEND_PATH "
        "SYSTEM_START_DATE USE_EXPERIMENTAL_PARSER_CONTEXT USE_FASTOKENS USE_RUST_FRONTEND "
        "VIDEO_FETCH_TIMEOUT",
    ),
    **_variables(
        OUTPUT,
        "BEAM_ALWAYS_CONSTRAIN_OUTPUT ENFORCE_STRICT_TOOL_CALLING KV_EVENTS_USE_INT_BLOCK_HASHES "
        "MAX_BAD_WORDS_TOTAL_TOKENS MAX_COMPLETION_PROMPTS MAX_NUM_BAD_WORDS MAX_N_SEQUENCES "
        "MAX_STOP_STRINGS REGEX_COMPILATION_TIMEOUT_S TOOL_JSON_ERROR_AUTOMATIC_RETRY "
        "TOOL_PARSE_REGEX_TIMEOUT_SECONDS USE_FLASHINFER_SAMPLER V1_OUTPUT_PROC_CHUNK_SIZE "
        "V1_USE_OUTLINES_CACHE XPU_USE_SAMPLER_KERNEL",
    ),
    **_variables(
        ROUNDING,
        "DBO_COMM_SMS DEEP_GEMM_WARMUP DISABLE_SHARED_EXPERTS_STREAM ENABLE_CUDAGRAPH_GC "
        "FLASHINFER_AUTOTUNE_SKIP_OPS LORA_DISABLE_PDL LORA_ENABLE_DUAL_STREAM "
        "MULTI_STREAM_GEMM_TOKEN_THRESHOLD SHARED_EXPERTS_STREAM_TOKEN_THRESHOLD "
        "TRITON_JIT_WARMUP_NUM_THREADS TUNED_CONFIG_FOLDER USE_BREAKABLE_CUDAGRAPH USE_BYTECODE_HOOK "
        "USE_STANDALONE_COMPILE",
    ),
}
"""Those of them that do not -> why. Any other that is set is in the key with its text."""

CONTENTS = dict.fromkeys(
    ("VLLM_HUMMING_ONLINE_QUANT_CONFIG", "VLLM_HUMMING_INPUT_QUANT_CONFIG"), content_of_file
)
"""What may name a file -> what counts of it."""

PROCESS_ONLY_ENVIRONMENT = {
    "VLLM_MOE_ROUTING_SIMULATION_STRATEGY": "experts are chosen at random",
    "VLLM_USE_MODELSCOPE": "weights come from ModelScope, where they cannot be looked at",
}
"""Those that, if set to anything but "0", mean nothing in another process -> why."""
