"""Stands for CUDA where the memory is the host's: a stream, and tensors over an address."""

from __future__ import annotations

import weakref
from typing import Any

import torch


class HostStream:
    """A stream on which everything is done when it was called."""

    cuda_stream = 0

    def synchronize(self) -> None:
        """Nothing is ever pending."""


STREAM = HostStream()
_owners: weakref.WeakValueDictionary[int, torch.Tensor] = weakref.WeakValueDictionary()


def share(tensor: torch.Tensor) -> int:
    """The address of a contiguous tensor of bytes, behind which ``tensor_at`` finds it while it lives."""
    address = tensor.data_ptr()
    _owners[address] = tensor
    return address


def tensor_at(
    address: int, dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...]
) -> torch.Tensor:
    """A view of what was shared, of this shape, from ``address`` on. ``strides``: in elements."""
    base = max((base for base in [*_owners] if base <= address), default=None)
    owner = None if base is None else _owners.get(base)
    if base is None or owner is None:
        raise ValueError(f"nobody has shared memory at {address:#x}")
    elements = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True)) + 1
    start = address - base
    found = owner.flatten()[start : start + elements * dtype.itemsize]
    return torch.as_strided(found.view(dtype), shape, strides)


class Cuda:
    """Of ``torch.cuda``, what the connector's manager asks."""

    Stream = torch.cuda.Stream

    @staticmethod
    def current_stream() -> HostStream:
        """The only one."""
        return STREAM


class TorchOnHost:
    """torch, with the streams of the host."""

    cuda = Cuda

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)
