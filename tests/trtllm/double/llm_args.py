"""The names of the fields of TensorRT-LLM's configuration classes, by version, and classes that have them.

Names only, as read in its sources: TorchLlmArgs with those of its base. ``quant_config`` and
``parallel_config`` are properties there, and no fields.
"""

from __future__ import annotations

from types import SimpleNamespace

BASE = """
model tokenizer tokenizer_mode skip_tokenizer_init trust_remote_code tensor_parallel_size dtype revision
tokenizer_revision pipeline_parallel_size context_parallel_size gpus_per_node moe_cluster_parallel_size
moe_tensor_parallel_size moe_expert_parallel_size enable_attention_dp enable_lm_head_tp_in_adp cp_config
load_format enable_lora lora_config kv_cache_config enable_chunked_prefill guided_decoding_backend
batched_logits_processor iter_stats_max_iterations request_stats_max_iterations peft_cache_config
scheduler_config cache_transceiver_config sparse_attention_config speculative_config max_batch_size
max_input_len max_seq_len max_beam_width max_num_tokens gather_generation_logits num_postprocess_workers
postprocess_tokenizer_dir reasoning_parser decoding_config mpi_session backend return_perf_metrics
orchestrator_type perf_metrics_max_requests garbage_collection_gen0_threshold cuda_graph_config
attention_dp_config disable_overlap_scheduler moe_config attn_backend sampler_type enable_iter_perf_stats
enable_iter_req_stats print_iter_log batch_wait_timeout_ms batch_wait_timeout_iters
batch_wait_max_tokens_ratio torch_compile_config enable_autotuner enable_layerwise_nvtx_marker
enable_min_latency stream_interval force_dynamic_quantization allreduce_strategy checkpoint_loader
checkpoint_format kv_connector_config mm_encoder_only ray_worker_extension_cls
"""
OF_1_1 = "fail_fast_on_attention_window_too_large build_config"
SINCE_1_2 = """
custom_tokenizer model_kwargs pp_partition otlp_traces_endpoint env_overrides nvfp4_gemm_config
sampler_force_async_worker ray_placement_config use_cute_dsl_blockscaling_mm use_cute_dsl_blockscaling_bmm
disable_flashinfer_sampling max_stats_len layer_wise_benchmarks_config
"""
OF_1_2 = "enable_sleep"
NEWEST = """
post_processor_hook kv_cache_compression_config prometheus_metrics_config enable_energy_metrics
telemetry_config multimodal_config dwdp_config encoder_max_batch_size encoder_max_num_tokens
enable_speculative_beam_history_d2h enable_early_first_token_response enable_low_latency_host_dispatch
mx_config gms_config encode_only ray_worker_nsight_options sleep_config reorder_policy_config
enable_resource_governor use_cute_dsl_bf16_bmm use_cute_dsl_bf16_gemm
"""
CACHE = """
enable_block_reuse max_tokens max_attention_window sink_token_length free_gpu_memory_fraction host_cache_size
cross_kv_cache_fraction secondary_offload_min_priority event_buffer_max_size
attention_dp_events_gather_period_ms enable_partial_reuse copy_on_partial_reuse use_uvm max_gpu_total_bytes
dtype mamba_ssm_cache_dtype tokens_per_block
"""
CACHE_OF_1 = "onboard_blocks"
CACHE_SINCE_1_2 = "use_kv_cache_manager_v2 max_util_for_resume"
CACHE_NEWEST = """
disk_cache_size disk_cache_path iteration_stats_interval mamba_ssm_stochastic_rounding mamba_ssm_philox_rounds
mamba_state_cache_interval enable_swa_scratch_reuse kv_cache_event_hash_algo enable_kv_pool_rebalance
disk_prefetch_num_reqs pool_ratio avg_seq_len block_reuse_policy
"""
QUANTIZATION = """
quant_algo kv_cache_quant_algo group_size smoothquant_val clamp_val use_meta_recipe has_zero_point
pre_quant_scale exclude_modules mamba_ssm_cache_dtype
"""
_OLD = {"QuantConfig": QUANTIZATION}
_NEW = {
    "TorchLlmArgs": BASE + SINCE_1_2 + NEWEST,
    "KvCacheConfig": CACHE + CACHE_SINCE_1_2 + CACHE_NEWEST,
    "QuantConfig": QUANTIZATION + "mamba_ssm_stochastic_rounding mamba_ssm_philox_rounds",
    "ModelExpressConfig": "server_url server_query_timeout_s preshard_strategy",
}
FIELDS = {
    "early": {"TorchLlmArgs": BASE + OF_1_1, "KvCacheConfig": f"{CACHE} {CACHE_OF_1}", **_OLD},
    "released": {
        "TorchLlmArgs": BASE + SINCE_1_2 + OF_1_2,
        "KvCacheConfig": f"{CACHE} {CACHE_OF_1} {CACHE_SINCE_1_2}",
        **_OLD,
    },
    "mid": _NEW,
    "newest": _NEW,
}
"""By version and class: names, separated by white space."""


def classes_of(version: str) -> dict[str, type[SimpleNamespace]]:
    """Classes of plain attributes that say, as pydantic's do, which fields they have."""
    return {
        name: type(name, (SimpleNamespace,), {"model_fields": dict.fromkeys(fields.split())})
        for name, fields in FIELDS[version].items()
    }
