"""Copies between ordinary memory and the host slab, in one thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from kvbm_core.clock import Clock, SystemClock
from kvbm_core.errors import Outcome
from kvbm_core.layout.view import Segment, pair_segments
from kvbm_core.storage.host_slab import HostSlab
from kvbm_core.transfer.coalesce import Run, runs_both_ways
from kvbm_core.transfer.digests import SlotDigests, device_blocks_of, gather
from kvbm_core.transfer.executor import DeviceMemory, refusal_of
from kvbm_core.transfer.jobs import Job, JobBoard
from kvbm_core.transfer.plan import GroupMove, JobResult, TransferPlan
from kvbm_core.types import Direction

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class _Lane:
    """The same pieces of all blocks seen from both sides, as ``[piece, block, byte]`` arrays."""

    device: Bytes
    host: Bytes


class MemcpyExecutor:
    """Executor for engines whose KV cache is in ordinary memory (see Executor for the rules).

    Offloads are copied ``max_batch_blocks`` blocks at a time; an onboard that arrives meanwhile goes first.
    """

    def __init__(
        self,
        device: DeviceMemory,
        host: HostSlab,
        *,
        max_batch_blocks: int = 16,
        on_done: Callable[[JobResult], None] | None = None,
        verify: bool = False,
        clock: Clock | None = None,
    ) -> None:
        if max_batch_blocks < 1:
            raise ValueError(f"max_batch_blocks={max_batch_blocks}")
        self._device = device
        self._host = host
        self._max_batch_blocks = max_batch_blocks
        self._digests = SlotDigests() if verify else None
        self._lanes = [_lanes(device, host, group) for group in range(len(device.views))]
        self._board = JobBoard(clock or SystemClock(), on_done)
        self._thread = threading.Thread(target=self._work, name="kvbm-memcpy", daemon=True)
        self._thread.start()

    def submit(self, plan: TransferPlan, *, deadline_s: float | None = None) -> None:
        """Queues a plan; see Executor."""
        refusal = refusal_of(plan, self._device, self._host)
        if refusal is None:
            self._board.add(plan, deadline_s)
        else:
            self._board.refuse(plan, *refusal)

    def poll(self) -> list[JobResult]:
        """See Executor."""
        return self._board.poll()

    def cancel(self, job_id: int) -> bool:
        """See Executor."""
        return self._board.cancel(job_id)

    def wait(self, job_ids: Collection[int], timeout_s: float) -> bool:
        """See Executor."""
        return self._board.wait(job_ids, timeout_s)

    def drain(self, timeout_s: float) -> bool:
        """See Executor."""
        return self._board.wait(None, timeout_s)

    def close(self) -> None:
        """See Executor."""
        self._board.close()
        self._thread.join()
        self._lanes = []  # the slab can be unmapped only when no array of it is left

    def _work(self) -> None:
        while (job := self._board.take()) is not None:
            self._execute(job)

    def _execute(self, job: Job) -> None:
        try:
            num_bytes = self._move(job.plan)
            wrong = self._verify(job.plan)
        except Exception as error:  # whatever happens to a job is its outcome, and the thread goes on
            self._board.end(job, Outcome.IO_ERROR, f"{type(error).__name__}: {error}")
            return
        if wrong:
            self._board.end(job, Outcome.CORRUPT, f"slots {wrong[:8]} came back with other bytes")
        else:
            self._board.end(job, Outcome.OK, num_bytes=num_bytes)

    def _move(self, plan: TransferPlan) -> int:
        is_offload = plan.direction is Direction.OFFLOAD
        num_bytes = 0
        for move in plan.moves:
            for batch in _batches(move, self._max_batch_blocks if is_offload else len(move.slots)):
                self._copy(move.group, batch, is_offload)
                num_bytes += len(batch) * self._device.views[move.group].block_bytes
                while is_offload and self._board.has_onboard:
                    urgent = self._board.take(timeout_s=0, onboard_only=True)
                    if urgent is not None:
                        self._execute(urgent)
        return num_bytes

    def _copy(self, group: int, batch: list[tuple[int, int]], is_offload: bool) -> None:
        for run in runs_both_ways([device for device, _ in batch], [slot for _, slot in batch]):
            device_blocks, slots = _slices(run)
            for lane in self._lanes[group]:
                device, host = lane.device[:, device_blocks], lane.host[:, slots]
                if is_offload:
                    np.copyto(host, device)
                else:
                    np.copyto(device, host)

    def _verify(self, plan: TransferPlan) -> list[int]:
        """Notes what was offloaded; the slots whose content is not what was offloaded to them."""
        wrong: list[int] = []
        if self._digests is not None:
            for group, device_block, slot in device_blocks_of(plan):
                content = gather(self._device.views[group], self._device.storages, device_block)
                if plan.direction is Direction.OFFLOAD:
                    self._digests.record(slot, content)
                elif not self._digests.matches(slot, content):
                    wrong.append(slot)
        return wrong


def _batches(move: GroupMove, size_blocks: int) -> Iterator[list[tuple[int, int]]]:
    pairs = list(zip(move.device_blocks, move.slots, strict=True))
    for start in range(0, len(pairs), max(1, size_blocks)):
        yield pairs[start : start + size_blocks]


def _slices(run: Run) -> tuple[slice, slice]:
    """Device blocks and slots of a run; a slice that descends to 0 must have no end."""
    end = run.dst + run.count * run.step
    return slice(run.src, run.src + run.count), slice(run.dst, end if end >= 0 else None, run.step)


def _lanes(device: DeviceMemory, host: HostSlab, group: int) -> list[_Lane]:
    """Pairs of device and slot segments, with pairs at equal distances taken together.

    One numpy call then copies a run of blocks for many layers: less interpreter time, and the GIL is given
    up for longer stretches instead of being fought for after every page.
    """
    view = device.views[group]
    pairs = list(pair_segments(view, host.view(view.block_bytes)))
    lanes: list[_Lane] = []
    while pairs:
        count = _equally_spaced(pairs)
        (first_device, first_host), bundle = pairs[0], pairs[:count]
        del pairs[:count]
        device_step = bundle[1][0].offset_bytes - first_device.offset_bytes if count > 1 else 0
        host_step = bundle[1][1].offset_bytes - first_host.offset_bytes if count > 1 else 0
        storage = device.storages[first_device.storage]
        lanes.append(
            _Lane(
                _pieces(storage, first_device, count, device_step, view.num_blocks),
                _pieces(host.array, first_host, count, host_step, host.num_slots),
            )
        )
    return lanes


def _equally_spaced(pairs: list[tuple[Segment, Segment]]) -> int:
    """How many of the first pairs are alike but for their offsets, which advance evenly on both sides."""
    count = 1
    steps: tuple[int, int] | None = None
    for (a, b), (c, d) in pairwise(pairs):
        alike = (a.storage, a.nbytes, a.block_stride_bytes, b.storage) == (
            (c.storage, c.nbytes, c.block_stride_bytes, d.storage)
        )
        step = (c.offset_bytes - a.offset_bytes, d.offset_bytes - b.offset_bytes)
        if not alike or (steps is not None and step != steps):
            break
        steps = step
        count += 1
    return count


def _pieces(storage: Bytes, segment: Segment, count: int, step_bytes: int, num_blocks: int) -> Bytes:
    pieces: Bytes = np.ndarray(
        (count, num_blocks, segment.nbytes),
        dtype=np.uint8,
        buffer=storage,
        offset=segment.offset_bytes,
        strides=(step_bytes, segment.block_stride_bytes, 1),
    )
    return pieces
