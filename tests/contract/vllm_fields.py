"""What kvbm_vllm reads of vLLM's objects: the one list against which both sides are held.

``FIELDS``: attributes that exist in every supported version and may be read directly. ``PROBED``: attributes
that only some versions have; they may be read with getattr(name, default) only. ``TYPE_OF``: what an
attribute is, where the adapter goes on from it; a leading ``*`` means a sequence of.
"""

from __future__ import annotations

WHERE = {
    "Request": "v1/request.py",
    "SchedulerOutput": "v1/core/sched/output.py",
    "NewRequestData": "v1/core/sched/output.py",
    "CachedRequestData": "v1/core/sched/output.py",
    "KVCacheConfig": "v1/kv_cache_interface.py",
    "KVCacheGroupSpec": "v1/kv_cache_interface.py",
    "AttentionSpec": "v1/kv_cache_interface.py",
    "KVCacheBlocks": "v1/core/kv_cache_manager.py",
    "KVConnectorOutput": "v1/outputs.py",
    "VllmConfig": "config/vllm.py",
    "ModelConfig": "config/model.py",
    "CacheConfig": "config/cache.py",
    "MultiModalConfig": "config/multimodal.py",
    "LoadConfig": "config/load.py",
    "ParallelConfig": "config/parallel.py",
    "KVEventsConfig": "config/kv_events.py",
    "KVTransferConfig": "config/kv_transfer.py",
    "LoRARequest": "lora/request.py",
    "MultiModalFeatureSpec": "multimodal/inputs.py",
    "PlaceholderRange": "multimodal/inputs.py",
    "KVConnectorStats": "distributed/kv_transfer/kv_connector/v1/metrics.py",
}

FIELDS: dict[str, set[str]] = {
    "Request": {
        "request_id",
        "prompt_token_ids",
        "prompt_embeds",
        "kv_transfer_params",
        "all_token_ids",
        "num_tokens",
        "num_computed_tokens",
        "num_preemptions",
        "mm_features",
        "lora_request",
        "cache_salt",
        "resumable",
        "skip_reading_prefix_cache",
        "trace_headers",
        "block_hashes",
        "status",
    },
    "SchedulerOutput": {
        "scheduled_new_reqs",
        "scheduled_cached_reqs",
        "num_scheduled_tokens",
        "total_num_scheduled_tokens",
        "scheduled_spec_decode_tokens",
    },
    "NewRequestData": {"req_id", "block_ids", "num_computed_tokens"},
    "CachedRequestData": {"req_ids", "resumed_req_ids", "new_block_ids", "num_computed_tokens"},
    "KVCacheConfig": {"num_blocks", "kv_cache_groups"},
    "KVCacheGroupSpec": {"layer_names", "kv_cache_spec"},
    "AttentionSpec": {"block_size"},
    "KVCacheBlocks": {"get_block_ids"},
    "KVConnectorOutput": {"finished_sending", "finished_recving", "kv_connector_worker_meta"},
    "VllmConfig": {
        "model_config",
        "cache_config",
        "load_config",
        "parallel_config",
        "kv_transfer_config",
        "kv_events_config",
        "speculative_config",
        "instance_id",
    },
    "ModelConfig": {
        "model",
        "model_weights",
        "revision",
        "hf_config",
        "hf_text_config",
        "max_model_len",
        "override_generation_config",
        "try_get_generation_config",
        "architecture",
        "trust_remote_code",
        "get_total_num_hidden_layers",
        "get_total_num_kv_heads",
        "enable_sleep_mode",
    },
    "MultiModalConfig": {"mm_encoder_attn_dtype", "mm_encoder_fp8_scale_path"},
    "LoadConfig": {"download_dir", "load_format", "model_loader_extra_config"},
    "CacheConfig": {"enable_prefix_caching", "cache_dtype"},
    "ParallelConfig": {
        "rank",
        "tensor_parallel_size",
        "pipeline_parallel_size",
        "data_parallel_size",
        "is_moe_model",
        "worker_cls",
        "worker_extension_cls",
        "nnodes_within_dp",
        "master_addr",
        "master_port",
    },
    "KVTransferConfig": {"kv_connector_extra_config", "engine_id"},
    "KVEventsConfig": {"enable_kv_cache_events"},
    "LoRARequest": {
        "lora_int_id",
        "lora_name",
        "lora_path",
        "load_inplace",
        "adapter_id",
        "name",
        "is_3d_lora_weight",
    },
    "MultiModalFeatureSpec": {"identifier", "mm_position"},
    "PlaceholderRange": {"offset", "length"},
    "KVConnectorStats": {"data"},
}

PROBED: dict[str, set[str]] = {
    "Request": {"kv_hints"},
    "SchedulerOutput": {"kv_connector_block_state"},
    "KVCacheConfig": {"hash_block_size"},
    "KVCacheGroupSpec": {"enable_kv_transfer", "host_resident"},
    "ParallelConfig": {
        "decode_context_parallel_size",
        "prefill_context_parallel_size",
        "data_parallel_index",
    },
    "CacheConfig": {"hash_block_size", "prefix_cache_retention_interval"},
    "ModelConfig": {"model_class_overrides", "original_max_model_len"},
    "AttentionSpec": {"kv_cache_specs"},
    "LoRARequest": {"tensorizer_config_dict"},
}

PROBED_IN = {"AttentionSpec": "UniformTypeKVCacheSpecs"}
"""Where a probed attribute comes from if not from the class itself: what else may stand in its place."""

TYPE_OF = {
    ("Followed", "request"): "Request",  # the adapter's own record of a request
    ("Request", "lora_request"): "LoRARequest",
    ("Request", "mm_features"): "*MultiModalFeatureSpec",
    ("MultiModalFeatureSpec", "mm_position"): "PlaceholderRange",
    ("SchedulerOutput", "scheduled_new_reqs"): "*NewRequestData",
    ("SchedulerOutput", "scheduled_cached_reqs"): "CachedRequestData",
    ("KVCacheConfig", "kv_cache_groups"): "*KVCacheGroupSpec",
    ("KVCacheGroupSpec", "kv_cache_spec"): "AttentionSpec",
    ("VllmConfig", "model_config"): "ModelConfig",
    ("VllmConfig", "cache_config"): "CacheConfig",
    ("VllmConfig", "load_config"): "LoadConfig",
    ("VllmConfig", "parallel_config"): "ParallelConfig",
    ("VllmConfig", "kv_events_config"): "KVEventsConfig",
    ("VllmConfig", "kv_transfer_config"): "KVTransferConfig",
}
