"""What counts of values that engines share: transformers' configuration, and files that settings name."""

from __future__ import annotations

import hashlib
import re
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
    values = config.to_dict() if callable(getattr(config, "to_dict", None)) else config
    if isinstance(values, Mapping):
        values = {key: item for key, item in values.items() if key not in _NAMES}
    return None if values is None else (type(config).__qualname__, _without_origins(values))


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


_OF_A_SERVICE = re.compile(
    r"\w+_(SERVICE_(HOST|PORT(_\w+)?)|PORT(_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?)"
)


def is_of_kubernetes(variable: str) -> bool:
    """Whether Kubernetes sets it in every pod for a Service of that name, also one that begins with the
    engine's: where the Service listens.
    """
    return _OF_A_SERVICE.fullmatch(variable) is not None
