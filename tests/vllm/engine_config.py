"""vLLM's own configuration objects for a tiny model: what the engine core would build at start-up."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVEventsConfig,
    KVTransferConfig,
    LoRAConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    SpeculativeConfig,
    VllmConfig,
)
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import (
    generate_scheduler_kv_cache_config,
    get_request_block_hasher,
    init_none_hash,
    resolve_cache_hit_alignment_tokens,
    resolve_kv_cache_block_sizes,
)
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)
from vllm.v1.structured_output import StructuredOutputManager

from kvbm_core.identity.weights import CLOCK_TICK_NS
from kvbm_vllm import engine_calls

try:
    from vllm.v1.core.kv_cache_planning import get_global_kv_cache_groups, get_kv_cache_configs
except ImportError:  # vLLM < 0.33
    from vllm.v1.core.kv_cache_utils import get_kv_cache_configs

    get_global_kv_cache_groups = None

DYNAMO = {"kv_connector": "DynamoConnector", "kv_connector_module_path": "kvbm.vllm_integration.connector"}
"""The guides' own way to name the connector."""

KV_HEADS, HEAD_SIZE = 2, 8
STATE_SHAPES = ((2, 4), (2, 8))
"""Of a rank's state of one layer, as vLLM has it: a convolution's and a recurrence's."""
Layer = int | None | Literal["state"]


@dataclass(frozen=True)
class EngineSpec:
    """One engine. ``windows``: sliding window in tokens of each layer, None = full attention, "state" = no
    KV, but a state.
    """

    block_size_tokens: int = 4
    num_blocks: int = 64
    max_batched_tokens: int = 128
    max_num_seqs: int = 8
    windows: tuple[Layer, ...] = (None, None)
    ranks: int = 1
    kv_heads: int | None = None
    """Of the whole model; None: KV_HEADS for each rank."""
    is_mla: bool = False
    """Layers with all of their KV keep latents. States beside them are divided among ranks."""
    layout: str = "LBNHC"
    max_model_len: int = 120
    async_scheduling: bool = False
    draft_tokens: int = 0
    """How many tokens are drafted at most."""
    has_draft_layer: bool = False
    """The last layer is a draft head's (MTP); else nothing on the device is (ngram)."""
    match_tokens: int | None = None
    """--prefix-match-unit: prefixes may end inside a block."""
    exports_checkpoints: bool = False
    """A prefill leaves a state before its end, as Mamba2 and KDA do."""
    mamba_mode: str = "align"
    retain_tokens: int | None = 0
    """--prefix-cache-retention-interval: how far apart the states are that vLLM keeps; 0: one for each
    prompt, None: all.
    """
    lora: bool = False
    weights: bytes = b"the fake model has none"
    kv_events: bool = False
    consolidated: tuple[str, str, str] | None = None
    """What dynamo.vllm was told: vLLM publishes at the first, and the consolidator at the second."""
    kv_numbers: Literal["any bits", "float32", "float8"] = "any bits"
    """What K and V are: "float32" may come back rounded to three bits behind the point; "float8" need not."""
    connector: dict[str, Any] = field(default_factory=lambda: dict(DYNAMO))
    extra_config: dict[str, Any] = field(default_factory=dict)

    @property
    def total_heads(self) -> int:
        """KV heads of the whole model."""
        return KV_HEADS * self.ranks if self.kv_heads is None else self.kv_heads

    def heads_of(self, rank: int) -> range:
        """Which KV heads a rank has: as vLLM divides them in QKVParallelLinear. With MLA all have one, the
        same.
        """
        if self.is_mla:
            return range(1)
        count, num_same = max(1, self.total_heads // self.ranks), max(1, self.ranks // self.total_heads)
        return range(rank // num_same * count, rank // num_same * count + count)

    @property
    def has_states(self) -> bool:
        """Whether a layer keeps a state."""
        return "state" in self.windows

    @property
    def layer_names(self) -> tuple[str, ...]:
        """As vLLM names attention layers; sorting them by name would put layer 10 before layer 2."""
        return tuple(f"model.layers.{i}.self_attn.attn" for i in range(len(self.windows)))


def _kv_events(spec: EngineSpec) -> KVEventsConfig | None:
    if spec.consolidated is not None:
        endpoint = spec.consolidated[0].replace("127.0.0.1", "*")
        return KVEventsConfig(enable_kv_cache_events=True, publisher="zmq", endpoint=endpoint)
    return KVEventsConfig(enable_kv_cache_events=True, publisher="null") if spec.kv_events else None


def make_vllm_config(spec: EngineSpec, folder: Path) -> VllmConfig:
    """The configuration of one engine with ``spec``, which has just read its model in ``folder``."""
    files = {"config.json": json.dumps(_model_json(spec)).encode(), "model.safetensors": spec.weights}
    model = write_weights(folder / "model", files)
    transfer = KVTransferConfig(
        kv_role="kv_both", kv_connector_extra_config=dict(spec.extra_config), **spec.connector
    )
    config = VllmConfig(
        model_config=ModelConfig(
            model=str(model), skip_tokenizer_init=True, dtype="float32", max_model_len=spec.max_model_len
        ),
        cache_config=CacheConfig(
            block_size=spec.block_size_tokens,
            enable_prefix_caching=True,
            num_gpu_blocks_override=spec.num_blocks,
            prefix_match_unit=spec.match_tokens,
            prefix_cache_retention_interval=spec.retain_tokens,
            mamba_cache_mode="align" if spec.has_states and spec.mamba_mode == "align" else "none",
        ),
        scheduler_config=SchedulerConfig(
            max_num_seqs=spec.max_num_seqs,
            max_num_batched_tokens=spec.max_batched_tokens,
            max_model_len=spec.max_model_len,
            is_encoder_decoder=False,
            enable_chunked_prefill=True,
            async_scheduling=spec.async_scheduling,
            disable_hybrid_kv_cache_manager=False,
            watermark=0.0,
        ),
        parallel_config=ParallelConfig(tensor_parallel_size=spec.ranks, distributed_executor_backend="uni"),
        device_config=DeviceConfig("cpu"),
        lora_config=LoRAConfig(max_loras=4, max_lora_rank=8) if spec.lora else None,
        kv_transfer_config=transfer,
        kv_events_config=_kv_events(spec),
        additional_config={"consolidator_endpoints": spec.consolidated} if spec.consolidated else {},
    )
    config.cache_config.kv_cache_layout = spec.layout
    if spec.draft_tokens:
        config.speculative_config = _drafting(spec, config)
    engine_calls.begin(config)  # as vLLM's executor does
    return config


def _drafting(spec: EngineSpec, config: VllmConfig) -> SpeculativeConfig:
    drafting = SpeculativeConfig(
        method="ngram",
        num_speculative_tokens=spec.draft_tokens,
        prompt_lookup_max=2,
        target_model_config=config.model_config,
        target_parallel_config=config.parallel_config,
    )
    if spec.has_draft_layer:  # vLLM would want a model on disk that has such a head
        drafting.method = "mtp"
    return drafting


def write_weights(folder: Path, files: Mapping[str, bytes]) -> Path:
    """A folder with these files, long enough before whoever loads it next."""
    folder.mkdir(exist_ok=True)
    for name, content in files.items():
        path = folder / name
        if not path.exists() or path.read_bytes() != content:
            path.write_bytes(content)
    settle(folder)
    return folder


def settle(folder: Path) -> None:
    """Until what happens next to a file of ``folder`` has another time stamp."""
    while time.time_ns() - max(path.stat().st_ctime_ns for path in folder.iterdir()) < 2 * CLOCK_TICK_NS:
        pass


def make_kv_cache_configs(spec: EngineSpec, config: VllmConfig) -> tuple[list[KVCacheConfig], KVCacheConfig]:
    """What vLLM's planner gives each rank, and the scheduler."""
    per_layer = dict(
        zip(spec.layer_names, (_layer_spec(spec, window) for window in spec.windows), strict=True)
    )
    memory_bytes = spec.num_blocks * sum(layer.page_size_bytes for layer in per_layer.values())
    per_rank = [dict(per_layer) for _ in range(spec.ranks)]
    groups = [get_global_kv_cache_groups(config, per_rank)] if get_global_kv_cache_groups else []
    configs = get_kv_cache_configs(config, per_rank, [memory_bytes] * spec.ranks, *groups)
    for each in configs:
        each.kv_cache_layout = config.cache_config.kv_cache_layout
    scheduler_config = generate_scheduler_kv_cache_config(configs)
    config.cache_config.num_gpu_blocks = scheduler_config.num_blocks
    block_tokens, hash_tokens = resolve_kv_cache_block_sizes(scheduler_config, config)
    for each in (*configs, scheduler_config):  # as the engine core does
        each.hash_block_size = hash_tokens
        each.cache_hit_alignment_tokens = resolve_cache_hit_alignment_tokens(
            scheduler_config, config, block_tokens, hash_tokens
        )
    return configs, scheduler_config


def make_scheduler(config: VllmConfig, kv_cache_config: KVCacheConfig) -> tuple[Scheduler, Any]:
    """vLLM's scheduler (with its connector) and the function that hashes a request's blocks."""
    block_size_tokens, hash_block_size_tokens = resolve_kv_cache_block_sizes(kv_cache_config, config)
    scheduler = config.scheduler_config.get_scheduler_cls()(
        vllm_config=config,
        kv_cache_config=kv_cache_config,
        structured_output_manager=StructuredOutputManager(config),
        block_size=block_size_tokens,
        hash_block_size=hash_block_size_tokens,
        log_stats=True,
    )
    hash_function = get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo)
    init_none_hash(hash_function)
    return scheduler, get_request_block_hasher(hash_block_size_tokens, hash_function)


def state_spec(spec: EngineSpec, page_bytes: int, **changes: Any) -> MambaSpec:
    """What vLLM says of a layer with a state, in an engine whose attention layers have pages of
    ``page_bytes``.
    """
    fields: dict[str, Any] = {
        "block_size": spec.block_size_tokens,
        "shapes": STATE_SHAPES,
        "dtypes": (torch.float32, torch.float32),
        "page_size_padded": page_bytes,
        "mamba_cache_mode": spec.mamba_mode,
        "num_speculative_blocks": spec.draft_tokens,
        "num_prefill_checkpoint_blocks": int(spec.exports_checkpoints),
        "prefill_checkpoint_alignment": 1 if spec.exports_checkpoints else None,
    }
    return MambaSpec(**(fields | changes))


def _layer_spec(spec: EngineSpec, window_tokens: Layer) -> KVCacheSpec:
    shape: dict[str, Any] = {
        "block_size": spec.block_size_tokens,
        "num_kv_heads": len(spec.heads_of(0)),
        "head_size": HEAD_SIZE,
        "dtype": torch.float32,
    }
    whole = MLAAttentionSpec(**(shape | {"num_kv_heads": 1})) if spec.is_mla else FullAttentionSpec(**shape)
    if window_tokens == "state":
        return state_spec(spec, whole.page_size_bytes)
    if window_tokens is None:
        return whole
    return SlidingWindowSpec(sliding_window=window_tokens, **shape)


def _model_json(spec: EngineSpec) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_attention_heads": max(4, spec.total_heads),
        "num_key_value_heads": spec.total_heads,
        "head_dim": HEAD_SIZE,
        "num_hidden_layers": len(spec.windows) - spec.has_draft_layer,
        "vocab_size": 512,
        "max_position_embeddings": spec.max_model_len,
        "dtype": "float32",
    }
