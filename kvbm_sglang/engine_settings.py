"""Settings of the running engine that change what a page's bytes mean and that no host pool tells.

A host pool's dtype is that of its storage: e5m2 and e4m3 are both bytes there.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

NAMES = (
    "kv_cache_dtype",
    "dtype",
    "quantization",
    "quantization_param_path",
    "torchao_config",
    "revision",
    "load_format",
    "model_impl",
    "json_model_override_args",
)
# Where SGLang has them: 0.5.15 and newer, and up to 0.5.19.
_PLACES = (
    ("sglang.srt.runtime_context", "get_server_args"),
    ("sglang.srt.server_args", "get_global_server_args"),
)


def find_server_args() -> Any:
    """The engine's arguments; None outside an engine, and where this SGLang has them elsewhere."""
    for place, getter in _PLACES:
        try:
            found = getattr(importlib.import_module(place), getter)()
        except (ImportError, AttributeError, ValueError, RuntimeError):
            continue
        if found is not None:
            return found
    return None


def settings_of(server_args: Any) -> Mapping[str, object]:
    """Those of NAMES that this SGLang has."""
    return {name: getattr(server_args, name) for name in NAMES if hasattr(server_args, name)}
