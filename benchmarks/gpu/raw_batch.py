"""A candidate for the executor's CPU side: addresses handed to cudaMemcpyBatchAsync as NumPy has computed
them.

The executor makes lists of them for cuda-python, which converts each number once more.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

from kvbm_core.transfer.pieces import CopyArrays

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
