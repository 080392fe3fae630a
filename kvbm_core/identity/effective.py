"""What counts of values that engines share: transformers' configuration, and files that settings name."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

NOT_IN_THE_EFFECTIVE_CONFIG = frozenset({"_commit_hash", "transformers_version", "use_cache"})
"""Of transformers' configuration: who wrote it."""
# Where it came from. In a configuration inside it, it may say which other weights are read.
_NAMES = frozenset({"_name_or_path", "name_or_path"})


def effective_config(config: Any) -> object:
    """transformers' configuration as the engine computes with it: the file, overrides and defaults
    together.
    """
    if config is None:
        return None
    has_text = callable(getattr(config, "to_dict", None))
    values = config.to_dict() if has_text else config
    if isinstance(values, Mapping):
        values = {key: item for key, item in values.items() if key not in _NAMES}
    # to_dict() of a class of its own may leave out what an override has set.
    attributes = _public_attributes(config) if has_text and hasattr(config, "__dict__") else None
    return type(config).__qualname__, _without_origins(values), _without_origins(attributes)


def _public_attributes(config: Any) -> dict[str, Any]:
    return {
        name: effective_config(item) if callable(getattr(item, "to_dict", None)) else item
        for name, item in vars(config).items()
        if not name.startswith("_") and name not in _NAMES
    }


def _without_origins(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {
            key: _without_origins(item)
            for key, item in value.items()
            if key not in NOT_IN_THE_EFFECTIVE_CONFIG
        }
    return [_without_origins(item) for item in value] if isinstance(value, list | tuple) else value


def file_digest(path: Any) -> str | None:
    """sha256 of a file that a field names; None for no file. OSError if it cannot be read."""
    return None if path is None else hashlib.sha256(Path(path).read_bytes()).hexdigest()
