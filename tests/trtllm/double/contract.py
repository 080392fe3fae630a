"""Puts a ``tensorrt_llm`` of one contract version into ``sys.modules``."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from tests.trtllm.double import (
    api_early,
    api_layout,
    api_mid,
    api_newest,
    api_released,
    llm_args,
    own_manager,
    requests,
    source,
    weights,
)

EARLY = "early"
RELEASED = "released"
MID = "mid"
NEWEST = "newest"
PYEXECUTOR = "tensorrt_llm._torch.pyexecutor"
V2_MANAGER = f"{PYEXECUTOR}.kv_cache.kv_cache_manager_v2"


@dataclass(frozen=True)
class Contract:
    """What the executor has to know of a version; ``release`` is the number that it gives itself.

    ``queries_first``: all requests of an iteration are queried before the first of them is told its blocks,
    and not one by one. ``drops_batches``: metadata may be bound for a batch that cannot run. ``holds_loads``:
    a cancelled request keeps its blocks until its load is over. ``counts_tokens``: it says how many tokens an
    iteration computes. ``queries_dummies``: it asks about requests that it made up; ``queries_in_warm_up``:
    before there is a cache. ``frees_one_save``: of the requests whose saves end in one iteration only the
    first is let go, by mistake. ``reports_all_ends``: request_finished comes for requests that were cancelled
    or have failed, too. ``leaks_on_error``: requests that end by an error of the forward pass keep their
    blocks for ever, by mistake.
    """

    version: str
    release: str
    api: Any
    bound_request: type = requests.ReleasedBoundRequest
    python_request: type = requests.ReleasedRequest
    counts_tokens: bool = True
    has_callable: bool = True
    has_connectors_package: bool = True
    waits_at_start: bool = True
    queries_first: bool = True
    queries_dummies: bool = True
    queries_in_warm_up: bool = False
    drops_batches: bool = True
    holds_loads: bool = False
    has_priorities: bool = True
    frees_one_save: bool = False
    reports_all_ends: bool = False
    leaks_on_error: bool = False

    def module(self) -> Any:
        """The installed module of the connector's classes."""
        return import_module(f"{self.package}.kv_cache_connector")

    def layout_of(self, pages: Any) -> Any:
        """The layout of a V2 cache, made by the installed builder."""
        return import_module(f"{self.package}.kv_cache_layout").build_kv_cache_layout_v2(pages)

    @property
    def package(self) -> str:
        """Where that module is."""
        return f"{PYEXECUTOR}.connectors" if self.has_connectors_package else PYEXECUTOR

    @property
    def is_newest(self) -> bool:
        """Whether this is N."""
        return self.version == NEWEST


_OLD = {
    "has_connectors_package": False,
    "waits_at_start": False,
    "queries_first": False,
    "drops_batches": False,
    "has_priorities": False,
}
_CONTRACTS = {
    EARLY: Contract(
        EARLY,
        "1.1.0rc5",
        api_early,
        counts_tokens=False,
        has_callable=False,
        queries_in_warm_up=True,
        frees_one_save=True,
        reports_all_ends=True,
        **_OLD,
    ),
    RELEASED: Contract(RELEASED, "1.2.1", api_released, leaks_on_error=True, **_OLD),
    MID: Contract(MID, "1.3.0rc0", api_mid),
    NEWEST: Contract(
        NEWEST,
        "1.3.0rc1",
        api_newest,
        requests.NewestBoundRequest,
        requests.NewestRequest,
        queries_dummies=False,
        holds_loads=True,
    ),
}
_installed: list[Contract] = []
_OURS = ("tensorrt_llm", "kvbm_trtllm", "kvbm.trtllm_integration")


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
        PYEXECUTOR,
        f"{PYEXECUTOR}.llm_request",
        f"{PYEXECUTOR}.model_loader",
        f"{PYEXECUTOR}.py_executor",
        f"{PYEXECUTOR}.scheduler",
        "tensorrt_llm.bindings",
        "tensorrt_llm.bindings.internal",
        "tensorrt_llm.bindings.internal.batch_manager",
        "tensorrt_llm.llmapi",
        "tensorrt_llm.llmapi.llm_args",
        "tensorrt_llm.logger",
    ]
    connectors = contract.package
    if contract.has_connectors_package:
        names.append(connectors)
    if contract.is_newest:
        names += [f"{connectors}.kv_cache_layout", f"{PYEXECUTOR}.kv_cache", V2_MANAGER]
    names.append(f"{connectors}.kv_cache_connector")
    modules = {name: ModuleType(name) for name in names}
    for name, module in modules.items():
        module.__path__ = []
        module.__spec__ = ModuleSpec(name, None, is_package=True)  # importlib.util.find_spec wants one
        parent, _, leaf = name.rpartition(".")
        if parent:
            setattr(modules[parent], leaf, module)
    modules["tensorrt_llm"].__version__ = contract.release  # type: ignore[attr-defined]
    modules["tensorrt_llm.bindings.internal.batch_manager"].LlmRequest = contract.bound_request  # type: ignore[attr-defined]
    modules["tensorrt_llm.llmapi.llm_args"].TorchLlmArgs = llm_args.classes_of(contract.version)[
        "TorchLlmArgs"
    ]  # type: ignore[attr-defined]
    for place, kind in (("model_loader", weights.ModelLoader), ("py_executor", weights.PyExecutor)):
        setattr(modules[f"{PYEXECUTOR}.{place}"], kind.__name__, type(kind.__name__, (kind,), {}))
    source.fill(modules)
    api = modules[f"{connectors}.kv_cache_connector"]
    own = {"api": api}
    api.KvCacheConnectorManager = type("KvCacheConnectorManager", (own_manager.KvCacheConnectorManager,), own)  # type: ignore[attr-defined]
    for name in ("RequestData", "SchedulerOutput", "KvCacheConnectorWorker", "KvCacheConnectorScheduler"):
        setattr(api, name, getattr(contract.api, name))
    if contract.is_newest:
        layout = modules[f"{connectors}.kv_cache_layout"]
        for name in (
            "KvCacheBufferRef",
            "KvCacheLayerGroupLayout",
            "KvCacheLayout",
            "KvCacheRegion",
            "build_kv_cache_layout_v2",
        ):
            setattr(layout, name, getattr(api_layout, name))
    return modules


def modules_of(version: str) -> dict[str, ModuleType]:
    """What stands in for TensorRT-LLM's modules in this version, without its own files; not in
    ``sys.modules``.
    """
    return _modules(_CONTRACTS[version])


_kept: dict[tuple[str, source.Source | None], dict[str, ModuleType]] = {}
"""By version and the files that it was loaded from: its modules and the adapter's, as they were left."""


def _take_out() -> dict[str, ModuleType]:
    """Removes what belongs to a version from ``sys.modules`` and returns it."""
    ours = [name for name in sys.modules if name.startswith(_OURS) and _belongs(name)]
    _bind_submodule(None)
    return {name: sys.modules.pop(name) for name in ours}


def _belongs(name: str) -> bool:
    return any(name == top or name.startswith(f"{top}.") for top in _OURS)


def _put_in(modules: dict[str, ModuleType]) -> None:
    sys.modules.update(modules)
    _bind_submodule(modules.get("kvbm.trtllm_integration"))


def _bind_submodule(module: ModuleType | None) -> None:
    """An imported ``kvbm.trtllm_integration`` is also an attribute of ``kvbm``, which stays."""
    package = sys.modules.get("kvbm")
    if package is not None and module is not None:
        package.trtllm_integration = module  # type: ignore[attr-defined]
    elif package is not None and hasattr(package, "trtllm_integration"):
        del package.trtllm_integration


@contextmanager
def installed(version: str) -> Iterator[Contract]:
    """TensorRT-LLM of this version can be imported inside, and adapters see it; afterwards all is as before.

    Adapters are imported once for each version, as in an engine's process.
    """
    contract = _CONTRACTS[version]
    before = _take_out()
    try:
        found = source.find()
        key = version, found if found is not None and found.version == version else None
        _put_in(_kept.get(key) or _loaded(contract, key[1]))
        _installed.append(contract)
        try:
            yield contract
        finally:
            _installed.pop()
            _kept[key] = _take_out()
    finally:
        _take_out()
        _put_in({name: module for name, module in before.items() if name.startswith("tensorrt_llm")})


def _loaded(contract: Contract, found: source.Source | None) -> dict[str, ModuleType]:
    """A version's modules; with TensorRT-LLM's own files in them, if there are any."""
    modules = _modules(contract)
    if found is not None:
        sys.modules.update(modules)
        source.load(found, modules)
    return modules
