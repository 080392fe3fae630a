"""Builds what is optional, and runs the executor contract on CUDA memory: no figure counts before this has passed."""

from __future__ import annotations

import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from benchmarks.gpu.device import Device, open_device
from benchmarks.gpu.rows import Goal, Result, Row
from benchmarks.gpu.stages import REPOSITORY, Options
from kvbm_core.clock import Clock
from kvbm_core.storage.host_slab import HostSlab
from kvbm_core.testing.executor_contract import LONG_S, NUM_SLOTS, Bench, ExecutorContract, two_group_memory
from kvbm_core.transfer.digests import SlotDigests
from kvbm_core.transfer.executor import DeviceMemory, Executor
from kvbm_core.transfer.executors.cuda import CudaExecutor
from kvbm_core.transfer.executors.cuda_runtime import CudaError
from kvbm_core.transfer.plan import JobResult

CONTRACT = Goal("tests of the executor contract that fail", "tests", bound=0)
CHECKED = Goal("tests of the executor contract that ran", "tests")
NATIVE = Goal("native module of the CPU's loops", "built")


class Breakable:
    """A CudaApi that can be told to refuse copies; all else is the real one's."""

    def __init__(self, api: Any) -> None:
        self._api = api
        self.is_broken = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._api, name)

    def copy(self, copies: Any, stream: Any) -> None:
        """See CudaApi."""
        if self.is_broken:
            raise CudaError("CUDA error 1 (asked for by a check)")
        self._api.copy(copies, stream)


@dataclass
class GpuBench(Bench):
    """The contract's bench, with tensors where it has arrays."""

    def content(self, group: int, block: int) -> bytes:
        """The bytes of a device block."""
        regions = self.device.views[group].regions(block)
        return b"".join(
            torch.as_tensor(self.device.storages[s])[o : o + n].cpu().numpy().tobytes() for s, o, n in regions
        )


class GpuContract(ExecutorContract):
    """The contract on the device's memory, with host memory pinned as the worker pins it."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._api = Breakable(device.api)

    def make_executor(
        self,
        device: DeviceMemory,
        host: HostSlab,
        *,
        on_done: Callable[[JobResult], None] | None,
        verify: bool,
        clock: Clock | None,
    ) -> Executor:
        """See ExecutorContract."""
        api: Any = self._api
        digests = SlotDigests() if verify else None
        return CudaExecutor(
            device, host, api, max_concurrent=1, max_batch_blocks=4, on_done=on_done, digests=digests, clock=clock
        )

    def break_copies(self, bench: Bench, broken: bool) -> None:
        """See ExecutorContract."""
        self._api.is_broken = broken

    @contextmanager
    def bench(
        self,
        *,
        on_done: Callable[[JobResult], None] | None = None,
        verify: bool = False,
        clock: Clock | None = None,
        prepare: Callable[[int, int], None] | None = None,
    ) -> Iterator[Bench]:
        """See ExecutorContract."""
        device = two_group_memory()
        if self._device.torch_device.type == "cuda":
            device.storages = [torch.from_numpy(array).to(self._device.torch_device) for array in device.storages]

        def pin(address: int, nbytes: int) -> Callable[[], None] | None:
            if prepare is not None:
                prepare(address, nbytes)
            return self._device.pin(address, nbytes) if self._device.pin is not None else None

        host = HostSlab(NUM_SLOTS, max(view.block_bytes for view in device.views), prepare=pin)
        if prepare is None and not host.wait_ready(LONG_S):
            raise CudaError(f"no pinned memory: {host.failure}")
        executor = self.make_executor(device, host, on_done=on_done, verify=verify, clock=clock)
        try:
            yield GpuBench(device, host, executor)
        finally:
            executor.close()
            host.close()


class ChecksStage:
    """See the module."""

    name = "checks"
    help = "the native module, the executor contract on CUDA memory"
    share = 0.1

    def goals(self, options: Options) -> Sequence[Goal]:
        """See Stage."""
        return (NATIVE, CHECKED, CONTRACT)

    def run(self, options: Options) -> Iterator[Result]:
        """See Stage."""
        reason = _build_native()
        unit = f"built ({reason.splitlines()[-1]})" if reason else NATIVE.unit
        yield Row(replace(NATIVE, unit=unit), ours=(float(not reason),))
        device = open_device(options.is_dry)
        try:
            failed = []
            names = [name for name in dir(ExecutorContract) if name.startswith("test_")]
            for name in names:
                try:
                    getattr(GpuContract(device), name)()
                except Exception:
                    traceback.print_exc()
                    failed.append(name)
            yield Row(CHECKED, ours=(float(len(names)),))
            goal = replace(CONTRACT, unit=f"tests ({', '.join(failed)})") if failed else CONTRACT
            yield Row(goal, ours=(float(len(failed)),))
        finally:
            device.close()


def _build_native() -> str:
    """Why kvbm's C module cannot be had here, or an empty string."""
    from kvbm_core.native import native

    if native is not None:
        return ""
    sys.path.insert(0, str(REPOSITORY))
    try:
        from hatch_build import SOURCE, compile_native
    except ImportError as error:
        return f"{error}; Python code does the same"
    suffix = str(sysconfig.get_config_var("EXT_SUFFIX"))
    return compile_native(REPOSITORY, REPOSITORY / SOURCE.with_suffix(suffix)) or ""
