"""Whether the tensors that vLLM's model computes with are still those of before. Runs in each rank, where the
engine core asks with ``look`` (engine_calls.ask).
"""

from __future__ import annotations

import logging
import weakref
from functools import partial
from typing import Any

import torch

from kvbm_core.identity.tensors import Seen, Watched
from kvbm_vllm import engine_calls

log = logging.getLogger("kvbm")

_CANNOT = "kvbm: the model's tensors cannot be looked at"
_watched: weakref.WeakKeyDictionary[torch.nn.Module, Watched] = weakref.WeakKeyDictionary()


def look(worker: Any, generation: int, now: int) -> Seen:
    """See Watched, of this rank's model and, if it has one, its draft."""
    try:
        model = worker.get_model()
        watched = _watched.get(model)
        if watched is None:
            watched = _watched[model] = _watch(worker)
        return watched.look(generation, now)
    except Exception:
        log.debug(_CANNOT, exc_info=True)
        return Seen.OTHERS


def rest(worker: Any) -> None:
    """See Watched."""
    try:
        watched = _watched.get(worker.get_model())
        if watched is not None:
            watched.rest()
    except Exception:
        log.debug(_CANNOT, exc_info=True)


def _watch(worker: Any) -> Watched:
    runner = getattr(worker, "model_runner", None)
    drafter = getattr(runner, "drafter", None) or getattr(runner, "speculator", None)
    models = (worker.get_model(), getattr(drafter, "model", None))
    return Watched(
        [model for model in models if isinstance(model, torch.nn.Module)],
        partial(engine_calls.model_loads, worker.vllm_config),
    )
