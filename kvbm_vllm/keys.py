"""vLLM request -> KeyNamespace and what each block depends on besides its tokens.

In doubt about an input, the request is not cached: ``uncacheable_reason`` names why, and it is counted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from kvbm_core.tokens.hashing import encode_fields
from kvbm_core.tokens.namespace import KeyNamespace
from kvbm_core.tokens.weights import model_stamp

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.request import Request


def base_namespace(vllm_config: VllmConfig, block_size_tokens: int, layout_fingerprint: str) -> KeyNamespace:
    """What all requests of one engine share. Raises nothing; every field is a string that vLLM resolved."""
    model, parallel, cache = vllm_config.model_config, vllm_config.parallel_config, vllm_config.cache_config
    return KeyNamespace(
        model=str(model.model),
        revision=str(model.revision or ""),
        kv_dtype=f"{cache.cache_dtype}/{model.dtype}",
        layout=layout_fingerprint,
        block_size_tokens=block_size_tokens,
        parallel=f"tp={parallel.tensor_parallel_size},pp={parallel.pipeline_parallel_size}",
        extra=(
            ("quantization", str(model.quantization or "")),
            ("hf_overrides", str(sorted(str(item) for item in _items(model.hf_overrides)))),
            ("served_code", str(model.code_revision or "")),
            ("weights", _weights_of(vllm_config)),
        ),
    )


def _weights_of(vllm_config: VllmConfig) -> str:
    """What tells these weights from others of the same name: blocks on disk outlive the process that computed
    them.
    """
    model, load_format = vllm_config.model_config, str(vllm_config.load_config.load_format)
    if load_format == "dummy":
        return f"dummy/{model.seed}"
    cache_dir = vllm_config.load_config.download_dir
    return model_stamp(
        str(model.model_weights or model.model), str(model.revision or ""), str(cache_dir or "")
    )


def _items(value: object) -> list[object]:
    return list(value.items()) if isinstance(value, dict) else [value]


def uncacheable_reason(request: Request) -> str | None:
    """Why blocks of this request must not be stored or loaded; None if they may."""
    if request.prompt_embeds is not None or request.prompt_token_ids is None:
        return "prompt_embeds"
    if request.resumable:
        # A streaming session replaces tokens that were computed already.
        return "streaming_session"
    return None


def adapter_of(request: Request) -> str:
    """The request's LoRA adapter as its namespace knows it; "" without one."""
    lora = request.lora_request
    return "" if lora is None else f"{lora.lora_name}\0{lora.lora_path}\0{model_stamp(str(lora.lora_path))}"


def multimodal_extras(request: Request, block_size_tokens: int) -> Callable[[int], bytes] | None:
    """For each block, the ids of the multimodal items that overlap it and where they start; None without
    items.
    """
    spans = [
        (feature.mm_position.offset, feature.mm_position.length, feature.identifier)
        for feature in request.mm_features
    ]
    if not spans:
        return None

    def extra_of_block(block: int) -> bytes:
        start, end = block * block_size_tokens, (block + 1) * block_size_tokens
        overlapping = [span for span in spans if span[0] < end and span[0] + span[1] > start]
        fields = [value for offset, length, name in overlapping for value in (name, offset, length)]
        return encode_fields(*fields) if fields else b""

    return extra_of_block
