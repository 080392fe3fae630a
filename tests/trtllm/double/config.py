"""What a test chooses of an executor, and the ``TorchLlmArgs`` that connectors get."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from tests.trtllm.double.llm_args import classes_of


@dataclass(frozen=True)
class ExecutorConfig:
    """An executor and its cache; the defaults make a small V1 cache with 32 bytes per token.

    ``attention_windows`` has one entry per layer, repeated as needed (V2 only); layers with the same window
    form a layer group. ``chunk_tokens`` is the token budget of an iteration (``max_num_tokens`` with chunked
    prefill), a multiple of ``tokens_per_block``; None schedules whole prompts. ``num_blocks`` counts per
    layer group.
    """

    manager: str = "v1"
    overlap: bool = False
    tokens_per_block: int = 4
    told_tokens_per_block: int | None = None
    """V1: what ``llm_args`` say instead of what the cache is made of (FlashMLA)."""
    num_blocks: int = 64
    num_layers: int = 2
    kv_factor: int = 2
    num_kv_heads: int = 1
    head_dim: int = 4
    dtype: str = "float16"
    chunk_tokens: int | None = None
    max_batch_size: int = 64
    cuda_graphs: bool = False
    graph_padding: bool = False
    """Batches that only decode are filled up to a power of two with a request that nobody is told of; it
    takes a block once, and keeps it."""
    enable_block_reuse: bool = True
    enable_partial_reuse: bool = False
    attention_windows: tuple[int | None, ...] = (None,)
    split_kv_regions: bool = False
    """V2: keys and values in regions of their own."""
    replicated_roles: tuple[str, ...] = ()
    """V2: what the cache says to be the same on all ranks (``key``, ``value``)."""
    slot_padding_bytes: int = 0
    """V2: bytes between the slots of a region that belong to nobody."""
    refuse_growth: bool = False
    """V2: no page beyond the scheduled chunk, so that offers beyond it are honoured in part only."""
    attention_dp: bool = False
    """N: each rank is an executor of its own as far as KV goes; they run their forward passes together."""
    dummies_fit: bool = True
    """Attention DP: a rank whose requests are all being loaded has room for a dummy request; else no rank
    runs.
    """
    defers_when_full: bool = False
    """Attention DP, a rank without room for a dummy request when its batch has gone to loads: all batches,
    whose
    metadata is bound and whose loads have begun, come again; else all ranks wait for the first of its
    loads."""
    double_finish: bool = False
    """Overlap: an end that was not predictable calls ``request_finished`` a second time."""
    sleeps: bool = False
    """Whether the loop sleeps in its queue while there is no request, as TensorRT-LLM's does: a step does
    nothing then, and what is still being saved is not polled."""
    vocab_size: int = 1000
    warmup_forwards: int = 2
    model: str = "double/model"
    load_format: str = "auto"
    sparse_attention: Any = None
    record: bool = True
    """Whether ``calls`` keeps every call; without, only how many there were (long runs)."""

    def __post_init__(self) -> None:
        if self.manager not in {"v1", "v2"}:
            raise ValueError(f"manager is v1 or v2, not {self.manager}")
        if self.manager == "v1" and self.windows != [None]:
            raise ValueError("V1 refuses a connector on a model with attention windows")
        if self.manager == "v2" and self.enable_partial_reuse:
            raise ValueError("partial reuse is for V1")
        if self.chunk_tokens is not None and self.chunk_tokens % self.tokens_per_block:
            raise ValueError("chunk_tokens is a multiple of tokens_per_block")
        if self.head_bytes % 8:
            raise ValueError("head_dim * itemsize is a multiple of 8 bytes")

    @property
    def windows(self) -> list[int | None]:
        """The window of each layer group, in order of first appearance."""
        return list(dict.fromkeys(self.window_of_layer(layer) for layer in range(self.num_layers)))

    def window_of_layer(self, layer: int) -> int | None:
        """The attention window of a layer, None for full attention."""
        return self.attention_windows[layer % len(self.attention_windows)]

    def group_of_layer(self, layer: int) -> int:
        """The layer group of a layer."""
        return self.windows.index(self.window_of_layer(layer))

    @property
    def torch_dtype(self) -> torch.dtype:
        """The element type of the cache."""
        found: torch.dtype = getattr(torch, self.dtype)
        return found

    @property
    def head_bytes(self) -> int:
        """Bytes of one head of one token, of keys or of values."""
        return self.head_dim * int(self.torch_dtype.itemsize)

    def llm_args(self, rank: int, size: int, kv_connector_config: Any = None) -> Any:
        """What the constructors of leader and worker get, a plain object (``TorchLlmArgs``)."""
        from tensorrt_llm.llmapi.llm_args import TorchLlmArgs

        from tests.trtllm.double import contract

        windows = None if self.windows == [None] else [window or 0 for window in self.attention_windows]
        mapping = SimpleNamespace(
            rank=rank, world_size=size, tp_size=size, tp_rank=rank, pp_size=1, pp_rank=0
        )
        cache = classes_of(contract.current().version)["KvCacheConfig"](
            tokens_per_block=self.told_tokens_per_block or self.tokens_per_block,
            dtype=self.dtype,
            max_attention_window=windows,
            enable_partial_reuse=self.enable_partial_reuse,
            enable_block_reuse=self.enable_block_reuse,
            host_cache_size=None,
        )
        return TorchLlmArgs(
            model=self.model,
            revision=None,
            dtype=self.dtype,
            kv_cache_config=cache,
            tensor_parallel_size=size,
            pipeline_parallel_size=1,
            enable_attention_dp=self.attention_dp,
            parallel_config=SimpleNamespace(to_mapping=lambda: mapping, world_size=size),
            quant_config=None,
            kv_connector_config=kv_connector_config,
            sparse_attention_config=self.sparse_attention,
            cuda_graph_config=SimpleNamespace(enable_padding=True) if self.graph_padding else None,
            load_format=self.load_format,
            disable_overlap_scheduler=not self.overlap,
            enable_chunked_prefill=self.chunk_tokens is not None,
            max_batch_size=self.max_batch_size,
            max_num_tokens=self.chunk_tokens or 8192,
        )
