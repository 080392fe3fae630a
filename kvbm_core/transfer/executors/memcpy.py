"""Copies between ordinary memory and the host slab, in one thread."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from kvbm_core.clock import Clock
from kvbm_core.errors import Outcome
from kvbm_core.layout.view import Segment, evenly_spaced, pair_segments
from kvbm_core.native import Bytes, Ids, Native, native
from kvbm_core.storage.host_slab import HostSlab
from kvbm_core.storage.huge_pages import HugePages
from kvbm_core.storage.numa import leave_bound_core
from kvbm_core.transfer.coalesce import runs_both_ways
from kvbm_core.transfer.digests import SlotDigests, device_blocks_of, gather
from kvbm_core.transfer.executor import DeviceMemory, StreamMark
from kvbm_core.transfer.executors.base import BoardExecutor, Content
from kvbm_core.transfer.jobs import Job, OnDone
from kvbm_core.transfer.plan import TransferPlan
from kvbm_core.types import Direction

PiecePairs = Sequence[tuple[Bytes, Bytes]]
"""Targets and sources, each ``[piece, block, byte]``; all have the same blocks."""


def copy_in_python(pieces: PiecePairs, dst_ids: Ids, src_ids: Ids) -> None:
    """Native.copy_blocks for several pieces: one numpy call for each run of blocks that are neighbours on
    both sides.
    """
    for dst, src in pieces:
        if (dst.shape[0], dst.shape[2], len(dst_ids)) != (src.shape[0], src.shape[2], len(src_ids)):
            raise ValueError(
                f"{len(src_ids)} blocks of {src.shape} cannot be copied to {len(dst_ids)} of {dst.shape}"
            )
        for side, ids in ((dst, dst_ids), (src, src_ids)):
            if len(ids) and not 0 <= ids.min() <= ids.max() < side.shape[1]:
                raise IndexError(f"blocks {ids.min()}..{ids.max()} are not in 0..{side.shape[1] - 1}")
    for run in runs_both_ways(src_ids.tolist(), dst_ids.tolist()):
        end = run.dst + run.count * run.step
        targets = slice(
            run.dst, end if end >= 0 else None, run.step
        )  # a slice that descends to 0 must have no end
        for dst, src in pieces:
            np.copyto(dst[:, targets], src[:, run.src : run.src + run.count])


def copy_natively(native: Native, pieces: PiecePairs, dst_ids: Ids, src_ids: Ids) -> None:
    """The same with the C module, which loses nothing where blocks have no neighbours."""
    for dst, src in pieces:
        native.copy_blocks(dst, dst_ids, src, src_ids)


copy_pieces = copy_in_python if native is None else partial(copy_natively, native)


@dataclass(frozen=True, slots=True)
class _Pieces:
    """The same pieces of all blocks seen from both sides, as ``[piece, block, byte]`` arrays."""

    device: Bytes
    host: Bytes


class MemcpyExecutor(BoardExecutor):
    """Executor for engines whose KV cache is in ordinary memory (see Executor for the rules).

    Offloads are copied ``max_batch_blocks`` blocks at a time; an onboard that arrives meanwhile goes first.
    """

    def __init__(
        self,
        device: DeviceMemory,
        host: HostSlab,
        *,
        max_batch_blocks: int = 16,
        on_done: OnDone,
        digests: SlotDigests | None = None,
        clock: Clock | None = None,
    ) -> None:
        if max_batch_blocks < 1:
            raise ValueError(f"max_batch_blocks={max_batch_blocks}")
        super().__init__("kvbm-memcpy", device, host, on_done=on_done, digests=digests, clock=clock)
        self._max_batch_blocks = max_batch_blocks
        self._pieces = [_pieces_of(device, host, group) for group in range(len(device.views))]
        self._thread.start()

    def mark(self) -> StreamMark:
        """None: on a CPU all that came before has been done."""
        return None

    def close(self) -> None:
        """See Executor."""
        super().close()
        self._pieces = []  # the slab can be unmapped only when no array of it is left

    def _work(self) -> None:
        leave_bound_core()
        pages = HugePages(self._device.storages)
        while True:
            job = self._board.take(timeout_s=0.0 if pages else None)
            if job is not None:
                self._execute(job)
            elif self._board.is_closed:
                return
            elif pages:  # only while there is nothing to copy
                pages.step()

    def _execute(self, job: Job[TransferPlan]) -> None:
        try:
            num_bytes = 0 if job.plan.compares else self._move(job.plan)
            self._finish(job, num_bytes, self._contents(job.plan))
        except Exception as error:  # whatever happens to a job is its outcome, and the thread goes on
            self._board.end(job, Outcome.IO_ERROR, f"{type(error).__name__}: {error}")

    def _move(self, plan: TransferPlan) -> int:
        is_offload = plan.direction is Direction.OFFLOAD
        num_bytes = 0
        for move in plan.moves:
            device_blocks, slots = np.array(move.device_blocks, np.int64), np.array(move.slots, np.int64)
            size_blocks = self._max_batch_blocks if is_offload else max(1, len(slots))
            for start in range(0, len(slots), size_blocks):
                batch = slice(start, start + size_blocks)
                self._copy(move.group, device_blocks[batch], slots[batch], is_offload)
                if is_offload:
                    self._let_onboards_pass()
            num_bytes += len(slots) * self._device.views[move.group].block_bytes
        return num_bytes

    def _let_onboards_pass(self) -> None:
        while self._board.has_onboard:
            urgent = self._board.take(timeout_s=0, onboard_only=True)
            if urgent is not None:
                self._execute(urgent)

    def _copy(self, group: int, device_blocks: Ids, slots: Ids, is_offload: bool) -> None:
        pieces = self._pieces[group]
        if is_offload:
            copy_pieces([(piece.host, piece.device) for piece in pieces], slots, device_blocks)
        else:
            copy_pieces([(piece.device, piece.host) for piece in pieces], device_blocks, slots)

    def _contents(self, plan: TransferPlan) -> Iterator[Content]:
        """Of its device blocks; an audit, which is in nobody's way, lets onboards pass."""
        for group, device_block, slot in device_blocks_of(plan):
            yield group, slot, gather(self._device.views[group], self._device.storages, device_block)
            if plan.compares:
                self._let_onboards_pass()


def _pieces_of(device: DeviceMemory, host: HostSlab, group: int) -> list[_Pieces]:
    """Pairs of device and slot segments, with pairs at equal distances taken together.

    One call then copies blocks for many layers: less interpreter time, and the GIL is given up for longer
    stretches instead of being fought for after every page.
    """
    view = device.views[group]
    pairs = list(pair_segments(view, host.view(view.block_bytes)))
    pieces: list[_Pieces] = []
    while pairs:
        count, (device_step, host_step) = evenly_spaced(pairs)
        on_device, on_host = pairs[0]
        del pairs[:count]
        storage = device.storages[on_device.storage]
        pieces.append(
            _Pieces(
                _array_of(storage, on_device, count, device_step, view.num_blocks),
                _array_of(host.array, on_host, count, host_step, host.num_slots),
            )
        )
    return pieces


def _array_of(storage: Bytes, segment: Segment, count: int, step_bytes: int, num_blocks: int) -> Bytes:
    array: Bytes = np.ndarray(
        (count, num_blocks, segment.nbytes),
        dtype=np.uint8,
        buffer=storage,
        offset=segment.offset_bytes,
        strides=(step_bytes, segment.block_stride_bytes, 1),
    )
    return array
