"""The leader: decides what moves, owns all metadata and no bytes.

Lives beside the engine's scheduler and is called from its thread only. Nothing here waits: what workers say
is taken from the handshake's inbox in ``poll``. A block is in the tier once every rank has acknowledged its
transfer. The two journeys of a block are in ``offload`` and ``onboard``.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial

from kvbm_core.blocks.slot_tier import BlockTier
from kvbm_core.clock import Clock
from kvbm_core.control.desk import Desk
from kvbm_core.errors import IntegrityError, Outcome
from kvbm_core.identity.roots import RootFacts
from kvbm_core.observe.labels import DropReason, FailureKind, MissReason
from kvbm_core.observe.log import RateLimitedLogger
from kvbm_core.observe.metrics import Metrics
from kvbm_core.observe.readiness import Readiness
from kvbm_core.observe.why import Account
from kvbm_core.runtime.audit import AuditedPrefix, AuditSampler
from kvbm_core.runtime.handshake import (
    Disabled,
    Handshake,
    RankAnswer,
    RankReplaced,
    SlotsReady,
    TierOff,
    TierReach,
)
from kvbm_core.runtime.leader_options import LeaderOptions
from kvbm_core.runtime.namesakes import Namesakes
from kvbm_core.runtime.offload import Offloading, OnPartEnd
from kvbm_core.runtime.onboard import Onboarding
from kvbm_core.runtime.orders import LeaderActs, LeaderOrders
from kvbm_core.runtime.pins import LeaderPins
from kvbm_core.runtime.rank_watch import RankWatch
from kvbm_core.runtime.recorder import Recorder
from kvbm_core.runtime.request import BlockTable, RequestState, StateOnDevice, Worth
from kvbm_core.runtime.tenants import Tenant, TenantTable
from kvbm_core.runtime.transfer_jobs import JobPart, TransferJob, readers_of, writers_of
from kvbm_core.runtime.why import Asked, MissFinder, Why
from kvbm_core.storage.disk.recovery import REPORT_SLOTS
from kvbm_core.tiers.chain import TierChain
from kvbm_core.tiers.groups import GroupSpec, base_block_tokens, needed_blocks
from kvbm_core.tiers.jobs import Job, JobTable, count_transfer
from kvbm_core.tiers.lower import LowerTierMaker
from kvbm_core.tiers.pace import ComputePace
from kvbm_core.tokens.chain import TokenChain
from kvbm_core.transfer.plan import JobResult, TierOrder, TransferPlan, rejected
from kvbm_core.types import Direction, SequenceHash, Tier

log = logging.getLogger("kvbm")

TAKE_IN_BLOCKS = REPORT_SLOTS
"""Of what each worker found in a lower tier, in one step of the engine: about a millisecond of it."""
EMPTY_BLOCKS = 16
"""What a message with little in it costs, in blocks."""
MAX_DISTRUSTED_NAMESPACES = 64
GAUGES_WAIT_S = 0.2
"""How long whoever reads the metrics waits for the engine's hooks; then the gauges are those of before."""


@dataclass(frozen=True, slots=True)
class LeaderParts:
    """What a leader is connected to. ``lower``: makes the tiers below the host, in the order of the search.
    ``send`` reaches every worker that stores, and does not wait. ``desk``: where orders of
    operators wait. ``recorder``: is told of requests that have ended.

    ``on_offload_end(part, committed)`` is told of the end of each request's offload; committed: can be
    matched. ``on_onboard_end(part, outcome)`` of the end of each load, when every rank has answered.
    """

    lower: tuple[LowerTierMaker, ...] = ()
    send: Callable[[TierOrder], None] = lambda order: None
    on_offload_end: OnPartEnd = lambda part, committed: None
    on_onboard_end: Callable[[JobPart, Outcome], None] = lambda part, outcome: None
    desk: Desk = field(default_factory=Desk)
    recorder: Recorder | None = None


class Leader:
    """See the module. One thread but for what says otherwise."""

    def __init__(
        self,
        groups: tuple[GroupSpec, ...],
        host: BlockTier,
        handshake: Handshake,
        *,
        clock: Clock,
        metrics: Metrics,
        options: LeaderOptions,
        parts: LeaderParts,
    ) -> None:
        self.groups = groups
        self.metrics = metrics
        self.disabled_reason: str | None = None
        self.layout_fingerprint = ""
        self.block_bytes = 0
        self.lock = threading.RLock()
        """Held by whoever calls a leader that a second thread looks at."""
        self._handshake = handshake
        self._clock, self._jobs = clock, JobTable(handshake.world_size, clock)
        self.chain = self._chain_over(host, parts, options.lease_ttl_s)
        self._pace = ComputePace(clock)
        self._ranks = RankWatch(handshake, clock, metrics, options.job_deadline_s)
        # Whether a rank's new process is still getting the memory that its old one had.
        self._is_refilling = False
        handshake.next_job_id = lambda: self._jobs.next_id
        self._requests: dict[str, RequestState] = {}
        self._log = RateLimitedLogger(log)
        self._sampler = AuditSampler(options.audit_rate, options.audit_seed)
        self._audits, self._distrusted = list[TransferJob](), set[SequenceHash]()
        self._on_onboard_end = parts.on_onboard_end
        self._recorder = parts.recorder
        self.pins = LeaderPins(groups, self.chain, clock, has_host_tier=metrics.has_host_tier)
        self.tenants = TenantTable(self.chain, self.pins.on_root)
        self._orders = self._orders_at(parts.desk)
        self.chain.holds_back = lambda: self._orders.hold_back
        metrics.on_look, metrics.on_page = self._publish_gauges, self._publish_headless
        self._offloading = Offloading(
            groups,
            self.chain,
            self._jobs,
            self._start,
            metrics=metrics,
            on_part_end=parts.on_offload_end,
            options=options,
        )
        self._keeper = self._offloading.keeper
        if self._keeper.positions:
            self.chain.count_states({group.index for group in groups if group.is_state})
        self._why = MissFinder(groups, self.chain, self.request, metrics=metrics, clock=clock)
        self._onboarding = Onboarding(
            groups,
            self.chain,
            self._start,
            clock=clock,
            metrics=metrics,
            options=options,
            pace=self._pace,
        )

    def _orders_at(self, desk: Desk) -> LeaderOrders:
        acts = LeaderActs(
            reset=self.reset,
            has_loads=lambda: self.has_loads,
            has_loads_of=self.has_loads_of,
            block_bytes=lambda: self.block_bytes,
        )
        return LeaderOrders(
            desk, self.groups, self.chain, self.metrics, tenants=self.tenants, pins=self.pins, acts=acts
        )

    def _chain_over(self, host: BlockTier, parts: LeaderParts, lease_ttl_s: float) -> TierChain:
        return TierChain(
            host,
            parts.lower,
            self._jobs,
            send=parts.send,
            clock=self._clock,
            metrics=self.metrics,
            lease_ttl_s=lease_ttl_s,
        )

    def _start(self, direction: Direction) -> TransferJob:
        jobs = self._jobs
        job = TransferJob(
            jobs.new_id(), jobs.all_ranks(), jobs.now_s(), on_end=lambda: None, direction=direction
        )
        job.on_end, job.on_late = partial(self._ended, job), partial(self._late, job)
        return jobs.add(job)

    # ---------------------------------------------------------------- state

    @property
    def is_ready(self) -> bool:
        """Whether the tier has slots and every rank answers; else every query is a miss."""
        return (
            self.chain.host.capacity_blocks > 0
            and self.disabled_reason is None
            and not self._ranks.away
            and not self._is_refilling
            and not self._orders.hold_back
        )

    def readiness(self) -> Readiness:
        """Whether the tier is in service, or why not. Any thread."""
        if self.disabled_reason is not None:
            return Readiness(False, f"the tier is off: {self.disabled_reason}")
        away = sorted(self._ranks.away)
        if away:
            return Readiness(False, f"no answer from rank {', '.join(map(str, away))}")
        if self._orders.is_draining:
            return Readiness(False, "an operator has it drained")
        return self._handshake.readiness()

    @property
    def pending_jobs(self) -> int:
        """Transfers that were sent, and that some rank has not answered yet. Any thread."""
        with self.lock:
            return len(self._jobs.jobs(TransferJob)) - self._offloading.has_gathered

    def is_pending(self, job_id: int) -> bool:
        """Whether some rank has not answered this transfer yet."""
        return job_id in self._jobs

    def offloads(self) -> set[int]:
        """Those that some rank has not answered yet."""
        jobs = self._jobs.jobs(TransferJob)
        return {job.job_id for job in jobs if job.direction is Direction.OFFLOAD}

    @property
    def open_requests(self) -> int:
        """Requests that have not been dropped."""
        return len(self._requests)

    @property
    def loading_blocks(self) -> int:
        """Blocks of the tier that are being brought up."""
        return self._onboarding.loading_blocks

    @property
    def stale_results_total(self) -> int:
        """Answers to jobs that were over, or that had been answered by that rank before."""
        return self._jobs.stale_results_total

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
        facts: RootFacts | None = None,
        tenant: Tenant | None = None,
    ) -> RequestState:
        """Starts to follow a request. ``extra_of_block(i)`` is what block i depends on besides its tokens.
        Blocks of a request that is not ``is_lasting`` mean nothing in another process: they stay in host
        memory. ``facts``: what ``root`` was made of, for who asks why a request missed. ``tenant``: whose it
        is; None: nobody knows.

        One that was opened under the same id before is let go; what still moves for it ends by itself.
        """
        old = self._requests.get(request_id)
        if old is not None:
            self._onboarding.let_go(old)
            self._give_up_audit(old)
        chain = TokenChain(root, base_block_tokens(self.groups), extra_of_block)
        worth = Worth.LASTING if is_lasting else Worth.LOCAL
        state = RequestState(request_id, chain, self.groups, worth, facts=facts)
        if tenant is not None:
            state.tenant = self.tenants.number(tenant, root)
        if self._recorder is not None:
            state.came_s = self._clock.now_s()
        if old is not None:
            state.account, state.span = old.account, old.span
        self._requests[request_id] = state
        return state

    # ---------------------------------------------------------------- the two journeys

    def match(
        self, state: RequestState, tokens: Sequence[int], computed_tokens: int, limit_tokens: int
    ) -> int | None:
        """How many tokens beyond ``computed_tokens`` can be brought up; the blocks found are leased.

        None: another request is loading this prefix right now, ask again. May be called any number of times.
        """
        if state.next_full_tokens:  # it has run, and was preempted
            self._count_use(state)
        state.restart_offload()
        state.hit_tokens = computed_tokens
        if self._recorder is not None and not state.prompt_tokens:
            state.prompt_tokens = limit_tokens + 1
        if state.span is None and self.metrics.traces is not None:
            state.span = self.metrics.traces.begin(state.request_id, state.trace_headers)
        allowed_tokens = limit_tokens
        if state.limits.load is not None:
            allowed_tokens = min(limit_tokens, computed_tokens + state.limits.load)
        asked = Asked(tokens, computed_tokens, limit_tokens, allowed_tokens)
        why = self._why_unasked(state)
        if why is not None:
            self._onboarding.let_go(state)
            self._answer(state, asked, 0, why)
            return 0
        self._why.began(state, tokens)
        if self.chain.is_asked:  # only for who may wait for a store
            state.seeker.token_s = self._pace.token_s
        matched = self._onboarding.match(state, tokens, computed_tokens, allowed_tokens)
        if matched and self._sampler.draws():  # computed again instead of loaded, then compared
            state.audited = AuditedPrefix(computed_tokens, computed_tokens + matched)
            self._onboarding.let_go(state)
            self._answer(state, asked, 0, (MissReason.AUDITED, "a hit, computed again to be compared"))
            return 0
        if matched is not None:
            self._answer(state, asked, matched, None)
        return matched

    def compare_with(self, namesakes: Namesakes) -> None:
        """What a miss under another configuration is told from."""
        self._why.namesakes = namesakes

    def _why_unasked(self, state: RequestState) -> Why | None:
        """Why the request is not looked up."""
        if not self.is_ready:
            return MissReason.NOT_READY, self.readiness().reason or "its memory is not ready, or being reset"
        if state.is_retired:
            return MissReason.CHANGED, "weights or its adapter have changed while it ran"
        if state.audited is not None:
            return MissReason.AUDITED, "a hit, computed again to be compared"
        if self._is_distrusted(state):
            return MissReason.FAILED, "an audit has found wrong blocks in this namespace"
        if self._orders.holds_back(state.tenant):
            return MissReason.NOT_READY, "its salt, adapter or prompt is being cleared"
        return None

    def _answer(self, state: RequestState, asked: Asked, matched: int, why: Why | None) -> None:
        if state.account is None:  # else it was asked for before, and there was no room for it
            self._why.answered(state, asked, matched, why)

    def pass_by(
        self,
        request_id: str,
        num_tokens: int,
        device_tokens: int,
        reason: MissReason,
        text: str = "",
        *,
        trace_headers: Mapping[str, str] | None = None,
    ) -> None:
        """A request of ``num_tokens`` that the tiers are not asked for, once: for who asks why."""
        if reason is MissReason.NOT_READY and not text:
            text = self.readiness().reason
        account = self._why.passed_by(request_id, num_tokens, device_tokens, reason, text)
        self._count_misses(account)
        traces = self.metrics.traces
        if traces is not None:
            traces.end(traces.begin(request_id, trace_headers), account)

    def _count_misses(self, account: Account | None) -> None:
        if account is not None and account.reason is not None:
            self.metrics.missed(account.reason, account.missed_tokens)

    def onboard(
        self, state: RequestState, num_tokens: int, tables: Sequence[BlockTable]
    ) -> TransferPlan | None:
        """Loads the matched prefix into the device blocks of ``tables``.

        None if the promise cannot be kept (no such match, lease expired, or the engine wants a block that was
        not matched): then nothing is loaded and the caller reports the load as failed.
        """
        plan = self._onboarding.onboard(state, num_tokens, tables)
        if plan is None and state.account is not None:
            state.account.failed(num_tokens, "what was found was gone before its load began")
        return plan

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
        if stored_tokens - computed_tokens > 1:  # one token is of an answer, and says nothing of prompts
            self._pace.computes(stored_tokens - computed_tokens)
        is_off = not self.is_ready or state.is_retired or self._is_distrusted(state)
        if stored_tokens < state.next_full_tokens or is_off:
            return None
        if state.audited is not None:
            if stored_tokens < state.audited.end_tokens:
                return None  # or what is to be compared would be stored anew in between
            self._gather_audit(state, state.audited, tables)
        return self._offloading.offload(state, tokens, computed_tokens, stored_tokens, tables)

    def offload_states(
        self,
        state: RequestState,
        tokens: Sequence[int],
        states: Sequence[StateOnDevice],
        num_prompt_tokens: int,
    ) -> int | None:
        """Writes through ``states``, which are complete after this step. Their blocks must stay as they are
        until the job is over. Those that are not where a hit may end are left out, and of those inside the
        prompt, of ``num_prompt_tokens``, the ones that are too near to each other.

        Answers as ``offload`` does. To be called behind it in a step.
        """
        is_off = not self.is_ready or state.is_retired or self._is_distrusted(state)
        if is_off or state.audited is not None:
            return None
        return self._offloading.offload_states(state, tokens, states, num_prompt_tokens)

    def take_offloads(self) -> TransferJob | None:
        """All that ``offload`` has gathered, of all requests, as one job; to be sent before its blocks are
        reused. Ends the plan of a step.
        """
        self._pace.planned()
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

    def take_audits(self) -> list[TransferJob]:
        """Comparisons of what this step computes with what is stored; to be sent with its offloads."""
        audits, self._audits = self._audits, []
        return audits

    def abandon(self, job_id: int) -> None:
        """A plan that was made and never sent: its job ends as if every rank had refused it."""
        for rank in self._jobs.all_ranks():
            self._jobs.acknowledge(rank, rejected(job_id, "never sent"))

    def readers_of(self, device_blocks: list[int]) -> set[int]:
        """Offloads that still read any of these device blocks, which are about to be overwritten."""
        return readers_of(self._jobs, device_blocks)

    def writers_of(self, device_blocks: Mapping[int, Collection[int]]) -> set[int]:
        """Onboards that still write any of these device blocks (by group), which the engine gave to somebody
        else.
        """
        return writers_of(self._jobs, device_blocks)

    # ---------------------------------------------------------------- ends

    def finish(self, state: RequestState) -> tuple[int, ...]:
        """The engine is done with the request; returns the offloads that still read its device blocks."""
        self._onboarding.let_go(state)
        state.is_finished = True
        self._give_up_audit(state)
        if not state.offload_jobs:  # else the end of the last of them does it
            self.chain.host.touch(self._keeper.used_keys(state))
        host, disk, stores = state.hit_blocks
        self.metrics.request_hits(host, disk, state.queried_blocks, stores)
        if self._recorder is not None and state.chain.hashes:
            self._recorder.ended(state.came_s, state.prompt_tokens, state.chain.hashes)
        self._count_misses(state.account)
        if state.span is not None and self.metrics.traces is not None:
            self.metrics.traces.end(state.span, state.account)
        self._drop_if_idle(state)
        return tuple(sorted(state.offload_jobs))

    def retire(self, state: RequestState) -> None:
        """Weights or an adapter have changed under the request: what it computes from now on, from what it
        has, belongs under no key. Nothing of it is matched or stored any more; until it begins anew, with
        ``open``.
        """
        self._onboarding.let_go(state)
        self._give_up_audit(state)
        if state.worth is not Worth.DISOWNED:
            state.worth = Worth.RETIRED

    def confirm(self, state: RequestState) -> None:
        """Of a request that was opened as not lasting: its keys mean the same in other processes too."""
        state.worth, hit_tokens = Worth.LASTING, state.hit_tokens
        self._count_use(state)
        states = self._keeper.runs_at(state, self._keeper.lasting_ends(state))
        self.chain.offer([*state.runs_from(hit_tokens), *states])

    def _count_use(self, state: RequestState) -> None:
        """What it began with was used, wherever that lay: on the device, in the host or below. Before what it
        has computed is offered, as that is of no use alone.
        """
        hit_tokens = state.hit_tokens
        if hit_tokens and state.worth is Worth.LASTING and self.chain.lower:
            state.hit_tokens = 0
            self.chain.used(state.runs(needed_blocks(group, 0, hit_tokens) for group in self.groups))

    def disown(self, state: RequestState) -> None:
        """The opposite: nobody knows what its keys mean. Those that were stored are forgotten."""
        self.retire(state)
        state.worth = Worth.DISOWNED
        self.chain.forget(state.chain_keys())

    def new_generation(self, *, keeps_host: bool) -> None:
        """The weights are others from now on: all open requests are retired, and the host tier, whose blocks
        nobody will ask for, is free. Lower tiers keep theirs: they are right for who has those weights.
        ``keeps_host``: the weights may also be the same, and its blocks are found again then.
        """
        for state in self._requests.values():
            self.retire(state)
        self._offloading.forget_gathered()
        if not keeps_host:
            self.chain.host.reset()

    def forget_names(self, *, of_open: bool = True) -> None:
        """What requests have computed so far, and what is on its way, is not what its names say any more: no
        event tells of it. ``of_open``: of requests that have not ended too.
        """
        parts = (part.state for job in self._jobs.jobs(TransferJob) for part in job.parts)
        for state in (*self._requests.values(), *parts):
            if of_open or state.is_finished:
                state.names_of = None

    def reset(self, tiers: Container[Tier] = frozenset(Tier)) -> None:
        """Forgets every block of these tiers; what is on its way there will not be committed."""
        self._let_all_go()
        self.chain.reset(tiers)

    @property
    def has_loads(self) -> bool:
        """Whether something is being loaded, or compared, or is promised to a request."""
        states = self._requests.values()
        is_promised = any(s.match is not None and self.chain.is_good(s.match.held) for s in states)
        return is_promised or bool(self._onboarding.held())

    def has_loads_of(self, tenants: Collection[int]) -> bool:
        """As ``has_loads``, for requests of these."""
        for state in self._requests.values():
            if state.tenant in tenants:
                if state.onboard_job is not None:
                    return True
                if state.match is not None and self.chain.is_good(state.match.held):
                    return True
        return False

    def _let_all_go(self) -> None:
        for state in self._requests.values():
            self._onboarding.let_go(state)
        self._offloading.forget_gathered()

    # ---------------------------------------------------------------- what workers said

    def acknowledge(self, rank: int, results: Iterable[JobResult]) -> None:
        """What rank ``rank`` said, when the engine carries it here; else it comes with ``poll``. What stands
        behind an answer that a bug meets is taken in with ``poll`` too.
        """
        self._ranks.heard(rank)
        self._handshake.inbox.extend(RankAnswer(rank, result) for result in results)
        self._take_in_inbox()

    @property
    def has_news(self) -> bool:
        """Whether workers or an operator have said something that ``poll`` has not taken. Any thread."""
        return bool(self._handshake.inbox) or bool(self._handshake.found) or self._orders.has_any

    def poll(self) -> None:
        """Takes what has arrived since the last call. Waits for nothing but ``lock``; any thread."""
        with self.lock:
            self._poll()

    def _poll(self) -> None:
        if self.has_news:
            self._take_in_news()
        if self.chain.live_leases:  # not in most steps
            self._mind_leases()
        if self._ranks.is_due():
            self._mind_ranks()
        if self._orders.has_any:
            self._orders.mind()
        if self.pins.is_due:
            self.pins.mind()

    def _take_in_news(self) -> None:
        self._take_in_inbox()
        self._take_in_found(TAKE_IN_BLOCKS)

    def _take_in_inbox(self) -> None:
        inbox = self._handshake.inbox
        while inbox:
            event = inbox.popleft()
            if isinstance(event, RankAnswer):
                self._jobs.acknowledge(event.rank, event.result)
            elif isinstance(event, SlotsReady):
                self._on_slots(event)
            elif isinstance(event, RankReplaced):
                self._on_replaced(event)
            elif isinstance(event, Disabled):
                self.disable(event.reason)
                self.metrics.failure(FailureKind.HANDSHAKE)
            elif isinstance(event, TierReach):
                self.chain.direct(event.tier, event.is_direct)
            else:
                self._on_tier_off(event)

    def _on_tier_off(self, event: TierOff) -> None:
        tier = self.chain.named(event.tier)
        if tier is not None:
            tier.turn_off(event.reason)

    def _mind_ranks(self) -> None:
        jobs = self._sent_jobs()
        self._ranks.look(jobs)
        held = sum(job.num_blocks for job in jobs if job.waiting_ranks & self._ranks.away)
        self.metrics.set_silent_ranks(len(self._ranks.away), held)

    def _sent_jobs(self) -> list[Job]:
        return [job for job in self._jobs.jobs(Job) if not self._offloading.is_gathering(job)]

    def _on_replaced(self, event: RankReplaced) -> None:
        """The bytes of one rank are gone, and with them every block; what it was told died with it."""
        self._is_refilling = True
        self._let_all_go()
        self.chain.host.reset()
        for job in self._sent_jobs():
            if job.job_id < event.first_job_id and event.rank in job.waiting_ranks:
                gone = rejected(job.job_id, "its process is gone", Outcome.IO_ERROR)
                self._jobs.acknowledge(event.rank, gone)

    def _mind_leases(self) -> None:
        expired = self.chain.mind(self._onboarding.held())
        if expired:
            self.metrics.failure(FailureKind.LEASE_EXPIRED, expired)

    def catch_up(self) -> None:
        """As ``poll``, with everything that has been found in lower tiers so far; at start, when nobody waits
        for a step.
        """
        with self.lock:
            self._take_in_found(float("inf"))
            self._poll()

    def _take_in_found(self, most_blocks: float) -> None:
        """At least one of the workers' messages, if there is one; ``most_blocks`` of each worker."""
        found, storing = self._handshake.found, self._handshake.storing_ranks
        num_taken, num_free = 0, most_blocks * len(storing)
        while found and num_taken < num_free:
            chunk = found.popleft()
            tier = self.chain.named(chunk.tier)
            if tier is not None:
                tier.expect(self._handshake.places_of(chunk.tier), storing)
                tier.take_in(chunk.rank, chunk.end, chunk.found)
            num_taken += max(EMPTY_BLOCKS, len(chunk.found))

    def _publish_gauges(self) -> None:
        """How full the tiers are, what is pinned, what is under way: now. Any thread."""
        if not self.lock.acquire(timeout=GAUGES_WAIT_S):
            return
        try:
            self.chain.publish_usage()
            self.metrics.set_pending_jobs(self.pending_jobs)
            self.metrics.set_live_leases(self.chain.host.live_leases)
            self.metrics.set_ordered(len(self.pins), self.chain.host.kept_blocks, self.tenants.num_quotas)
        finally:
            self.lock.release()

    def _publish_headless(self) -> None:
        """What of the disk is of no use. Any thread; the engine waits for copies alone."""
        if not self.lock.acquire(timeout=GAUGES_WAIT_S):
            return
        try:
            found = self.chain.chains()
        finally:
            self.lock.release()
        for tier, chains in found:
            self.metrics.headless_blocks(tier, chains.num_headless)

    def _on_slots(self, event: SlotsReady) -> None:
        host = self.chain.host
        is_first = not host.capacity_blocks and event.slots > 0
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
        for tier in self.chain.lower:
            storing = self._handshake.storing_ranks
            tier.expect(0, storing, event.head_shard_bytes or event.block_bytes // len(storing))
        host.grow(event.slots)
        if event.slots >= host.capacity_blocks:
            self._is_refilling = False
        what = "tier" if self.metrics.has_host_tier else "memory for blocks on their way to the disk"
        if is_first and event.slots < event.planned_slots:
            line = "kvbm: host %s: %d of %d blocks can be used, the others are being made ready"
            log.info(line, what, event.slots, event.planned_slots)
        if event.slots == event.planned_slots:
            size_gb = event.slots * event.block_bytes / 1e9
            log.info("kvbm: host %s ready: %d blocks, %.2f GB", what, event.slots, size_gb)
            if event.head_shard_bytes and self.chain.is_asked:
                line = "kvbm: shared blocks are kept by heads (parts of %.3g MB)"
                log.info(line, event.head_shard_bytes / 1e6)

    def disable(self, reason: str) -> None:
        """No block is matched or stored from now on; ``reason`` is one line."""
        if self.disabled_reason is None:
            log.error("kvbm: the host tier is off, the engine serves without it: %s", reason)
        self.disabled_reason = reason

    def _ended(self, job: TransferJob) -> None:
        if job.compares:
            self._end_audit(job)
            return
        is_offload = job.direction is Direction.OFFLOAD
        is_done = self._offloading.end(job) if is_offload else self._onboarding.end(job)
        if not is_offload:
            part = job.parts[0]
            if not is_done and part.state.account is not None:
                part.state.account.failed(part.num_tokens, f"its load failed: {job.outcome}")
            self._on_onboard_end(part, job.outcome)
        if is_done:
            self._count_done(job)
        elif job.outcome is not Outcome.OK:
            self._count_failure(job)
        for part in job.parts:
            if is_offload and is_done and part.state.worth is Worth.DISOWNED:
                self.chain.forget(part.keys)
        for part in job.parts:
            if is_done:
                self.chain.tell(part.runs)
            if is_offload and is_done and part.state.worth is Worth.LASTING:
                if part.state.next_full_tokens:  # else it waits to run again
                    self._count_use(part.state)
                self.chain.offer(self._keeper.offered(part.state, part.runs))
            self._drop_if_idle(part.state)

    def _count_done(self, job: TransferJob) -> None:
        traces = self.metrics.traces
        spans = [part.state.span for part in job.parts] if traces is not None else ()
        with nullcontext() if traces is None else traces.around(spans):
            count_transfer(self.metrics, job.direction, job.results, self.chain.tier_of)

    def _late(self, job: TransferJob, result: JobResult) -> None:
        """Nothing is freed before the answer that counts, but nobody waits for it any more."""
        self._onboarding.late(job, result.outcome)

    def _end_audit(self, job: TransferJob) -> None:
        (part,) = job.parts
        self._onboarding.end_audit(job)
        if job.outcome is Outcome.OK:
            self.metrics.audited_blocks("equal", job.num_blocks)
            self._count_use(part.state)
            if part.state.worth is Worth.LASTING:
                self.chain.used(part.runs)
        elif job.found_wrong:
            self.metrics.audited_blocks("wrong", job.num_blocks)
            self._distrust(part.state.chain.root)
        else:  # cancelled, or the disk failed, or its numbers cannot be compared
            self.metrics.audited_blocks("not_compared", job.num_blocks)
            self._sampler.came_to_nothing()
            self._log.warning(
                "audit", "kvbm: an audit of %d blocks came to nothing: %s", job.num_blocks, job.outcome
            )
        self._drop_if_idle(part.state)

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

    def _count_failure(self, job: TransferJob) -> None:
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
            if state.worth is not Worth.LASTING:
                return
            self._count_use(state)
            if state.marks.spare_tokens and self.chain.lower:
                self.chain.offer(self._keeper.rest(state))
            if self.chain.keeps_extents:
                self.chain.ended(state.considered_runs())

    def check_integrity(self) -> None:
        """Raises IntegrityError unless tier, jobs and requests agree. Cost grows with all of them."""
        host = self.chain.host
        self.chain.check_integrity()
        self._onboarding.check_integrity()
        jobs = self._jobs.jobs(TransferJob)
        offloading = sum(job.num_blocks for job in jobs if job.stores)
        reserved = self._onboarding.reserved_blocks(self._requests.values())
        if host.pending_blocks != offloading + self.chain.fetching_blocks + reserved:
            raise IntegrityError("slots are reserved for no offload in flight")
        matches = sum(1 for state in self._requests.values() if state.match is not None)
        loads = sum(1 for job in jobs if not job.stores)
        if not self.chain.lower and not loads <= host.live_leases <= loads + matches:
            raise IntegrityError(f"{host.live_leases} leases for {loads} loads and {matches} matches")
        for state in self._requests.values():
            own_jobs = {*state.offload_jobs, *filter(None, [state.onboard_job])}
            if not all(job_id in self._jobs for job_id in own_jobs) or (state.is_finished and not own_jobs):
                raise IntegrityError(
                    f"request {state.request_id} waits for jobs that are over, or for nothing"
                )
