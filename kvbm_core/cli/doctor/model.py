"""What a model's configuration says of its KV cache."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from kvbm_core.cli.doctor.check import Check, Finding, Subject, error, note, ok, warning
from kvbm_core.identity.hub import folder_of
from kvbm_core.identity.layers import WITHOUT_KV, keeps_states, layer_kinds, text_part

MAX_CONFIG_BYTES = 4 << 20
_ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "float8": 1}
_KV = 2


def look_at_model(subject: Subject) -> Iterator[Finding]:
    """Whether kvbm serves such a model, and how many of its tokens the host tier holds."""
    if not subject.model:
        return
    folder = folder_of(subject.model)
    if folder is None and _is_path(subject.model):
        yield error(
            f"{subject.model} is not there", "name the model's folder, or its name in the hub's cache"
        )
        return
    if folder is None:
        yield note(
            f"{subject.model} is not on this machine", "name its folder, or download it, to have it looked at"
        )
        return
    config = _config_of(folder)
    if config is None:
        yield error(f"{folder} has no config.json that can be read", "name the folder of a model")
        return
    text = text_part(config)
    if keeps_states(config):
        remedy = (
            "not every engine is served with such models, see docs/hybrid.md: the others refuse it at start"
        )
        yield note(f"{_name(config)} keeps states besides attention over blocks", remedy)
    if not list(folder.glob("*.safetensors")) and folder.is_dir():
        remedy = "kvbm names blocks by the weights' bytes: blocks of made-up weights stay off the disk"
        yield note(f"{folder} has no *.safetensors", remedy)
    token_bytes = kv_bytes_per_token(text)
    if not token_bytes:
        yield ok(f"{_name(config)}: its configuration can be read")
        return
    seen = f"{_name(config)}: {token_bytes / 1e3:,.0f} kB of KV for each token, over all ranks"
    host_gb = subject.settings.cpu_cache_gb
    if host_gb is None:
        yield ok(seen)
        return
    tokens = int(host_gb * 1e9 / token_bytes)
    seen += f"; the host tier holds {tokens:,} tokens"
    longest = text.get("max_position_embeddings")
    if isinstance(longest, int) and tokens < longest:
        remedy = "raise DYN_KVBM_CPU_CACHE_GB, or one prompt throws the others out"
        yield warning(f"{seen}, and its longest prompt has {longest:,}", remedy)
    else:
        yield ok(seen)


def kv_bytes_per_token(text: Mapping[str, Any]) -> int:
    """Over all layers and ranks, with the KV cache in the model's own type; 0 if that is not known."""
    try:
        layers = sum(kind not in WITHOUT_KV for kind in layer_kinds(text, int(text["num_hidden_layers"])))
        dtype = str(text.get("torch_dtype") or text.get("dtype") or "bfloat16")
        item_bytes = next((size for name, size in _ITEM_BYTES.items() if name in dtype), 2)
        if text.get("kv_lora_rank"):  # MLA: one latent vector for all heads
            return layers * (int(text["kv_lora_rank"]) + int(text.get("qk_rope_head_dim", 0))) * item_bytes
        heads = int(text.get("num_key_value_heads") or text["num_attention_heads"])
        head_items = int(text.get("head_dim") or int(text["hidden_size"]) // int(text["num_attention_heads"]))
        return _KV * layers * heads * head_items * item_bytes
    except (KeyError, TypeError, ValueError, ZeroDivisionError):
        return 0


def _is_path(name: str) -> bool:
    """Whether it must be a path: a name of the hub is NAME or OWNER/NAME."""
    parent = Path(name).expanduser().parent
    return name.startswith((".", "/", "~")) or name.count("/") > 1 or (parent != Path() and parent.exists())


def _config_of(folder: Path) -> dict[str, Any] | None:
    path = folder / "config.json" if folder.is_dir() else folder
    try:
        with path.open("rb") as file:
            found = json.loads(file.read(MAX_CONFIG_BYTES))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def _listed(config: Mapping[str, Any], key: str) -> list[object]:
    value = config.get(key)
    return value if isinstance(value, list) else [] if value is None else [value]


def _name(config: Mapping[str, Any]) -> str:
    return str((_listed(config, "architectures") or _listed(config, "model_type") or ["a model"])[0])


CHECKS = (
    Check(
        "model",
        "with --model: whether such a model is served, and how many tokens the host tier holds",
        look_at_model,
    ),
)
