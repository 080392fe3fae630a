"""Where SGLang reads its weights, and when it changes them in place."""

from __future__ import annotations

import inspect
import os
import sys
import weakref
from collections.abc import Iterable
from functools import wraps
from typing import Any

from kvbm_core.identity.weights import Source, WeightsIdentity, process_began_ns
from kvbm_sglang.config_tables import FOLDER_FORMATS, load_format_of, names_weights

# In the process that computes, at some depth: the scheduler's part, the worker's, the model runner's.
_PLACES = ("sglang.srt.managers.", "sglang.srt.model_executor.", "sglang.srt.speculative.")
_UPDATES = ("update_weights_from_", "begin_weight_update", "end_weight_update")
_RELEASE = "release_memory_occupation"
_CHECK = "check_weights"
_HARMLESS_CHECKS = ("checksum", "compare", "snapshot")  # "reset_tensors" overwrites them
_MARK = "_kvbm_watched"

_watching: weakref.WeakSet[WeightsIdentity] = weakref.WeakSet()


def weights_identity(server_args: Any, model: str, code: Iterable[str] = ()) -> WeightsIdentity:
    """Of this engine; not started. ``server_args``: as they are in effect; None where they are
    not known. ``code``: repositories that code of the model comes from.
    """
    weights = WeightsIdentity(weight_sources(server_args, model, code), process_began_ns())
    _watching.add(weights)
    _watch()
    return weights


def weight_sources(server_args: Any, model: str, code: Iterable[str] = ()) -> dict[str, Source]:
    """By what each is to the engine."""
    cache_dir = str(getattr(server_args, "download_dir", None) or "")
    revision = str(getattr(server_args, "revision", None) or "")
    load_format = getattr(server_args, "load_format", None)
    sources = {"model": _source(model, revision, cache_dir, load_format, server_args)}
    draft = getattr(server_args, "speculative_draft_model_path", None)
    if draft:
        revision = str(getattr(server_args, "speculative_draft_model_revision", None) or "")
        load_format = getattr(server_args, "speculative_draft_load_format", None) or load_format
        sources["draft"] = _source(str(draft), revision, cache_dir, load_format, server_args)
    for repository in sorted(code):
        sources[f"code {repository}"] = Source(repository, cache_dir=cache_dir, is_code=True)
    return sources


def _source(name: str, revision: str, cache_dir: str, load_format: Any, server_args: Any) -> Source:
    load_format = load_format_of(load_format)
    unknown = ""
    if load_format == "dummy":
        unknown = f"the weights of {name} are made up (load format dummy)"
    elif load_format not in FOLDER_FORMATS or names_weights(
        getattr(server_args, "model_loader_extra_config", None)
    ):
        unknown = "the load format, or its extra configuration, does not say what is read"
    elif "://" in name:
        unknown = f"{name} is not on this machine"
    elif os.environ.get("SGLANG_USE_MODELSCOPE", "").lower() in {"1", "true"} and not os.path.exists(name):
        unknown = f"{name} is of ModelScope, whose cache names no file by its content"
    runs_code = bool(getattr(server_args, "trust_remote_code", False))
    return Source(name, revision, cache_dir, unknown, load_format=load_format, runs_code=runs_code)


def _watch() -> None:
    """Sees to it that updates in place are noticed before they begin."""
    for module_name, module in list(sys.modules.items()):
        if not module_name.startswith(_PLACES):
            continue
        for kind in list(vars(module).values()):
            if isinstance(kind, type) and kind.__module__ == module_name:
                _wrap(kind)


def _wrap(kind: type) -> None:
    for name, method in list(vars(kind).items()):
        is_update = name.startswith(_UPDATES) or name in {_RELEASE, _CHECK}
        if not is_update or not inspect.isfunction(method) or inspect.iscoroutinefunction(method):
            continue
        if not hasattr(method, _MARK):
            setattr(kind, name, _watched(method))


def _watched(method: Any) -> Any:
    name = method.__name__

    @wraps(method)
    def watched(*args: Any, **kwargs: Any) -> Any:
        request = args[1] if len(args) > 1 else None
        if name == _RELEASE:
            changes = _releases_weights(request)
        elif name == _CHECK:
            changes = (kwargs.get("action") or getattr(request, "action", request)) not in _HARMLESS_CHECKS
        else:
            changes = True
        for weights in list(_watching) if changes else ():
            weights.changed(f"SGLang is about to {name}")
        return method(*args, **kwargs)

    setattr(watched, _MARK, True)
    return watched


def _releases_weights(request: Any) -> bool:
    tags = getattr(request, "tags", None)  # none: all of them
    return not tags or "weights" in tags
