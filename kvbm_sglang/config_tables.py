"""Every field of SGLang's arguments (0.5.10 to 0.5.23): in the key, or irrelevant, or of one process only.

The line between the two first is that of kvbm_vllm/config_tables.py: a field is in the key if it can change
which function of the tokens K and V are, or the formats of the numbers they are computed and stored in; not
if it changes at most the order in which the same numbers are added up. In doubt it is in the key.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from kvbm_core.identity.effective import effective_config, file_digest
from kvbm_core.identity.environment import WORDS_OF_LIBRARIES, code_of_package, content_of_file
from kvbm_core.identity.fields import ConfigTable, InKey, Irrelevant, Rule, ThisProcessOnly

FOLDER_FORMATS = frozenset((
    "auto", "pt", "safetensors", "npcache", "sharded_state", "presharded", "gguf", "bitsandbytes", "mistral",
    "layered", "fastsafetensors", "instanttensor", "runai_streamer",
))  # fmt: skip
"""Load formats that read files of the model's folder, and nothing else."""
READING_SETTINGS = frozenset(("enable_multithread_load", "num_threads", "concurrency", "memory_limit"))
"""Of ``model_loader_extra_config``: how fast files are read."""

# Reasons that many fields share.
ELSEWHERE = "where the engine runs and listens"
ROUNDING = "changes at most the order of the same additions"
EXPERTS = "where experts lie, not what they compute"
ELASTIC = "with elastic experts nothing is kept on disk"
CAPACITY = "how much is computed or kept at a time"
SCHEDULING = "when a request runs, and with which others"
OUTPUT = "what is made of the model's output"
ROWS = "what is made of every token; nothing is cached then"
OBSERVED = "what is logged, measured or traced"
MOVED = "where weights lie and how they get there"
OF_FORMAT = "read by load formats that keep nothing on disk"
FOLDER = "what is in the folder is in the weights' stamp"
INPUT = "how requests become tokens; the tokens are in the key"
CACHES = "which pages SGLang keeps, and where"
IN_PAGE = "in the part of the key that says which part of the model a page holds"
REMOTE = "how pages reach other engines"
NO_ADAPTERS = "with LoRA nothing is kept on disk"
NO_IMAGES = "nothing of a model that takes images, audio or video is kept on disk"
FILE = "the content of the file"
IN_STAMP = Irrelevant("which files are read is in the weights' stamp")


def _irrelevant(reason: str, names: str) -> dict[str, Rule]:
    return dict.fromkeys(names.split(), Irrelevant(reason))


def _in_key(names: str) -> dict[str, Rule]:
    return dict.fromkeys(names.split(), InKey())


def _process_only(reason: str, names: str) -> dict[str, Rule]:
    return dict.fromkeys(names.split(), ThisProcessOnly(reason))


def _variables(reason: str, names: str) -> dict[str, str]:
    return {f"SGLANG_{name}": reason for name in names.split()}


# ---------------------------------------------------------------- what counts of a value


def load_format_of(value: Any) -> str:
    """Of an enum or a text; "auto" if none is given."""
    return str(getattr(value, "value", value) or "auto")


def _loads_elsewhere(value: Any) -> bool:
    return load_format_of(value) not in FOLDER_FORMATS


def _is_on(value: Any) -> bool:
    return str(value or "off") != "off"


def names_weights(value: Any) -> bool:
    """Whether ``model_loader_extra_config`` says more than how to read, and how fast."""
    try:
        settings = json.loads(value or "{}") if isinstance(value, str | bytes) else value or {}
    except ValueError:
        return True
    return not (isinstance(settings, Mapping) and set(settings) <= READING_SETTINGS)


# ---------------------------------------------------------------- tables

SERVER_ARGS = ConfigTable(
    "ServerArgs",
    {
        "quantization_param_path": InKey(file_digest, FILE),
        "ds_channel_config_path": InKey(file_digest, FILE),
        "dllm_algorithm_config": InKey(file_digest, FILE),
        "load_format": ThisProcessOnly(
            "the weights are not, or not only, those of the model's folder", _loads_elsewhere, IN_STAMP
        ),
        "speculative_draft_load_format": ThisProcessOnly(
            "the draft's weights are not those of its folder", _loads_elsewhere, IN_STAMP
        ),
        "model_loader_extra_config": ThisProcessOnly("it may name other weights", names_weights),
        "weight_cache_mode": ThisProcessOnly("weights come from another process's memory", _is_on),
        "elastic_ep_backend": ThisProcessOnly("experts may be missing for a while"),
        "decrypted_draft_config_file": ThisProcessOnly("a draft's configuration from another place"),
        "uno_lora_path": ThisProcessOnly("an adapter whose files may change"),
        "enable_lora": ThisProcessOnly("SGLang's name of an adapter does not say what its weights are"),
        "lora_paths": ThisProcessOnly("SGLang's name of an adapter does not say what its weights are"),
        **_in_key(
            "trust_remote_code context_length is_embedding model_impl model_config_parser dtype "
            "quantization kv_cache_dtype json_model_override_args modelopt_quant quantize_and_serve "
            "torchao_config qsa_indexer_dtype weight_version device decrypted_config_file "
            "startup_weight_load_mode dllm_algorithm dllm_fdfo enable_deterministic_inference "
            "rl_on_policy_target enable_tf32_matmul enable_mis multi_item_scoring_delimiter "
            "language_model_only attention_backend decode_attention_backend prefill_attention_backend "
            "fp8_gemm_runner_backend fp4_gemm_runner_backend bf16_gemm_backend "
            "triton_attention_reduce_in_fp32 enable_precise_embedding_interpolation "
            "enable_fused_qk_norm_rope nsa_prefill_backend nsa_decode_backend dsa_prefill_backend "
            "dsa_decode_backend dsa_topk_backend dsa_paged_mqa_logits_backend "
            "enable_deepseek_v4_fp4_indexer dsv4_prefill_backend dsv4_attn_backend "
            "enable_dsa_fused_indexer dsa_triton_union prefill_kv_cache_dequant_dtype "
            "enable_double_sparsity ds_heavy_channel_num ds_heavy_token_num ds_heavy_channel_type "
            "ds_sparse_decode_threshold enable_hisparse hisparse_config enable_lean_attention "
            "flashinfer_mla_disable_ragged moe_a2a_backend moe_runner_backend "
            "flashinfer_mxfp4_moe_precision deepep_dispatcher_output_dtype enable_w4a4_mxfp4_megamoe "
            "flashinfer_a2a_dispatch_type disable_flashinfer_cutlass_moe_fp4_allgather kt_method "
            "kt_num_gpu_experts kt_max_deferred_experts_per_token enable_paged_experts fuseep_mode "
            "enable_quant_communications enable_scattered_sconv boundary_reduction enable_layernorm_sp "
            "enable_megamoe_for_layernorm_sp enable_nvidia_megakernel enable_amd_monokernel "
            "enable_torch_compile disable_shared_experts_fusion enforce_shared_experts_fusion "
            "mamba_backend mamba_ssm_dtype mamba_track_interval linear_attn_backend "
            "linear_attn_decode_backend linear_attn_prefill_backend linear_attn_verify_backend "
            "enable_mamba_cache_stochastic_rounding mamba_cache_philox_rounds "
            "enable_int8_mamba_checkpoint enable_linear_replayssm linear_replayssm_cache_len "
            "enable_linear_replayssm_spec enable_gdn_replayssm_spec mamba_scheduler_strategy "
            "mamba_radix_cache_strategy uses_mamba_radix_cache enable_encoder_swa_bounded_replay "
            "enable_decoder_swa_bounded_replay disable_hybrid_swa_memory c128_page_size "
            "speculative_algorithm speculative_num_steps speculative_eagle_topk "
            "speculative_num_draft_tokens speculative_attention_mode speculative_draft_attention_backend "
            "speculative_moe_runner_backend speculative_moe_a2a_backend "
            "speculative_draft_model_quantization enable_multi_layer_eagle speculative_dflash_block_size "
            "speculative_draft_window_size speculative_dspark_block_size speculative_dsa_topk_backend "
            "speculative_draft_kv_cache_dtype _speculative_draft_quantization_explicitly_set "
            "speculative_boundary_reduction speculative_draft_sink_size "
            "speculative_enable_w4a4_mxfp4_megamoe speculative_skip_dp_mlp_sync enable_dp_attention "
            "attn_dp_size ep_size moe_dp_size moe_dense_tp_size enable_attn_tp_input_scattered "
            "disable_attn_tp_gather enable_prefill_cp enable_prefill_context_parallel "
            "enable_nsa_prefill_context_parallel enable_dsa_prefill_context_parallel cp_strategy "
            "prefill_cp_mode nsa_prefill_cp_mode dsa_prefill_cp_mode enable_dsa_cache_layer_split "
            "dcp_comm_backend dcp_replicate_q_proj enable_cp_decode_attn_tp enable_cp_tp_group_sharing "
            "enable_kv_cache_sharding enable_shared_experts_attn_tp enable_dense_mlp_attn_tp "
            "shared_experts_tp_size dwdp_size"
        ),
        **_irrelevant(
            ELSEWHERE,
            "host port fastapi_root_path grpc_mode skip_server_warmup warmups ssl_keyfile ssl_certfile "
            "ssl_ca_certs ssl_keyfile_password enable_ssl_refresh api_key admin_api_key served_model_name "
            "file_storage_path enable_http2 smg_grpc_mode grpc_port sidecar sidecar_args "
            "grpc_worker_threads http2_max_concurrent_streams http2_initial_connection_window_size "
            "enable_http_worker_reuseport grpc_response_timeout_secs smg_http_sidecar_port "
            "grpc_http_sidecar_port nccl_port dist_timeout dist_init_addr nnodes node_rank "
            "gated_launch_port watchdog_timeout soft_watchdog_timeout base_gpu_id gpu_id_step "
            "sleep_on_idle use_ray custom_sigquit_handler numa_node gc_threshold mooncake_ib_device "
            "enable_p2p_check enable_dp_attention_local_control_broadcast",
        ),
        **_irrelevant(
            ROUNDING,
            "random_seed enable_dp_lm_head enable_tp_lm_head_all_to_all disable_flashinfer_autotune "
            "flashinfer_autotune_skip_ops triton_attention_num_kv_splits triton_attention_split_tile_size "
            "disable_cuda_graph disable_cuda_graph_padding enable_profile_cuda_graph enable_cudagraph_gc "
            "enable_torch_compile_debug_mode torch_compile_max_bs debug_cuda_graph cuda_graph_config "
            "cuda_graph_backend_decode cuda_graph_backend_prefill cuda_graph_max_bs_decode "
            "cuda_graph_max_bs_prefill cuda_graph_bs_decode cuda_graph_bs_prefill "
            "disable_prefill_cuda_graph disable_decode_cuda_graph cuda_graph_max_seq_len_prefill "
            "cuda_graph_prefill_max_context cuda_graph_max_bs cuda_graph_bs disable_piecewise_cuda_graph "
            "enforce_piecewise_cuda_graph piecewise_cuda_graph_max_tokens piecewise_cuda_graph_tokens "
            "piecewise_cuda_graph_compiler enable_breakable_cuda_graph cuda_graph_tc_compiler "
            "enable_two_batch_overlap enable_single_batch_overlap tbo_token_distribution_threshold "
            "enable_flashinfer_allreduce_fusion enforce_disable_flashinfer_allreduce_fusion "
            "enable_aiter_allreduce_fusion disable_aiter_allreduce_fusion_in_prefill "
            "disable_aiter_allreduce_fusion_in_decode flashinfer_allreduce_fusion_backend "
            "enable_nccl_nvls enable_symm_mem disable_custom_all_reduce enable_mscclpp "
            "enable_torch_symm_mem pre_warm_nccl enable_fused_moe_sum_all_reduce deepep_mode "
            "deepep_config deepep_v2_mode enable_waterfill enable_deepep_waterfill kt_cpuinfer "
            "kt_threadpool_count paged_experts_num_resident",
        ),
        **_irrelevant(
            EXPERTS,
            "ep_num_redundant_experts ep_dispatch_algorithm init_expert_location enable_eplb "
            "eplb_algorithm eplb_rebalance_num_iterations eplb_rebalance_layers_per_chunk "
            "eplb_min_rebalancing_utilization_threshold",
        ),
        **_irrelevant(
            ELASTIC,
            "enable_elastic_expert_backup elastic_ep_initial_size elastic_ep_rejoin "
            "elastic_ep_scale_timeout ep_join_mode ep_join_rank_offset max_ep_size",
        ),
        **_irrelevant(
            CAPACITY,
            "mem_fraction_static max_running_requests max_queued_requests max_total_tokens "
            "chunked_prefill_size enable_dynamic_chunking max_prefill_tokens prefill_max_requests "
            "swa_full_tokens_ratio _swa_full_tokens_ratio_explicitly_set swa_prefix_tails "
            "max_mamba_cache_size mamba_full_memory_ratio int8_mamba_ckpt_size mamba_max_states_per_path "
            "pp_max_micro_batch_size pp_async_batch_depth num_reserved_decode_tokens "
            "disable_chunked_prefix_cache enable_pdmux pdmux_config_path sm_group_num",
        ),
        **_irrelevant(
            SCHEDULING,
            "schedule_policy enable_priority_scheduling disable_priority_preemption "
            "default_priority_value abort_on_priority_when_disabled schedule_low_priority_values_first "
            "priority_scheduling_preemption_threshold schedule_conservativeness enable_prefill_delayer "
            "prefill_delayer_max_delay_passes prefill_delayer_token_usage_low_watermark "
            "prefill_delayer_forward_passes_buckets prefill_delayer_wait_seconds_buckets "
            "prefill_delayer_queue_min_ratio prefill_delayer_max_delay_ms disable_overlap_schedule "
            "enable_mixed_chunk num_continuous_decode_steps scheduler_recv_interval retraction_policy "
            "min_free_slots_delay prefill_decode_interval prefill_decode_interval_min_bs "
            "load_balance_method optimistic_prefill_retries",
        ),
        **_irrelevant(ROWS, "enable_return_routed_experts enable_return_indexer_topk"),
        **_irrelevant(
            OUTPUT,
            "stream_interval stream_response_default_include_usage incremental_streaming_output "
            "enable_streaming_session constrained_json_whitespace_pattern "
            "constrained_json_disable_any_whitespace constrained_json_max_whitespace_cnt "
            "enable_cache_report reasoning_parser tool_call_parser tool_server sampling_defaults "
            "preferred_sampling_params disable_tokenizer_batch_decode detokenizer_worker_num "
            "batch_notify_size enable_strict_thinking enable_response_store return_input_ids "
            "return_output_ids sampling_backend grammar_backend disable_outlines_disk_cache "
            "enable_custom_logit_processor enable_return_hidden_states "
            "return_hidden_states_mode enable_return_aux_hidden_states "
            "aux_hidden_state_capture return_aux_hidden_state_layer_ids enable_fp32_lm_head "
            "enable_watermark watermark_config watermark_key watermark_key_b watermark_context_window "
            "watermark_mixing_probability watermark_max_probability watermark_default_enabled "
            "watermark_enforce_all sampling_mask_max_tokens mlx_enable_sampling "
            "speculative_accept_threshold_single speculative_accept_threshold_acc speculative_token_map "
            "speculative_ngram_min_bfs_breadth speculative_ngram_max_bfs_breadth "
            "speculative_ngram_match_type speculative_ngram_max_trie_depth speculative_ngram_capacity "
            "speculative_ngram_external_corpus_path speculative_ngram_external_sam_budget "
            "speculative_ngram_external_corpus_max_tokens speculative_adaptive "
            "speculative_adaptive_config speculative_dspark_sps_table_path "
            "speculative_dspark_confidence_sts_path speculative_dspark_align_verify_tokens_to_graph_tier "
            "speculative_use_rejection_sampling speculative_domino_candidate_pool_size "
            "speculative_use_block_verification",
        ),
        **_irrelevant(
            INPUT,
            "tokenizer_path tokenizer_mode tokenizer_worker_num skip_tokenizer_init chat_template "
            "hf_chat_template_name completion_template enable_tokenizer_batch_encode allow_auto_truncate "
            "enable_dynamic_batch_tokenizer dynamic_batch_tokenizer_batch_size "
            "dynamic_batch_tokenizer_batch_timeout tokenizer_backend default_chat_template_kwargs "
            "trust_request_chat_template",
        ),
        **_irrelevant(
            OBSERVED,
            "log_level log_level_http log_requests log_requests_level log_requests_format "
            "log_requests_target uvicorn_access_log_exclude_prefixes crash_dump_folder show_time_cost "
            "enable_metrics enable_mfu_metrics enable_metrics_for_all_schedulers "
            "tokenizer_metrics_custom_labels_header tokenizer_metrics_allowed_custom_labels "
            "extra_metric_labels bucket_time_to_first_token bucket_inter_token_latency "
            "bucket_e2e_request_latency prompt_tokens_buckets generation_tokens_buckets "
            "gc_warning_threshold_secs decode_log_interval enable_request_time_stats_logging "
            "kv_events_config enable_trace otlp_traces_endpoint otlp_service_name export_metrics_to_file "
            "export_metrics_to_file_dir debug_tensor_dump_output_folder debug_tensor_dump_layers "
            "debug_tensor_dump_input_file load_snapshot_publish_interval load_publish_endpoint "
            "enable_forward_pass_metrics forward_pass_metrics_worker_id forward_pass_metrics_ipc_name "
            "trace_modules stat_loggers kv_canary kv_canary_real_data kv_canary_sweep_interval "
            "msprobe_dump_config collect_tokens_histogram enable_nan_detection "
            "enable_expert_distribution_metrics enable_layerwise_nvtx_marker "
            "expert_distribution_recorder_mode expert_distribution_recorder_buffer_size "
            "expert_balancedness_report_mode spec_trace_dir",
        ),
        **_irrelevant(
            MOVED,
            "download_dir model_checksum delete_ckpt_after_loading weight_loader_disable_mmap "
            "weight_loader_prefetch_checkpoints weight_loader_prefetch_num_threads "
            "weight_loader_drop_cache_after_load weight_cache_socket weight_cache_timeout cpu_offload_gb "
            "offload_group_size offload_num_in_group offload_prefetch_step offload_mode "
            "ple_offload_embedding ple_offload_backend ple_offload_dir enable_memory_saver "
            "enable_weights_cpu_backup enable_draft_weights_cpu_backup "
            "remote_instance_weight_loader_start_seed_via_transfer_engine modelopt_checkpoint_save_path "
            "modelopt_export_path engine_info_bootstrap_port",
        ),
        **_irrelevant(
            OF_FORMAT,
            "remote_instance_weight_loader_seed_instance_ip "
            "remote_instance_weight_loader_seed_instance_service_port "
            "remote_instance_weight_loader_send_weights_group_ports remote_instance_weight_loader_backend",
        ),
        **_irrelevant(
            FOLDER,
            "model_path revision speculative_draft_model_path speculative_draft_model_revision",
        ),
        **_irrelevant(
            CACHES,
            "radix_eviction_policy radix_eviction_policy_config _radix_eviction_policy_explicitly_set "
            "enable_hierarchical_cache hicache_ratio hicache_size hicache_write_policy hicache_io_backend "
            "hicache_mem_layout hicache_storage_backend hicache_storage_prefetch_policy "
            "hicache_storage_backend_extra_config hicache_host_memory_mode hicache_host_memory_fraction "
            "hicache_storage_prefetch_retry_poll_interval hicache_storage_prefetch_retry_max_attempts "
            "enable_lmcache lmcache_config_file disable_radix_cache radix_cache_backend "
            "enable_session_radix_cache enable_flexkv flexkv_config_file "
            "enable_unified_cache_external_linker unified_cache_external_linker_backend "
            "unified_cache_external_linker_config enable_linker_mla_dedup prefill_only_disable_kv_cache "
            "strip_thinking_cache",
        ),
        **_irrelevant(
            IN_PAGE,
            "page_size tp_size pp_size dp_size attn_cp_size dcp_size enable_page_major_kv_layout "
            "enable_unified_memory",
        ),
        **_irrelevant(
            REMOTE,
            "disaggregation_mode disaggregation_transfer_backend disaggregation_bootstrap_port "
            "disaggregation_ib_device disaggregation_decode_enable_offload_kvcache "
            "disaggregation_decode_polling_interval disaggregation_decode_enable_radix_cache "
            "disaggregation_decode_extra_slots disaggregation_decode_retraction_backup "
            "disaggregation_decode_allocation_policy disaggregation_enable_kv_checksum "
            "enable_pd_role_switch disaggregation_decode_host_receive_threshold "
            "optimistic_prefill_attempts decoupled_spec_bind_endpoint decoupled_spec_connect_endpoints "
            "decoupled_spec_rank decoupled_spec_role",
        ),
        **_irrelevant(
            NO_ADAPTERS,
            "enable_lora_overlap_loading max_lora_rank lora_target_modules max_loaded_loras "
            "max_loras_per_batch lora_eviction_policy lora_backend max_lora_chunk_size "
            "experts_shared_outer_loras lora_use_virtual_experts lora_strict_loading "
            "lora_drain_wait_threshold",
        ),
        **_irrelevant(
            NO_IMAGES,
            "enable_multimodal mm_attention_backend disable_fast_image_processor "
            "enable_broadcast_mm_inputs_process enable_prefix_mm_cache mm_enable_dp_encoder "
            "mm_process_config limit_mm_data_per_request enable_mm_global_cache mm_feature_transport "
            "mm_processor_worker_num mm_io_worker_num allowed_media_domains media_url_max_file_size_mb "
            "mm_preprocess_cache_size_mb trust_mm_content_hashes image_processor_backend "
            "mm_global_cache_backend keep_mm_feature_on_device encoder_only language_only "
            "encoder_transfer_backend encoder_urls enable_adaptive_dispatch_to_encoder "
            "encoder_bootstrap_port encoder_register_urls asr_max_buffer_seconds "
            "asr_max_concurrent_sessions",
        ),
        **_process_only(
            "weights are sent, made or changed while the engine runs, or come from elsewhere",
            "checkpoint_engine_wait_weights_before_ready custom_weight_loader rl_quant_profile "
            "modelopt_checkpoint_restore_path modelexpress_config kt_weight_path",
        ),
        **_process_only(
            "code or data of the user's own changes what layers compute",
            "forward_hooks debug_tensor_dump_inject",
        ),
    },
)

MODEL = ConfigTable(
    "ModelConfig",
    {
        "hf_config": InKey(effective_config, "as SGLang computes with it, after json_model_override_args"),
        "dtype": InKey(),
        "is_multimodal": ThisProcessOnly(
            "the model takes images, audio or video, and SGLang's page hash does not name them for certain "
            "(--language-model-only, where SGLang has it, keeps text on disk)"
        ),
    },
)
"""Of the model's configuration what counts; all else in it follows from this and from the arguments."""

HICACHE = ConfigTable(
    "HiCacheStorageConfig",
    {
        **_in_key("should_split_heads tp_lcm_size"),
        **_irrelevant(
            IN_PAGE,
            "tp_rank tp_size pp_rank pp_size attn_cp_rank attn_cp_size dcp_rank dcp_size is_mla_model "
            "is_page_first_layout logical_page_size",
        ),
        **_irrelevant(OBSERVED, "enable_storage_metrics"),
        **_irrelevant(ELSEWHERE, "dp_rank"),
        **_irrelevant(FOLDER, "model_name"),
        **_irrelevant("kvbm's own settings", "extra_config"),
    },
)

TABLES = (SERVER_ARGS, MODEL, HICACHE)

# ---------------------------------------------------------------- the environment

ENVIRONMENT = re.compile(
    r"SGLANG_\w+|SGL_\w+|USE_TRITON_W8A8_FP8_KERNEL|USE_ROCM_AITER_ROPE_BACKEND"
    r"|DEEP_NORMAL_MODE_USE_INT8_QUANT|CK_MOE|ASCEND_USE_FIA|MINIMAX_NPU_PREFILL_BSQ"
)
"""Variables that may change what SGLang computes."""

ENVIRONMENT_WORDS = (
    "Every variable that is set and begins with `SGLANG_` or `SGL_` is in the name with its text, and so\n"
    "are `USE_TRITON_W8A8_FP8_KERNEL`, `USE_ROCM_AITER_ROPE_BACKEND`, `DEEP_NORMAL_MODE_USE_INT8_QUANT`,\n"
    "`CK_MOE`, `ASCEND_USE_FIA` and `MINIMAX_NPU_PREFILL_BSQ`. So is the content of a file that\n"
    "`SGLANG_HUMMING_ONLINE_QUANT_CONFIG` or `SGLANG_HUMMING_INPUT_QUANT_CONFIG` names, and of the package\n"
    "that `SGLANG_EXTERNAL_MODEL_PACKAGE` names; if it cannot be read, blocks are of this process only.\n"
    f"{WORDS_OF_LIBRARIES}\n"
    "Not those that Kubernetes sets for a Service (`SGLANG_..._SERVICE_HOST`, `SGLANG_..._PORT_8000_TCP`),\n"
    "and not these (`*` stands for any end):"
)

IRRELEVANT_ENVIRONMENT: dict[str, str] = {
    **_variables(
        ELSEWHERE,
        "RUN_ID PORT TCP_STORE_PORT BACKUP_PORT_BASE GRPC_PORT ZMQ_ALLOWED_PEERS ZMQ_SOURCE_IP "
        "RAY_BUNDLE_INDICES DISTRIBUTED_INIT_METHOD_OVERRIDE IS_FIRST_RANK_ON_NODE "
        "ONE_VISIBLE_DEVICE_PER_PROCESS SET_CPU_AFFINITY NUMA_BIND_V2 AUTO_NUMA_BIND "
        "CRASH_ON_NUMA_BIND_FAILURE CPU_OMP_THREADS_BIND TIMEOUT_KEEP_ALIVE WARMUP_TIMEOUT "
        "UVICORN_WORKER_HEALTHCHECK_TIMEOUT HTTP_SERVER_APP_PATH GRPC_WORKER_THREADS HOST_IP",
    ),
    **_variables(
        OBSERVED,
        "LOG_* TRACE_* TORCH_PROFILER_DIR PROFILE_* JIT_LOG_LEVEL OTLP_* EXPOSE_OWN_ENV_VARS "
        "CUDA_COREDUMP* PYSPY_DUMP_BEFORE_CRASH RECORD_STEP_TIME IS_IN_CI IS_IN_CI_AMD",
    ),
    **_variables(
        MOVED,
        "CACHE_DIR JIT_CACHE_DIR CUTE_AOT_CACHE_DIR DG_CACHE_DIR SORT_WEIGHT_FILES "
        "PREFETCH_BLOCK_SIZE_MB WEIGHT_CACHE_SOCKET_TEMPLATE WEIGHT_CACHE_READY_TEMPLATE",
    ),
    **_variables(
        CAPACITY,
        "INIT_NEW_TOKEN_RATIO MIN_NEW_TOKEN_RATIO_FACTOR NEW_TOKEN_RATIO_DECAY_STEPS RETRACT_DECODE_STEPS "
        "CLIP_MAX_NEW_TOKENS_ESTIMATION MAX_NEW_TOKENS_LIMIT EMPTY_CACHE_INTERVAL "
        "FLASHINFER_WORKSPACE_SIZE SYMM_MEM_PREALLOC_GB_SIZE",
    ),
    **_variables(CACHES, "HICACHE_* TEST_HICACHE_* MLA_DEDUP_CHUNK_TOKENS HUGEPAGE_SIZE"),
    **_variables(REMOTE, "DISAGGREGATION_* DISAGG_STAGING_*"),
    **_variables(INPUT, "BATCH_TOKENIZER_OUTPUTS PARALLEL_PROMPT_ENCODE* PATCH_TOKENIZER"),
}
"""Those of them that do not -> why. Any other that is set is in the key with its text."""

CONTENTS = {
    "SGLANG_EXTERNAL_MODEL_PACKAGE": code_of_package,
    "SGLANG_HUMMING_INPUT_QUANT_CONFIG": content_of_file,
    "SGLANG_HUMMING_ONLINE_QUANT_CONFIG": content_of_file,
}
"""What names a package, or may name a file -> what counts of it."""

PROCESS_ONLY_ENVIRONMENT = {
    "SGLANG_SIMULATE_UNIFORM_EXPERTS": "experts are chosen at random",
    "SGLANG_SIMULATE_ROUND_ROBIN_EXPERTS": "experts are not those that the model chooses",
    "SGLANG_KV_CANARY_PERTURB_*": "pages are spoiled for a test",
    "SGLANG_DEBUG_HISPARSE_SKIP_IO": "pages are left out for a test",
    "SGLANG_QWEN4_PLE_FILE_DIR": "a part of the weights is in another folder",
    "SGLANG_USE_MODELSCOPE": "weights come from ModelScope, where they cannot be looked at",
}
"""Those that, if set to anything but "0" or "false", mean nothing in another process -> why."""
