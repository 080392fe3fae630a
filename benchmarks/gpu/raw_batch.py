"""A candidate for the executor's CPU side: addresses computed by NumPy, handed to cudaMemcpyBatchAsync as they lie.

The executor makes a Python list entry for each piece, and cuda-python converts each of them once more.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from kvbm_core.layout.view import Segment

Numbers = npt.NDArray[np.int64]
CopyArrays = tuple[Numbers, Numbers, Numbers]
"""Targets, sources and sizes, as in Copies."""

_STREAM_ORDER = 1
_PREFER_OVERLAP_WITH_COMPUTE = 1
_LAST_WITH_FAIL_INDEX = 12


class _Attributes(ctypes.Structure):
    """cudaMemcpyAttributes; the two locations are hints that only managed memory has."""

    _fields_ = (
        ("source_access_order", ctypes.c_int),
        ("source_location", ctypes.c_int * 2),
        ("target_location", ctypes.c_int * 2),
        ("flags", ctypes.c_uint),
    )


class PieceTable:
    """Where the pieces of a block are on both sides. A copy a piece: neighbouring blocks are not made one."""

    def __init__(
        self,
        pairs: Sequence[tuple[Segment, Segment]],
        device_bases: Sequence[int],
        host_base: int,
        chunk_bytes: int,
    ) -> None:
        device, host = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
        self._device = np.array([device_bases[s.storage] + s.offset_bytes for s in device], np.int64)
        self._host = np.array([host_base + s.offset_bytes for s in host], np.int64)
        self._device_strides = np.array([s.block_stride_bytes for s in device], np.int64)
        self._host_strides = np.array([s.block_stride_bytes for s in host], np.int64)
        self._sizes = np.array([s.nbytes for s in device], np.int64)
        self._host_base, self._chunk_bytes = host_base, chunk_bytes

    def arrays(self, blocks: Sequence[int], slots: Sequence[int], *, to_host: bool) -> CopyArrays:
        """The copies of blocks to or from slots; none lies in two chunks of the slab, which were pinned apart."""
        device = (self._device + np.array(blocks, np.int64)[:, None] * self._device_strides).ravel()
        host = (self._host + np.array(slots, np.int64)[:, None] * self._host_strides).ravel()
        sizes = np.tile(self._sizes, len(blocks))
        while True:
            room = self._chunk_bytes - (host - self._host_base) % self._chunk_bytes
            over = sizes > room
            if not over.any():
                return (host, device, sizes) if to_host else (device, host, sizes)
            head, rest = room[over], sizes[over] - room[over]
            sizes[over] = head
            device = np.concatenate((device, device[over] + head))
            host = np.concatenate((host, host[over] + head))
            sizes = np.concatenate((sizes, rest))


def batch_by_library(cuda_version: str) -> Callable[[CopyArrays, int], int]:
    """cudaMemcpyBatchAsync of the runtime that torch has loaded; the function answers CUDA's error number.

    OSError or AttributeError where there is no such library or it is older than CUDA 12.8.
    """
    major = int(cuda_version.partition(".")[0])
    call = ctypes.CDLL(f"libcudart.so.{major}").cudaMemcpyBatchAsync
    attributes = _Attributes(source_access_order=_STREAM_ORDER, flags=_PREFER_OVERLAP_WITH_COMPUTE)
    first = ctypes.c_size_t(0)
    failed = ctypes.c_size_t(0)

    def queue(arrays: CopyArrays, stream: int) -> int:
        targets, sources, sizes = (ctypes.c_void_p(each.ctypes.data) for each in arrays)
        count, one = ctypes.c_size_t(len(arrays[0])), ctypes.c_size_t(1)
        fail_index = (ctypes.byref(failed),) if major <= _LAST_WITH_FAIL_INDEX else ()
        what = (targets, sources, sizes, count, ctypes.byref(attributes), ctypes.byref(first), one)
        return int(call(*what, *fail_index, ctypes.c_void_p(stream)))

    return queue
