"""A worker: moves the bytes of its rank's shard; no policy.

``register`` says hello; slots are allocated when the leader has answered, in the background. Plans may be
submitted from then on (the leader makes none before). What finishes is acknowledged to the leader at once and
kept for ``take``.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import TYPE_CHECKING

from msgspec.structs import replace

from kvbm_core.errors import ConfigError, Outcome, StuckCopyError
from kvbm_core.layout.heads import HeadShards
from kvbm_core.observe.log import RateLimitedLogger
from kvbm_core.runtime.channel import WorkerChannel, find_leader
from kvbm_core.runtime.endpoint import Endpoint
from kvbm_core.runtime.messages import (
    PROTOCOL_VERSION,
    Ask,
    Borrow,
    Configure,
    GiveBack,
    Hello,
    Here,
    Join,
    Lent,
    Message,
    Move,
    Note,
    PeerNews,
    Ready,
    Refused,
    Results,
    Returned,
    TierDirect,
    TierFound,
    TierRefused,
)
from kvbm_core.runtime.replicas import ReplicaRank, Role
from kvbm_core.storage.disk.recovery import Found
from kvbm_core.tiers.lower import PEERS
from kvbm_core.transfer.executor import DeviceMemory, Executor
from kvbm_core.transfer.executors.broadcast import BroadcastExecutor
from kvbm_core.transfer.executors.broadcast_group import Group
from kvbm_core.transfer.movers.opening import Shard
from kvbm_core.transfer.plan import JobResult, TierOrder, TransferPlan, rejected
from kvbm_core.transfer.rank import RankMemory, RankOptions
from kvbm_core.types import BlockKey, Direction

if TYPE_CHECKING:
    from kvbm_core.peers.rank import PeerOptions
    from kvbm_core.peers.server import PeerServer

log = logging.getLogger("kvbm")

OnDone = Callable[[JobResult], None]

FENCE_TIMEOUT_S = 60.0


class _Listener:
    """Tells the leader what this rank's lower tiers say."""

    def __init__(self, rank: int, channel: WorkerChannel) -> None:
        self._rank = rank
        self._channel = channel

    def found(self, tier: str, end: int, found: list[Found]) -> None:
        """See TierListener."""
        slots, keys, sequences = [record.slot for record in found], [], []
        for record in found:
            keys.append(bytes(record.key))
            sequences.append(record.sequence)
        self._channel.send(TierFound(self._rank, tier, end, slots, keys, sequences))

    def refused(self, tier: str, reason: str) -> None:
        """See TierListener."""
        self._channel.send(TierRefused(self._rank, tier, reason))

    def direct(self, tier: str, is_direct: bool) -> None:
        """See TierListener."""
        self._channel.send(TierDirect(self._rank, tier, is_direct))


class _PeerLine:
    """What this rank's server of other instances asks the leader; see peers.server.LeaderLine."""

    def __init__(self, rank: int, channel: WorkerChannel) -> None:
        self._rank = rank
        self._channel = channel

    def borrow(self, number: int, keys: Sequence[BlockKey], ttl_s: float, *, is_find: bool) -> None:
        """See LeaderLine."""
        self._channel.send(Borrow(self._rank, number, list(keys), ttl_s, is_find))

    def give_back(self, number: int) -> None:
        """See LeaderLine."""
        self._channel.send(GiveBack(self._rank, number))

    def counted(self, busy: int, refused: int, bad: int) -> None:
        """See LeaderLine."""
        self._channel.send(PeerNews(self._rank, busy, refused, bad))


class Worker:
    """Called from the engine's worker thread; ``take`` and callbacks are safe against the executor's
    threads.

    ``engine_carries_acks``: the adapter takes results to the leader with what the engine sends there in each
    step anyway (``take_results``); else they go over the channel. ``max_ctas``: see Group.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        endpoint: Endpoint,
        options: RankOptions,
        *,
        engine_carries_acks: bool = False,
        max_ctas: int | None = None,
    ) -> None:
        self.rank = rank
        self._world_size = world_size
        self._options = options
        self._engine_carries_acks = engine_carries_acks
        self._device: DeviceMemory | None = None
        self._fingerprint = ""
        self._heads: HeadShards | None = None
        self._memory: RankMemory | None = None
        self._peers: PeerOptions | None = None
        self._peer_server: PeerServer | None = None
        self._executor: Executor | None = None
        self._is_refused = False
        self._refusal = ""
        self._is_closed = False
        self._lock = threading.Lock()
        self._log = RateLimitedLogger(log)
        self._done: list[JobResult] = []
        self._results: list[JobResult] = []
        self._notes: deque[bytes] = deque()
        self._is_noted = threading.Event()
        self._in_flight: dict[int, Direction] = {}
        self._overwritten: set[int] = set()
        # What the leader has ended is not begun any more: jobs below the number, and those that it named.
        self._first_job_id = 0
        self._ended: set[int] = set()
        # Orders to lower tiers that have not been answered; jobs of both kinds whose second answer is due.
        self._orders: set[int] = set()
        self._late: set[int] = set()
        self._wrap: Callable[[Executor], Executor] = lambda executor: executor
        self._judge: Callable[[JobResult], JobResult] = lambda result: result
        self._on_note: Callable[[bytes], None] = lambda note: None
        self._engine = endpoint.engine
        self._channel = WorkerChannel(endpoint, self._on_message)
        self._channel.on_other_leader = self._on_other_leader
        self._replica = ReplicaRank(rank, max_ctas, options.transfer_deadline_s, self._channel.send)
        self._finder = find_leader(endpoint, rank, self._channel)

    # ---------------------------------------------------------------- set-up

    def meet_peers(self, options: PeerOptions) -> None:
        """Before ``register``: other instances may copy blocks from here, and blocks come from them."""
        self._peers = options

    def register(
        self, memory: DeviceMemory, fingerprint: str, heads: HeadShards | None = None, *, part: str = ""
    ) -> None:
        """The device cache is known: says hello until the leader has answered. ``heads``: how its blocks are
        divided in stores that others share.

        ``part``: which part of the KV this rank has, where other ranks may have the same and are to share it.
        One of them stores it; the others have neither slots nor lower tiers, and get from it what it loads.
        """
        self._device = memory
        self._fingerprint = fingerprint
        self._heads = heads
        self._replica.open(part if self._world_size > 1 else "")
        self._channel.repeat(self._hello)

    def wrap_executor(self, wrap: Callable[[Executor], Executor]) -> None:
        """Puts ``wrap`` around the executor that will be made (fault injection, recording)."""
        self._wrap = wrap

    def judge_results(self, judge: Callable[[JobResult], JobResult]) -> None:
        """Lets ``judge`` see, and change, each result before anybody else does (fault injection, byte
        checks).
        """
        self._judge = judge

    def on_note(self, heed: Callable[[bytes], None]) -> None:
        """Lets ``heed`` see each note as it arrives, on the channel's thread, before it can be taken."""
        self._on_note = heed

    def refuse(self, reason: str) -> None:
        """Tells the leader that this rank cannot take part."""
        self._refusal, self._is_refused = reason, True
        self._channel.send(Refused(self.rank, reason, self._engine))

    def _on_other_leader(self) -> None:
        """What the one before has said of this rank says nothing of this one."""
        if self._refusal:
            self.refuse(self._refusal)
        else:
            self._is_refused = False

    @property
    def is_ready(self) -> bool:
        """Whether plans can be executed."""
        return self._executor is not None

    def _hello(self) -> Message | None:
        if self._device is None or self._executor is not None or self._is_refused:
            return None
        return Hello(
            protocol=PROTOCOL_VERSION,
            rank=self.rank,
            world_size=self._world_size,
            block_bytes=max(view.block_bytes for view in self._device.views),
            num_device_blocks=self._device.views[0].num_blocks,
            fingerprint=self._fingerprint,
            part=self._replica.part,
            machine=self._replica.machine,
            broadcast_address=self._replica.address,
            head_shards=self._heads.meaning if self._heads is not None else "",
            head_shard_bytes=self._heads.shard_bytes if self._heads is not None else 0,
            engine=self._engine,
        )

    def _on_message(self, message: Message) -> None:
        if isinstance(message, Refused):
            self._is_refused = True
            log.error("kvbm: worker %d: refused by the leader: %s", self.rank, message.reason)
        elif isinstance(message, Ask):
            self._answer(message)
        elif isinstance(message, Join) and self._device is not None:
            self._replica.invited(message, self._device)
        elif isinstance(message, Configure) and self._executor is None and self._device is not None:
            self._configure(message, self._device)
        elif isinstance(message, Move):
            self._move(message.order)
        elif isinstance(message, Lent | Returned):
            self._heed_loan(message)
        elif isinstance(message, Note):
            self._on_note(message.content)
            self._notes.append(message.content)
            self._is_noted.set()

    def _heed_loan(self, message: Lent | Returned) -> None:
        from kvbm_core.peers.lending import Loan

        if self._peer_server is None:
            return
        if isinstance(message, Returned):
            self._peer_server.returned(message.number, was_held=message.was_held)
        else:
            loan = Loan(message.slots, message.places, message.tier, message.is_refused)
            self._peer_server.lent(message.number, loan)

    def _answer(self, ask: Ask) -> None:
        with self._lock:
            asked = set(ask.job_ids)
            # Those that wait for the engine's next step, which may be long in coming.
            results = [result for result in self._results if result.job_id in asked]
            if ask.is_last:
                known = {*self._in_flight, *self._late, *self._orders, *(r.job_id for r in results)}
                never = asked - known
                self._ended.update(never)
                results += [rejected(job_id, "never came") for job_id in sorted(never)]
        if results:
            self._channel.send(Results(self.rank, results))
        self._channel.send(Here(self.rank))

    def _is_ended(self, job_id: int) -> bool:
        """Whether the leader does not wait for this job any more, and may have given its slots to another."""
        return job_id in self._ended or job_id < self._first_job_id

    def _configure(self, message: Configure, device: DeviceMemory) -> None:
        self._first_job_id = message.first_job_id
        role: Role | None = None
        try:
            role = self._replica.decided(self._world_size, are_shared=message.is_shared)
            if role.shard is not None:
                self._allocate(message, device, role.shard, role.group)
            elif role.group is not None:  # another rank has the slots; here all of them can be used
                self._begin(self._make_broadcast(device, role.group, None), None)
                self._slots_ready(message.num_slots)
        except Exception as error:  # out of memory, an executor that cannot be: serve without, and say why
            if role is not None and role.group is not None:
                role.group.close()
                role.group.discard()
            self._is_refused = True
            self._channel.send(Refused(self.rank, f"cannot allocate {message.num_slots} blocks: {error}"))

    def _allocate(
        self, message: Configure, device: DeviceMemory, shard: tuple[int, int], group: Group | None
    ) -> None:
        memory = RankMemory(
            device,
            message.num_slots,
            self._options,
            places=message.tiers,
            shard=Shard(*shard, self._fingerprint, self._heads),
            listener=_Listener(self.rank, self._channel),
            on_ready=self._slots_ready,
        )
        self._memory = memory
        try:
            if group is not None:
                executor: Executor = self._make_broadcast(device, group, memory.make_executor)
            else:
                executor = memory.make_executor(self._finished)
        except Exception:
            memory.close()
            raise
        if self._peers is not None:
            self._join_peers(self._peers, shard, memory, max(view.block_bytes for view in device.views))
        self._begin(executor, memory)
        self._slots_ready(memory.slab.ready_slots)

    def _join_peers(
        self, options: PeerOptions, shard: tuple[int, int], memory: RankMemory, block_bytes: int
    ) -> None:
        from kvbm_core.peers.rank import join_peers  # only where there are peers

        line = _PeerLine(self.rank, self._channel)
        try:
            self._peer_server = join_peers(options, (*shard, block_bytes, self._fingerprint), memory, line)
        except ConfigError as error:
            self._channel.send(TierRefused(self.rank, PEERS, str(error.args[-1])))

    def _begin(self, executor: Executor, memory: RankMemory | None) -> None:
        if self._is_closed:  # while files were being made
            self._end(executor, memory)
            return
        self._executor = self._wrap(executor)
        if self._finder is not None:
            self._finder.are_met()

    def _make_broadcast(
        self, device: DeviceMemory, group: Group, make_loader: Callable[[OnDone], Executor] | None
    ) -> Executor:
        return BroadcastExecutor(
            device,
            group,
            self._finished,
            make_loader=make_loader,
            # Nobody is to ask for loads any more that can only fail.
            on_broken=lambda reason: self._channel.send(Refused(self.rank, reason)),
            verifies=self._options.verify,
        )

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
            self._finished(rejected(plan.job_id, "comes too late"))
            return
        if executor is None:
            self._finished(rejected(plan.job_id, "no executor"))
            return
        try:
            executor.submit(plan, deadline_s=self._options.transfer_deadline_s)
        except Exception as error:
            log.exception("kvbm: worker %d: job %d could not be submitted", self.rank, plan.job_id)
            self._finished(rejected(plan.job_id, str(error), Outcome.IO_ERROR))

    def reject(self, job_id: int) -> None:
        """Ends a job of the leader's that will not be submitted here."""
        self._finished(rejected(job_id, "not submitted"))

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
        if not self.wait(None, FENCE_TIMEOUT_S):
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
        if not self._done and not self._results:  # most steps
            return []
        with self._lock:
            done, self._done = self._done, []
        self._acknowledge()
        return done

    def take_results(self) -> list[JobResult]:
        """What the leader is to hear since the last call, for adapters that carry it: after ``take`` in each
        step.
        """
        if not self._results:
            return []
        with self._lock:
            results, self._results = self._results, []
        return results

    def take_notes(self) -> list[bytes]:
        """What the leader's adapter said to this one outside of the engine's steps, in its order."""
        self._is_noted.clear()
        return [self._notes.popleft() for _ in range(len(self._notes))]

    def wait_note(self, timeout_s: float) -> bool:
        """Waits until the leader has said something that was not taken yet; False if time ran out."""
        return self._is_noted.wait(timeout_s)

    def wait(self, job_ids: Collection[int] | None, timeout_s: float) -> bool:
        """Waits until these jobs (None = all) have ended; False if time ran out."""
        return self._executor is None or self._executor.wait(job_ids, timeout_s)

    def _move(self, order: TierOrder) -> None:
        memory, is_answered = self._memory, order.kind.is_answered
        with self._lock:
            is_ended = self._is_ended(order.job_id)
            if is_answered:
                if order.job_id in self._orders or order.job_id in self._late:
                    return
                self._orders.add(order.job_id)
        if memory is None or (is_answered and is_ended):
            if is_answered:
                self._order_ended(order, rejected(order.job_id, "comes too late"))
            return
        memory.submit(order, partial(self._order_ended, order))

    def _order_ended(self, order: TierOrder, result: JobResult) -> None:
        """Not carried by the engine's steps: there may be none for a long time."""
        is_failure = result.outcome not in (Outcome.OK, Outcome.REJECTED, Outcome.MISS)
        if is_failure and order.places:  # a store by key says itself what is wrong with it
            line = "kvbm: rank %d: the %s: %s"
            self._log.warning((order.tier, result.outcome), line, self.rank, order.tier, result.detail)
        with self._lock:
            self._orders.discard(result.job_id)
            (self._late.add if result.is_late else self._late.discard)(result.job_id)
        self._channel.send(Results(self.rank, [result]))

    def _finished(self, result: JobResult) -> None:
        with self._lock:
            is_second = result.job_id in self._late
            if is_second:  # the engine has heard of it
                self._late.discard(result.job_id)
                self._results.append(result)
        if is_second:
            self._acknowledge()
            return
        result = self._judge(result)
        with self._lock:
            direction = self._in_flight.pop(result.job_id, None)
            if result.job_id in self._overwritten:
                self._overwritten.discard(result.job_id)
                result = replace(
                    result,
                    outcome=Outcome.TIMED_OUT,
                    detail="its source was overwritten meanwhile",
                    failed=(),
                )
            self._done.append(result)
            if result.is_late:
                self._late.add(result.job_id)
            self._results.append(result)
            may_wait = direction is Direction.OFFLOAD and bool(self._in_flight)
        # Several offloads in one message: each message wakes threads that the engine's own compete with.
        if not may_wait:
            self._acknowledge()
        if result.outcome not in (Outcome.OK, Outcome.REJECTED):
            what = "stored" if direction is Direction.OFFLOAD else "loaded"
            line = "kvbm: rank %d: blocks were not %s (%s): %s"
            self._log.warning((what, result.outcome), line, self.rank, what, result.outcome, result.detail)

    def _acknowledge(self) -> None:
        results = [] if self._engine_carries_acks else self.take_results()
        if results:
            self._channel.send(Results(self.rank, results))

    def close(self) -> None:
        """Closes the channel, ends the executor (waits for running copies), frees the slab. May be called
        twice.
        """
        self._is_closed = True
        if self._finder is not None:
            self._finder.close()
        # First: its thread is the one that makes executor and slab.
        self._channel.close()
        if self._executor is not None:
            self._end(self._executor, self._memory)
        self._executor = None
        self._replica.close()

    def _end(self, executor: Executor, memory: RankMemory | None) -> None:
        if self._peer_server is not None:
            self._peer_server.close()
        if memory is not None:
            memory.close_lower()
        executor.close()
        if memory is not None:
            memory.close()
