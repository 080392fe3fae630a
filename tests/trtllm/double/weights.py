"""The classes by which trainers change weights in TensorRT-LLM's process."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.trtllm.double.executor import Executor
    from tests.trtllm.double.model import Model


class ModelLoader:
    """What puts weights into a model."""

    def reload(self, model: Model, weights: str, allow_partial_loading: bool = False) -> None:
        """A part of them."""
        model.weights = weights


class PyExecutor:
    """The loop."""

    def __init__(self, double: Executor) -> None:
        self._double = double

    def reset_prefix_cache(self) -> None:
        """What the device has is of the weights before."""
        self._double.drop_device_cache()
