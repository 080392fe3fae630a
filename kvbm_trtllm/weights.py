"""When TensorRT-LLM's weights change: a connector is not told, so the methods by which trainers do it are
watched.
"""

from __future__ import annotations

import sys
import weakref
from functools import wraps
from typing import Any

from kvbm_core.identity.weights import WeightsIdentity

# Its own WorkerExtension calls the first for each part of the weights, and the second when all are there. Who
# has written to the tensors in another way calls the second, and nobody else does.
_ORDERS = (("ModelLoader", "reload"), ("PyExecutor", "reset_prefix_cache"))
_PLACE = "tensorrt_llm._torch.pyexecutor."
_MARK = "_kvbm_watched"

_watching: weakref.WeakSet[EngineChanges] = weakref.WeakSet()


class EngineChanges:
    """Hears of the orders in this process, on whichever thread, and tells the leader's, which asks."""

    def __init__(self, weights: WeightsIdentity) -> None:
        self._weights = weights
        self._order = ""
        _watching.add(self)
        _watch()

    def hear(self, order: str) -> None:
        """It is about to be carried out."""
        self._order = order

    def take(self) -> bool:
        """Whether the weights have changed since the last call."""
        order, self._order = self._order, ""
        if order:
            self._weights.changed(f"TensorRT-LLM was told to {order}")
        return bool(order)


def _watch() -> None:
    for name, module in list(sys.modules.items()):
        for kind_name, order in _ORDERS if name.startswith(_PLACE) else ():
            kind = getattr(module, kind_name, None)
            method = getattr(kind, order, None)
            if method is not None and not hasattr(method, _MARK):
                setattr(kind, order, _watched(method, order))


def _watched(method: Any, order: str) -> Any:
    @wraps(method)
    def watched(*args: Any, **kwargs: Any) -> Any:
        for changes in list(_watching):
            changes.hear(order)
        return method(*args, **kwargs)

    setattr(watched, _MARK, True)
    return watched
