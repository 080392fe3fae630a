"""The mover of a block file: one thread reads, one writes."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Sequence
from functools import partial

from kvbm_core.clock import Clock, SystemClock
from kvbm_core.errors import Outcome
from kvbm_core.storage.disk.aio_io import make_file_io
from kvbm_core.storage.disk.block_file import BlockFile
from kvbm_core.storage.disk.io import FileIo, TakesMemory
from kvbm_core.storage.disk.record_io import Record, RecordIo
from kvbm_core.storage.host_slab import HostSlab
from kvbm_core.storage.late import LATE, Tell
from kvbm_core.storage.numa import leave_bound_core
from kvbm_core.transfer.jobs import Job, JobBoard
from kvbm_core.transfer.movers.base import OnBlocks, OnResult
from kvbm_core.transfer.plan import JobResult, OrderKind, TierOrder, rejected
from kvbm_core.types import Direction

LOOK_FOR_LATE_S = 0.05
STOP_TIMEOUT_S = 2.0
"""What a disk that is written or read has for it when the executor is closed."""
CLOSE_TIMEOUT_S = 1.0
"""What each direction has after that; then its requests are left to the kernel."""

log = logging.getLogger("kvbm")


class DiskMover:
    """Mover of a block file.

    What did not end within ``io_deadline_s`` is TIMED_OUT and late: its slots, in memory and in the file, are
    not to be used for anything else until its second result. The slab's slots are whole sectors
    (``HostSlab.slot_bytes`` is what the file's geometry says). ``ios``: one to read by and one to write by,
    which this closes; made here unless given. A block that is read twice ends once, with its second try.
    """

    def __init__(
        self,
        file: BlockFile,
        host: HostSlab,
        *,
        io_deadline_s: float = 10.0,
        first_sequence: int = 0,
        clock: Clock | None = None,
        ios: Sequence[FileIo] | None = None,
    ) -> None:
        if host.slot_bytes != file.geometry.payload_bytes:
            raise ValueError(f"slots of {host.slot_bytes} bytes, records of {file.geometry.payload_bytes}")
        clock = clock or SystemClock()
        self._file = file
        self._host = host
        self._memory: object = host.array  # a slab keeps its memory as long as somebody has an array of it
        self.stop_others: Callable[[], bool] = lambda: True
        """Ends whatever else uses the file, before it is closed; False if something of that goes on."""
        self._io_deadline_s = io_deadline_s
        if ios is None:
            ios = [make_file_io(file.fd, is_direct=file.is_direct) for _ in Direction]
        for io in ios:
            if isinstance(io, TakesMemory):
                io.register(host.address, host.num_slots * host.slot_bytes, host.slot_bytes)
        self._record_ios = [RecordIo(file, io, first_sequence=first_sequence, clock=clock) for io in ios]
        self._reads: JobBoard[TierOrder] = JobBoard(clock)
        self._writes: JobBoard[TierOrder] = JobBoard(clock)
        self._new_life = threading.Event()
        self._num_resets = 0
        self._threads = [
            threading.Thread(
                target=partial(self._work, board, record_io), name=f"kvbm-disk-{name}", daemon=True
            )
            for name, board, record_io in zip(
                ("reader", "writer"), (self._reads, self._writes), self._record_ios, strict=True
            )
        ]
        for thread in self._threads:
            thread.start()

    def submit(
        self,
        order: TierOrder,
        on_result: OnResult,
        *,
        deadline_s: float | None = None,
        on_blocks: OnBlocks | None = None,
    ) -> None:
        """See Mover."""
        if order.kind is OrderKind.FORGET:
            self._forget_all()
            return
        if order.kind is OrderKind.FIND:
            on_result(rejected(order.job_id, "the leader knows what is in this tier"))
            return
        if order.kind is OrderKind.ERASE:
            deadline_s, on_result = None, self._erased
        board = self._reads if order.kind is OrderKind.FETCH else self._writes
        try:
            order.check(self._host.ready_slots, self._file.geometry.num_slots)
        except ValueError as error:
            board.refuse(order, Outcome.REJECTED, str(error), on_result)
            return
        board.add(order, deadline_s, on_blocks if board is self._reads else self._num_resets, on_result)

    def _forget_all(self) -> None:
        """Done by the writing thread, which rejects what was submitted before."""
        self._num_resets += 1
        self._new_life.set()
        self._writes.wake()

    def _erased(self, result: JobResult) -> None:
        """Nobody else hears of it. What a reset came before is gone with everything."""
        if result.outcome not in (Outcome.OK, Outcome.REJECTED):
            line = "kvbm: %s: blocks that were cleared may be found after a restart (%s); clear the disk"
            log.error(line, self._file.path, result.detail)

    def cancel(self, job_id: int) -> bool:
        """See Mover."""
        return self._reads.cancel(job_id)

    def wait(self, job_ids: Collection[int] | None, timeout_s: float) -> bool:
        """Waits until these jobs (None = all) have ended, in whatever way; False after ``timeout_s``."""
        return self._reads.wait(job_ids, timeout_s) and self._writes.wait(job_ids, timeout_s)

    def close(self) -> None:
        """See Mover. What the disk does not end keeps the file open and the slab's memory."""
        for board in (self._reads, self._writes):
            board.close()
        for record_io in self._record_ios:
            record_io.stop(STOP_TIMEOUT_S)
        is_over = self.stop_others()
        ends_at_s = time.monotonic() + 2 * STOP_TIMEOUT_S
        for thread in self._threads:
            thread.join(max(0.0, ends_at_s - time.monotonic()))
        if any(thread.is_alive() for thread in self._threads):  # in the kernel, for a reset
            return
        self._record_ios = [
            record_io for record_io in self._record_ios if not record_io.close(CLOSE_TIMEOUT_S)
        ]
        if self._record_ios or not is_over:  # the file may not become somebody else's
            return
        self._file.close()
        self._memory = None

    def _work(self, board: JobBoard[TierOrder], record_io: RecordIo) -> None:
        leave_bound_core()
        while not board.is_closed:
            job = board.take(timeout_s=LOOK_FOR_LATE_S if record_io.late_requests else None)
            if board is self._writes and self._new_life.is_set():
                self._begin_new_life()
            if job is not None and board is self._writes and job.token != self._num_resets:
                board.end(job, Outcome.REJECTED, "a reset came before it could be written")
            elif job is not None:
                self._execute(job, board, record_io)
            if record_io.late_requests:
                record_io.reap()
        if board is self._writes and self._new_life.is_set():
            self._begin_new_life()

    def _begin_new_life(self) -> None:
        self._new_life.clear()
        try:
            self._file.begin_new_life()
        except OSError as error:  # in this process nothing of before is found again; a restart might
            log.error("kvbm: %s: a reset could not be written down: %s", self._file.path, error)

    def _execute(self, job: Job[TierOrder], board: JobBoard[TierOrder], record_io: RecordIo) -> None:
        order, size = job.plan, self._host.slot_bytes
        if order.kind is OrderKind.ERASE:
            try:
                self._file.erase(order.places)
            except OSError as error:
                board.end(job, Outcome.IO_ERROR, str(error))
            else:
                board.end(job, Outcome.OK)
            return
        records = [
            Record(key, place, self._host.address + slot * size)
            for key, slot, place in zip(order.keys, order.slots, order.places, strict=True)
        ]
        try:
            if order.kind is OrderKind.FETCH:
                outcomes = record_io.read(
                    records, deadline_s=self._io_deadline_s, on_ended=job.token, keep=self._memory
                )
            else:
                outcomes = record_io.write(records, deadline_s=self._io_deadline_s, keep=self._memory)
        except Exception as error:  # whatever happens to a job is its outcome, and the thread goes on
            log.exception("kvbm: disk job %d", order.job_id)
            end = partial(board.end, job, Outcome.IO_ERROR, f"{type(error).__name__}: {error}")
            self._end_when_free(end, records, record_io)
            return
        bad = [(s, o) for s, o in zip(order.slots, outcomes, strict=True) if o is not Outcome.OK]
        num_bytes = (len(records) - len(bad)) * size
        if not bad:
            board.end(job, Outcome.OK, num_bytes=num_bytes)
            return
        detail = f"{len(bad)} of {len(records)} blocks: {bad[0][1]} in {self._file.path}"
        end = partial(board.end, job, bad[0][1], detail, num_bytes=num_bytes, failed=tuple(bad))
        self._end_when_free(end, records, record_io)

    def _end_when_free(self, end: Tell, records: Sequence[Record], record_io: RecordIo) -> None:
        record_io.reap()
        size = self._host.slot_bytes
        LATE.tell_when_free([(record.address, record.address + size) for record in records], end)
