"""Kinds of host memory: how long they take to get, how fast the GPU copies from and to them, how fast the CPU
reads.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np
import numpy.typing as npt
import torch

from benchmarks.gpu.copies import DRY_PAGES_BYTES
from benchmarks.gpu.device import WAIT_S, Device, finish, open_device
from benchmarks.gpu.rows import Cell, Goal, Result, Row
from benchmarks.gpu.stages import Options, median_of, now_s, told_by
from kvbm_core.storage.host_slab import HostSlab
from kvbm_core.storage.numa import cpus_in
from kvbm_core.transfer.executors.cuda_runtime import CudaError

NBYTES = 1 << 30
SLAB_CHUNK_BYTES = 256 << 20
WRITE_COMBINED = 4
TABLE = "pinned memory"
OURS = Goal("onboard from registered huge pages", "GB/s", "cudaHostAlloc", 0.98, "higher")
DIRECTIONS = ("host to device", "device to host")

Memory = npt.NDArray[np.uint8]
Kind = Callable[[int], AbstractContextManager[Memory]]
"""Gives so many bytes, and takes them back."""


class PinnedStage:
    """See the module."""

    name = "pinned"
    help = "cudaHostAlloc, write-combined, registered huge pages, near and far NUMA nodes"
    share = 0.06

    def goals(self, options: Options) -> Sequence[Goal]:
        """See Stage."""
        return (OURS,)

    def run(self, options: Options) -> Iterator[Result]:
        """See Stage."""
        nbytes = options.choose(DRY_PAGES_BYTES[-1], NBYTES)
        device = open_device(options.is_dry)
        rates: dict[str, tuple[float, ...]] = {}
        try:
            on_device = torch.ones(nbytes, dtype=torch.uint8, device=device.torch_device)
            for name, kind in _kinds(device).items():
                try:
                    values, rates[name] = _figures(device, kind, on_device, nbytes, options)
                    yield Cell(TABLE, {"kind": name} | values)
                except Exception as error:  # the other kinds are still worth knowing
                    yield Cell(TABLE, {"kind": name, "failed": told_by(error)})
        finally:
            device.close()
        yield Row(OURS, rates.get("registered huge pages", ()), rates.get("cudaHostAlloc", ()))


def _kinds(device: Device) -> dict[str, Kind]:
    if device.torch_device.type == "cuda":
        kinds: dict[str, Kind] = {
            "cudaHostAlloc": lambda nbytes: _host_alloc(nbytes, 0),
            "cudaHostAlloc, write-combined": lambda nbytes: _host_alloc(nbytes, WRITE_COMBINED),
        }
    else:
        kinds = {"cudaHostAlloc": lambda nbytes: nullcontext(device.pinned(nbytes).numpy())}
    kinds["registered huge pages"] = partial(_registered, device, device.near_cpus)
    nodes = numa_nodes(Path("/sys/devices/system/node"))
    if len(nodes) > 1:
        for node, cpus in nodes.items():
            kinds[f"registered huge pages, NUMA node {node}"] = partial(_registered, device, cpus)
    kinds["not pinned"] = lambda nbytes: nullcontext(np.ones(nbytes, np.uint8))
    return kinds


def _figures(
    device: Device,
    kind: Kind,
    on_device: torch.Tensor,
    nbytes: int,
    options: Options,
) -> tuple[dict[str, str], tuple[float, ...]]:
    started_s = now_s()
    with kind(nbytes) as memory:
        memory[:] = 1
        ready_s = now_s() - started_s
        stream = device.api.create_stream(high_priority=False)
        on_host = int(memory.ctypes.data)
        rates = []
        for ends in ((on_device.data_ptr(), on_host), (on_host, on_device.data_ptr())):
            seconds = median_of(partial(_copy_s, device, ends, nbytes, stream), options.choose(1, 7))
            rates.append(tuple(nbytes / each / 1e9 for each in seconds))
        read_s = median(median_of(partial(_read_s, memory[: nbytes // 16]), 3))
    values = {f"{name}, GB/s": f"{median(rate):.1f}" for name, rate in zip(DIRECTIONS, rates, strict=True)}
    values["CPU reads, GB/s"] = f"{nbytes // 16 / read_s / 1e9:.2f}"
    return values | {"ready after, s per GiB": f"{ready_s * (1 << 30) / nbytes:.2f}"}, rates[0]


def _copy_s(device: Device, ends: tuple[int, int], nbytes: int, stream: object) -> float:
    """In pieces that each lie in one registration."""
    device.synchronize()
    started_s = now_s()
    for start in range(0, nbytes, SLAB_CHUNK_BYTES):
        device.one_copy(ends[0] + start, ends[1] + start, min(SLAB_CHUNK_BYTES, nbytes - start), stream)
    finish(device, [stream])
    return now_s() - started_s


def _read_s(memory: Memory) -> float:
    target = np.empty_like(memory)
    target[:] = 0
    started_s = now_s()
    np.copyto(target, memory)
    return now_s() - started_s


@contextmanager
def _host_alloc(nbytes: int, flags: int) -> Iterator[Memory]:
    """cudaHostAlloc, which torch does not offer with flags; freed when the iterator ends."""
    runtime = ctypes.CDLL(f"libcudart.so.{str(torch.version.cuda).split('.')[0]}")
    pointer = ctypes.c_void_p()
    code = runtime.cudaHostAlloc(ctypes.byref(pointer), ctypes.c_size_t(nbytes), ctypes.c_uint(flags))
    if code != 0 or pointer.value is None:
        raise CudaError(f"cudaHostAlloc of {nbytes} bytes, flags {flags}: CUDA error {code}")
    try:
        yield np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(pointer.value))
    finally:
        runtime.cudaFreeHost(pointer)


@contextmanager
def _registered(device: Device, cpus: frozenset[int], nbytes: int) -> Iterator[Memory]:
    """The product's own slab, touched first by a thread that runs on ``cpus``."""
    slab = HostSlab(1, nbytes, prepare=device.pin, cpus=cpus, chunk_bytes=SLAB_CHUNK_BYTES)
    try:
        if not slab.wait_ready(WAIT_S):
            raise CudaError(f"no pinned memory: {slab.failure}")
        yield slab.array
    finally:
        slab.close()


def numa_nodes(folder: Path) -> dict[int, frozenset[int]]:
    """CPUs of each node that has some."""
    found = {
        int(node.name.removeprefix("node")): cpus_in((node / "cpulist").read_text())
        for node in sorted(folder.glob("node[0-9]*"))
    }
    return {node: cpus for node, cpus in found.items() if cpus}
