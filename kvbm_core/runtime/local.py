"""The tiers of one process, by key: for engines whose ranks each look after their own blocks and have no
leader.

A lock around the chain of tiers, and this rank's memory.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field
from functools import partial

from kvbm_core.blocks.departures import Leave
from kvbm_core.blocks.slot_tier import BlockTier, Reservation, Residency
from kvbm_core.clock import Clock, SystemClock
from kvbm_core.errors import IntegrityError, Outcome
from kvbm_core.observe.labels import DropReason, MissReason
from kvbm_core.observe.log import RateLimitedLogger
from kvbm_core.observe.metrics import Metrics
from kvbm_core.policy.named import PolicyMaker, make_policy
from kvbm_core.runtime.sharing import Sharing
from kvbm_core.runtime.why import Absences, Why
from kvbm_core.storage.disk.recovery import Found
from kvbm_core.tiers.chain import Held, TierChain
from kvbm_core.tiers.jobs import Job, JobTable, count_transfer
from kvbm_core.tiers.lower import LowerTier, LowerTierMaker, Seeker, Sought
from kvbm_core.tokens.runs import BlockRun, consecutive, run_of
from kvbm_core.transfer.executor import DeviceMemory
from kvbm_core.transfer.executors.broadcast_group import Group
from kvbm_core.transfer.movers.opening import Shard
from kvbm_core.transfer.plan import GroupMove, JobResult, TierOrder, TierPlace, TransferPlan, rejected
from kvbm_core.transfer.rank import RankMemory, RankOptions
from kvbm_core.types import BlockKey, Direction, Tier, group_of

log = logging.getLogger("kvbm")

RESET_LOOK_S = 0.1
"""How often a reset looks whether promises have run out."""
NEWS_LOOK_S = 0.1
"""How often somebody who waits for news looks without any."""
OnEnd = Callable[[Outcome], None]
"""Told of the end of a transfer, once, from any thread. Must be short."""


@dataclass(frozen=True, slots=True)
class LocalOptions:
    """``num_slots``: of the host tier. ``lower`` makes the tiers below it, in the order of the search, and
    ``places`` says where they are. ``fingerprint``: what the bytes of a block mean; what has another is begun
    anew. ``lease_ttl_s``: how long a match is held for an owner who does not come back. ``listener`` hears
    what can be matched, from any thread.
    """

    num_slots: int
    lower: tuple[LowerTierMaker, ...] = ()
    places: tuple[TierPlace, ...] = ()
    fingerprint: str = ""
    lease_ttl_s: float = 30.0
    memory: RankOptions = field(default_factory=RankOptions)
    listener: Residency | None = None
    make_policy: PolicyMaker = make_policy


@dataclass(eq=False)
class Claim:
    """Blocks held to be loaded. ``expires_at_s``: if nobody claims them, see LocalTiers.match."""

    held: Held
    expires_at_s: float

    @property
    def keys(self) -> Sequence[BlockKey]:
        """What is held."""
        return self.held.keys


@dataclass(slots=True, eq=False)
class _Load(Job):
    """``is_told``: whoever ordered it has heard how it ended."""

    claim: Claim | None = None
    tell: OnEnd = lambda outcome: None
    is_lasting: bool = True
    is_cancelled: bool = False
    is_told: bool = False

    @property
    def num_blocks(self) -> int:
        """See Job."""
        return 0 if self.claim is None else len(self.claim.keys)


@dataclass(slots=True, eq=False)
class _Store(Job):
    """``is_spoiled``: its device blocks were used otherwise meanwhile."""

    keys: tuple[BlockKey, ...] = ()
    reservation: Reservation | None = None
    tell: OnEnd = lambda outcome: None
    is_lasting: bool = True
    is_spoiled: bool = False

    @property
    def num_blocks(self) -> int:
        """See Job."""
        return 0 if self.reservation is None else len(self.reservation.keys)


class LocalTiers:
    """Safe to call from any thread; nothing waits for I/O but the constructor, ``bring``,
    ``wait_stored`` and ``close``.

    A block is there once its transfer has ended well, not before; a failed one leaves nothing registered.
    What a load stumbled over is forgotten, so that it fails once. Constructor: see RankMemory. ``group``: of
    ranks that have the same KV; this one stores it for the others. The group in a key is the number of the
    view of ``memory`` that its block is in.
    """

    def __init__(
        self,
        memory: DeviceMemory,
        options: LocalOptions,
        metrics: Metrics | None = None,
        clock: Clock | None = None,
        *,
        group: Group | None = None,
    ) -> None:
        self.block_bytes = memory.views[0].block_bytes
        self._num_groups = len(memory.views)
        self._metrics = metrics = metrics or Metrics()
        self._clock = clock = clock or SystemClock()
        self._ttl_s = options.lease_ttl_s
        self._lock = threading.Condition()
        self._log = RateLimitedLogger(log)
        self._turn = threading.Lock()
        self._inbox: deque[Callable[[], None]] = deque()
        self._orders: deque[TierOrder] = deque()
        self._ended: list[tuple[OnEnd, Outcome]] = []
        self._jobs = JobTable(1, clock)
        host = BlockTier(Tier.HOST, options.make_policy(), clock, options.listener, metrics)
        self._chain = TierChain(
            host,
            options.lower,
            self._jobs,
            send=self._orders.append,
            clock=clock,
            metrics=metrics,
            lease_ttl_s=options.lease_ttl_s,
        )
        metrics.on_page = self._publish_headless
        self._absences = Absences(self._chain, has_host_tier=True)
        for place in options.places:
            self._lower(place.name).expect(place.num_slots, [0])
        self._num_resetting = 0
        self._promises: dict[str, Claim] = {}
        self._claims: set[Claim] = set()
        self._memory = RankMemory(
            memory,
            options.num_slots,
            options.memory,
            places=options.places,
            shard=Shard(0, 1, options.fingerprint),
            listener=self,
            on_ready=lambda slots: self._hear(partial(host.grow, slots)),
        )
        self._sharing: Sharing | None = None
        try:
            if group is None:
                self._executor = self._memory.make_executor(self._answered)
            else:
                make_loader, verifies = self._memory.make_executor, options.memory.verify
                self._sharing = Sharing(memory, group, self._answered, make_loader, verifies=verifies)
                self._executor = self._sharing.executor
        except BaseException:
            self._memory.close()
            raise

    # ---------------------------------------------------------------- the way up

    def contains(self, key: BlockKey) -> bool:
        """Whether the block can be loaded now."""
        with self._lock:
            return self._chain.residents.contains(key)

    def hold_back_while(self, is_held: Callable[[], bool]) -> None:
        """While ``is_held``, nothing is brought up that nobody asks for."""
        self._chain.holds_back = is_held

    def leading(self, keys: Sequence[BlockKey]) -> int:
        """How many leading ``keys`` can be loaded now. Nothing is held, and no tier is asked."""
        with self._lock:
            return self._chain.residents.match_prefix(keys)

    def match(self, owner: str, keys: Sequence[BlockKey]) -> int:
        """How many leading ``keys`` can be loaded. They are held for ``owner`` until ``claim``, or
        ``lease_ttl_s``. What more there is in lower tiers that must be asked is on its way up after this.

        Asked again it answers anew, and holds that instead.
        """
        if self._sharing is not None and self._sharing.is_broken:
            return 0
        with self._lock:
            self._mind()
            self._let_go(owner)
            if self._num_resetting:
                return 0
            claim = self._hold(owner, keys[: self._chain.residents.match_prefix(keys)])
            found = 0 if claim is None else len(claim.keys)
            if claim is not None:
                self._promises[owner] = claim
            if self._chain.is_asked:
                self._chain.wanted([run_of(keys[found:])], asks_again=False)
        self._take_turn()
        return found

    def bring(self, keys: Sequence[BlockKey], timeout_s: float) -> int:
        """How many leading ``keys`` can be loaded, after lower tiers that must be asked have brought what
        they have, or when ``timeout_s`` is over. Nothing is held.
        """
        ends_at_s, seeker = self._clock.now_s() + timeout_s, Seeker()
        while True:
            with self._lock:
                self._mind()
                found = self._chain.residents.match_prefix(keys)
                is_coming = found < len(keys) and self._is_coming(keys[found:], seeker)
            self._take_turn()
            left_s = ends_at_s - self._clock.now_s()
            if not is_coming or left_s <= 0:
                return found
            self.wait_news(left_s)

    def wait_news(self, timeout_s: float) -> None:
        """Waits until a transfer has ended or so, for a moment at most: whoever waits looks again."""
        with self._lock:
            self._lock.wait(min(timeout_s, NEWS_LOOK_S))

    def claim(self, owner: str, keys: Sequence[BlockKey]) -> Claim | None:
        """Holds ``keys``, of those matched or others, until ``load`` or ``drop``; None if not all can be."""
        wanted = tuple(keys)
        with self._lock:
            claim = self._promises.pop(owner, None)
            is_kept = claim is not None and claim.keys == wanted and self._chain.is_good(claim.held)
            if claim is not None and not is_kept:
                self._chain.release(claim.held)
            if not is_kept:
                claim = self._hold(owner, wanted)
                if claim is not None and claim.keys != wanted:
                    self._chain.release(claim.held)
                    claim = None
            if claim is not None:
                self._claims.add(claim)
            return claim

    def drop(self, claim: Claim) -> None:
        """A claim that will not be loaded."""
        with self._lock:
            self._claims.remove(claim)
            self._chain.release(claim.held)

    def load(
        self,
        claim: Claim,
        device_blocks: Sequence[int],
        on_end: OnEnd,
        *,
        turn: int | None = None,
        is_lasting: bool = True,
    ) -> None:
        """Fills ``device_blocks[i]`` with block i of ``claim``. OK: all are filled; else they hold garbage.

        After its end nothing writes to them any more. What came from lower tiers stays in the host. What is
        not ``is_lasting`` is not offered to them, see ``store``. ``turn``: what all ranks of the group call
        this load, see ``turn_of``; they must begin the same ones in the same order.
        """
        plan = None
        with self._lock:
            self._claims.remove(claim)
            held = claim.held
            if self._chain.is_good(held):
                job_id = self._jobs.new_id() if turn is None or self._sharing is None else turn
                job = _Load(job_id, {0}, self._jobs.now_s(), lambda: None)
                job.on_end, job.on_late = partial(self._end_load, job), partial(self._late_load, job)
                job.claim, job.tell, job.is_lasting = claim, on_end, is_lasting
                self._jobs.add(job)
                moves = self._moves(held.keys, device_blocks, held.slots)
                reads = self._chain.reads(held, job.job_id)
                plan = TransferPlan(job.job_id, Direction.ONBOARD, moves, reads)
            else:
                self._chain.release(held)
        if plan is not None:
            self._submit(plan)
        else:
            self._metrics.failure(f"{Direction.ONBOARD}_{Outcome.MISS}")
            self.skip(turn, len(device_blocks))
            on_end(Outcome.MISS)

    def skip(self, turn: int | None, num_blocks: int) -> None:
        """In place of ``load`` of what cannot be loaded after all: it fails on all ranks of the group."""
        if self._sharing is not None and turn is not None:
            self._sharing.skip(turn, num_blocks)

    def cancel(self, claim: Claim) -> None:
        """Ends a load: at once if nothing of it is being copied, else soon. Nothing if it is over.

        Blocks of it that come from lower tiers wait for them no more; what was kept stays.
        """
        with self._lock:
            jobs = [job for job in self._jobs.jobs(_Load) if job.claim is claim]
            for job in jobs:
                job.is_cancelled = True
        for job in jobs:
            self._executor.cancel(job.job_id)

    def why_missed(self, key: BlockKey) -> Why:
        """Why the block cannot be loaded now."""
        with self._lock:
            if self._num_resetting or not self._chain.host.capacity_blocks:
                return MissReason.NOT_READY, "its memory is not ready, or being reset"
            return self._absences.first(key)

    # ---------------------------------------------------------------- the way down

    def store(
        self,
        keys: Sequence[BlockKey],
        device_blocks: Sequence[int],
        on_end: OnEnd,
        *,
        is_lasting: bool = True,
    ) -> None:
        """Keeps ``device_blocks[i]`` as ``keys[i]``, but for those that are there already or on their way.

        OK: all of them are there now. NO_SPACE: some are not, but those from the head on that had room are.
        Keys that are not ``is_lasting`` mean nothing in another process: their blocks stay in host memory.
        """
        block_of = dict(zip(keys, device_blocks, strict=True))
        plan, outcome = None, Outcome.OK
        with self._lock:
            num_new = len(self._chain.new_of(keys))
            reservation = self._chain.reserve(keys, lambda new: frozenset(keys))
            self._metrics.dropped(DropReason.NO_SPACE, num_new - len(reservation.keys))
            if reservation.keys:
                job = _Store(self._jobs.new_id(), {0}, self._jobs.now_s(), lambda: None)
                job.on_end = partial(self._end_store, job)
                job.keys, job.reservation = tuple(keys), reservation
                job.tell, job.is_lasting = on_end, is_lasting
                self._jobs.add(job)
                blocks = [block_of[key] for key in reservation.keys]
                moves = self._moves(reservation.keys, blocks, reservation.slots)
                plan = TransferPlan(job.job_id, Direction.OFFLOAD, moves)
            else:
                self._chain.host.touch(keys)
                outcome = self._kept(keys)
        if plan is not None:
            self._submit(plan)
        else:
            on_end(outcome)

    @property
    def tiers(self) -> frozenset[Tier]:
        """Those that there are."""
        return frozenset({Tier.HOST, *(tier.tier for tier in self._chain.lower)})

    def reset(self, tiers: Container[Tier], timeout_s: float) -> bool:
        """Forgets every block of these tiers, when what is being loaded has ended; nothing new is matched
        meanwhile. False, and nothing is forgotten, if that takes too long.
        """
        ends_at_s = self._clock.now_s() + timeout_s
        with self._lock:
            self._num_resetting += 1
            try:
                while not self._is_quiet():
                    if self._clock.now_s() >= ends_at_s:
                        return False
                    self._lock.wait(RESET_LOOK_S)
                self._chain.reset(tiers)
            finally:
                self._num_resetting -= 1
        self._take_turn()
        with self._lock:
            self._chain.publish_usage()
        return True

    def _is_quiet(self) -> bool:
        """Nothing is promised, or being loaded; under the lock."""
        self._mind()
        return not self._promises and not self._claims and not self._jobs.jobs(_Load)

    def disown(self) -> None:
        """Device blocks that stores still read are used otherwise from now on: nothing of these stores will
        be kept.
        """
        with self._lock:
            for job in self._jobs.jobs(_Store):
                job.is_spoiled = True

    # ---------------------------------------------------------------- state and end

    @property
    def is_asked(self) -> bool:
        """Whether ``match`` has something looked for that is nowhere here."""
        return self._chain.is_asked

    @property
    def off_tiers(self) -> dict[str, str]:
        """Lower tiers that cannot be had, and why."""
        with self._lock:
            return {tier.name: tier.off_reason for tier in self._chain.lower if tier.off_reason is not None}

    @property
    def resident_blocks(self) -> tuple[int, ...]:
        """Blocks in the host, and in each lower tier."""
        with self._lock:
            lower = [tier.usage[0] for tier in self._chain.lower]
            return (self._chain.host.resident_blocks, *lower)

    def wait_ready(self, *slots: int, timeout_s: float) -> bool:
        """Waits until so many slots of the host, and of each lower tier that is not off, can be used; False
        if time ran out.
        """

        def is_ready() -> bool:
            lower = zip(self._chain.lower, slots[1:], strict=False)
            is_below = all(tier.usage[1] >= num or tier.off_reason is not None for tier, num in lower)
            return is_below and self._chain.host.capacity_blocks >= slots[0]

        with self._lock:
            return self._lock.wait_for(is_ready, timeout_s)

    def wait_stored(self, timeout_s: float) -> bool:
        """Waits until nothing is on its way to lower tiers; False if time ran out."""
        with self._lock:
            return self._lock.wait_for(lambda: not self._chain.storing_blocks, timeout_s)

    def close(self) -> None:
        """Ends what is under way, threads, memory and files; idempotent. What is in the host is gone."""
        with self._lock:
            for owner in list(self._promises):
                self._let_go(owner)
        self._memory.close_lower()
        self._executor.close()
        self._memory.close()

    def check_integrity(self) -> None:
        """Raises IntegrityError unless the books agree."""
        with self._lock:
            self._chain.check_integrity()
            held = [claim.held for claim in (*self._claims, *self._promises.values())]
            held += [job.claim.held for job in self._jobs.jobs(_Load) if job.claim is not None]
            reserved = sum(len(one.reservation.keys) for one in held if one.reservation is not None)
            reserved += sum(job.num_blocks for job in self._jobs.jobs(_Store))
            reserved += self._chain.fetching_blocks
            if self._chain.host.pending_blocks != reserved:
                raise IntegrityError("host slots are reserved for nobody")
            leases = self._chain.host.live_leases + self._chain.live_leases
            if leases and not held and not self._chain.storing_blocks:
                raise IntegrityError(f"{leases} leases are held for nobody")

    # ---------------------------------------------------------------- TierListener

    def found(self, tier: str, end: int, found: list[Found]) -> None:
        """See TierListener."""
        self._hear(lambda: self._lower(tier).take_in(0, end, found))

    def refused(self, tier: str, reason: str) -> None:
        """See TierListener."""
        self._hear(lambda: self._lower(tier).turn_off(reason))

    def direct(self, tier: str, is_direct: bool) -> None:
        """See TierListener."""
        self._hear(lambda: self._chain.direct(tier, is_direct))

    def _lower(self, name: str) -> LowerTier:
        tier = self._chain.named(name)
        if tier is None:
            raise ValueError(f"there is no tier {name}")
        return tier

    # ---------------------------------------------------------------- what is held; under the lock

    def _hold(self, owner: str, keys: Sequence[BlockKey]) -> Claim | None:
        """The longest prefix of ``keys`` that can be held; None if there is none."""
        keys = tuple(keys)
        while keys:
            held = self._chain.hold(owner, keys)
            if isinstance(held, Held):
                return Claim(held, self._clock.now_s() + self._ttl_s)
            keys = keys[:held]
        return None

    def _moves(
        self, keys: Sequence[BlockKey], device_blocks: Sequence[int], slots: Sequence[int]
    ) -> tuple[GroupMove, ...]:
        """``keys[i]`` between its device block and its slot."""
        if self._num_groups == 1:
            return (GroupMove(0, tuple(device_blocks), tuple(slots)),)
        places: dict[int, list[int]] = {}
        for place, key in enumerate(keys):
            places.setdefault(group_of(key), []).append(place)
        return tuple(
            GroupMove(group, tuple(device_blocks[i] for i in at), tuple(slots[i] for i in at))
            for group, at in sorted(places.items())
        )

    def _is_coming(self, keys: Sequence[BlockKey], seeker: Seeker) -> bool:
        """Whether to wait for the first of ``keys``: it is on its way, or there is soon room for it."""
        sought = self._chain.sought([run_of(keys)], seeker)
        return sought is Sought.COMING or (sought is Sought.STUCK and self._chain.fetching_blocks > 0)

    def _let_go(self, owner: str) -> None:
        promise = self._promises.pop(owner, None)
        if promise is not None:
            self._chain.release(promise.held)

    def _mind(self) -> None:
        """Ends promises whose time is over; what was claimed, and what moves, stays held."""
        now_s = self._clock.now_s()
        for owner in [owner for owner, promise in self._promises.items() if promise.expires_at_s <= now_s]:
            self._let_go(owner)
        loading = [job.claim.held for job in self._jobs.jobs(_Load) if job.claim is not None]
        self._chain.mind([*(claim.held for claim in self._claims), *loading])

    # ---------------------------------------------------------------- turns

    def _submit(self, plan: TransferPlan) -> None:
        try:
            self._memory.start(self._executor, plan)
        except Exception as error:  # whatever happens to a job is its outcome
            log.exception("kvbm: %s %d could not be submitted", plan.direction, plan.job_id)
            self._answered(rejected(plan.job_id, str(error), Outcome.IO_ERROR))

    def _publish_headless(self) -> None:
        with self._lock:
            found = self._chain.chains()
        for tier, chains in found:
            self._metrics.headless_blocks(tier, chains.num_headless)

    def _answered(self, result: JobResult) -> None:
        self._hear(partial(self._jobs.acknowledge, 0, result))

    def _hear(self, news: Callable[[], None]) -> None:
        self._inbox.append(news)
        self._take_turn()

    def _take_turn(self) -> None:
        """Takes in what was heard and sends what follows from it; one thread at a time, the others leave it
        theirs.
        """
        while self._inbox or self._orders:
            if not self._turn.acquire(blocking=False):
                return  # whoever has the turn looks again after it
            try:
                self._take_in()
            finally:
                self._turn.release()

    def _take_in(self) -> None:
        with self._lock:
            while self._inbox:
                self._inbox.popleft()()
            self._chain.publish_usage()
            ended, self._ended = self._ended, []
            self._lock.notify_all()
        for tell, outcome in ended:
            try:
                tell(outcome)
            except Exception:  # the next one is to hear of its end all the same
                log.exception("kvbm: the end of a transfer could not be told")
        while self._orders:
            self._memory.submit(self._orders.popleft(), self._answered)

    # ---------------------------------------------------------------- ends; under the lock

    def _tell_load(self, job: _Load, outcome: Outcome) -> None:
        if not job.is_told:
            job.is_told = True
            self._ended.append((job.tell, outcome))

    def _late_load(self, job: _Load, result: JobResult) -> None:
        """Its device blocks are free, its host slots are not."""
        self._tell_load(job, result.outcome)
        if job.claim is not None:
            self._chain.note_late(job.claim.held, result.outcome)

    def _end_load(self, job: _Load) -> None:
        claim, (result,) = job.claim, job.results
        if claim is None:
            return
        held, keys = claim.held, claim.keys
        is_unwanted = job.is_cancelled and result.outcome is Outcome.REJECTED
        self._count(Direction.ONBOARD, result)
        if result.outcome is Outcome.OK:
            for below in held.below:
                self._metrics.onboarded_blocks(len(below.lease.keys), below.tier.tier, Tier.DEVICE)
            self._metrics.onboarded_blocks(len(keys) - held.num_fetched, Tier.HOST, Tier.DEVICE)
        self._chain.loaded(held, job.failures(held.slots), forgets=not is_unwanted)
        if result.outcome is Outcome.OK:
            self._chain.tell([run_of(keys)])
            if job.is_lasting:
                self._chain.used([run_of(keys)])
        self._chain.host.touch(keys)
        self._tell_load(job, result.outcome)

    def _end_store(self, job: _Store) -> None:
        reservation, (result,) = job.reservation, job.results
        if reservation is None:
            return
        self._count(Direction.OFFLOAD, result)
        outcome = Outcome.REJECTED if job.is_spoiled else result.outcome
        if self._chain.stored(reservation, outcome):
            self._chain.host.touch(job.keys)
            self._chain.tell([run_of(job.keys)])
            if job.is_lasting:
                new = frozenset(reservation.keys)
                blocks = [i for i, key in enumerate(job.keys) if key in new]
                self._chain.offer([BlockRun(job.keys, *span) for span in consecutive(blocks)])
        if outcome is Outcome.OK:
            outcome = self._kept(job.keys)
        else:
            self._metrics.dropped(DropReason.TRANSFER_FAILED, len(reservation.keys))
            self._chain.host.departures.note(reservation.keys, Leave.FAILED)
        self._ended.append((job.tell, outcome))

    def _kept(self, keys: Sequence[BlockKey]) -> Outcome:
        is_there = self._chain.residents.contains
        return Outcome.OK if all(map(is_there, keys)) else Outcome.NO_SPACE

    def _count(self, direction: Direction, result: JobResult) -> None:
        if result.outcome is Outcome.OK:
            count_transfer(self._metrics, direction, [result], self._chain.tier_of)
        else:
            self._metrics.failure(f"{direction}_{result.outcome}")
            what = "stored" if direction is Direction.OFFLOAD else "loaded"
            line = "kvbm: blocks were not %s (%s): %s"
            self._log.warning((what, result.outcome), line, what, result.outcome, result.detail)
