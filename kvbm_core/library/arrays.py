"""The caller's arrays, checked, and copies between them and bytes."""

from __future__ import annotations

import sys
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from kvbm_core.library.spec import BlockSpec

Bytes: TypeAlias = npt.NDArray[np.uint8]
Blocks: TypeAlias = Any
"""A NumPy array or torch tensor of shape ``(blocks, *spec.shape)`` and the spec's dtype, on any device. Typed
as Any: torch is not needed, and not every program has it.
"""


class NumpyBlocks:
    """Blocks in an array whose dtype and shape were checked."""

    def __init__(self, array: npt.NDArray[Any]) -> None:
        self._array = array

    def read(self, block: int, into: Bytes) -> None:
        """Copies block ``block`` to ``into``."""
        np.copyto(into.view(self._array.dtype).reshape(self._array.shape[1:]), self._array[block])

    def write(self, block: int, source: Bytes) -> None:
        """Copies ``source`` to block ``block``."""
        np.copyto(self._array[block, ...], source.view(self._array.dtype).reshape(self._array.shape[1:]))


class TorchBlocks:
    """The same in a tensor, of any device; a copy is over when the call returns."""

    def __init__(self, tensor: Any) -> None:
        import torch

        self._from_numpy = torch.from_numpy
        self._tensor = tensor.detach()

    def _typed(self, raw: Bytes) -> Any:
        return self._from_numpy(raw).view(self._tensor.dtype).reshape(self._tensor.shape[1:])

    def read(self, block: int, into: Bytes) -> None:
        """See NumpyBlocks."""
        self._typed(into).copy_(self._tensor[block])

    def write(self, block: int, source: Bytes) -> None:
        """See NumpyBlocks."""
        self._tensor[block].copy_(self._typed(source))


def as_blocks(array: Blocks, spec: BlockSpec, name: str, *, writes: bool) -> NumpyBlocks | TorchBlocks:
    """``array``, the argument ``name`` of a call, as blocks of ``spec``. TypeError or ValueError, one line,
    for what is none, or cannot be written to.
    """
    torch = sys.modules.get("torch")  # whoever has a tensor has imported it
    if torch is not None and isinstance(array, torch.Tensor):
        _check(array.shape, str(array.dtype).removeprefix("torch."), spec, name)
        if array.layout is not torch.strided or array.device.type == "meta":
            raise ValueError(f"kvbm: {name} holds no bytes of its own ({array.layout}, {array.device})")
        return TorchBlocks(array)
    if not isinstance(array, np.ndarray):
        raise TypeError(f"kvbm: {name} is a NumPy array or a torch tensor, not {type(array).__name__}")
    _check(array.shape, array.dtype.name, spec, name)
    if not array.dtype.isnative:
        raise ValueError(f"kvbm: the bytes of {name} are in another order than this machine's")
    if writes and not array.flags.writeable:
        raise ValueError(f"kvbm: {name} cannot be written to")
    return NumpyBlocks(array)


def _check(shape: tuple[int, ...], dtype: str, spec: BlockSpec, name: str) -> None:
    if dtype != spec.dtype:
        raise ValueError(f"kvbm: {name} has dtype {dtype}; this cache has blocks of {spec.dtype}")
    if len(shape) == 0 or tuple(shape[1:]) != spec.shape:
        wanted = ", ".join(map(str, ("blocks", *spec.shape)))
        raise ValueError(f"kvbm: {name} has shape {tuple(shape)}; it must have ({wanted})")
