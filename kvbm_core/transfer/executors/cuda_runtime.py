"""The few things of CUDA that the executor needs; torch and cuda-python are imported when first used."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable
from typing import Any

logger = logging.getLogger(__name__)

Copies = tuple[list[int], list[int], list[int]]
"""Target addresses, source addresses, sizes in bytes; the copies of a batch run in any order."""

_CUDA_MEMCPY_DEFAULT = 4
_PREFER_OVERLAP_WITH_COMPUTE = 1
_CAPTURE_MODE_RELAXED = 2
# The call does not exist here: insufficient driver, newer driver needed, no such symbol, not supported.
_NOT_HERE = frozenset({35, 36, 500, 801})


class CudaError(RuntimeError):
    """A CUDA call that failed, with its number."""


class CudaRuntime:
    """What CudaExecutor calls: streams and events through torch, so that they are the engine's own kind. They
    are opaque to it, and nothing here waits for the GPU.

    Copies go, in one call per batch, through cuda-python (cudaMemcpyBatchAsync, CUDA 12.8), else one call
    each through cuda-python or through the runtime library that torch has loaded, whichever works first.
    """

    def __init__(self, device_index: int) -> None:
        import torch

        self._torch = torch
        self._device = torch.device("cuda", device_index)
        self._ways: list[Callable[[Copies, int], int]] | None = None

    def bind_thread(self) -> None:
        """Makes the calling thread use this device."""
        self._torch.cuda.set_device(self._device)
        _allow_calls_during_capture()

    def address_of(self, storage: Any) -> int:
        """Where a device storage begins."""
        return int(storage.data_ptr())

    def create_stream(self, *, high_priority: bool) -> Any:
        """A stream of our own that does not synchronise with the default stream."""
        return self._torch.cuda.Stream(device=self._device, priority=-1 if high_priority else 0)

    def record_on_current_stream(self) -> Any:
        """An event after everything that the calling thread's current stream was given so far."""
        return self.record(self._torch.cuda.current_stream(self._device))

    def record(self, stream: Any) -> Any:
        """An event after everything that ``stream`` was given so far."""
        event = self._torch.cuda.Event(enable_timing=False)
        event.record(stream)
        return event

    def wait_event(self, stream: Any, event: Any) -> None:
        """What ``stream`` is given from now on starts after ``event``; the CPU does not wait."""
        stream.wait_event(event)

    def is_done(self, event: Any) -> bool:
        """Whether the event has happened. CudaError if something before it failed."""
        return bool(event.query())

    def is_idle(self, stream: Any) -> bool:
        """Whether ``stream`` has done all that it was given. CudaError if something of it failed."""
        return bool(stream.query())

    def copy(self, copies: Copies, stream: Any) -> None:
        """Queues the copies on ``stream``."""
        if not copies[0]:
            return
        if self._ways is None:
            self._ways = ways_to_copy(self._torch.version.cuda)
        while self._ways:
            code = self._ways[0](copies, int(stream.cuda_stream))
            if code == 0:
                return
            if code not in _NOT_HERE:
                raise CudaError(f"CUDA error {code} while queueing {len(copies[0])} copies")
            logger.info("kvbm: %s is not available here (CUDA error %d)", self._ways[0].__name__, code)
            del self._ways[0]
        raise CudaError("no CUDA copy function works here")

    def pci_address(self) -> str:
        """Where the device sits, as the kernel names it; empty if this torch does not say."""
        found = self._torch.cuda.get_device_properties(self._device)
        if not hasattr(found, "pci_bus_id"):
            return ""
        return f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0"

    def pin(self, address: int, nbytes: int) -> Callable[[], None]:
        """Page-locks host memory for fast copies; returns what undoes it. CudaError if refused."""
        self.bind_thread()
        cudart = self._torch.cuda.cudart()
        code = int(cudart.cudaHostRegister(address, nbytes, 0))
        if code != 0:
            raise CudaError(f"cudaHostRegister of {nbytes} bytes: CUDA error {code}")

        def unpin() -> None:
            cudart.cudaHostUnregister(address)

        return unpin


def _allow_calls_during_capture() -> None:
    """While the engine captures a CUDA graph in its thread, pinning and event queries in ours would fail, and
    its capture with them, unless this thread is declared unrelated (capture mode "relaxed")."""
    try:
        exchange = ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode
    except (OSError, AttributeError):
        return
    exchange(ctypes.byref(ctypes.c_int(_CAPTURE_MODE_RELAXED)))


def ways_to_copy(cuda_version: str | None) -> list[Callable[[Copies, int], int]]:
    """Functions that queue copies on a stream handle and return a CUDA error number, the best first."""
    ways: list[Callable[[Copies, int], int]] = []
    try:
        from cuda.bindings import runtime
    except ImportError:
        pass
    else:
        if hasattr(runtime, "cudaMemcpyBatchAsync"):
            ways.append(_batch_by_cuda_python(runtime))
        ways.append(_single_by_cuda_python(runtime))
    if cuda_version is not None:
        ways.append(_single_by_library(f"libcudart.so.{cuda_version.split('.')[0]}"))
    return ways


def _batch_by_cuda_python(runtime: Any) -> Callable[[Copies, int], int]:
    attributes = runtime.cudaMemcpyAttributes()
    # The source must be read in stream order: it is being written until the event that the stream waits for.
    attributes.srcAccessOrder = runtime.cudaMemcpySrcAccessOrder.cudaMemcpySrcAccessOrderStream
    attributes.flags = _PREFER_OVERLAP_WITH_COMPUTE

    def batch_by_cuda_python(copies: Copies, stream: int) -> int:
        targets, sources, sizes = copies
        answer = runtime.cudaMemcpyBatchAsync(
            targets, sources, sizes, len(sizes), [attributes], [0], 1, stream
        )  # CUDA 12 answers (error, index of the failed copy), CUDA 13 (error,)
        return int(answer[0])

    return batch_by_cuda_python


def _single_by_cuda_python(runtime: Any) -> Callable[[Copies, int], int]:
    kind = runtime.cudaMemcpyKind.cudaMemcpyDefault

    def single_by_cuda_python(copies: Copies, stream: int) -> int:
        for target, source, nbytes in zip(*copies, strict=True):
            code = int(runtime.cudaMemcpyAsync(target, source, nbytes, kind, stream)[0])
            if code != 0:
                return code
        return 0

    return single_by_cuda_python


def _single_by_library(soname: str) -> Callable[[Copies, int], int]:
    """torch has loaded this library already, so its soname finds that same copy."""

    def single_by_library(copies: Copies, stream: int) -> int:
        memcpy = ctypes.CDLL(soname).cudaMemcpyAsync
        memcpy.argtypes = (
            ctypes.c_void_p,
            ctypes.c_void_p,
            ctypes.c_size_t,
            ctypes.c_int,
            ctypes.c_void_p,
        )
        for target, source, nbytes in zip(*copies, strict=True):
            code = int(memcpy(target, source, nbytes, _CUDA_MEMCPY_DEFAULT, stream))
            if code != 0:
                return code
        return 0

    return single_by_library
