"""torch tensors as TensorInfo and raw storages. torch is touched only through the tensors handed in."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from kvbm_core.errors import LayoutError
from kvbm_core.layout.tensors import TensorInfo

if TYPE_CHECKING:
    import torch


def describe_tensors(
    tensors: Mapping[str, torch.Tensor], layer_order: Sequence[str]
) -> tuple[list[TensorInfo], list[Any]]:
    """The tensors named by ``layer_order``, and the memory under them, each storage once.

    A storage is a numpy uint8 array for CPU tensors and a torch uint8 tensor for CUDA ones, over all its
    bytes; it keeps the memory alive. LayoutError for tensors on several or other devices.
    """
    infos: list[TensorInfo] = []
    storages: list[Any] = []
    index_of: dict[int, int] = {}
    devices = {str(tensors[name].device) for name in layer_order}
    if len(devices) > 1:
        raise LayoutError(f"kvbm: KV cache on several devices: {', '.join(sorted(devices))}")
    for name in layer_order:
        tensor = tensors[name]
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        if address not in index_of:
            index_of[address] = len(storages)
            storages.append(_raw_bytes(name, tensor))
        infos.append(
            TensorInfo(
                name=name,
                shape=tuple(tensor.shape),
                strides=tuple(tensor.stride()),
                itemsize=tensor.element_size(),
                dtype=str(tensor.dtype).removeprefix("torch."),
                storage=index_of[address],
                storage_offset_bytes=tensor.storage_offset() * tensor.element_size(),
                storage_bytes=storage.nbytes(),
            )
        )
    return infos, storages


def _raw_bytes(name: str, tensor: torch.Tensor) -> Any:
    storage = tensor.untyped_storage()
    if tensor.device.type == "cuda":
        raw = tensor.new_empty(0, dtype=_torch_uint8())
        return raw.set_(storage, 0, (storage.nbytes(),), (1,))
    if tensor.device.type != "cpu":
        raise LayoutError(f"kvbm: KV cache of {name} is on {tensor.device}, not on a CPU or CUDA device")
    if storage.nbytes() == 0:
        raise LayoutError(f"kvbm: KV cache of {name} is empty")
    buffer = (ctypes.c_uint8 * storage.nbytes()).from_address(storage.data_ptr())
    buffer.owner = storage  # the array below keeps the buffer, the buffer keeps the storage
    return np.frombuffer(buffer, dtype=np.uint8)


def _torch_uint8() -> torch.dtype:
    import torch

    return torch.uint8
