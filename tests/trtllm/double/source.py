"""TensorRT-LLM's own files in place of the double's: KVBM_TRTLLM_SOURCE names a folder that has them.

The folder is a checkout of TensorRT-LLM or the ``site-packages`` it is installed in: the files lie under
``tensorrt_llm/_torch/pyexecutor``. They are executed with stand-ins for what they import themselves, and only
for that. Loaded are the connector's module (base classes, ``KvCacheConnectorManager``) and, where the version
has it, the builder of V2 layouts.
"""

from __future__ import annotations

import ast
import os
from dataclasses import dataclass
from functools import cache
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import CodeType, ModuleType, SimpleNamespace
from typing import Any

import torch

from tests.trtllm.double import comm, host, requests

VARIABLE = "KVBM_TRTLLM_SOURCE"
PYEXECUTOR = "tensorrt_llm/_torch/pyexecutor"
NAMES = ("connectors/kv_cache_connector.py", "kv_cache_connector.py")
LAYOUT = "kv_cache_layout.py"
LLM_ARGS = "tensorrt_llm/llmapi/llm_args.py"
MANAGER = "KvCacheConnectorManager"
CALLED = {
    "build_scheduler_output",
    "get_finished",
    "get_num_new_matched_tokens",
    "handle_metadata",
    "request_finished",
    "should_add_sequence",
    "take_scheduled_requests_pending_load",
    "update_state_after_alloc",
}
"""Methods of the manager without which it is another connector than this one."""


class SourceError(RuntimeError):
    """The folder cannot be used; the message says what is missing in which file."""


@dataclass(frozen=True)
class Source:
    """``version``: one of the double's. ``layout``: None where the version has no V2 layouts."""

    connector: Path
    layout: Path | None
    version: str


def find() -> Source | None:
    """The files of the folder that the variable names; None without it, and where it has no connector."""
    where = folder()
    return None if where is None or missing_in(where) else find_in(where)


def folder() -> Path | None:
    """The folder that the variable names."""
    named = os.environ.get(VARIABLE)
    return Path(named) if named else None


def version() -> str | None:
    """Which of the double's versions the files are of."""
    found = find()
    return None if found is None else found.version


def missing_in(where: Path) -> str | None:
    """What to say of a folder without a connector."""
    paths = [where / PYEXECUTOR / name for name in NAMES]
    if any(path.is_file() for path in paths):
        return None
    return f"{VARIABLE}: there is neither {paths[0]} nor {paths[1]}"


@cache
def find_in(where: Path) -> Source:
    """The files of a folder that has a connector. SourceError if they are not what is known."""
    connector = next(path for name in NAMES if (path := where / PYEXECUTOR / name).is_file())
    classes = {
        node.name: node
        for node in ast.parse(connector.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef)
    }
    absent = {"RequestData", MANAGER} - {*classes}
    if not absent:
        defined = {item.name for item in classes[MANAGER].body if isinstance(item, ast.FunctionDef)}
        absent = {f"{MANAGER}.{name}" for name in CALLED - defined}
    if absent:
        raise SourceError(
            f"{VARIABLE}: {connector} has another connector than kvbm knows, without "
            + ", ".join(sorted(absent))
        )
    fields = {
        item.target.id
        for item in classes["RequestData"].body
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
    }
    version = "mid" if connector.parent.name == "connectors" else "released"
    if "new_block_ids_by_layer_group" in fields:
        version = "newest"
    elif "num_scheduled_tokens" not in fields:
        version = "early"
    layout = connector.parent / LAYOUT if version == "newest" else None
    if layout is not None and not layout.is_file():
        raise SourceError(f"{VARIABLE}: there is no {layout}, which belongs to {connector}")
    return Source(connector, layout, version)


class TensorWrapper:
    """Memory at an address."""

    def __init__(self, data_ptr: int, dtype: torch.dtype, shape: Any, strides: Any = None) -> None:
        self.parts = (data_ptr, dtype, tuple(shape), tuple(strides))


class KvCacheConnectorManagerCpp:
    """The base class of the connector's manager, which is C++."""


class KVCacheManagerV2:
    """What tells a V2 cache from a V1 cache."""


def binding_to_torch_dtype(dtype: torch.dtype) -> torch.dtype:
    """The double's caches name torch's types."""
    return dtype


STAND_INS: dict[str, dict[str, Any]] = {
    "tensorrt_llm": {"mpi_rank": comm.mpi_rank, "mpi_world_size": comm.mpi_world_size},
    "tensorrt_llm._utils": {
        "mpi_rank": comm.mpi_rank,
        "mpi_world_size": comm.mpi_world_size,
        "mpi_broadcast": comm.mpi_broadcast,
        "mpi_allgather": comm.mpi_allgather,
        "TensorWrapper": TensorWrapper,
        "convert_to_torch_tensor": lambda wrapper: host.tensor_at(*wrapper.parts),
        "binding_to_torch_dtype": binding_to_torch_dtype,
    },
    "tensorrt_llm.bindings": {"LlmRequestState": requests.LlmRequestState},
    "tensorrt_llm.bindings.internal.batch_manager": {MANAGER: KvCacheConnectorManagerCpp},
    "tensorrt_llm.logger": {
        "logger": SimpleNamespace(warning=lambda *_: None, warning_once=lambda *_, key: None)
    },
    "tensorrt_llm._torch.pyexecutor.llm_request": {"get_draft_token_length": lambda request: 0},
    "tensorrt_llm._torch.pyexecutor.scheduler": {"ScheduledRequests": object},
    "tensorrt_llm._torch.pyexecutor.kv_cache.kv_cache_manager_v2": {"KVCacheManagerV2": KVCacheManagerV2},
}
"""By module: what TensorRT-LLM's files import, and no more."""


def fill(modules: dict[str, ModuleType]) -> None:
    """Puts the stand-ins into modules of their names, as far as these are there."""
    for name, values in STAND_INS.items():
        if name in modules:
            vars(modules[name]).update(values)


def load(found: Source, modules: dict[str, ModuleType]) -> None:
    """Executes the files, in place of what the modules of their names have. These are in ``sys.modules``."""
    for path in filter(None, (found.layout, found.connector)):
        name = next(name for name in modules if name.endswith(f".{path.stem}"))
        module = modules[name]
        for own in [own for own in vars(module) if not own.startswith("__") or own == "__path__"]:
            delattr(module, own)
        module.__spec__ = ModuleSpec(name, None, origin=str(path))
        module.__package__ = module.__spec__.parent  # for its relative imports
        try:
            exec(_compiled(path), vars(module))
        except ImportError as error:
            raise SourceError(
                f"{VARIABLE}: {path} needs what tests/trtllm/double/source.py has no stand-in for: {error}"
            ) from error
        if hasattr(module, "torch"):
            module.torch = host.TorchOnHost()


@cache
def _compiled(path: Path) -> CodeType:
    return compile(path.read_text(encoding="utf-8"), str(path), "exec")
