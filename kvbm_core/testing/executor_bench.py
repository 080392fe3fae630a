"""What an executor is tried on: two KV cache groups, a slab, a listener for its results."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvbm_core.errors import Outcome
from kvbm_core.layout.tensors import TensorInfo, view_of_tensors
from kvbm_core.storage.host_slab import HostSlab
from kvbm_core.transfer.executor import DeviceMemory, Executor
from kvbm_core.transfer.plan import GroupMove, JobResult, TransferPlan
from kvbm_core.types import Direction

NUM_DEVICE_BLOCKS = 12
NUM_SLOTS = 8
HELD_JOB = 1000
LONG_S = 120.0
"""Longer than anything here takes; a wait that needs it has failed."""


@dataclass
class Listener:
    """Collects results; the thread that brings the one of HELD_JOB is kept until ``gate`` is set."""

    results: list[JobResult] = field(default_factory=list)
    gate: threading.Event = field(default_factory=threading.Event)
    _arrived: threading.Condition = field(default_factory=threading.Condition)

    def __call__(self, result: JobResult) -> None:
        with self._arrived:
            self.results.append(result)
            self._arrived.notify_all()
        if result.job_id == HELD_JOB:
            self.gate.wait(LONG_S)

    def wait_for(self, job_id: int, num_results: int = 1) -> bool:
        """Waits until the job has ended, with so many results; False if it takes too long."""
        with self._arrived:
            return self._arrived.wait_for(lambda: self.ids().count(job_id) >= num_results, LONG_S)

    def ids(self) -> list[int]:
        """Of the jobs that ended, in order."""
        return [result.job_id for result in self.results]

    def outcomes(self) -> dict[int, Outcome]:
        """By job id."""
        return {result.job_id: result.outcome for result in self.results}


@dataclass
class Bench:
    """An executor between a device memory with two KV cache groups and a slab."""

    device: DeviceMemory
    host: HostSlab
    executor: Executor
    results: list[JobResult]
    """Where the test has no listener of its own."""

    def poll(self) -> list[JobResult]:
        """Results since the last poll."""
        taken, self.results[:] = [*self.results], []
        return taken

    def content(self, group: int, block: int) -> bytes:
        """The bytes of a device block."""
        regions = self.device.views[group].regions(block)
        return b"".join(self.device.storages[s][o : o + n].tobytes() for s, o, n in regions)

    def wipe(self) -> None:
        """Forgets all device bytes."""
        for storage in self.device.storages:
            storage[:] = 0

    def slot(self, slot: int) -> npt.NDArray[np.uint8]:
        """The bytes of a slot."""
        return self.host.array[slot * self.host.slot_bytes : (slot + 1) * self.host.slot_bytes]


def two_group_memory(seed: int = 1) -> DeviceMemory:
    """Random bytes under a group with packed layers that are interleaved, and one with K and V apart."""
    blocks, layers, heads, tokens, content = NUM_DEVICE_BLOCKS, 3, 2, 4, 8
    page = heads * tokens * content
    packed_bytes, apart_bytes = blocks * layers * page * 2, 2 * blocks * page * 2
    packed = [
        TensorInfo(
            name=f"packed.{layer}",
            shape=(blocks, heads, tokens, content),
            strides=(layers * page, content, heads * content, 1),
            itemsize=2,
            dtype="float16",
            storage=0,
            storage_offset_bytes=layer * page * 2,
            storage_bytes=packed_bytes,
        )
        for layer in range(layers)
    ]
    apart_strides = (blocks * page, page, heads * content, content, 1)
    apart_shape = (2, blocks, tokens, heads, content)
    apart = TensorInfo("apart", apart_shape, apart_strides, 2, "float16", 1, 0, apart_bytes)
    random = np.random.default_rng(seed)
    storages = [random.integers(0, 256, n, dtype=np.uint8) for n in (packed_bytes, apart_bytes)]
    views = (view_of_tensors(packed, blocks), view_of_tensors([apart], blocks))
    return DeviceMemory(views, storages, ("float16", "float16"))


def comparison(job_id: int, blocks: Sequence[int], slots: Sequence[int], group: int = 0) -> TransferPlan:
    """A plan that compares them."""
    return replace(plan(job_id, Direction.OFFLOAD, blocks, slots, group), compares=True)


def plan(
    job_id: int, direction: Direction, blocks: Sequence[int], slots: Sequence[int], group: int = 0
) -> TransferPlan:
    """A plan with one move."""
    return TransferPlan(job_id, direction, (GroupMove(group, tuple(blocks), tuple(slots)),))


def is_mapped(address: int) -> bool:
    """Whether ``address`` is in a mapping of this process."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, end = (int(number, 16) for number in line.split()[0].split("-"))
        if start <= address < end:
            return True
    return False
