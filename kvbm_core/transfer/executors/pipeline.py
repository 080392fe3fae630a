"""Plans whose blocks are partly on disk: disk -> host slot -> device, chunk by chunk, over two other
executors.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count

from kvbm_core.clock import Clock, SystemClock
from kvbm_core.errors import Outcome
from kvbm_core.transfer.digests import SlotDigests
from kvbm_core.transfer.executor import Copier, StreamMark
from kvbm_core.transfer.executors.disk import DiskExecutor
from kvbm_core.transfer.plan import FromDisk, GroupMove, JobResult, TransferPlan

CHUNK_BYTES = 8 << 20

OnDone = Callable[[JobResult], None]


@dataclass
class _Load:
    """A plan with reads. ``chunk_of[i]``: the chunk of read i; a chunk goes up when all of it has been
    read. ``mark``: see Copier. ``is_released``: the disk is through with the slots of a late one.
    """

    plan: TransferPlan
    chunk_of: list[int]
    unread: list[int]
    copies: list[TransferPlan]
    deadline_s: float | None
    submitted_s: float
    mark: StreamMark = None
    copying: set[int] = field(default_factory=set)
    read_result: JobResult | None = None
    failure: JobResult | None = None
    num_bytes: int = 0
    is_cancelled: bool = False
    copy_s: float = 0.0
    is_over: bool = False
    is_released: bool = False


class PipelineExecutor:
    """Executor: passes plans without reads to ``device``; while a chunk of another one is copied, the next is
    read.

    The parts of a plan are jobs of their own, with negative numbers. The plan has ended when all of them
    have. Copies that were not begun when a read failed, or the plan was cancelled, are left out. A plan that
    is cancelled does not wait for the disk: it is over, and late, when nothing of it is copied any more.

    ``make_disk`` may answer None: until ``join_disk`` there is no disk then, and a plan with reads is
    REJECTED.
    """

    def __init__(
        self,
        make_device: Callable[[OnDone], Copier],
        make_disk: Callable[[OnDone], DiskExecutor | None],
        block_bytes: int,
        on_done: OnDone,
        digests: SlotDigests | None = None,
        *,
        clock: Clock | None = None,
    ) -> None:
        self._chunk_blocks = max(1, CHUNK_BYTES // block_bytes)
        self._on_done = on_done
        self._digests = digests
        self._clock = clock or SystemClock()
        self._changed = threading.Condition()
        self._loads: dict[int, _Load] = {}
        self._reading: dict[int, _Load] = {}
        """Those whose reads the disk has not ended, also when they are over."""
        self._parent_of: dict[int, int] = {}
        self._part_ids = count(-1, -1)
        self._on_released: Callable[[int], None] = lambda job_id: None
        self.disk: DiskExecutor | None
        self.join_disk(make_disk)
        try:
            self._device = make_device(self._device_done)
        except BaseException:
            if self.disk is not None:
                self.disk.close()
            raise

    def join_disk(self, make_disk: Callable[[OnDone], DiskExecutor | None]) -> None:
        """The disk can be used from now on. Once; any thread."""
        disk = make_disk(self._disk_done)
        if disk is not None:
            self._on_released, disk.on_released = disk.on_released, self._disk_released
        self.disk = disk

    def submit(self, plan: TransferPlan, *, deadline_s: float | None = None) -> None:
        """See Executor."""
        if plan.reads is None:
            self._device.submit(plan, deadline_s=deadline_s)
            return
        disk = self.disk
        if disk is None:
            self._on_done(JobResult(plan.job_id, Outcome.REJECTED, 0, 0.0, 0.0, "no disk"))
            return
        try:
            load, resident = self._split(plan, deadline_s)
            # Here, as the thread that submits the copies later has another current stream.
            load.mark = self._device.mark()
        except ValueError as error:  # unequal lengths
            self._on_done(JobResult(plan.job_id, Outcome.REJECTED, 0, 0.0, 0.0, str(error)))
            return
        except Exception as error:  # of the device
            detail = f"{type(error).__name__}: {error}"
            self._on_done(JobResult(plan.job_id, Outcome.IO_ERROR, 0, 0.0, 0.0, detail))
            return
        with self._changed:
            if plan.job_id in self._loads:
                raise ValueError(f"job {plan.job_id} is already in flight")
            self._loads[plan.job_id] = self._reading[plan.job_id] = load
            if self._digests is not None:  # the disk's records have checksums of their own
                self._digests.forget(plan.reads.slots)
            parts = [self._part_of(load, resident)] if resident.moves else []
        for part in parts:
            self._submit_part(load, part)
        disk.submit(plan.reads, deadline_s=deadline_s, on_block=partial(self._block_read, load))

    def poll(self) -> list[JobResult]:
        """Always empty: results go to the listener."""
        return []

    def cancel(self, job_id: int) -> bool:
        """See Executor."""
        with self._changed:
            load = self._loads.get(job_id)
            if load is not None:
                if load.is_over:
                    return False
                load.is_cancelled = True
                parts = list(load.copying)
        if load is None:
            return self._device.cancel(job_id)
        if self.disk is not None:
            self.disk.cancel(job_id)
        for part in parts:
            self._device.cancel(part)
        self._end_if_over(load)
        with self._changed:
            return not load.copying

    def wait(self, job_ids: Collection[int], timeout_s: float) -> bool:
        """See Executor."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._loads.keys().isdisjoint(job_ids), timeout_s):
                return False
        return self._device.wait(job_ids, timeout_s)

    def drain(self, timeout_s: float) -> bool:
        """See Executor. What goes down to the disk is not waited for: no device memory has to do with it."""
        with self._changed:
            if not self._changed.wait_for(lambda: not self._loads, timeout_s):
                return False
        return self._device.drain(timeout_s)

    def close(self) -> None:
        """See Executor."""
        with self._changed:
            loads = list(self._loads)
        for job_id in loads:  # what the disk still reads is not waited for by a copy
            self.cancel(job_id)
        if self.disk is not None:
            self.disk.close()
        self._device.close()

    # ---------------------------------------------------------------- parts

    def _split(self, plan: TransferPlan, deadline_s: float | None) -> tuple[_Load, TransferPlan]:
        """Copies per chunk of reads, in the order of the plan; and what is in its slots already."""
        slots = plan.reads.slots if plan.reads is not None else ()
        chunk_of_slot = {slot: number // self._chunk_blocks for number, slot in enumerate(slots)}
        num_chunks = -(-len(slots) // self._chunk_blocks)
        unread = [0] * num_chunks
        for chunk in chunk_of_slot.values():
            unread[chunk] += 1
        resident = num_chunks
        picked: list[list[GroupMove]] = [[] for _ in range(num_chunks + 1)]
        for move in plan.moves:
            pairs: dict[int, tuple[list[int], list[int]]] = {}
            for device_block, slot in zip(move.device_blocks, move.slots, strict=True):
                blocks, own = pairs.setdefault(chunk_of_slot.get(slot, resident), ([], []))
                blocks.append(device_block)
                own.append(slot)
            for chunk, (blocks, own) in pairs.items():
                picked[chunk].append(GroupMove(move.group, tuple(blocks), tuple(own)))
        copies = [replace(plan, moves=tuple(moves), reads=None) for moves in picked]
        chunks, now_s = [chunk_of_slot[slot] for slot in slots], self._clock.now_s()
        load = _Load(plan, chunks, unread, copies, deadline_s, now_s)
        return load, copies.pop()

    def _part_of(self, load: _Load, copies: TransferPlan) -> TransferPlan:
        part = replace(copies, job_id=next(self._part_ids))
        self._parent_of[part.job_id] = load.plan.job_id
        load.copying.add(part.job_id)
        return part

    def _submit_part(self, load: _Load, part: TransferPlan) -> None:
        self._device.submit(part, deadline_s=load.deadline_s, after=load.mark)
        if load.is_cancelled:  # between the decision to copy and this
            self._device.cancel(part.job_id)

    def _block_read(self, load: _Load, number: int, outcome: Outcome) -> None:
        if outcome is not Outcome.OK:
            return  # the job's result will say so
        chunk = load.chunk_of[number]
        with self._changed:
            load.unread[chunk] -= 1
            is_void = load.is_cancelled or load.failure is not None
            if load.unread[chunk] or is_void or not load.copies[chunk].moves:
                return
            part = self._part_of(load, load.copies[chunk])
        self._submit_part(load, part)

    def _disk_done(self, result: JobResult) -> None:
        with self._changed:
            load = self._reading.pop(result.job_id, None)
            was_over = load is not None and load.is_over  # and said to be late
            if load is not None and load.plan.compares and result.outcome is Outcome.CORRUPT:
                result = replace(result, outcome=Outcome.MISS)  # the disk is damaged; no KV was compared
            if load is not None and not was_over:
                load.read_result = result
                if result.outcome is not Outcome.OK:
                    load.failure = load.failure or result
        if load is None:
            self._on_done(result)
        elif not was_over:
            self._end_if_over(load)
        elif not result.is_late:  # else the disk says itself when that is over
            self._disk_released(result.job_id)

    def _disk_released(self, job_id: int) -> None:
        with self._changed:
            load = self._loads.get(job_id)
            if load is not None:  # its result is not out yet; nobody is to hear of the end before that
                load.is_released = True
                return
        self._on_released(job_id)

    def _device_done(self, result: JobResult) -> None:
        with self._changed:
            load = self._loads.get(self._parent_of.pop(result.job_id, 0))
            if load is not None:
                load.copying.discard(result.job_id)
                load.num_bytes += result.num_bytes
                load.copy_s += result.seconds
                if result.outcome is not Outcome.OK:
                    load.failure = load.failure or result
        if load is None:
            self._on_done(result)
        else:
            self._end_if_over(load)

    def _end_if_over(self, load: _Load) -> None:
        with self._changed:
            is_read = load.read_result is not None or load.is_cancelled
            if not is_read or load.copying or load.is_over:
                return
            load.is_over = True
            result = self._result_of(load)
        try:
            self._on_done(result)
        finally:
            with self._changed:
                self._loads.pop(load.plan.job_id, None)
                self._changed.notify_all()
            if load.is_released:
                self._on_released(load.plan.job_id)

    def _result_of(self, load: _Load) -> JobResult:
        read, failure = load.read_result, load.failure
        if read is None:
            seconds = self._clock.now_s() - load.submitted_s
            result = JobResult(load.plan.job_id, Outcome.REJECTED, 0, 0.0, seconds, is_late=True)
        else:
            result = replace(
                read,
                job_id=load.plan.job_id,
                num_bytes=load.num_bytes,
                seconds=max(0.0, self._clock.now_s() - load.submitted_s - read.queued_s),
                from_disk=FromDisk(read.num_bytes, read.seconds, load.copy_s),
            )
        if load.is_cancelled:
            return replace(result, outcome=Outcome.REJECTED, detail="cancelled", num_bytes=0)
        if failure is not None:
            return replace(result, outcome=failure.outcome, detail=failure.detail, num_bytes=0)
        return result
