"""Builds what is optional, and runs the executor contract on CUDA memory: no figure counts before this has
passed.
"""

from __future__ import annotations

import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from benchmarks.gpu.device import Device, open_device
from benchmarks.gpu.rows import Goal, Result, Row
from benchmarks.gpu.stages import REPOSITORY, Options
from kvbm_core.testing.executor_bench import Bench
from kvbm_core.testing.executor_contract import ExecutorContract, Prepare, Setup
from kvbm_core.transfer.executor import DeviceMemory, Executor
from kvbm_core.transfer.executors.cuda_runtime import CudaError

CONTRACT = Goal("tests of the executor contract that fail", "tests", bound=0)
CHECKED = Goal("tests of the executor contract that ran", "tests")
NATIVE = Goal("native module of the CPU's loops", "built")


class Breakable:
    """A CudaRuntime that can be told to refuse copies; all else is the real one's."""

    def __init__(self, api: Any) -> None:
        self._api = api
        self.is_broken = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._api, name)

    def copy(self, copies: Any, stream: Any) -> None:
        """See CudaRuntime."""
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

    bench_class = GpuBench

    def __init__(self, device: Device) -> None:
        self._device = device
        self._api = Breakable(device.api)

    def make_executor(self, setup: Setup) -> Executor:
        """See ExecutorContract."""
        api: Any = self._api
        return setup.cuda_copier(api, setup.on_done)

    def break_copies(self, bench: Bench, broken: bool) -> None:
        """See ExecutorContract."""
        self._api.is_broken = broken

    def make_memory(self) -> DeviceMemory:
        """See ExecutorContract."""
        memory = super().make_memory()
        if self._device.torch_device.type == "cuda":
            memory.storages = [
                torch.from_numpy(array).to(self._device.torch_device) for array in memory.storages
            ]
        return memory

    def preparation(self, prepare: Prepare | None) -> Prepare:
        """See ExecutorContract."""

        def pin(address: int, nbytes: int) -> Callable[[], None] | None:
            if prepare is not None:
                prepare(address, nbytes)
            return self._device.pin(address, nbytes) if self._device.pin is not None else None

        return pin


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
