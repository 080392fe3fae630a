"""The leader: decides what moves, owns all metadata and no bytes.

Lives beside the engine's scheduler and is called from its thread only. Nothing here waits: what workers say
is taken from the handshake's inbox in ``poll``. A block is in the tier once every rank has acknowledged its
transfer. The two journeys of a block are in ``offload`` and ``onboard``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from kvbm_core.clock import Clock
from kvbm_core.errors import IntegrityError, Outcome
from kvbm_core.observe.labels import DropReason, FailureKind
from kvbm_core.observe.log import RateLimitedLogger
from kvbm_core.observe.metrics import Metrics
from kvbm_core.observe.readiness import Readiness
from kvbm_core.policy.admission import AdmissionPolicy
from kvbm_core.runtime.audit import AuditedPrefix, AuditSampler
from kvbm_core.runtime.disk import DiskOptions, DiskTier
from kvbm_core.runtime.handshake import Disabled, Handshake, RankAck, RankReplaced, SlotsReady
from kvbm_core.runtime.jobs import Job, JobBook, Share, count_transfer
from kvbm_core.runtime.messages import JobAck, Message
from kvbm_core.runtime.offload import Offloading, OnShareEnd
from kvbm_core.runtime.onboard import Onboarding
from kvbm_core.runtime.rank_watch import RankWatch, WatchOptions
from kvbm_core.runtime.request import NULL_BLOCK, BlockTable, RequestState
from kvbm_core.storage.disk.recovery import REPORT_SLOTS
from kvbm_core.tiers.groups import GroupSpec, base_block_tokens
from kvbm_core.tiers.tier import BlockTier
from kvbm_core.tokens.chain import TokenChain
from kvbm_core.transfer.plan import TransferPlan
from kvbm_core.types import Direction, SequenceHash, Tier

log = logging.getLogger("kvbm")

TAKE_IN_BLOCKS = REPORT_SLOTS
"""Of what each worker found on disk, in one step of the engine: about a millisecond of it."""
EMPTY_BLOCKS = 16
"""What a message with little in it costs, in blocks."""
MAX_DISTRUSTED_NAMESPACES = 64


@dataclass(frozen=True, slots=True)
class LeaderOptions:
    """Times in seconds. ``share_loads``: wait for a prefix being loaded, as the engine will share its device
    blocks.

    ``null_block``: the number that stands in the engine's block tables where it keeps no block.
    ``audit_rate``: the share of hits that are computed again and compared, 0 to 1; ``audit_seed``: see
    AuditSampler.
    """

    lease_ttl_s: float = 30.0
    share_wait_s: float = 1.0
    share_loads: bool = True
    null_block: int = NULL_BLOCK
    watch: WatchOptions = field(default_factory=WatchOptions)
    audit_rate: float = 0.0
    audit_seed: int | None = None


@dataclass(frozen=True, slots=True)
class DiskSetup:
    """What a leader with a disk tier needs; ``send`` reaches every worker and does not wait."""

    admission: AdmissionPolicy
    send: Callable[[Message], None]


class Leader:
    """``on_offload_end(share, committed)`` is told of the end of each request's offload; committed: can be
    matched.

    ``on_onboard_end(share, outcome)`` of the end of each load, when every rank has answered.
    """

    def __init__(  # noqa: PLR0917 - the parts of a leader, put together in one place
        self,
        groups: tuple[GroupSpec, ...],
        tier: BlockTier,
        handshake: Handshake,
        world_size: int,
        clock: Clock,
        metrics: Metrics,
        options: LeaderOptions,
        on_offload_end: OnShareEnd = lambda share, committed: None,
        disk: DiskSetup | None = None,
        on_onboard_end: Callable[[Share, Outcome], None] = lambda share, outcome: None,
    ) -> None:
        self.groups = groups
        self.tier = tier
        self.metrics = metrics
        self.disabled_reason: str | None = None
        self.layout_fingerprint = ""
        self.block_bytes = 0
        self._handshake = handshake
        self._jobs = JobBook(world_size, clock)
        self._ranks = RankWatch(handshake, clock, metrics, options.watch)
        # Whether a rank's new process is still getting the memory that its old one had.
        self._is_refilling = False
        handshake.next_job_id = lambda: self._jobs.next_id
        self._requests: dict[str, RequestState] = {}
        self._log = RateLimitedLogger(log)
        self.disk: DiskTier | None = None
        if disk is not None:
            self.disk = DiskTier(
                tier,
                disk.admission,
                disk.send,
                self._jobs.new_id,
                world_size,
                clock,
                metrics,
                DiskOptions(lease_ttl_s=options.lease_ttl_s),
            )
        self._sampler = AuditSampler(options.audit_rate, options.audit_seed)
        self._audits: list[Job] = []
        self._distrusted: set[SequenceHash] = set()
        self._clock = clock
        self._on_onboard_end = on_onboard_end
        self._offloading = Offloading(
            groups, tier, self._jobs, metrics, on_offload_end, null_block=options.null_block
        )
        self._onboarding = Onboarding(
            groups,
            tier,
            self._jobs,
            clock,
            metrics,
            lease_ttl_s=options.lease_ttl_s,
            share_wait_s=options.share_wait_s if options.share_loads else 0.0,
            disk=self.disk,
            null_block=options.null_block,
        )

    # ---------------------------------------------------------------- state

    @property
    def is_ready(self) -> bool:
        """Whether the tier has slots and every rank answers; else every query is a miss."""
        return (
            self.tier.capacity_blocks > 0
            and self.disabled_reason is None
            and not self._ranks.away
            and not self._is_refilling
        )

    def readiness(self) -> Readiness:
        """Whether the tier is in service, or why not. Any thread."""
        if self.disabled_reason is not None:
            return Readiness(False, f"the tier is off: {self.disabled_reason}")
        away = sorted(self._ranks.away)
        if away:
            return Readiness(False, f"no answer from rank {', '.join(map(str, away))}")
        return self._handshake.readiness()

    @property
    def pending_jobs(self) -> int:
        """Transfers that were sent, and that some rank has not answered yet."""
        return len(self._jobs) - self._offloading.has_gathered

    def is_pending(self, job_id: int) -> bool:
        """Whether some rank has not answered this transfer yet."""
        return job_id in self._jobs

    def offloads(self) -> set[int]:
        """Those that some rank has not answered yet."""
        return {job.job_id for job in self._jobs.jobs() if job.direction is Direction.OFFLOAD}

    @property
    def open_requests(self) -> int:
        """Requests that have not been dropped."""
        return len(self._requests)

    @property
    def loading_blocks(self) -> int:
        """Blocks of the tier that are being brought up."""
        return self._onboarding.loading_blocks

    @property
    def stale_acks_total(self) -> int:
        """Answers to jobs that were over, or that had been answered by that rank before."""
        return self._jobs.stale_acks_total

    def request(self, request_id: str) -> RequestState | None:
        """The state of a request opened before and not finished."""
        state = self._requests.get(request_id)
        return None if state is None or state.is_finished else state

    def open(
        self,
        request_id: str,
        root: SequenceHash,
        extra_of_block: Callable[[int], bytes] | None,
        *,
        is_lasting: bool = True,
    ) -> RequestState:
        """Starts to follow a request. ``extra_of_block(i)`` is what block i depends on besides its tokens.
        Blocks of a request that is not ``is_lasting`` mean nothing in another process: they stay in host
        memory.

        One that was opened under the same id before is let go; what still moves for it ends by itself.
        """
        old = self._requests.get(request_id)
        if old is not None:
            self._onboarding.let_go(old)
            self._give_up_audit(old)
        chain = TokenChain(root, base_block_tokens(self.groups), extra_of_block)
        state = RequestState(request_id, chain, self.groups, is_lasting=is_lasting)
        self._requests[request_id] = state
        return state

    # ---------------------------------------------------------------- the two journeys

    def match(
        self, state: RequestState, tokens: Sequence[int], computed_tokens: int, limit_tokens: int
    ) -> int | None:
        """How many tokens beyond ``computed_tokens`` can be brought up; the blocks found are leased.

        None: another request is loading this prefix right now, ask again. May be called any number of times.
        """
        state.restart_offload()
        if not self.is_ready or state.is_retired or state.audited is not None or self._is_distrusted(state):
            self._onboarding.let_go(state)
            return 0
        matched = self._onboarding.match(state, tokens, computed_tokens, limit_tokens)
        if matched and self._sampler.draws():  # computed again instead of loaded, then compared
            state.audited = AuditedPrefix(computed_tokens, computed_tokens + matched)
            self._onboarding.let_go(state)
            return 0
        return matched

    def onboard(
        self, state: RequestState, num_tokens: int, tables: Sequence[BlockTable]
    ) -> TransferPlan | None:
        """Loads the matched prefix into the device blocks of ``tables``.

        None if the promise cannot be kept (no such match, lease expired, or the engine wants a block that was
        not matched): then nothing is loaded and the caller reports the load as failed.
        """
        return self._onboarding.onboard(state, num_tokens, tables)

    def decline(self, state: RequestState) -> None:
        """The engine does not take what was matched: the blocks are let go."""
        self._onboarding.let_go(state)

    def offload(
        self,
        state: RequestState,
        tokens: Sequence[int],
        computed_tokens: int,
        stored_tokens: int,
        tables: Sequence[BlockTable],
    ) -> int | None:
        """Writes through the full blocks up to ``stored_tokens`` that no copy below the device exists of.

        ``computed_tokens``: position before this step; windowed groups may already have given up blocks
        before it. Answers the job in which they will be, with ``take_offloads``; None if no block is full.
        """
        is_off = not self.is_ready or state.is_retired or self._is_distrusted(state)
        if stored_tokens < state.next_full_tokens or is_off:
            return None
        if state.audited is not None:
            if stored_tokens < state.audited.end_tokens:
                return None  # or what is to be compared would be stored anew in between
            self._gather_audit(state, state.audited, tables)
        return self._offloading.offload(state, tokens, computed_tokens, stored_tokens, tables)

    def take_offloads(self) -> Job | None:
        """All that ``offload`` has gathered, of all requests, as one job; to be sent before its blocks are
        reused.
        """
        if not self._offloading.has_gathered:
            return None
        finished = [state for state in self._offloading.gathered_states() if state.is_finished]
        job = self._offloading.take()
        for state in finished:
            self._drop_if_idle(state)
        return job

    def _gather_audit(self, state: RequestState, prefix: AuditedPrefix, tables: Sequence[BlockTable]) -> None:
        state.audited = None
        job = self._onboarding.audit(state, prefix, tables)
        if job is None:
            self._sampler.came_to_nothing()
        else:
            self._audits.append(job)

    def _give_up_audit(self, state: RequestState) -> None:
        if state.audited is not None:
            state.audited = None
            self._sampler.came_to_nothing()

    def take_audits(self) -> list[Job]:
        """Comparisons of what this step computes with what is stored; to be sent with its offloads."""
        audits, self._audits = self._audits, []
        return audits

    def abandon(self, job_id: int) -> None:
        """A plan that was made and never sent: its job ends as if every rank had refused it."""
        for rank in self._jobs.ranks():
            self._acknowledge(rank, JobAck(job_id, Outcome.REJECTED, 0, 0.0, 0.0))

    def readers_of(self, device_blocks: list[int]) -> set[int]:
        """Offloads that still read any of these device blocks, which are about to be overwritten."""
        return self._jobs.readers_of(device_blocks)

    def writers_of(self, device_blocks: Mapping[int, Collection[int]]) -> set[int]:
        """Onboards that still write any of these device blocks (by group), which the engine gave to somebody
        else.
        """
        return self._jobs.writers_of(device_blocks)

    # ---------------------------------------------------------------- ends

    def finish(self, state: RequestState) -> tuple[int, ...]:
        """The engine is done with the request; returns the offloads that still read its device blocks."""
        self._onboarding.let_go(state)
        state.is_finished = True
        self._give_up_audit(state)
        if not state.offload_jobs:  # else the end of the last of them does it
            self.tier.touch(state.chain_keys())
        self.metrics.request_hits(state.host_hit_blocks, state.disk_hit_blocks, state.queried_blocks)
        self._drop_if_idle(state)
        return tuple(sorted(state.offload_jobs))

    def retire(self, state: RequestState) -> None:
        """Weights or an adapter have changed under the request: what it computes from now on, from what it
        has, belongs under no key. Nothing of it is matched or stored any more; until it begins anew, with
        ``open``.
        """
        self._onboarding.let_go(state)
        self._give_up_audit(state)
        state.is_retired = True

    def confirm(self, state: RequestState) -> None:
        """Of a request that was opened as not lasting: its keys mean the same in other processes too."""
        state.is_lasting = True
        if self.disk is not None:
            keys = state.chain_keys()
            is_hit = state.host_hit_blocks or state.disk_hit_blocks
            (self.disk.hit if is_hit else self.disk.offer)(keys)

    def disown(self, state: RequestState) -> None:
        """The opposite: nobody knows what its keys mean. Those that were stored are forgotten."""
        self.retire(state)
        state.is_disowned = True
        self.tier.forget(state.chain_keys())

    def new_generation(self) -> None:
        """The weights are others from now on: all open requests are retired, and the host tier, whose blocks
        nobody will ask for, is free. The disk keeps its blocks: they are right for who has those weights.
        """
        for state in self._requests.values():
            self.retire(state)
        self._offloading.forget_gathered()
        self.tier.reset()

    def reset(self) -> None:
        """Forgets every block of the tiers; what is on its way will not be committed."""
        self._reset_host()
        if self.disk is not None:
            self.disk.reset()

    def _reset_host(self) -> None:
        for state in self._requests.values():
            self._onboarding.let_go(state)
        self._offloading.forget_gathered()
        self.tier.reset()

    # ---------------------------------------------------------------- what workers said

    def acknowledge(self, rank: int, acks: Iterable[JobAck]) -> None:
        """What rank ``rank`` said, when the engine carries it here; else it comes with ``poll``."""
        self._ranks.heard(rank)
        for ack in acks:
            self._acknowledge(rank, ack)
        self.publish_gauges()

    @property
    def has_news(self) -> bool:
        """Whether workers have said something that ``poll`` has not taken. Any thread."""
        return bool(self._handshake.inbox) or bool(self._handshake.found)

    def poll(self) -> None:
        """Takes what has arrived since the last call. Never waits."""
        has_news = self.has_news
        if has_news:
            self._take_in_news()
        if self.tier.live_leases or (
            self.disk is not None and self.disk.tier.live_leases
        ):  # not in most steps
            self._mind_leases()
        if self._ranks.is_due():
            self._mind_ranks()
        if has_news:
            self.publish_gauges()

    def _take_in_news(self) -> None:
        inbox = self._handshake.inbox
        while inbox:
            event = inbox.popleft()
            if isinstance(event, RankAck):
                self._acknowledge(event.rank, event.ack)
            elif isinstance(event, SlotsReady):
                self._on_slots(event)
            elif isinstance(event, RankReplaced):
                self._on_replaced(event)
            elif isinstance(event, Disabled):
                self.disable(event.reason)
                self.metrics.failure(FailureKind.HANDSHAKE)
            elif self.disk is not None:
                self.disk.turn_off(event.reason)
        self._take_in_found(TAKE_IN_BLOCKS)

    def _mind_ranks(self) -> None:
        orders = [] if self.disk is None else self.disk.orders()
        self._ranks.look([*((job.job_id, job) for job in self._sent_jobs()), *orders])
        held = sum(job.num_blocks for job in self._sent_jobs() if job.waiting_ranks & self._ranks.away)
        self.metrics.set_silent_ranks(len(self._ranks.away), held)

    def _sent_jobs(self) -> list[Job]:
        return [job for job in self._jobs.jobs() if job.shares]  # not the one that is being gathered

    def _on_replaced(self, event: RankReplaced) -> None:
        """The bytes of one rank are gone, and with them every block; what it was told died with it."""
        self._is_refilling = True
        self._reset_host()
        jobs = [(job.job_id, job.waiting_ranks) for job in self._sent_jobs()]
        orders = [] if self.disk is None else self.disk.orders()
        for job_id, waiting_ranks in [
            *jobs,
            *((order_id, order.waiting_ranks) for order_id, order in orders),
        ]:
            if job_id < event.first_job_id and event.rank in waiting_ranks:
                self._acknowledge(event.rank, JobAck(job_id, Outcome.IO_ERROR, 0, 0.0, 0.0))

    def _mind_leases(self) -> None:
        # Before any lease is ended: those of copies that are under way hold, however long nobody has called.
        self._onboarding.renew_leases()
        if self.disk is not None:
            self.disk.renew_leases(self._clock.now_s())
        expired = self.tier.expire_leases() + (self.disk.tier.expire_leases() if self.disk is not None else 0)
        if expired:
            self.metrics.failure(FailureKind.LEASE_EXPIRED, expired)

    def catch_up(self) -> None:
        """As ``poll``, with everything that has been found on disk so far; at start, when nobody waits for a
        step.
        """
        self._take_in_found(float("inf"))
        self.poll()

    def _take_in_found(self, most_blocks: float) -> None:
        """At least one of the workers' messages, if there is one; ``most_blocks`` of each worker."""
        found, disk = self._handshake.found, self.disk
        if disk is None or not found:
            return
        disk.num_ranks = self._handshake.num_storing_ranks
        disk.expect(self._handshake.disk_slots)
        num_taken, num_free = 0, most_blocks * disk.num_ranks
        while found and num_taken < num_free:
            chunk = found.popleft()
            disk.take_in(chunk.rank, chunk.end, chunk.found)
            num_taken += max(EMPTY_BLOCKS, len(chunk.found))

    def publish_gauges(self) -> None:
        """How full the tier is, what is pinned, what is under way: now."""
        self.metrics.tier_usage(Tier.HOST, self.tier.resident_blocks, self.tier.capacity_blocks)
        if self.disk is not None:
            self.metrics.tier_usage(Tier.DISK, self.disk.tier.resident_blocks, self.disk.tier.capacity_blocks)
        self.metrics.set_pending_jobs(self.pending_jobs)
        self.metrics.set_live_leases(self.tier.live_leases)

    def _on_slots(self, event: SlotsReady) -> None:
        is_first = not self.tier.capacity_blocks and event.slots > 0
        if is_first and self.metrics.has_host_tier and event.planned_slots < event.num_device_blocks:
            log.warning(
                "kvbm: the host tier (%d blocks, %.2f GB) is smaller than the device tier (%d "
                "blocks, %.2f GB) "
                "and will churn; raise DYN_KVBM_CPU_CACHE_GB",
                event.planned_slots,
                event.planned_slots * event.block_bytes / 1e9,
                event.num_device_blocks,
                event.num_device_blocks * event.block_bytes / 1e9,
            )
        self.layout_fingerprint = event.fingerprint
        self.block_bytes = event.block_bytes
        if self.disk is not None:
            self.disk.block_bytes = event.block_bytes
        self.tier.grow(event.slots)
        if event.slots >= self.tier.capacity_blocks:
            self._is_refilling = False
        if event.slots == event.planned_slots:
            what = "tier" if self.metrics.has_host_tier else "memory for blocks on their way to the disk"
            size_gb = event.slots * event.block_bytes / 1e9
            log.info("kvbm: host %s ready: %d blocks, %.2f GB", what, event.slots, size_gb)

    def disable(self, reason: str) -> None:
        """No block is matched or stored from now on; ``reason`` is one line."""
        if self.disabled_reason is None:
            log.error("kvbm: the host tier is off, the engine serves without it: %s", reason)
        self.disabled_reason = reason

    def _acknowledge(self, rank: int, ack: JobAck) -> None:
        if ack.is_late:  # nothing is freed before the second answer, but nobody is sent there for a while
            self._note_late(rank, ack)
            return
        if self.disk is not None and self.disk.owns(ack.job_id):
            self.disk.acknowledge(rank, ack)
            return
        job = self._jobs.acknowledge(rank, ack)
        if job is None:
            return
        if job.compares:
            self._end_audit(job)
            return
        is_offload = job.direction is Direction.OFFLOAD
        is_done = self._offloading.end(job) if is_offload else self._onboarding.end(job)
        if not is_offload:
            self._on_onboard_end(job.shares[0], job.outcome)
        if is_done:
            count_transfer(self.metrics, job.direction, job.acks)
        elif job.outcome is not Outcome.OK:
            self._count_failure(job)
        for share in job.shares:
            if is_offload and is_done and self.disk is not None and share.state.is_lasting:
                self.disk.offer(share.keys)
            if is_offload and is_done and share.state.is_disowned:
                self.tier.forget(share.keys)
            self._drop_if_idle(share.state)

    def _note_late(self, rank: int, ack: JobAck) -> None:
        job = self._jobs.get(ack.job_id)
        if job is not None:
            job.late_ranks.add(rank)
            self._onboarding.stop_sharing(job)
        if self.disk is not None:
            self.disk.note_late(rank, ack.job_id)
            self.disk.judge(ack.outcome)

    def _end_audit(self, job: Job) -> None:
        (share,) = job.shares
        self._onboarding.end_audit(job)
        if job.outcome is Outcome.OK:
            self.metrics.audited_blocks("equal", job.num_blocks)
        elif job.outcome is Outcome.CORRUPT:
            self.metrics.audited_blocks("wrong", job.num_blocks)
            self._distrust(share.state.chain.root)
        else:  # cancelled, or the disk failed, or its numbers cannot be compared
            self.metrics.audited_blocks("not_compared", job.num_blocks)
            self._sampler.came_to_nothing()
            self._log.warning(
                "audit", "kvbm: an audit of %d blocks came to nothing: %s", job.num_blocks, job.outcome
            )
        self._drop_if_idle(share.state)

    def _is_distrusted(self, state: RequestState) -> bool:
        return bool(self._distrusted) and state.chain.root in self._distrusted

    def _distrust(self, root: SequenceHash) -> None:
        """Nothing of this namespace is loaded or stored any more. What is stored is forgotten, on disk for
        good: it cannot be told which of it is right.
        """
        log.error(
            "kvbm: AUDIT: blocks in the cache are not what the engine computes. Everything stored is "
            "forgotten, and requests of this namespace (model, adapter, salt) are served without the cache "
            "until the engine starts again. "
            "Report this with the model, the engine's version and its command line."
        )
        self._distrusted.add(root)
        if len(self._distrusted) > MAX_DISTRUSTED_NAMESPACES:
            self.disable(f"audits found wrong blocks in more than {MAX_DISTRUSTED_NAMESPACES} namespaces")
        self.reset()

    def _count_failure(self, job: Job) -> None:
        if job.direction is Direction.OFFLOAD and job.outcome is Outcome.REJECTED:
            # Cancelled before it began, because its device blocks were about to be overwritten.
            self.metrics.dropped(DropReason.PREEMPTED, job.num_blocks)
            return
        kind = f"{job.direction}_{job.outcome}"
        self.metrics.failure(kind)
        line = "kvbm: %s of %d blocks failed (%s); treated as a miss"
        self._log.warning(kind, line, job.direction, job.num_blocks, job.outcome)

    def _drop_if_idle(self, state: RequestState) -> None:
        is_idle = state.is_finished and not state.offload_jobs and state.onboard_job is None
        if is_idle and self._requests.get(state.request_id) is state:
            del self._requests[state.request_id]

    def check_integrity(self) -> None:
        """Raises IntegrityError unless tier, jobs and requests agree. Cost grows with all of them."""
        self.tier.check_integrity()
        self._onboarding.check_integrity()
        jobs = self._jobs.jobs()
        offloading = sum(job.num_blocks for job in jobs if job.stores)
        if self.tier.pending_blocks != offloading + self._onboarding.reserved_blocks(self._requests.values()):
            raise IntegrityError("slots are reserved for no offload in flight")
        matches = sum(1 for state in self._requests.values() if state.match is not None)
        loads = sum(1 for job in jobs if not job.stores)
        if self.disk is None and not loads <= self.tier.live_leases <= loads + matches:
            raise IntegrityError(f"{self.tier.live_leases} leases for {loads} loads and {matches} matches")
        if self.disk is not None:
            self.disk.check_integrity()
        for state in self._requests.values():
            own_jobs = {*state.offload_jobs, *filter(None, [state.onboard_job])}
            if not all(job_id in self._jobs for job_id in own_jobs) or (state.is_finished and not own_jobs):
                raise IntegrityError(
                    f"request {state.request_id} waits for jobs that are over, or for nothing"
                )
