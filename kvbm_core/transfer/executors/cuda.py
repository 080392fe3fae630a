"""Copies between GPU memory and the pinned host slab, beside the model's own work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from kvbm_core.clock import Clock
from kvbm_core.errors import Outcome
from kvbm_core.layout.view import pair_segments
from kvbm_core.storage.host_slab import HostSlab
from kvbm_core.transfer.digests import SlotDigests, device_blocks_of
from kvbm_core.transfer.executor import DeviceMemory, StreamMark
from kvbm_core.transfer.executors.base import BoardExecutor, Content
from kvbm_core.transfer.executors.cuda_runtime import CudaRuntime
from kvbm_core.transfer.jobs import Job, OnDone
from kvbm_core.transfer.pieces import PieceTable
from kvbm_core.transfer.plan import TransferPlan
from kvbm_core.types import Direction

POLL_INTERVAL_S = 0.0005
"""How long the thread lets copies run before it looks again: an onboard is noticed at most this late."""


@dataclass(slots=True)
class _Flight:
    """A job whose copies the GPU has. ``readback``, if any, is filled with the device blocks by the GPU.
    Without an event it is over when its stream is idle.
    """

    job: Job[TransferPlan]
    num_bytes: int = 0
    event: Any = None
    readback: list[Content] = field(default_factory=list)
    failure: str = ""


class CopyLimits(NamedTuple):
    """How many jobs the GPU has at most, and how many blocks one call copies."""

    max_concurrent: int = 4
    max_batch_blocks: int = 16


USUAL_LIMITS = CopyLimits()


class CudaExecutor(BoardExecutor):
    """Executor for engines whose KV cache is on a GPU (see Executor for the rules).

    A stream per direction, the onboard one with priority. What the caller's stream was given before submit
    is waited for by our stream, never by the CPU. One thread queues the copies, as many blocks per call
    and for as many jobs at once as ``limits`` says, and watches their events.
    """

    def __init__(
        self,
        device: DeviceMemory,
        host: HostSlab,
        api: CudaRuntime,
        *,
        limits: CopyLimits = USUAL_LIMITS,
        on_done: OnDone,
        digests: SlotDigests | None = None,
        clock: Clock | None = None,
    ) -> None:
        if min(limits) < 1:
            raise ValueError(str(limits))
        super().__init__("kvbm-cuda", device, host, on_done=on_done, digests=digests, clock=clock)
        self._api = api
        self._limits = limits
        self._bases = [api.address_of(storage) for storage in device.storages]
        self._tables = [
            PieceTable(
                pair_segments(view, host.view(view.block_bytes)), self._bases, host.address, host.chunk_bytes
            )
            for view in device.views
        ]
        self._streams = {
            Direction.ONBOARD: api.create_stream(high_priority=True),
            Direction.OFFLOAD: api.create_stream(high_priority=False),
        }
        self._flights: list[_Flight] = []
        self._thread.start()

    def mark(self) -> StreamMark:
        """See Executor."""
        return self._api.record_on_current_stream()

    def _work(self) -> None:
        self._api.bind_thread()
        while self._flights or not self._board.is_closed:
            if self._has_room():
                job = self._board.take(timeout_s=POLL_INTERVAL_S if self._flights else None)
                if job is not None:
                    self._flights.append(self._launch(job))
            else:
                self._board.pause(POLL_INTERVAL_S)
            self._flights = [flight for flight in self._flights if not self._land(flight)]

    def _has_room(self) -> bool:
        """A stream that somebody waits for to be idle is given nothing more."""
        has_events = all(flight.event is not None for flight in self._flights)
        return has_events and len(self._flights) < self._limits.max_concurrent

    def _launch(self, job: Job[TransferPlan]) -> _Flight:
        """Queues all copies of a job. If that fails half way, what was queued is still waited for."""
        plan = job.plan
        flight = _Flight(job)
        stream = self._streams[plan.direction]
        try:
            self._api.wait_event(stream, job.token)
            for move in () if plan.compares else plan.moves:
                for start in range(0, len(move.slots), self._limits.max_batch_blocks):
                    batch = slice(start, start + self._limits.max_batch_blocks)
                    self._copy(plan.direction, move.group, move.device_blocks[batch], move.slots[batch])
                flight.num_bytes += len(move.slots) * self._device.views[move.group].block_bytes
            if self._digests is not None or plan.compares:
                self._read_back(flight, stream)
        except Exception as error:  # whatever happens to a job is its outcome, and the thread goes on
            flight.failure = f"{type(error).__name__}: {error}"
        try:
            flight.event = self._api.record(stream)
        except Exception as error:
            flight.failure = flight.failure or f"{type(error).__name__}: {error}"
        return flight

    def _copy(
        self, direction: Direction, group: int, device_blocks: Sequence[int], slots: Sequence[int]
    ) -> None:
        arrays = self._tables[group].arrays(device_blocks, slots, to_host=direction is Direction.OFFLOAD)
        targets, sources, sizes = (numbers.tolist() for numbers in arrays)
        self._api.copy((targets, sources, sizes), self._streams[direction])

    def _read_back(self, flight: _Flight, stream: Any) -> None:
        """Queues copies of the device blocks to memory of our own, in stream order after the job's copies."""
        targets: list[int] = []
        sources: list[int] = []
        sizes: list[int] = []
        for group, device_block, slot in device_blocks_of(flight.job.plan):
            view = self._device.views[group]
            content = np.empty(view.block_bytes, dtype=np.uint8)
            flight.readback.append((group, slot, content))
            target = int(content.ctypes.data)
            for storage, offset_bytes, nbytes in view.regions(device_block):
                targets.append(target)
                sources.append(self._bases[storage] + offset_bytes)
                sizes.append(nbytes)
                target += nbytes
        self._api.copy((targets, sources, sizes), stream)

    def _land(self, flight: _Flight) -> bool:
        """Ends the job if the GPU is through with it; False if not yet."""
        try:
            if not self._is_over(flight):
                return False
        except Exception as error:
            flight.failure = flight.failure or f"{type(error).__name__}: {error}"
        if flight.failure:
            self._board.end(flight.job, Outcome.IO_ERROR, flight.failure)
        else:
            self._finish(flight.job, flight.num_bytes, flight.readback)
        return True

    def _is_over(self, flight: _Flight) -> bool:
        if flight.event is not None:
            return self._api.is_done(flight.event)
        return self._api.is_idle(self._streams[flight.job.plan.direction])
