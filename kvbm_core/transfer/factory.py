"""Which executor fits which device memory."""

from __future__ import annotations

from collections.abc import Callable

from kvbm_core.clock import Clock, SystemClock
from kvbm_core.errors import UnsupportedError
from kvbm_core.storage.host_slab import HostSlab
from kvbm_core.storage.numa import cpus_near
from kvbm_core.transfer.digests import SlotDigests
from kvbm_core.transfer.executor import Copier, DeviceMemory
from kvbm_core.transfer.plan import JobResult


def make_executor(
    device: DeviceMemory,
    host: HostSlab,
    *,
    max_concurrent: int = 4,
    max_batch_blocks: int = 16,
    on_done: Callable[[JobResult], None],
    digests: SlotDigests | None = None,
    clock: Clock | None = None,
) -> Copier:
    """The executor for this device memory. UnsupportedError if there is none.

    ``max_concurrent`` jobs are in flight on a GPU (the CPU executor runs one at a time, as one thread
    already takes much of the memory bandwidth that the model needs too). With ``digests`` it is
    made sure after each onboard that the device holds the bytes that were offloaded, else it is CORRUPT.
    ``on_done`` gets every result, from any thread.
    """
    clock = clock or SystemClock()
    if device.is_cpu:
        from kvbm_core.transfer.executors.memcpy import MemcpyExecutor

        return MemcpyExecutor(
            device, host, max_batch_blocks=max_batch_blocks, on_done=on_done, digests=digests, clock=clock
        )
    if _is_cuda(device):
        from kvbm_core.transfer.executors.cuda import CopyLimits, CudaExecutor
        from kvbm_core.transfer.executors.cuda_runtime import CudaRuntime

        return CudaExecutor(
            device,
            host,
            CudaRuntime(device.storages[0].device.index),
            limits=CopyLimits(max_concurrent, max_batch_blocks),
            on_done=on_done,
            digests=digests,
            clock=clock,
        )
    raise UnsupportedError(f"kvbm: no way to copy from {type(device.storages[0]).__name__} storages")


def slab_preparation(device: DeviceMemory) -> Callable[[int, int], Callable[[], None] | None] | None:
    """What HostSlab's ``prepare`` must be for this device memory: pinning for CUDA, nothing for a CPU."""
    if not _is_cuda(device):
        return None
    from kvbm_core.transfer.executors.cuda_runtime import CudaRuntime

    return CudaRuntime(device.storages[0].device.index).pin


def slab_cpus(device: DeviceMemory) -> frozenset[int]:
    """What HostSlab's ``cpus`` should be for this device memory: those near the GPU, or anywhere for a
    CPU.
    """
    if not _is_cuda(device):
        return frozenset()
    from kvbm_core.transfer.executors.cuda_runtime import CudaRuntime

    return cpus_near(CudaRuntime(device.storages[0].device.index).pci_address())


def _is_cuda(device: DeviceMemory) -> bool:
    return all(getattr(storage, "is_cuda", False) for storage in device.storages)
