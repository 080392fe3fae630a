"""The GPU that is measured, and what stands for it in a dry run."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, cast

import torch

from benchmarks.gpu.raw_batch import batch_by_library
from kvbm_core.storage.host_slab import HostSlab
from kvbm_core.storage.numa import cpus_near
from kvbm_core.testing.cuda_double import CudaDouble
from kvbm_core.transfer.executor import DeviceMemory, Executor
from kvbm_core.transfer.executors.cuda import CudaExecutor
from kvbm_core.transfer.executors.cuda_runtime import Copies, CudaError, CudaRuntime, ways_to_copy
from kvbm_core.transfer.factory import make_executor
from kvbm_core.transfer.jobs import OnDone
from kvbm_core.transfer.pieces import CopyArrays

MATRIX = 8192
HIDDEN, LAYER_WEIGHTS = 4096, 47_000  # a layer of Qwen3-8B, about 190 million weights, as one matrix
WAIT_S = 60.0

CopyWay = Callable[[Copies, Any], None]
"""Queues copies on a stream; CudaError if that is refused."""


class Device(Protocol):
    """What the stages need of a GPU."""

    api: CudaRuntime
    torch_device: torch.device
    pin: Callable[[int, int], Callable[[], None] | None] | None
    near_cpus: frozenset[int]
    """Where the worker's slab is touched; empty: anywhere."""

    def executor(self, memory: DeviceMemory, slab: HostSlab, on_done: OnDone) -> Executor:
        """As the worker makes it."""

    def copy_ways(self) -> dict[str, CopyWay]:
        """All DMA calls that there are, by name."""

    def copy_arrays(self, arrays: CopyArrays, stream: Any) -> None:
        """cudaMemcpyBatchAsync without lists."""

    def pinned(self, nbytes: int) -> torch.Tensor:
        """Host memory in one piece, page-locked by cudaHostAlloc."""

    def one_copy(self, target: int, source: int, nbytes: int, stream: Any) -> None:
        """cudaMemcpyAsync."""

    def on_stream(self, stream: Any) -> AbstractContextManager[Any]:
        """What torch and Triton launch inside goes to ``stream``."""

    def upload(self, numbers: Sequence[int]) -> torch.Tensor:
        """int64 on the device, queued on the current stream: nothing that was queued before is waited for."""

    def matmul_s(self, count: int) -> float:
        """Seconds on the GPU of ``count`` matrix products in a row."""

    def compute_stream(self) -> Any:
        """Where ``layer`` computes."""

    def layer(self, tokens: int) -> Callable[[], None]:
        """Queues about as much computing as a layer of an 8B model has for ``tokens`` tokens."""

    def synchronize(self) -> None:
        """Waits until the GPU has nothing left to do."""

    def close(self) -> None:
        """Ends what was started."""


class Gpu:
    """The first CUDA device."""

    def __init__(self) -> None:
        if not torch.cuda.is_available():
            raise RuntimeError("no CUDA device (--dry-run tries the script on the CPU)")
        self.torch_device = torch.device("cuda", 0)
        self._runtime = CudaRuntime(0)
        self.api: CudaRuntime = self._runtime
        self.pin: Callable[[int, int], Callable[[], None] | None] | None = self._runtime.pin
        self.near_cpus = cpus_near(self._runtime.pci_address())
        self._runtime.bind_thread()
        self._ways = self.copy_ways()
        self._batch: Callable[[CopyArrays, int], int] | None = None
        self._matrices: list[torch.Tensor] = []
        self._layer_weights: list[torch.Tensor] = []

    def executor(self, memory: DeviceMemory, slab: HostSlab, on_done: OnDone) -> Executor:
        """See Device."""
        return make_executor(memory, slab, on_done=on_done)

    def copy_ways(self) -> dict[str, CopyWay]:
        """See Device."""

        def way(queue: Callable[[Copies, int], int]) -> CopyWay:
            def copy(copies: Copies, stream: Any) -> None:
                code = queue(copies, int(stream.cuda_stream))
                if code != 0:
                    raise CudaError(f"{queue.__name__}: CUDA error {code}")

            return copy

        return {queue.__name__: way(queue) for queue in ways_to_copy(torch.version.cuda)}

    def copy_arrays(self, arrays: CopyArrays, stream: Any) -> None:
        """See Device."""
        if self._batch is None:
            self._batch = batch_by_library(str(torch.version.cuda))
        code = self._batch(arrays, int(stream.cuda_stream))
        if code != 0:
            raise CudaError(f"cudaMemcpyBatchAsync: CUDA error {code}")

    def pinned(self, nbytes: int) -> torch.Tensor:
        """See Device."""
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def one_copy(self, target: int, source: int, nbytes: int, stream: Any) -> None:
        """See Device; the plain call, however many ways there are."""
        name = next(name for name in self._ways if name.startswith("single"))
        self._ways[name](([target], [source], [nbytes]), stream)

    def on_stream(self, stream: Any) -> AbstractContextManager[Any]:
        """See Device."""
        return cast(AbstractContextManager[Any], torch.cuda.stream(stream))

    def upload(self, numbers: Sequence[int]) -> torch.Tensor:
        """See Device."""
        return torch.tensor(numbers).pin_memory().to(self.torch_device, non_blocking=True)

    def matmul_s(self, count: int) -> float:
        """See Device."""
        if not self._matrices:
            shape = (MATRIX, MATRIX)
            self._matrices = [
                torch.randn(shape, dtype=torch.bfloat16, device=self.torch_device) for _ in range(3)
            ]
        a, b, out = self._matrices
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.mm(
            a, b, out=out
        )  # while it runs, the CPU gets ahead: no launch is waited for between the events
        start.record()
        for _ in range(count):
            torch.mm(a, b, out=out)
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3

    def compute_stream(self) -> Any:
        """See Device."""
        return torch.cuda.current_stream(self.torch_device)

    def layer(self, tokens: int) -> Callable[[], None]:
        """See Device."""
        if not self._layer_weights:
            self._layer_weights = [
                torch.randn(HIDDEN, LAYER_WEIGHTS, dtype=torch.bfloat16, device=self.torch_device)
            ]
        x = torch.randn(tokens, HIDDEN, dtype=torch.bfloat16, device=self.torch_device)
        out = torch.empty(tokens, LAYER_WEIGHTS, dtype=torch.bfloat16, device=self.torch_device)

        def compute() -> None:
            torch.mm(x, self._layer_weights[0], out=out)

        return compute

    def synchronize(self) -> None:
        """See Device."""
        torch.cuda.synchronize()

    def close(self) -> None:
        """See Device."""
        self._matrices = []
        self._layer_weights = []


class DryGpu:
    """Ordinary memory and the double of CUDA: the same calls, no figures."""

    def __init__(self) -> None:
        self.torch_device = torch.device("cpu")
        self._double = CudaDouble()
        self.api: CudaRuntime = self._double
        self.pin: Callable[[int, int], Callable[[], None] | None] | None = None
        self.near_cpus: frozenset[int] = frozenset()

    def executor(self, memory: DeviceMemory, slab: HostSlab, on_done: OnDone) -> Executor:
        """See Device."""
        return CudaExecutor(memory, slab, self._double, on_done=on_done)

    def copy_ways(self) -> dict[str, CopyWay]:
        """See Device."""
        return {"single_by_double": self._double.copy}

    def copy_arrays(self, arrays: CopyArrays, stream: Any) -> None:
        """See Device."""
        targets, sources, sizes = (array.tolist() for array in arrays)
        self._double.copy((targets, sources, sizes), stream)

    def pinned(self, nbytes: int) -> torch.Tensor:
        """See Device."""
        return torch.empty(nbytes, dtype=torch.uint8)

    def one_copy(self, target: int, source: int, nbytes: int, stream: Any) -> None:
        """See Device."""
        self._double.copy(([target], [source], [nbytes]), stream)

    def on_stream(self, stream: Any) -> AbstractContextManager[Any]:
        """See Device; what is launched on a CPU has ended when the call returns."""
        return nullcontext()

    def upload(self, numbers: Sequence[int]) -> torch.Tensor:
        """See Device."""
        return torch.tensor(numbers)

    def matmul_s(self, count: int) -> float:
        """See Device."""
        a = torch.ones(64, 64)
        started_s = time.perf_counter()
        for _ in range(count):
            torch.mm(a, a)
        return time.perf_counter() - started_s

    def compute_stream(self) -> Any:
        """See Device."""
        return self._double.compute

    def layer(self, tokens: int) -> Callable[[], None]:
        """See Device."""
        x = torch.ones(tokens, 64)

        def product() -> None:
            torch.mm(x, x.T)

        return lambda: self._double.compute_calls(product)

    def synchronize(self) -> None:
        """See Device; whoever used a stream of the double has waited for its event."""

    def close(self) -> None:
        """See Device."""
        self._double.close()


def open_device(is_dry: bool) -> Device:
    """The GPU, or its stand-in. RuntimeError without a GPU."""
    return DryGpu() if is_dry else Gpu()


def finish(device: Device, streams: list[Any]) -> None:
    """Waits, without giving the CPU away, until the streams have done what they were given; TimeoutError if
    not.
    """
    deadline_s = time.perf_counter() + WAIT_S
    for event in [device.api.record(stream) for stream in streams]:
        while not device.api.is_done(event):
            if time.perf_counter() > deadline_s:
                raise TimeoutError(f"a stream did not end within {WAIT_S:.0f} s")
