"""Blocks from disk straight into the device's memory, by NIXL; no byte of a payload passes the host's."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from kvbm_core.clock import Clock, SystemClock
from kvbm_core.errors import Outcome
from kvbm_core.storage.disk.block_file import BlockFile
from kvbm_core.storage.disk.io import FileIo, TakesMemory, Transfer
from kvbm_core.storage.disk.nixl_io import NixlIo
from kvbm_core.storage.disk.record import SECTOR_BYTES, pack_file
from kvbm_core.storage.disk.record_io import Record, RecordIo
from kvbm_core.storage.late import LATE
from kvbm_core.transfer.executor import DeviceMemory, StreamMark
from kvbm_core.transfer.jobs import Job, JobBoard, OnDone
from kvbm_core.transfer.movers.base import TierListener
from kvbm_core.transfer.movers.device_stage import DeviceStage
from kvbm_core.transfer.plan import JobResult, TierOrder

SETTING = "KVBM_DISK_TO_DEVICE"
PLUGINS = {"nixl-posix": "POSIX", "nixl-gds": "GDS", "nixl-gds-mt": "GDS_MT"}
PORTION_BYTES = 256 << 20
"""Read in one call; between two of them a load that was cancelled meanwhile ends."""
LOOK_S = 0.1
PROBE_S = 5.0
STOP_TIMEOUT_S = 2.0
CLOSE_TIMEOUT_S = 1.0
FAILURES_IN_A_ROW = 2
"""Loads of which no block could be read; then it is the way that fails, and host memory is the other one."""

log = logging.getLogger("kvbm")

Target = tuple[int, int]
"""A KV cache group, and a block of it on the device."""
MakeIo = Callable[[int, int | None], FileIo]
"""``make_io(fd, gpu)``. OSError, one line, if there is none."""


@dataclass(eq=False)
class DirectLoad:
    """Where the blocks of an order go, by its slots, and what is to come before (see Copier.mark).

    ``is_spreading``: its device blocks are being written. ``is_over``: its end was told, or is being told.
    """

    targets: Mapping[int, Target]
    mark: StreamMark = None
    job: Job[TierOrder] | None = None
    is_cancelled: bool = False
    is_spreading: bool = False
    is_over: bool = False


class DirectReader:
    """Reads of one rank's block file into memory of its device, in a thread of its own. Safe to call from any
    thread.

    Records are read into a DeviceStage, checked there, and then spread to their device blocks. So what does
    not verify, and what a late request writes, never reaches a device block: a load that was given up or
    cancelled is over at once, and no result of it is late. ``listener`` is told (``direct``) whether all of
    that works, and when it works no more. One line in the log says why not. ``make_io``: by
    NIXL, as the file's options say, unless given.
    """

    def __init__(
        self,
        name: str,
        file: BlockFile,
        device: DeviceMemory,
        listener: TierListener,
        *,
        clock: Clock | None = None,
        make_io: MakeIo | None = None,
    ) -> None:
        self._name = name
        self._file = file
        self._device = device
        self._listener = listener
        self._clock = clock or SystemClock()
        self._make_io = make_io or self._by_nixl
        self._lock = threading.Lock()
        self._loads: dict[int, DirectLoad] = {}
        self._board: JobBoard[TierOrder] = JobBoard(self._clock)
        self._record_io: RecordIo | None = None
        self._stage: DeviceStage | None = None
        self._failures = 0
        self._is_left_behind = False
        self._thread = threading.Thread(target=self._work, name="kvbm-disk-direct", daemon=True)
        self._thread.start()

    # ---------------------------------------------------------------- any thread

    def submit(
        self, order: TierOrder, load: DirectLoad, on_done: OnDone, *, deadline_s: float | None = None
    ) -> None:
        """Starts ``order``, whose slots are direct ones (see plan.FIRST_DIRECT_SLOT), and returns at once.
        Its result counts bytes of device blocks. One that has not started ``deadline_s`` seconds from now is
        TIMED_OUT.
        """

        def ended(result: JobResult) -> None:
            with self._lock:
                self._loads.pop(order.job_id, None)
            on_done(result)

        with self._lock:
            self._loads[order.job_id] = load
        refusal = self._refusal_of(order, load)
        if refusal is None:
            self._board.add(order, deadline_s, load, ended)
        else:
            self._board.refuse(order, Outcome.REJECTED, refusal, ended)

    def cancel(self, job_id: int) -> bool:
        """True: nothing of it touches a device block from now on; its result is REJECTED. False: its blocks
        are being written, which is over soon; or it is over, or unknown.
        """
        if self._board.cancel(job_id):
            return True
        with self._lock:
            load = self._loads.get(job_id)
            if load is None or load.is_over:
                return False
            load.is_cancelled = True
            if load.is_spreading or load.job is None:
                return False
            load.is_over = True
            job = load.job
        self._board.end(job, Outcome.REJECTED, "cancelled")
        return True

    def close(self) -> bool:
        """Rejects what waits, gives what is read some seconds, ends the thread; idempotent. False if
        something may still be read: the file has to stay open.
        """
        self._board.close()
        if self._record_io is not None:
            self._record_io.stop(STOP_TIMEOUT_S)
        self._thread.join(2 * STOP_TIMEOUT_S + CLOSE_TIMEOUT_S)
        return not (self._thread.is_alive() or self._is_left_behind)

    def _refusal_of(self, order: TierOrder, load: DirectLoad) -> str | None:
        try:
            order.check_direct(self._file.geometry.num_slots)
        except ValueError as error:
            return str(error)
        views, targets = self._device.views, list(load.targets.values())
        for group, block in targets:
            if not 0 <= group < len(views) or not 0 <= block < views[group].num_blocks:
                return f"there is no device block {block} of group {group}"
        if len(set(targets)) < len(targets) or set(load.targets) != set(order.slots):
            return f"a target of job {order.job_id} is named twice, or a slot has none"
        return None

    # ---------------------------------------------------------------- the thread

    def _work(self) -> None:
        reason = ""
        try:
            self._stage = stage = DeviceStage(self._device, self._file.geometry.payload_bytes)
            with stage.bound():
                self._begin(stage)
                self._serve(stage)
        except _RefusedError as error:
            reason = str(error)
        except Exception as error:  # of torch, of the device: blocks come by way of host memory
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
        finally:
            self._end()
        if reason:
            self._listener.direct(self._name, False)
            line = "kvbm: %s=%s: %s; blocks come from disk by way of host memory"
            log.warning(line, SETTING, self._file.options.to_device, reason)

    def _begin(self, stage: DeviceStage) -> None:
        """Makes sure that it works; _RefusedError, one line, if not."""
        options = self._file.options
        if reason := why_not(options.to_device, stage.gpu, is_direct=self._file.is_direct):
            raise _RefusedError(reason)
        try:
            io = self._make_io(self._file.fd, stage.gpu)
        except OSError as error:
            raise _RefusedError(error.strerror or str(error)) from error
        if isinstance(io, TakesMemory):
            io.register(stage.address, stage.num_places * stage.place_bytes, stage.place_bytes)
        # From here on it is closed with what reads by it.
        self._record_io = RecordIo(self._file, io, clock=self._clock)
        if not self._probe(stage, io):
            return
        self._listener.direct(self._name, True)
        log.info(
            "kvbm: %s: blocks go straight to the device (%s, %.3g MB of its memory on the way)",
            self._file.path,
            options.to_device,
            stage.num_places * stage.place_bytes / 1e6,
        )

    def _by_nixl(self, fd: int, gpu: int | None) -> FileIo:
        return NixlIo(fd, PLUGINS[self._file.options.to_device], gpu=gpu)

    def _probe(self, stage: DeviceStage, io: FileIo) -> bool:
        """The file's header, read to the device, is what it has to be; or the engine ends (False)."""
        place = stage.take()
        io.submit([Transfer(-1, 0, [(place, SECTOR_BYTES)])], is_write=False)
        ends_at_s, ended = time.monotonic() + PROBE_S, list[tuple[int, int]]()
        while not ended and not self._board.is_closed and time.monotonic() < ends_at_s:
            ended = io.collect(LOOK_S)
        if self._board.is_closed:
            return False
        (looked,) = stage.look([place])
        if not ended or ended[0][1] != SECTOR_BYTES or looked[0] != pack_file(self._file.header):
            said = f" ({io.failure})" if isinstance(io, NixlIo) and io.failure else ""
            raise _RefusedError(f"the file's header does not reach the device's memory{said}")
        stage.give(place)
        return True

    def _serve(self, stage: DeviceStage) -> None:
        record_io = self._record_io
        if record_io is None:
            return
        while not self._board.is_closed:
            job = self._board.take(timeout_s=LOOK_S if record_io.late_requests else None)
            if job is not None:
                self._execute(job, stage, record_io)
            if record_io.late_requests:
                record_io.reap()
            if self._failures >= FAILURES_IN_A_ROW:
                raise _RefusedError(f"{self._failures} loads in a row failed")

    def _end(self) -> None:
        self._board.close()
        for load in list(self._loads.values()):  # of a device that failed in between
            self._finish(load, Outcome.IO_ERROR, "the device failed")
        if self._record_io is not None:
            self._is_left_behind = not self._record_io.close(CLOSE_TIMEOUT_S)
        if self._is_left_behind:  # something may still be written there
            LATE.add((), self)
        else:
            self._stage = None

    def _execute(self, job: Job[TierOrder], stage: DeviceStage, record_io: RecordIo) -> None:
        order, load = job.plan, job.token
        with self._lock:
            load.job = job
        blocks = [load.targets[slot] for slot in order.slots]
        records = [Record(key, place, 0) for key, place in zip(order.keys, order.places, strict=True)]
        outcomes: list[Outcome] = []
        step = max(1, PORTION_BYTES // stage.place_bytes)
        for start in range(0, len(records), step):
            if load.is_cancelled or self._board.is_closed:
                break
            some = slice(start, start + step)
            staged = _StagedBlocks(self, stage, load, blocks[some])
            deadline_s = self._file.options.io_deadline_s
            outcomes += record_io.read_to_device(records[some], staged, deadline_s=deadline_s)
        if load.is_cancelled or len(outcomes) < len(records):
            self._finish(load, Outcome.REJECTED, "cancelled")
            return
        pairs = list(zip(order.slots, outcomes, strict=True))
        bad = tuple(pair for pair in pairs if pair[1] is not Outcome.OK)
        views = self._device.views
        num_bytes = sum(views[load.targets[s][0]].block_bytes for s, o in pairs if o is Outcome.OK)
        has_failed = bool(bad) and all(outcome is Outcome.IO_ERROR for outcome in outcomes)
        self._failures = self._failures + 1 if has_failed else 0
        if not bad:
            self._finish(load, Outcome.OK, num_bytes=num_bytes)
            return
        detail = f"{len(bad)} of {len(pairs)} blocks: {bad[0][1]} in {self._file.path}"
        self._finish(load, bad[0][1], detail, num_bytes, bad)

    @contextmanager
    def at_device(self, load: DirectLoad) -> Iterator[bool]:
        """Whether its device blocks may be written inside; whoever cancels it meanwhile waits for that."""
        with self._lock:
            is_allowed = load.is_spreading = not load.is_cancelled
        try:
            yield is_allowed
        finally:
            with self._lock:
                load.is_spreading = False
                was_cancelled = load.is_cancelled
            if was_cancelled:
                self._finish(load, Outcome.REJECTED, "cancelled")

    def _finish(
        self,
        load: DirectLoad,
        outcome: Outcome,
        detail: str = "",
        num_bytes: int = 0,
        failed: tuple[tuple[int, Outcome], ...] = (),
    ) -> None:
        with self._lock:
            if load.is_over or load.job is None:
                return
            load.is_over = True
            job = load.job
        self._board.end(job, outcome, detail, num_bytes=num_bytes, failed=failed)


class _StagedBlocks:
    """DeviceBlocks of one call: from ``stage`` to ``targets``."""

    def __init__(
        self, owner: DirectReader, stage: DeviceStage, load: DirectLoad, targets: Sequence[Target]
    ) -> None:
        self._owner = owner
        self.bounce = stage
        self._load = load
        self._targets = targets

    def part(self, indices: Sequence[int]) -> _StagedBlocks:
        """See DeviceBlocks."""
        targets = [self._targets[index] for index in indices]
        return _StagedBlocks(self._owner, self.bounce, self._load, targets)

    def begin(self, index: int) -> int:
        """See PlacedBlocks."""
        return self.bounce.take()

    def end(self, index: int, place: int, outcome: Outcome) -> None:
        """See PlacedBlocks."""
        self.bounce.give(place)

    def look(self, places: Sequence[int]) -> list[tuple[bytes, bytes]]:
        """See DeviceBlocks."""
        return self.bounce.look(places)

    def payload_digest(self, place: int) -> bytes:
        """See DeviceBlocks."""
        return self.bounce.payload_digest(place)

    def deliver(self, indices: Sequence[int], places: Sequence[int]) -> None:
        """See DeviceBlocks. Nothing is written for a load that was cancelled."""
        of_group: dict[int, tuple[list[int], list[int]]] = {}
        for index, place in zip(indices, places, strict=True):
            group, block = self._targets[index]
            blocks, own = of_group.setdefault(group, ([], []))
            blocks.append(block)
            own.append(place)
        with self._owner.at_device(self._load) as is_allowed:
            for group, (blocks, own) in of_group.items() if is_allowed else ():
                self.bounce.spread(group, blocks, own, self._load.mark)


class _RefusedError(Exception):
    """Why blocks do not go straight to the device; one line."""


def why_not(kind: str, gpu: int | None, *, is_direct: bool) -> str | None:
    """Why ``kind``, a value of the setting, does not go with this device or file; None if it does."""
    if gpu is None and kind != "nixl-posix":
        return "the KV cache is not in a GPU's memory; nixl-posix is for that"
    if gpu is not None and kind == "nixl-posix":
        return "it does not reach a GPU's memory; write nixl-gds-mt or nixl-gds"
    if gpu is not None and not is_direct:
        return "the file cannot be read with O_DIRECT; set DYN_KVBM_DISK_CACHE_DIR to ext4 or XFS on NVMe"
    return None
