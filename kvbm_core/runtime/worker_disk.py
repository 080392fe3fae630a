"""A worker's part of the disk tier: the block file of its rank, what is found in it, and what goes there."""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import msgspec

from kvbm_core.errors import Outcome
from kvbm_core.runtime.messages import Acks, DiskFound, DiskRefused, DiskShare, JobAck, Message, Store
from kvbm_core.storage.disk.allocate import DirectoryBusyError, DiskError, FileOptions
from kvbm_core.storage.disk.block_file import SUFFIX, BlockFile, Geometry
from kvbm_core.storage.disk.choose import AUTO, chosen_file_io
from kvbm_core.storage.disk.io import FileIo
from kvbm_core.storage.disk.recovery import SCAN_DEPTH, Found, Recovery
from kvbm_core.storage.host_slab import HostSlab
from kvbm_core.transfer.digests import SlotDigests
from kvbm_core.transfer.executor import Copier
from kvbm_core.transfer.executors.disk import DiskExecutor
from kvbm_core.transfer.executors.pipeline import OnDone, PipelineExecutor
from kvbm_core.transfer.plan import DiskPlan, JobResult
from kvbm_core.types import BlockKey, Direction

LOCK_RETRY_S = 0.1
CLOSE_TIMEOUT_S = 5.0

log = logging.getLogger("kvbm")


@dataclass(frozen=True, slots=True)
class WorkerDiskOptions:
    """``io_deadline_s``: a read or write that takes longer is given up. ``io``: see ``chosen_file_io``.

    ``check_at_start``: what is on the disk is offered once all of its bytes have been read and checked.
    """

    file: FileOptions = field(default_factory=FileOptions)
    io_deadline_s: float = 10.0
    io: str = AUTO
    check_at_start: bool = False


class WorkerDisk:
    """``open``, then ``start``, on the channel's thread; the rest is safe from any thread.

    A file that another process has still (an engine that was killed may need a while to end) is opened by
    ``open_later`` when that has given it up.
    """

    def __init__(
        self, rank: int, world_size: int, options: WorkerDiskOptions, send: Callable[[Message], None]
    ) -> None:
        self._rank = rank
        self._world_size = world_size
        self._options = options
        self._send = send
        self._file: BlockFile | None = None
        self._ios: list[FileIo] | None = None
        self._executor: DiskExecutor | None = None
        self._recovery: Recovery | None = None
        self._lock = threading.Lock()
        self._stores: set[int] = set()
        self._late: dict[int, JobAck] = {}
        self._place: tuple[Path, Geometry] | None = None
        self._closing = threading.Event()
        self._opener: threading.Thread | None = None
        self._is_forgotten = False

    @property
    def is_busy(self) -> bool:
        """Whether the file is to be had later: see ``open_later``."""
        return self._place is not None and self._file is None

    def open(self, share: DiskShare, slot_bytes: int, fingerprint: str) -> bool:
        """Opens this rank's file; False if that is not possible now. The leader is told if it will never be;
        then the rank serves without a disk.
        """
        path = Path(share.folder) / f"rank-{self._rank}-of-{self._world_size}{SUFFIX}"
        meaning = hashlib.sha256(f"{fingerprint}/{slot_bytes}".encode()).digest()[:16]
        self._place = (path, Geometry(share.num_slots, slot_bytes, meaning))
        is_open = self._try_to_open()
        if self.is_busy:
            log.warning(
                "kvbm: %s: another process has it still; the disk tier joins when it is free, "
                "the engine serves without it meanwhile",
                path,
            )
        return is_open

    def open_later(self, on_open: Callable[[], None]) -> None:
        """Tries again, in a thread, until the file is open or never to be had; calls ``on_open`` then."""
        self._opener = threading.Thread(
            target=self._keep_trying, args=(on_open,), name="kvbm-disk-opener", daemon=True
        )
        self._opener.start()

    def _keep_trying(self, on_open: Callable[[], None]) -> None:
        while self.is_busy and not self._closing.wait(LOCK_RETRY_S):
            if not self._try_to_open():
                continue
            if self._closing.is_set() and self._file is not None:  # it took longer than ``close`` waits
                self._file.close()
                return
            try:
                on_open()
            except Exception as error:  # nobody else would hear of it
                log.exception("kvbm: the disk tier cannot join")
                self._send(DiskRefused(self._rank, str(error)))

    def _try_to_open(self) -> bool:
        """False: it is busy, or never to be had; ``is_busy`` tells which."""
        if self._place is None:
            return False
        path, geometry = self._place
        file: BlockFile | None = None
        try:
            file = BlockFile(path, geometry, self._options.file)
            self._ios = self._make_ios(file)
        except DirectoryBusyError:
            return False
        except DiskError as error:
            log.error("%s", error.args[-1])
            self._place = None
            self._send(DiskRefused(self._rank, str(error.args[-1])))
            return False
        self._file = file
        log.info(
            "kvbm: disk tier: %s, %.2f GB (%s, %s, I/O: %s)",
            path,
            geometry.file_bytes / 1e9,
            "O_DIRECT" if file.is_direct else "page cache",
            "space reserved" if file.is_reserved else "sparse",
            self._options.io,
        )
        return True

    def _make_ios(self, file: BlockFile) -> list[FileIo] | None:
        """Those that a setting names: made now, as now is when the leader can be told that there are none."""
        if self._options.io == AUTO:
            return None
        ios: list[FileIo] = []
        try:
            for _ in Direction:
                ios.append(chosen_file_io(file.fd, is_direct=file.is_direct, kind=self._options.io))
        except DiskError:
            for io in ios:
                io.close(0.0)
            file.close()
            raise
        return ios

    def start(
        self,
        slab: HostSlab,
        on_done: Callable[[JobResult], None],
        on_released: Callable[[int], None],
        *,
        looks: bool = True,
    ) -> DiskExecutor:
        """The executor of the open file, whose content is looked at from now on, or from ``look`` on."""
        if self._file is None:
            raise ValueError("the disk is not open")
        executor = DiskExecutor(
            self._file,
            slab,
            on_done=on_done,
            on_released=on_released,
            io_deadline_s=self._options.io_deadline_s,
            first_sequence=time.time_ns(),
            ios=self._ios,
        )
        executor.stop_others = self._stop_looking
        with self._lock:
            self._executor = executor
        if self._is_forgotten:
            executor.forget_all()
        if looks:
            self.look()
        return executor

    def look(self) -> None:
        """Begins to look at what is in the file; the leader hears of it."""
        if self._file is None:
            raise ValueError("the disk is not open")
        make_io = None
        if self._options.io != AUTO:
            read_by = partial(chosen_file_io, kind=self._options.io, depth=SCAN_DEPTH)
            make_io = partial(read_by, self._file.fd, is_direct=self._file.is_direct)
        checks = self._options.check_at_start
        self._recovery = Recovery(self._file, self._tell_found, make_io=make_io, checks=checks)

    def _stop_looking(self) -> bool:
        return self._recovery is None or self._recovery.close()

    def _tell_found(self, end: int, found: list[Found]) -> None:
        slots, keys, sequences = [record.slot for record in found], [], []
        for record in found:
            keys.append(bytes(record.key))
            sequences.append(record.sequence)
        self._send(DiskFound(self._rank, end, slots, keys, sequences))

    def store(self, message: Store, *, deadline_s: float) -> None:
        """Writes host slots to the disk; the leader hears of the end."""
        keys = tuple(BlockKey(key) for key in message.keys)
        plan = DiskPlan(
            message.job_id, Direction.OFFLOAD, keys, tuple(message.slots), tuple(message.disk_slots)
        )
        with self._lock:
            self._stores.add(plan.job_id)
        if self._executor is None:
            self.stored(JobResult(plan.job_id, Outcome.REJECTED, 0, 0.0, 0.0, "no disk"))
            return
        self._executor.submit(plan, deadline_s=deadline_s)

    def is_store(self, job_id: int) -> bool:
        """Whether this job is one of ``store``."""
        with self._lock:
            return job_id in self._stores

    def stored(self, result: JobResult) -> None:
        """The end of a ``store``. Not carried by the engine's steps: there may be none for a long time."""
        ack = JobAck.of(result)
        with self._lock:
            if result.is_late:
                self._late[result.job_id] = ack
                ack = msgspec.structs.replace(ack, is_late=True)
            else:
                self._stores.discard(result.job_id)
        if result.outcome is not Outcome.OK:
            log.warning("kvbm: worker %d: disk job %d: %s", self._rank, result.job_id, result.detail)
        self._send(Acks(self._rank, [ack]))

    def released(self, job_id: int) -> None:
        """A late ``store`` is over: its slots are free."""
        with self._lock:
            self._stores.discard(job_id)
            ack = self._late.pop(job_id, None)
        if ack is not None:
            self._send(Acks(self._rank, [ack]))

    def forget_all(self) -> None:
        """See DiskExecutor.forget_all; holds for a file that is opened later too."""
        with self._lock:
            self._is_forgotten = True
            executor = self._executor
        if executor is not None:
            executor.forget_all()

    def close(self) -> None:
        """Ends the search for what is on the disk, and the wait for the file; some seconds at most.

        The executor is closed by whoever it was given to.
        """
        self._closing.set()
        if self._opener is not None:
            self._opener.join(CLOSE_TIMEOUT_S)
        self._stop_looking()


def piped(  # noqa: PLR0917 - what is put together
    make_device: Callable[[OnDone], Copier],
    disk: WorkerDisk,
    slab: HostSlab,
    on_done: OnDone,
    on_released: Callable[[int], None],
    digests: SlotDigests | None = None,
) -> PipelineExecutor:
    """The executor over ``disk``, which is open, or joins it when it is."""

    def start(on_done: OnDone) -> DiskExecutor:
        return disk.start(slab, on_done, on_released, looks=not was_busy)

    def join() -> None:
        pipeline.join_disk(start)
        disk.look()  # now that what the leader does with it finds a disk

    was_busy = disk.is_busy
    make_disk = (lambda on_done: None) if was_busy else start
    pipeline = PipelineExecutor(make_device, make_disk, slab.slot_bytes, on_done, digests)
    if was_busy:
        disk.open_later(join)
    return pipeline
