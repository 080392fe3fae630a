"""Latents of MLA that one GPU loads for all: over NCCL, in one process with a thread for each GPU."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from benchmarks.gpu.device import WAIT_S
from benchmarks.gpu.rows import Cell, Goal, Result, Row
from benchmarks.gpu.stages import Options, now_s
from kvbm_core.errors import Outcome
from kvbm_core.layout.view import BlockView, Segment
from kvbm_core.storage.host_slab import HostSlab
from kvbm_core.transfer.executor import DeviceMemory, Executor
from kvbm_core.transfer.executors.broadcast import BroadcastExecutor, OnDone
from kvbm_core.transfer.executors.broadcast_group import Group, GroupError, MeetingPoint
from kvbm_core.transfer.factory import make_executor, slab_cpus, slab_preparation
from kvbm_core.transfer.plan import GroupMove, JobResult, TransferPlan
from kvbm_core.types import Direction

WRONG = Goal("loads of one GPU for all that brought other bytes", "loads", bound=0)
RATE = Goal("load of one GPU for all", "GB/s", "its own load")
GONE = Goal("until the others know that a GPU's process is gone", "s", bound=5.0)
TABLE = "one load for all GPUs"
LAYERS, PAGE_BYTES = 61, 64 * 576 * 2
"""DeepSeek-V3's, of 64 tokens."""


class BroadcastStage:
    """See the module."""

    name = "broadcast"
    help = "latents of MLA that one GPU loads for all over NCCL; needs two GPUs"
    share = 0.06

    def goals(self, options: Options) -> Sequence[Goal]:
        """See Stage. None where there is nobody to send to."""
        return (WRONG, RATE, GONE) if options.is_dry or torch.cuda.device_count() > 1 else ()

    def run(self, options: Options) -> Iterator[Result]:
        """See Stage."""
        num_ranks = 2 if options.is_dry else torch.cuda.device_count()
        yield Cell(TABLE, {"GPUs": str(0 if options.is_dry else num_ranks), "run": str(num_ranks > 1)})
        if num_ranks < 2:
            return
        ranks = _Ranks(num_ranks, options)
        try:
            alone, together, num_wrong = [], [], 0
            for number in range(options.choose(1, 7)):
                alone.append(ranks.load_alone())
                together.append(ranks.load(number))
                num_wrong += not ranks.are_equal()
            yield Row(WRONG, (float(num_wrong),))
            yield Row(RATE, tuple(together), tuple(alone))
            yield Row(GONE, (ranks.gone_s(),))
        finally:
            ranks.close()


class _Ranks:
    """One executor on each GPU, as a worker makes it. Rates in GB/s."""

    def __init__(self, num_ranks: int, options: Options) -> None:
        self._num_blocks = options.choose(8, 128)
        devices = [
            torch.device("cpu") if options.is_dry else torch.device("cuda", rank) for rank in range(num_ranks)
        ]
        self._memories = [_memory(self._num_blocks, device) for device in devices]
        (view,) = self._memories[0].views
        self._num_bytes = view.block_bytes * self._num_blocks
        self._slab = HostSlab(
            self._num_blocks,
            view.block_bytes,
            prepare=slab_preparation(self._memories[0]),
            cpus=slab_cpus(self._memories[0]),
        )
        if not self._slab.wait_ready(WAIT_S):
            raise RuntimeError(f"no host memory: {self._slab.failure}")
        self._slab.array[:] = np.random.default_rng(options.seed).integers(
            0, 256, self._slab.array.size, dtype=np.uint8
        )
        self._ended: dict[tuple[int, int], Outcome] = {}
        self._changed = threading.Condition()
        self._copier = make_executor(self._memories[0], self._slab, on_done=self._note(-1))
        self._executors = self._connected(devices)

    def _connected(self, devices: Sequence[torch.device]) -> list[BroadcastExecutor]:
        numbers, point = range(len(devices)), MeetingPoint()
        groups = [Group(n, numbers, point.address, None if n else point) for n in numbers]
        with ThreadPoolExecutor(len(groups)) as pool:
            list(pool.map(lambda group: group.connect(devices[group.rank]), groups))

        def make_loader(on_done: OnDone) -> Executor:
            return make_executor(self._memories[0], self._slab, on_done=on_done)

        return [
            BroadcastExecutor(
                self._memories[group.rank],
                group,
                self._note(group.rank),
                make_loader=None if group.rank else make_loader,
            )
            for group in groups
        ]

    def _note(self, rank: int) -> Callable[[JobResult], None]:
        def ended(result: JobResult) -> None:
            with self._changed:
                self._ended[rank, result.job_id] = result.outcome
                self._changed.notify_all()

        return ended

    def _run(self, executors: Sequence[Executor], ranks: Sequence[int], job_id: int) -> float:
        """Seconds until all have it."""
        blocks = tuple(range(self._num_blocks))
        plan = TransferPlan(job_id, Direction.ONBOARD, (GroupMove(0, blocks, blocks[::-1]),))
        started_s = now_s()
        for executor in executors:
            executor.submit(plan)
        waited = {(rank, job_id) for rank in ranks}
        with self._changed:
            if not self._changed.wait_for(lambda: waited <= self._ended.keys(), WAIT_S):
                raise TimeoutError(f"load {job_id} did not end")
        bad = {self._ended[key] for key in waited} - {Outcome.OK}
        if bad:
            raise GroupError(f"load {job_id} ended as {sorted(map(str, bad))}")
        return now_s() - started_s

    def load_alone(self) -> float:
        """The first GPU for itself."""
        return self._num_bytes / self._run([self._copier], [-1], 10_000 + len(self._ended)) / 1e9

    def load(self, number: int) -> float:
        """One for all, over other bytes."""
        for memory in self._memories:
            for storage in memory.storages:
                storage[:] = 255 - number
        return self._num_bytes / self._run(self._executors, range(len(self._executors)), number) / 1e9

    def are_equal(self) -> bool:
        """Whether every GPU has what the host has, block by block."""
        pieces = self._slab.array.reshape(self._num_blocks, -1)[::-1]
        expected = np.ascontiguousarray(pieces.reshape(self._num_blocks, LAYERS, -1).transpose(1, 0, 2))
        return all(
            np.array_equal(torch.as_tensor(memory.storages[0]).cpu().numpy(), expected.ravel())
            for memory in self._memories
        )

    def gone_s(self) -> float:
        """The last rank ends; how long the first one takes to give up the next load."""
        self._executors[-1].close()
        started_s = now_s()
        try:
            self._run(self._executors[:-1], range(len(self._executors) - 1), 20_000)
        except GroupError:
            return now_s() - started_s
        raise RuntimeError("a load went well without one of the ranks")

    def close(self) -> None:
        """Ends threads and memory."""
        with ThreadPoolExecutor(len(self._executors)) as pool:
            list(pool.map(lambda executor: executor.close(), self._executors))
        self._copier.close()
        self._slab.close()


def _memory(num_blocks: int, device: torch.device) -> DeviceMemory:
    """A layer after the other, as vLLM keeps MLA's latents."""
    layer_bytes = num_blocks * PAGE_BYTES
    segments = tuple(Segment(0, layer * layer_bytes, PAGE_BYTES, PAGE_BYTES) for layer in range(LAYERS))
    storage = torch.zeros(LAYERS * layer_bytes, dtype=torch.uint8, device=device)
    return DeviceMemory(
        (BlockView(num_blocks, segments),), [storage.numpy() if device.type == "cpu" else storage]
    )
