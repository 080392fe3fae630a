"""A worker: moves the bytes of its rank's shard; no policy.

``register`` says hello; slots are allocated when the leader has answered, in the background. Plans may be
submitted from then on (the leader makes none before). What finishes is acknowledged to the leader at once and
kept for ``take``.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from functools import partial

import msgspec

from kvbm_core.errors import ConfigError, Outcome, StuckCopyError
from kvbm_core.runtime.channel import WorkerChannel
from kvbm_core.runtime.endpoint import Endpoint
from kvbm_core.runtime.messages import (
    PROTOCOL_VERSION,
    Acks,
    Ask,
    Configure,
    DiskShare,
    ForgetDisk,
    Hello,
    Here,
    JobAck,
    Message,
    Note,
    Ready,
    Refused,
    Store,
)
from kvbm_core.runtime.worker_disk import WorkerDisk, WorkerDiskOptions, piped
from kvbm_core.storage.disk.record import whole_sectors
from kvbm_core.storage.host_slab import HostSlab, available_memory_bytes
from kvbm_core.transfer.digests import SlotDigests
from kvbm_core.transfer.executor import Copier, DeviceMemory, Executor
from kvbm_core.transfer.executors.broadcast import BroadcastExecutor
from kvbm_core.transfer.executors.broadcast_group import Group, MeetingPoint
from kvbm_core.transfer.factory import make_executor, slab_cpus, slab_preparation
from kvbm_core.transfer.plan import JobResult, TransferPlan
from kvbm_core.types import Direction

log = logging.getLogger("kvbm")

OnDone = Callable[[JobResult], None]

FENCE_TIMEOUT_S = 60.0
LOAD_GRACE_S = 60.0
"""What a load may take once it has started; other ranks that wait for it give up after that."""


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """``transfer_deadline_s``: a plan not started by then is given up. ``verify``: compare bytes after an
    onboard.

    ``engine_carries_acks``: the adapter takes acknowledgements to the leader with what the engine sends there
    in each step anyway (``take_acks``); else they go over the channel. ``near_memory``: host memory from the
    GPU's NUMA node.

    ``replicates``: every rank has the same KV. Rank 0 stores it; the others have neither slots nor a disk and
    get what they load from rank 0, as fast as NCCL with ``max_ctas`` is (None: its own choice).
    """

    transfer_deadline_s: float = 60.0
    max_concurrent_transfers: int = 4
    max_batch_blocks: int = 16
    verify: bool = False
    engine_carries_acks: bool = False
    near_memory: bool = True
    replicates: bool = False
    max_ctas: int | None = None
    disk: WorkerDiskOptions = field(default_factory=WorkerDiskOptions)


class Worker:
    """Called from the engine's worker thread; ``take`` and callbacks are safe against the executor's
    threads.
    """

    def __init__(self, rank: int, world_size: int, endpoint: Endpoint, options: WorkerOptions) -> None:
        self.rank = rank
        self._world_size = world_size
        self._options = options
        self._memory: DeviceMemory | None = None
        self._fingerprint = ""
        self._slab: HostSlab | None = None
        self._executor: Executor | None = None
        self._disk: WorkerDisk | None = None
        self._replicates = options.replicates and world_size > 1
        self._point: MeetingPoint | None = None
        self._is_refused = False
        self._is_closed = False
        self._lock = threading.Lock()
        self._done: list[JobResult] = []
        self._acks: list[JobAck] = []
        self._notes: deque[Note] = deque()
        self._is_noted = threading.Event()
        self._in_flight: dict[int, Direction] = {}
        self._overwritten: set[int] = set()
        # What the leader has ended is not begun any more: jobs below the number, and those that it named.
        self._first_job_id = 0
        self._ended: set[int] = set()
        # Given up, while their host slots are still being written to: their answers, for when that is over.
        self._late: dict[int, JobAck] = {}
        self._wrap: Callable[[Executor], Executor] = lambda executor: executor
        self._judge: Callable[[JobResult], JobResult] = lambda result: result
        self._on_note: Callable[[Note], None] = lambda note: None
        self._channel = WorkerChannel(endpoint, self._on_message)

    # ---------------------------------------------------------------- set-up

    def keep_own(self) -> None:
        """Before ``register``: the ranks have not the same KV after all; each stores and loads its own."""
        self._replicates = False

    def register(self, memory: DeviceMemory, fingerprint: str) -> None:
        """The device cache is known: says hello until the leader has answered."""
        self._memory = memory
        self._fingerprint = fingerprint
        if self._replicates and self.rank == 0:
            self._point = MeetingPoint()
        self._channel.repeat(self._hello)

    def wrap_executor(self, wrap: Callable[[Executor], Executor]) -> None:
        """Puts ``wrap`` around the executor that will be made (fault injection, recording)."""
        self._wrap = wrap

    def judge_results(self, judge: Callable[[JobResult], JobResult]) -> None:
        """Lets ``judge`` see, and change, each result before anybody else does (fault injection, byte
        checks).
        """
        self._judge = judge

    def on_note(self, heed: Callable[[Note], None]) -> None:
        """Lets ``heed`` see each note as it arrives, on the channel's thread, before it can be taken."""
        self._on_note = heed

    def refuse(self, reason: str) -> None:
        """Tells the leader that this rank cannot take part."""
        self._is_refused = True
        self._channel.send(Refused(self.rank, reason))

    @property
    def is_ready(self) -> bool:
        """Whether plans can be executed."""
        return self._executor is not None

    def _hello(self) -> Message | None:
        if self._memory is None or self._executor is not None or self._is_refused:
            return None
        return Hello(
            protocol=PROTOCOL_VERSION,
            rank=self.rank,
            world_size=self._world_size,
            block_bytes=max(view.block_bytes for view in self._memory.views),
            num_device_blocks=self._memory.views[0].num_blocks,
            fingerprint=self._fingerprint,
            replicates=self._replicates,
            broadcast_address=self._point.address if self._point is not None else "",
        )

    def _on_message(self, message: Message) -> None:
        if isinstance(message, Refused):
            self._is_refused = True
            log.error("kvbm: worker %d: refused by the leader: %s", self.rank, message.reason)
        elif isinstance(message, Ask):
            self._answer(message)
        elif isinstance(message, Configure) and self._executor is None and self._memory is not None:
            self._first_job_id = message.first_job_id
            try:
                if self._replicates and self.rank > 0:
                    self._follow(message, self._memory)
                else:
                    self._allocate(message, self._memory)
            except (
                Exception
            ) as error:  # out of memory, no executor for this memory...: serve without, and say why
                self._is_refused = True
                self._channel.send(Refused(self.rank, f"cannot allocate {message.num_slots} blocks: {error}"))
        elif isinstance(message, Store):
            self._store(message)
        elif isinstance(message, ForgetDisk) and self._disk is not None:
            self._disk.forget_all()
        elif isinstance(message, Note):
            self._on_note(message)
            self._notes.append(message)
            self._is_noted.set()

    def _answer(self, ask: Ask) -> None:
        with self._lock:
            asked = set(ask.job_ids)
            # Those that wait for the engine's next step, which may be long in coming.
            acks = [ack for ack in self._acks if ack.job_id in asked]
            if ask.is_last:
                unknown = asked - self._in_flight.keys() - self._late.keys() - {ack.job_id for ack in acks}
                never = [
                    job_id for job_id in unknown if self._disk is None or not self._disk.is_store(job_id)
                ]
                self._ended.update(never)
                acks += [JobAck(job_id, Outcome.REJECTED, 0, 0.0, 0.0) for job_id in never]
        if acks:
            self._channel.send(Acks(self.rank, acks))
        self._channel.send(Here(self.rank))

    def _is_ended(self, job_id: int) -> bool:
        """Whether the leader does not wait for this job any more, and may have given its slots to another."""
        return job_id in self._ended or job_id < self._first_job_id

    def _follow(self, message: Configure, memory: DeviceMemory) -> None:
        """Rank 0 has the slots; here all of them can be used."""
        self._begin(self._make_broadcast(message, memory, None), None)
        self._slots_ready(message.num_slots)

    def _allocate(self, message: Configure, memory: DeviceMemory) -> None:
        num_slots, slot_bytes = message.num_slots, max(view.block_bytes for view in memory.views)
        if message.disk is not None:
            slot_bytes = whole_sectors(slot_bytes)
        needed, available = num_slots * slot_bytes, available_memory_bytes()
        if needed > available:
            need = f"rank {self.rank} needs {needed / 1e9:.2f} GB, {available / 1e9:.2f} GB are free"
            raise ConfigError("DYN_KVBM_CPU_CACHE_GB", f"{needed / 1e9:.2f}", f"{need}; set a smaller size")
        slab = HostSlab(
            num_slots,
            slot_bytes,
            prepare=slab_preparation(memory),
            on_ready=self._slots_ready,
            cpus=slab_cpus(memory) if self._options.near_memory else (),
        )
        make = partial(self._make_executor, message.disk, memory, slab)
        try:
            executor = (
                self._make_broadcast(message, memory, make) if self._replicates else make(self._finished)
            )
        except Exception:
            slab.close()
            raise
        self._begin(executor, slab)
        self._slots_ready(slab.ready_slots)

    def _begin(self, executor: Executor, slab: HostSlab | None) -> None:
        if self._is_closed:  # while files were being made
            self._end(executor, slab)
            return
        self._slab = slab
        self._executor = self._wrap(executor)

    def _make_broadcast(
        self, message: Configure, memory: DeviceMemory, make_loader: Callable[[OnDone], Executor] | None
    ) -> Executor:
        address, max_ctas = message.broadcast_address, self._options.max_ctas
        return BroadcastExecutor(
            memory,
            Group(self.rank, self._world_size, address, self._point, max_ctas=max_ctas),
            self._finished,
            make_loader=make_loader,
            # Nobody is to ask for loads any more that can only fail.
            on_broken=lambda reason: self._channel.send(Refused(self.rank, reason)),
            load_timeout_s=self._options.transfer_deadline_s + LOAD_GRACE_S,
        )

    def _make_executor(
        self, share: DiskShare | None, memory: DeviceMemory, slab: HostSlab, on_done: OnDone
    ) -> Executor:
        digests = SlotDigests() if self._options.verify else None

        def make(on_done: OnDone) -> Copier:
            return make_executor(
                memory,
                slab,
                max_concurrent=self._options.max_concurrent_transfers,
                max_batch_blocks=self._options.max_batch_blocks,
                on_done=on_done,
                digests=digests,
            )

        if share is None:
            return make(on_done)
        num_storing_ranks = 1 if self._replicates else self._world_size
        disk = WorkerDisk(self.rank, num_storing_ranks, self._options.disk, self._channel.send)
        if not disk.open(share, slab.slot_bytes, self._fingerprint) and not disk.is_busy:
            return make(on_done)
        self._disk = disk
        return piped(make, disk, slab, on_done, self._released, digests)

    def _slots_ready(self, slots: int) -> None:
        # The leader may send plans as soon as it hears this; slots that were ready before the executor are
        # told after.
        if self._executor is not None and slots:
            self._channel.send(Ready(self.rank, slots))

    # ---------------------------------------------------------------- work

    def submit(self, plan: TransferPlan) -> None:
        """Starts ``plan``; never blocks and never raises for a plan that cannot run: that is a failed job."""
        with self._lock:
            if plan.job_id in self._in_flight:
                return
            self._in_flight[plan.job_id] = plan.direction
            is_ended = self._is_ended(plan.job_id)
        executor = self._executor
        if is_ended:
            self._finished(JobResult(plan.job_id, Outcome.REJECTED, 0, 0.0, 0.0, "comes too late"))
            return
        if executor is None:
            self._finished(JobResult(plan.job_id, Outcome.REJECTED, 0, 0.0, 0.0, "no executor"))
            return
        try:
            executor.submit(plan, deadline_s=self._options.transfer_deadline_s)
        except Exception as error:
            log.exception("kvbm: worker %d: job %d could not be submitted", self.rank, plan.job_id)
            self._finished(JobResult(plan.job_id, Outcome.IO_ERROR, 0, 0.0, 0.0, str(error)))

    def reject(self, job_id: int) -> None:
        """Ends a job of the leader's that will not be submitted here."""
        self._finished(JobResult(job_id, Outcome.REJECTED, 0, 0.0, 0.0, "not submitted"))

    def fence(self, job_ids: Collection[int]) -> None:
        """The device blocks of these jobs are somebody else's from now on: cancels what has not begun to
        copy, waits for the rest.

        What copies waits for memory alone. An offload that has not ended in FENCE_TIMEOUT_S will be reported
        as failed, whatever it says later: it only reads. A load would write into what is not its own:
        StuckCopyError.
        """
        if self._executor is None:
            return
        copying = {
            job_id for job_id in job_ids if self.is_in_flight(job_id) and not self._executor.cancel(job_id)
        }
        if not copying or self._executor.wait(copying, FENCE_TIMEOUT_S):
            return
        with self._lock:
            stuck = self._in_flight.keys() & copying
            loads = [job_id for job_id in stuck if self._in_flight[job_id] is Direction.ONBOARD]
            self._overwritten.update(stuck)
        if loads:
            raise self._stuck(loads)

    def fence_all(self) -> None:
        """As ``fence`` with everything that is under way."""
        with self._lock:
            job_ids = set(self._in_flight)
        self.fence(job_ids)

    def leave_device(self) -> None:
        """The device memory is about to be taken away: cancels loads that have not begun to copy, waits for
        the rest. StuckCopyError if a copy does not end in FENCE_TIMEOUT_S.
        """
        with self._lock:
            loads = [job_id for job_id, way in self._in_flight.items() if way is Direction.ONBOARD]
        self.fence(loads)
        if not self.drain(FENCE_TIMEOUT_S):
            with self._lock:
                stuck = list(self._in_flight)
            raise self._stuck(stuck)

    def _stuck(self, job_ids: Collection[int]) -> StuckCopyError:
        error = StuckCopyError(
            f"kvbm: worker {self.rank}: copies of device memory did not end in {FENCE_TIMEOUT_S:.0f} s (jobs "
            f"{sorted(job_ids)[:8]}); their blocks belong to others now, and the engine must not go on: look "
            "for errors of the GPU or its driver, and start it again"
        )
        log.error("%s", error)
        return error

    def is_known(self, job_id: int) -> bool:
        """Whether the job is in flight or its end has not been taken yet."""
        with self._lock:
            return job_id in self._in_flight or any(result.job_id == job_id for result in self._done)

    def is_in_flight(self, job_id: int) -> bool:
        """Whether the job was submitted here and has not ended."""
        with self._lock:
            return job_id in self._in_flight

    def take(self) -> list[JobResult]:
        """Jobs that ended since the last call. Call it once per step: acknowledgements do not wait longer
        than that.
        """
        if not self._done and not self._acks:  # most steps
            return []
        with self._lock:
            done, self._done = self._done, []
        self._acknowledge()
        return done

    def take_acks(self) -> list[JobAck]:
        """Acknowledgements since the last call, for adapters that carry them: after ``take`` in each step."""
        if not self._acks:
            return []
        with self._lock:
            acks, self._acks = self._acks, []
        return acks

    def take_notes(self) -> list[Note]:
        """What the leader said to the adapter outside of the engine's steps, in its order."""
        self._is_noted.clear()
        return [self._notes.popleft() for _ in range(len(self._notes))]

    def wait_note(self, timeout_s: float) -> bool:
        """Waits until the leader has said something that was not taken yet; False if time ran out."""
        return self._is_noted.wait(timeout_s)

    def wait(self, job_ids: Collection[int], timeout_s: float) -> bool:
        """Waits until these jobs have ended; False if time ran out."""
        return self._executor is None or self._executor.wait(job_ids, timeout_s)

    def drain(self, timeout_s: float) -> bool:
        """Waits until nothing is under way; False if time ran out."""
        return self._executor is None or self._executor.drain(timeout_s)

    def _store(self, message: Store) -> None:
        with self._lock:
            is_ended = self._is_ended(message.job_id)
        if self._disk is None or is_ended:
            self._channel.send(Acks(self.rank, [JobAck(message.job_id, Outcome.REJECTED, 0, 0.0, 0.0)]))
            return
        self._disk.store(message, deadline_s=self._options.transfer_deadline_s)

    def _released(self, job_id: int) -> None:
        if self._disk is not None and self._disk.is_store(job_id):
            self._disk.released(job_id)
            return
        with self._lock:
            ack = self._late.pop(job_id, None)
            if ack is None:  # its end comes only now
                return
            self._acks.append(ack)
        self._acknowledge()

    def _finished(self, result: JobResult) -> None:
        if self._disk is not None and self._disk.is_store(result.job_id):
            self._disk.stored(result)
            return
        result = self._judge(result)
        with self._lock:
            direction = self._in_flight.pop(result.job_id, None)
            if result.job_id in self._overwritten:
                self._overwritten.discard(result.job_id)
                result = replace(
                    result, outcome=Outcome.TIMED_OUT, detail="its source was overwritten meanwhile"
                )
            self._done.append(result)
            ack = JobAck.of(result)
            if result.is_late:
                self._late[result.job_id] = ack
                ack = msgspec.structs.replace(ack, is_late=True)
            self._acks.append(ack)
            may_wait = direction is Direction.OFFLOAD and bool(self._in_flight)
        # Several offloads in one message: each message wakes threads that the engine's own compete with.
        if not may_wait:
            self._acknowledge()
        if result.outcome not in (Outcome.OK, Outcome.REJECTED):
            log.warning(
                "kvbm: worker %d: job %d: %s %s", self.rank, result.job_id, result.outcome, result.detail
            )

    def _acknowledge(self) -> None:
        acks = [] if self._options.engine_carries_acks else self.take_acks()
        if acks:
            self._channel.send(Acks(self.rank, acks))

    def close(self) -> None:
        """Closes the channel, ends the executor (waits for running copies), frees the slab. May be called
        twice.
        """
        self._is_closed = True
        # First: its thread is the one that makes executor and slab.
        self._channel.close()
        if self._executor is not None:
            self._end(self._executor, self._slab)
        self._executor = None
        if self._point is not None:
            self._point.close()
            self._point.discard()

    def _end(self, executor: Executor, slab: HostSlab | None) -> None:
        if self._disk is not None:
            self._disk.close()
        executor.close()
        if slab is not None:
            slab.close()
