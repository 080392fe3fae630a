"""GPUs, by the driver's own library, and whether host memory can be pinned for them."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator
from typing import Any, NamedTuple

from kvbm_core.cli.doctor.check import Check, Finding, Subject, error, note, ok

LIBRARY = "libcuda.so.1"
PINNED_BYTES = 64 << 20
_NAME_BYTES = 128
_REASONS = {
    34: "only the driver's stub is there",
    100: "there is no device",
    101: "no such device",
    802: "the system is not yet initialized (nvidia-fabricmanager)",
    803: "driver and its library are of different versions",
    999: "unknown",
}


class CallFailedError(Exception):
    """A call of the driver's, and its number."""

    def __init__(self, call: str, code: int) -> None:
        reason = _REASONS.get(code)
        super().__init__(f"{call}: CUDA error {code}{f' ({reason})' if reason else ''}")


class Gpu(NamedTuple):
    """``pci``: its address, as the kernel has it."""

    name: str
    memory_bytes: int
    pci: str


class Driver:
    """The few calls of CUDA's driver library. OSError without it, CallFailedError where one fails."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(LIBRARY)
        self.call("cuInit", 0)

    def call(self, name: str, *arguments: Any) -> None:
        """One call; the GIL is not held meanwhile."""
        code = int(getattr(self._library, name)(*arguments))
        if code:
            raise CallFailedError(name, code)

    @property
    def version(self) -> str:
        """CUDA's, that this driver can run."""
        number = ctypes.c_int()
        self.call("cuDriverGetVersion", ctypes.byref(number))
        return f"{number.value // 1000}.{number.value % 1000 // 10}"

    def gpus(self) -> list[Gpu]:
        """Those that this process may use."""
        count = ctypes.c_int()
        self.call("cuDeviceGetCount", ctypes.byref(count))
        return [self._gpu(self.device(index)) for index in range(count.value)]

    def device(self, index: int) -> ctypes.c_int:
        """CUDA's handle of it."""
        device = ctypes.c_int()
        self.call("cuDeviceGet", ctypes.byref(device), index)
        return device

    def _gpu(self, device: ctypes.c_int) -> Gpu:
        name, pci = (ctypes.create_string_buffer(_NAME_BYTES) for _ in range(2))
        memory = ctypes.c_size_t()
        self.call("cuDeviceGetName", name, _NAME_BYTES, device)
        self.call("cuDeviceTotalMem_v2", ctypes.byref(memory), device)
        self.call("cuDeviceGetPCIBusId", pci, _NAME_BYTES, device)
        return Gpu(name.value.decode(errors="replace"), memory.value, pci.value.decode().lower())


def look_at_gpu(subject: Subject) -> Iterator[Finding]:
    """Which there are, or why CUDA does not start."""
    has_device = bool(list((subject.root / "proc/driver/nvidia/gpus").glob("*")))
    try:
        driver = Driver()
        found = driver.gpus()
    except OSError:
        if has_device:
            remedy = f"give the container its libraries (--gpus all), so that {LIBRARY} is found"
            yield error("an NVIDIA GPU is there, and its driver's library is not", remedy)
        else:
            yield note("no NVIDIA GPU: kvbm serves engines that run on CPUs here")
        return
    except CallFailedError as problem:
        yield error(
            f"CUDA does not start: {problem}", "compare nvidia-smi inside and outside of the container"
        )
        return
    for gpu in found:
        yield ok(
            f"{gpu.name}, {gpu.memory_bytes / 1e9:.0f} GB, at {gpu.pci} (driver for CUDA {driver.version})"
        )
    if not found:
        yield note("CUDA starts, and shows no GPU", "look at CUDA_VISIBLE_DEVICES")


def look_at_pinning(subject: Subject) -> Iterator[Finding]:
    """Pins a little host memory as the host tier's is, and gives it back."""
    try:
        driver = Driver()
        if not driver.gpus():
            return
    except (OSError, CallFailedError):
        return  # the check of the GPU says why
    device = driver.device(0)
    context = ctypes.c_void_p()
    try:
        driver.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        driver.call("cuCtxSetCurrent", context)
        try:
            _pin(driver)
        finally:
            driver.call("cuCtxSetCurrent", None)
            driver.call("cuDevicePrimaryCtxRelease_v2", device)
    except CallFailedError as problem:
        remedy = "raise the container's limit of memory, and ulimit -l; kvbm runs with what can be pinned"
        yield error(f"host memory cannot be pinned: {problem}", remedy)
    else:
        yield ok(f"host memory can be pinned ({PINNED_BYTES >> 20} MiB tried)")


def _pin(driver: Driver) -> None:
    with mmap.mmap(-1, PINNED_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        first = ctypes.c_char.from_buffer(memory)
        try:
            address = ctypes.c_void_p(ctypes.addressof(first))
            driver.call("cuMemHostRegister_v2", address, ctypes.c_size_t(PINNED_BYTES), 0)
            driver.call("cuMemHostUnregister", address)
        finally:
            del first  # or the mapping could not be closed


CHECKS = (
    Check("gpu", "NVIDIA GPUs, by the driver's library", look_at_gpu),
    Check("pinning", "whether host memory can be pinned for a GPU", look_at_pinning),
)
