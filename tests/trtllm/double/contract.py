"""Puts a ``tensorrt_llm`` of one contract version into ``sys.modules``."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

from tests.trtllm.double import api_layout, api_newest, api_released, comm, requests

RELEASED = "released"
NEWEST = "newest"


@dataclass(frozen=True)
class Contract:
    """What the executor has to know of a version."""

    version: str
    api: Any
    bound_request: type
    python_request: type

    @property
    def is_newest(self) -> bool:
        """Whether this is N."""
        return self.version == NEWEST


_CONTRACTS = {
    RELEASED: Contract(RELEASED, api_released, requests.ReleasedBoundRequest, requests.ReleasedRequest),
    NEWEST: Contract(NEWEST, api_newest, requests.NewestBoundRequest, requests.NewestRequest),
}
_installed: list[Contract] = []
_OURS = ("tensorrt_llm", "kvbm_trtllm", "kvbm.trtllm_integration")


class TorchLlmArgs(SimpleNamespace):
    """Plain attributes."""


def current() -> Contract:
    """The version installed now; raises RuntimeError outside ``installed``."""
    if not _installed:
        raise RuntimeError("no contract is installed: use contract.installed(version) or a World")
    return _installed[-1]


def _modules(contract: Contract) -> dict[str, ModuleType]:
    names = [
        "tensorrt_llm",
        "tensorrt_llm._utils",
        "tensorrt_llm._torch",
        "tensorrt_llm._torch.pyexecutor",
        "tensorrt_llm.bindings",
        "tensorrt_llm.bindings.internal",
        "tensorrt_llm.bindings.internal.batch_manager",
        "tensorrt_llm.llmapi",
        "tensorrt_llm.llmapi.llm_args",
    ]
    connectors = "tensorrt_llm._torch.pyexecutor"
    if contract.is_newest:
        connectors += ".connectors"
        names += [connectors, f"{connectors}.kv_cache_layout"]
    names.append(f"{connectors}.kv_cache_connector")
    modules = {name: ModuleType(name) for name in names}
    for name, module in modules.items():
        module.__path__ = []
        module.__spec__ = ModuleSpec(name, None, is_package=True)  # importlib.util.find_spec wants one
        parent, _, leaf = name.rpartition(".")
        if parent:
            setattr(modules[parent], leaf, module)
    for name in ("tensorrt_llm", "tensorrt_llm._utils"):
        for function in (comm.mpi_rank, comm.mpi_world_size, comm.mpi_broadcast, comm.mpi_allgather):
            if name == "tensorrt_llm._utils" or function in {comm.mpi_rank, comm.mpi_world_size}:
                setattr(modules[name], function.__name__, function)
    modules["tensorrt_llm"].__version__ = "1.3.0rc1" if contract.is_newest else "1.2.1"  # type: ignore[attr-defined]
    modules["tensorrt_llm.bindings.internal.batch_manager"].LlmRequest = contract.bound_request  # type: ignore[attr-defined]
    modules["tensorrt_llm.llmapi.llm_args"].TorchLlmArgs = TorchLlmArgs  # type: ignore[attr-defined]
    api = modules[f"{connectors}.kv_cache_connector"]
    for name in ("RequestData", "SchedulerOutput", "KvCacheConnectorWorker", "KvCacheConnectorScheduler"):
        setattr(api, name, getattr(contract.api, name))
    if contract.is_newest:
        layout = modules[f"{connectors}.kv_cache_layout"]
        for name in (
            "BAD_PAGE_INDEX",
            "KvCacheBufferRef",
            "KvCacheLayerGroupLayout",
            "KvCacheLayout",
            "KvCacheRegion",
            "valid_page_slots",
        ):
            setattr(layout, name, getattr(api_layout, name))
    return modules


def _take_out() -> dict[str, ModuleType]:
    """Removes what belongs to a version from ``sys.modules`` and returns it."""
    ours = [name for name in sys.modules if any(name == top or name.startswith(f"{top}.") for top in _OURS)]
    return {name: sys.modules.pop(name) for name in ours}


def _unbind_submodule() -> None:
    """An imported ``kvbm.trtllm_integration`` is also an attribute of ``kvbm``, which stays."""
    package = sys.modules.get("kvbm")
    if package is not None and hasattr(package, "trtllm_integration"):
        del package.trtllm_integration


@contextmanager
def installed(version: str) -> Iterator[Contract]:
    """TensorRT-LLM of this version can be imported inside, and adapters import it anew; afterwards all is as before."""
    contract = _CONTRACTS[version]
    before = _take_out()
    _unbind_submodule()
    sys.modules.update(_modules(contract))
    _installed.append(contract)
    try:
        yield contract
    finally:
        _installed.pop()
        _take_out()
        _unbind_submodule()
        sys.modules.update({name: module for name, module in before.items() if name.startswith("tensorrt_llm")})
