"""vLLM's own arguments and variables, and values for them by their types: nobody lists them here."""

from __future__ import annotations

import dataclasses
import enum
import json
import os
import re
import types
import typing
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

from vllm import envs
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs

from kvbm_core.identity.fields import Irrelevant, ThisProcessOnly
from kvbm_vllm.config_tables import TABLES
from tests.vllm.engine_setups import MODEL

_OBSERVED = "what is logged or measured"
_MOVED = "where weights lie and how they get there"
HARMLESS: dict[str, str] = {
    "cp_kv_cache_interleave_size": "1 is what it is by default",
    "cpu_offload_gb": _MOVED,
    "cudagraph_metrics": _OBSERVED,
    "data_parallel_size": "MODEL has no experts",
    "enable_layerwise_nvtx_tracing": _OBSERVED,
    "enable_logging_iteration_details": _OBSERVED,
    "enable_mfu_metrics": _OBSERVED,
    "enable_mm_processor_stats": _OBSERVED,
    "jit_monitor_mode": _OBSERVED,
    "jit_monitor_verbose": _OBSERVED,
    "kv_cache_metrics": _OBSERVED,
    "kv_cache_metrics_sample": _OBSERVED,
    "max_model_len": "the RoPE of MODEL does not depend on it",
    "offload_group_size": _MOVED,
    "offload_num_in_group": _MOVED,
    "offload_prefetch_step": _MOVED,
    "safetensors_load_strategy": "the same files are read in another way",
    "scheduling_policy": "which request runs when",
}
"""Arguments of which no field in config_tables has the name, or one that counts with other values or models
alone, and that shape nothing of MODEL -> why.
"""
PLAIN: dict[str, Any] = {"skip_tokenizer_init": True, "dtype": "float32"}


COUNTING = {("cp_kv_cache_interleave_size", 64), ("safetensors_load_strategy", "torchao")}
"""Values of these that count all the same."""


def is_harmless(argument: str, value: Any = None) -> bool:
    """Whether it is declared to shape no K or V: above, or in the table with the field of its name."""
    rules = [table.rules[argument] for table in TABLES if argument in table.rules]
    rules = [rule.otherwise if isinstance(rule, ThisProcessOnly) else rule for rule in rules]
    is_declared = argument in HARMLESS and (argument, value) not in COUNTING
    return is_declared or (bool(rules) and all(isinstance(rule, Irrelevant) for rule in rules))


@cache
def drawn() -> tuple[tuple[str, Any], ...]:
    """All arguments with values that their types name, but for the default; no texts that name anything."""
    return tuple(
        (field.name, value)
        for field in dataclasses.fields(EngineArgs)
        if field.name not in {"model", "log_level", *PLAIN}  # the log is this process's
        for value in _values(field.type, field.default)
        if value != field.default
    )


def _values(hint: Any, default: Any) -> Iterator[Any]:
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        yield from parts
    elif origin in {typing.Union, types.UnionType}:
        for part in parts:
            yield from _values(part, default)
    elif origin is typing.Annotated:
        yield from _values(parts[0], default)
    elif isinstance(hint, type) and issubclass(hint, enum.Enum):
        yield from hint
    elif hint is bool:
        yield from (False, True)
    elif hint is int:
        yield from (default + 1, 2 * default + 2) if isinstance(default, int) else (1, 64)
    elif hint is float:
        yield from (0.25, 0.75)


class Folder:
    """One model, and engines that have it."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(MODEL))
        (folder / "model.safetensors").write_bytes(b"the weights")
        self._folder = str(folder)

    def config(self, **arguments: Any) -> VllmConfig:
        """Whatever vLLM raises, if it does not start with these."""
        with patch.dict(os.environ):
            return EngineArgs(**{"model": self._folder, **PLAIN, **arguments}).create_engine_config()


def shown(value: Any) -> Any:
    """All that a configuration holds, as a text without addresses."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = (field.name for field in dataclasses.fields(value) if field.name != "instance_id")
        return {name: shown(getattr(value, name, None)) for name in names}
    if isinstance(value, dict):
        return {str(key): shown(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [shown(item) for item in value]
    if isinstance(value, set | frozenset):
        return sorted(map(str, value))
    return re.sub(r" at 0x[0-9a-f]+|0x[0-9a-f]+", "", repr(value))


def variables() -> list[str]:
    """Of vLLM's environment."""
    return sorted(name for name in envs.environment_variables if name.startswith("VLLM_"))
