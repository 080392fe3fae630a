"""Where SGLang reads its weights, and when it changes them in place."""

from __future__ import annotations

import inspect
import itertools
import logging
import os
import sys
import threading
import time
import weakref
from collections.abc import Iterable, Mapping
from datetime import timedelta
from functools import wraps
from types import FrameType
from typing import Any

from kvbm_core.identity.roots import Stamp
from kvbm_core.identity.tensors import Seen, Watched
from kvbm_core.identity.weights import Source, WeightsIdentity, process_began_ns
from kvbm_sglang.config_tables import FOLDER_FORMATS, load_format_of, names_weights

# In the process that computes, at some depth: the scheduler's part, the worker's, the model runner's.
_PLACES = ("sglang.srt.managers.", "sglang.srt.model_executor.", "sglang.srt.speculative.")
_UPDATES = ("update_weights_from_", "begin_weight_update", "end_weight_update")
_RELEASE = "release_memory_occupation"
_CHECK = "check_weights"
_FLUSH = "flush_cache"
_HARMLESS_CHECKS = ("checksum", "compare", "snapshot")  # "reset_tensors" overwrites them
_MARK = "_kvbm_watched"
ASK_AGAIN_S = 0.1
"""Between two questions to a thread, or to other ranks, that are still looking."""
RANKS_WAIT_S = 1.0
"""After a flush the other ranks are waited for once: they get the same request at the same time."""

log = logging.getLogger("kvbm")


class EngineWeights(WeightsIdentity):
    """Also ends doubts by itself: who asks for the stamp looks at the ``models`` first; none: they cannot be
    looked at. Any thread.

    Only what was loaded at the start is looked at: other weights never last.
    """

    def __init__(self, sources: Mapping[str, Source], models: Iterable[Any]) -> None:
        super().__init__(sources, process_began_ns())
        self._orders = threading.RLock()
        self._flush = 0
        self._ask_again_s = self._wait_s = 0.0
        self._is_model_loaded = False
        models = list(models)
        self._tensors = Watched(models, self._model_loads) if models else None
        if self._tensors is not None:
            self._tensors.look(0, 0)

    def stamp(self) -> Stamp:
        """See WeightsIdentity; while there is a doubt, up to 256 MB of tensors are looked at."""
        if self._is_model_loaded or self.doubted_generation is not None:
            with self._orders:
                self._look()
        return super().stamp()

    def changed(self, why: str) -> None:
        """See WeightsIdentity. The tensors' memory may be about to be unmapped."""
        with self._orders:
            tensors, self._tensors = self._tensors, None
            if tensors is not None:
                tensors.rest()
            super().changed(why)

    def flushed(self, number: int) -> None:
        """SGLang is about to empty its cache, as trainers want it when they have changed the weights.
        ``number``: the same on all ranks, and of no other flush.
        """
        with self._orders:
            self._flush, self._wait_s = number, RANKS_WAIT_S
            if self._tensors is None:
                self.changed(f"SGLang is about to {_FLUSH}, and kvbm cannot compare the weights")
            else:
                self.doubt()

    def close(self) -> None:
        """See WeightsIdentity."""
        _watching.discard(self)
        with self._orders:
            if self._tensors is not None:
                self._tensors.rest()
        super().close()

    def _model_loads(self) -> None:
        self._is_model_loaded = True

    def _look(self) -> None:
        if self._is_model_loaded:
            self._is_model_loaded = False
            self.changed("load_weights of the model was called")
        tensors, now_s = self._tensors, time.monotonic()
        if tensors is None or self.doubted_generation is None or now_s < self._ask_again_s:
            return
        try:
            seen = tensors.look(0, self._flush)
            if seen is not Seen.LATER:
                wait_s, self._wait_s = self._wait_s, 0.0
                seen = _of_all_ranks(seen, self._flush, wait_s)
        except Exception:
            log.debug("kvbm: the model's tensors cannot be looked at", exc_info=True)
            seen = Seen.OTHERS
        if seen is Seen.LATER:
            self._ask_again_s = now_s + ASK_AGAIN_S
            return
        self.end_doubt(are_same=seen is Seen.SAME)
        if seen is Seen.OTHERS:
            self._tensors = None


def _of_all_ranks(seen: Seen, flush: int, wait_s: float) -> Seen:
    """What all ranks of the engine have found after that flush; this one has ``seen``. Each of them has
    another part of the weights, and computes with what the others make of theirs. ``wait_s``: for them; 0:
    not at all.
    """
    from torch import distributed

    size = distributed.get_world_size() if distributed.is_initialized() else 1
    if size == 1:
        return seen
    store = distributed.distributed_c10d._get_default_store()
    keys = [f"kvbm flush {flush} rank {rank}" for rank in range(size)]
    store.set(keys[distributed.get_rank()], seen.value)
    if seen is Seen.OTHERS:
        return seen
    if not store.check(keys):
        if not wait_s:
            return Seen.LATER
        try:
            store.wait(keys, timedelta(seconds=wait_s))
        except RuntimeError:
            return Seen.LATER
    return Seen.SAME if {store.get(key) for key in keys} == {Seen.SAME.value.encode()} else Seen.OTHERS


_watching: weakref.WeakSet[EngineWeights] = weakref.WeakSet()
_flushes = itertools.count(1)


def weights_identity(server_args: Any, model: str, code: Iterable[str] = ()) -> EngineWeights:
    """Of this engine, whose scheduler makes it; not started. ``server_args``: as they are in effect; None
    where they are not known. ``code``: repositories that code of the model comes from.
    """
    weights = EngineWeights(weight_sources(server_args, model, code), _models())
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


def _models() -> list[Any]:
    """The model and, if there is one, its drafts: of the scheduler further up, which has loaded them. None if
    they cannot be found.
    """
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        parts = getattr(frame.f_locals.get("self"), "__dict__", {})
        if "tp_worker" in parts:
            draft = parts.get("draft_worker")
            try:
                drafts = [] if draft is None else [runner for _, runner in draft.weight_update_runners()]
                return [runner.model for runner in (parts["tp_worker"].model_runner, *drafts)]
            except AttributeError:  # before 0.5.23, of a draft
                return []
        frame = frame.f_back
    return []


def _watch() -> None:
    """Sees to it that updates in place, and flushes, are noticed before they begin."""
    for module_name, module in list(sys.modules.items()):
        if not module_name.startswith(_PLACES):
            continue
        for kind in list(vars(module).values()):
            if isinstance(kind, type) and kind.__module__ == module_name:
                _wrap(kind)


def _wrap(kind: type) -> None:
    for name, method in list(vars(kind).items()):
        is_watched = name.startswith(_UPDATES) or name in {_RELEASE, _CHECK, _FLUSH}
        if not is_watched or not inspect.isfunction(method) or inspect.iscoroutinefunction(method):
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
            changes = name != _FLUSH
        number = next(_flushes) if name == _FLUSH else 0
        for weights in list(_watching):
            if number:
                weights.flushed(number)
            elif changes:
                weights.changed(f"SGLang is about to {name}")
        return method(*args, **kwargs)

    setattr(watched, _MARK, True)
    return watched


def _releases_weights(request: Any) -> bool:
    tags = getattr(request, "tags", None)  # none: all of them
    return not tags or "weights" in tags
