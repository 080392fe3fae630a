"""What the layers of a model keep of the tokens that they have seen, as its config.json says it.

Configs have many ways to say it. A kind here is one of those below, or a word of the config's own, which is
taken for attention.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

FULL, WINDOW, CHUNKS = "full_attention", "sliding_attention", "chunked_attention"
STATE, CONVOLUTION, BOTH = "linear_attention", "conv", "hybrid"
NONE = "mlp"
WINDOWED = frozenset({WINDOW, CHUNKS})
STATES = frozenset({STATE, CONVOLUTION, BOTH})
"""They keep a state for each sequence; ``BOTH`` keeps KV too."""
WITHOUT_KV = frozenset({STATE, CONVOLUTION, NONE})
_TEXT_PARTS = ("text_config", "llm_config", "language_config", "thinker_config")
_SAME = {
    "attention": FULL,
    "mamba": STATE,
    "mamba2": STATE,
    "recurrent": STATE,
    "short_conv": CONVOLUTION,
    "moe": NONE,
}
_LETTERS = {"M": STATE, "*": FULL, "-": NONE, "E": NONE}
"""Of Nemotron-H's hybrid_override_pattern."""
_MAMBA_ALONE = re.compile("(falcon_)?mamba2?|rwkv.*")
_OF_STATES = re.compile("mamba|ssm|rwkv|linear_attn|linear_num|gated_delta|recurrent|short_conv|conv_L_cache")
_GEMMA2_PATTERN = 2
_QWEN_INTERVAL = 4


def text_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Of a model with images and the like the part that is the language model."""
    for part in _TEXT_PARTS:
        inner = config.get(part)
        if isinstance(inner, Mapping):
            return text_part(inner)
    return config


def layer_kinds(text: Mapping[str, Any], num_layers: int) -> tuple[str, ...]:
    """Of each layer that has a cache of its own."""
    given = text.get("layer_types") or text.get("layers_block_type")
    if isinstance(given, list) and given:
        return tuple(_SAME.get(str(kind), str(kind)) for kind in given[:num_layers])
    return _hybrid_kinds(text, num_layers) or _attention_kinds(text, num_layers)


def keeps_states(config: Mapping[str, Any]) -> bool:
    """Whether some layers keep a state instead of keys and values; also if that is only likely."""
    text = text_part(config)
    num_layers = next(
        (value for name in ("num_hidden_layers", "n_layer") if isinstance(value := text.get(name), int)), 1
    )
    kinds = layer_kinds(text, num_layers)
    if STATES & set(kinds):
        return True
    says_all = bool(text.get("layer_types") or text.get("layers_block_type"))
    return not says_all and any(_OF_STATES.search(str(name)) for name in text)


def state_bytes(text: Mapping[str, Any], dtype_bytes: int) -> int:
    """Of one state of one layer over all ranks, without room for drafts; 0 if the config does not say it.

    As vLLM and SGLang keep it: the last inputs of a convolution, in the model's type, and a matrix of each
    head, in a type of its own.
    """
    kimi = text.get("linear_attn_config")
    if isinstance(kimi, Mapping):  # Kimi Delta Attention, whose matrix is of float32
        heads, width = int(kimi["num_heads"]), int(kimi["head_dim"])
        rows = 3 * heads * width
        return rows * (int(kimi["short_conv_kernel_size"]) - 1) * dtype_bytes + 4 * heads * width * width
    matrix_bytes = _matrix_bytes(text, dtype_bytes)
    if "linear_num_value_heads" in text:  # gated delta net
        heads, width = int(text["linear_num_value_heads"]), int(text["linear_value_head_dim"])
        key_width = int(text["linear_key_head_dim"])
        rows = 2 * int(text["linear_num_key_heads"]) * key_width + heads * width
        kept = int(text["linear_conv_kernel_dim"]) - 1
        return rows * kept * dtype_bytes + heads * width * key_width * matrix_bytes
    if "conv_L_cache" in text:  # LFM2: a convolution alone
        return (
            int(text.get("conv_dim") or text["hidden_size"]) * (int(text["conv_L_cache"]) - 1) * dtype_bytes
        )
    return _mamba2_bytes(text, dtype_bytes, matrix_bytes)


def _mamba2_bytes(text: Mapping[str, Any], dtype_bytes: int, matrix_bytes: int) -> int:
    heads = _first(text, "mamba_num_heads", "mamba_n_heads")
    depth = _first(text, "ssm_state_size", "mamba_d_state")
    groups = _first(text, "mamba_n_groups", "n_groups", "mamba_ngroups")
    if not heads or not depth or not groups:
        return 0
    width = _first(text, "mamba_d_ssm")
    if not width and "mamba_num_heads" in text:  # Nemotron-H
        width = heads * int(text["mamba_head_dim"])
    width = width or int(_first(text, "mamba_expand") or 2) * int(text["hidden_size"])
    rows, kept = width + 2 * groups * depth, (_first(text, "conv_kernel", "mamba_d_conv") or 4) - 1
    return rows * kept * dtype_bytes + width * depth * matrix_bytes


def _matrix_bytes(text: Mapping[str, Any], dtype_bytes: int) -> int:
    default = "float32" if "ssm_state_size" in text else ""  # vLLM's, of Nemotron-H
    name = str(text.get("mamba_ssm_cache_dtype") or text.get("mamba_ssm_dtype") or default)
    return {"float32": 4, "float16": 2, "bfloat16": 2}.get(name.removeprefix("torch."), dtype_bytes)


def _first(text: Mapping[str, Any], *names: str) -> int:
    """The first of these that is a number; 0 if none is."""
    return next((value for name in names if isinstance(value := text.get(name), int)), 0)


def _hybrid_kinds(text: Mapping[str, Any], num_layers: int) -> tuple[str, ...]:
    """Of families that have no list of layers; () for all others."""
    model_type, layers = str(text.get("model_type")), range(num_layers)
    if model_type == "falcon_h1":
        return (BOTH,) * num_layers
    pattern = text.get("hybrid_override_pattern")
    if isinstance(pattern, str):
        return tuple(_LETTERS.get(letter, NONE) for letter in pattern)
    if _MAMBA_ALONE.fullmatch(model_type):
        return (STATE,) * num_layers
    has_kv = _attention_of(text)
    return () if has_kv is None else tuple(FULL if has_kv(layer) else STATE for layer in layers)


def _attention_of(text: Mapping[str, Any]) -> Callable[[int], bool] | None:
    """Which layers have attention, all others having states; None for models of attention alone."""
    kimi, period = text.get("linear_attn_config"), _first(text, "attn_layer_period")
    listed, flags = text.get("attn_layer_indices"), text.get("attn_type_list")
    if isinstance(kimi, Mapping):
        states = set(kimi.get("kda_layers") or ())  # counted from 1
        return lambda layer: layer + 1 not in states
    if "linear_num_value_heads" in text:  # Qwen3-Next, Qwen3.5
        interval = _first(text, "full_attention_interval") or _QWEN_INTERVAL
        return lambda layer: (layer + 1) % interval == 0
    if period:  # Jamba
        return lambda layer: layer % period == _first(text, "attn_layer_offset")
    if isinstance(listed, list):  # Bamba
        return lambda layer: layer in listed
    if isinstance(flags, list):  # MiniMax-01
        return lambda layer: bool(layer < len(flags) and flags[layer])
    return None


def _attention_kinds(text: Mapping[str, Any], num_layers: int) -> tuple[str, ...]:
    window = _first(text, "sliding_window")
    if not window or text.get("use_sliding_window") is False:
        return (FULL,) * num_layers
    default = _GEMMA2_PATTERN if text.get("model_type") == "gemma2" else 0
    pattern = _first(text, "sliding_window_pattern") or default
    is_full = [pattern > 0 and (layer + 1) % pattern == 0 for layer in range(num_layers)]
    return tuple(FULL if full else WINDOW for full in is_full)
