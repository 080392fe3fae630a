"""A KV cache of CPU tensors, the host slab, the real executor between them, and other ways to do the same."""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import count

import numpy as np
import numpy.typing as npt
import torch

from benchmarks.suite import CannotRun, expect
from kvbm_core.errors import Outcome
from kvbm_core.layout.tensors import view_of_tensors
from kvbm_core.storage.host_slab import HostSlab
from kvbm_core.transfer.executor import DeviceMemory, Executor
from kvbm_core.transfer.factory import make_executor
from kvbm_core.transfer.plan import GroupMove, JobResult, TransferPlan
from kvbm_core.transfer.torch_memory import describe_tensors
from kvbm_core.types import Direction

LAYERS = 8
WAIT_S = 60.0
Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Choice:
    """Which blocks move: ``device_blocks[i]`` and ``slots[i]``, both scattered."""

    device_blocks: list[int]
    slots: list[int]


class CopyBench:
    """Caches of LAYERS tensors with pages of ``page_bytes``; ``num_moved`` of twice as many blocks move at a
    time.
    """

    def __init__(self, page_bytes: int, num_moved: int, seed: int) -> None:
        num_blocks = 2 * num_moved
        self.page_bytes = page_bytes
        self.num_moved = num_moved
        self._draw = random.Random(seed)
        self._jobs = count(1)
        generator = torch.Generator().manual_seed(seed)
        shape = (num_blocks, page_bytes)
        self.layers = [
            torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator) for _ in range(LAYERS)
        ]
        names = [f"layer.{number}" for number in range(LAYERS)]
        infos, storages = describe_tensors(dict(zip(names, self.layers, strict=True)), names)
        device = DeviceMemory((view_of_tensors(infos, num_blocks),), storages)
        self._host = HostSlab(num_blocks, LAYERS * page_bytes)
        if not self._host.wait_ready(WAIT_S):
            raise CannotRun(
                f"no memory for {num_blocks * LAYERS * page_bytes >> 20} MiB of slots: {self._host.failure}"
            )
        self._results: list[JobResult] = []
        self._executor: Executor = make_executor(device, self._host, on_done=self._results.append)
        self.slots: Bytes = self._host.array.reshape(num_blocks, LAYERS, page_bytes)
        self.torch_slots = torch.from_numpy(self.slots)
        self._source: Bytes = np.ones(self.moved_bytes, np.uint8)
        self._target: Bytes = np.zeros(self.moved_bytes, np.uint8)

    @property
    def moved_bytes(self) -> int:
        """Bytes of one copy."""
        return self.num_moved * LAYERS * self.page_bytes

    def choose(self) -> Choice:
        """Blocks and slots for the next copy."""
        numbers = range(2 * self.num_moved)
        return Choice(self._draw.sample(numbers, self.num_moved), self._draw.sample(numbers, self.num_moved))

    def plan(self, direction: Direction, choice: Choice) -> TransferPlan:
        """What a leader would send."""
        move = GroupMove(0, tuple(choice.device_blocks), tuple(choice.slots))
        return TransferPlan(next(self._jobs), direction, (move,))

    def execute(self, plan: TransferPlan) -> None:
        """From submission to the end of the job, as the worker does it."""
        self._executor.submit(plan)
        expect(self._executor.wait([plan.job_id], WAIT_S), "a copy did not end")

    def wipe(self, direction: Direction, choice: Choice) -> None:
        """What is to be written holds something else: no copy can pass by doing nothing."""
        if direction is Direction.OFFLOAD:
            self.slots[choice.slots] = ~self.slots[choice.slots]
            return
        blocks = torch.tensor(choice.device_blocks)
        for layer in self.layers:
            layer[blocks] = ~layer[blocks]

    def check(self, name: str, choice: Choice) -> None:
        """Each slot holds its block, page by page."""
        for number, layer in enumerate(self.layers):
            same = np.array_equal(self.slots[choice.slots, number], layer.numpy()[choice.device_blocks])
            expect(same, f"{name}: wrong bytes in layer {number}, pages of {self.page_bytes}")

    def check_outcomes(self) -> None:
        """All jobs of the executor have ended well."""
        outcomes = {result.outcome for result in self._results}
        self._results.clear()
        expect(outcomes == {Outcome.OK}, f"copies ended in {outcomes}")

    def memcpy(self) -> None:
        """The limit: as many bytes, in one piece."""
        np.copyto(self._target, self._source)

    def torch_per_page(self, direction: Direction, choice: Choice) -> None:
        """Tensor.copy_ of each page."""
        for number, layer in enumerate(self.layers):
            for block, slot in zip(choice.device_blocks, choice.slots, strict=True):
                if direction is Direction.OFFLOAD:
                    self.torch_slots[slot, number].copy_(layer[block])
                else:
                    layer[block].copy_(self.torch_slots[slot, number])

    def torch_indexed(self, direction: Direction, choice: Choice) -> None:
        """index_select and index_copy_ of each layer."""
        blocks, slots = torch.tensor(choice.device_blocks), torch.tensor(choice.slots)
        for number, layer in enumerate(self.layers):
            in_slots = self.torch_slots[:, number]
            if direction is Direction.OFFLOAD:
                in_slots.index_copy_(0, slots, layer.index_select(0, blocks))
            else:
                layer.index_copy_(0, blocks, in_slots.index_select(0, slots))

    def close(self) -> None:
        """Ends the executor, gives the slab back."""
        self._executor.close()
        del self.slots, self.torch_slots
        self._host.close()
