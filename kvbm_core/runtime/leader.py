"""The leader: decides what moves, owns all metadata and no bytes.

Lives beside the engine's scheduler and is called from its thread only. Nothing here waits: what workers say is taken
from the handshake's inbox in ``poll``. A block is in the tier once every rank has acknowledged its transfer.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvbm_core.blocks.lease import Lease
from kvbm_core.clock import Clock
from kvbm_core.errors import Outcome
from kvbm_core.observe.labels import DropReason, FailureKind
from kvbm_core.observe.metrics import Metrics
from kvbm_core.runtime.handshake import Disabled, Handshake, RankAck, SlotsReady
from kvbm_core.runtime.jobs import Job, JobBook
from kvbm_core.runtime.messages import JobAck
from kvbm_core.runtime.request import Match, RequestState
from kvbm_core.tiers.groups import GroupSpec, alignment_tokens, base_block_tokens, longest_prefix_tokens, needed_blocks
from kvbm_core.tiers.tier import BlockTier
from kvbm_core.tokens.chain import TokenChain
from kvbm_core.transfer.plan import GroupMove, TransferPlan
from kvbm_core.types import BlockKey, Direction, SequenceHash, Tier

log = logging.getLogger("kvbm")

BlockTable = Sequence[int]
"""Device block ids of one request in one group, by block index; NULL_BLOCK where the engine keeps nothing."""
NULL_BLOCK = 0


@dataclass(frozen=True, slots=True)
class LeaderOptions:
    """Times in seconds. ``share_loads``: a prefix being loaded is waited for (the engine will share its device blocks)."""

    lease_ttl_s: float = 30.0
    share_wait_s: float = 1.0
    share_loads: bool = True


class Leader:
    """``on_offload_end(job, state, committed)`` is called when an offload is over; committed: its blocks can be matched."""

    def __init__(
        self,
        groups: tuple[GroupSpec, ...],
        tier: BlockTier,
        handshake: Handshake,
        world_size: int,
        clock: Clock,
        metrics: Metrics,
        options: LeaderOptions,
        on_offload_end: Callable[[Job, RequestState | None, bool], None] | None = None,
    ) -> None:
        self.groups = groups
        self.tier = tier
        self.metrics = metrics
        self.disabled_reason: str | None = None
        self.layout_fingerprint = ""
        self._handshake = handshake
        self._jobs = JobBook(world_size)
        self._clock = clock
        self._options = options
        self._on_offload_end = on_offload_end or (lambda job, state, committed: None)
        self._requests: dict[str, RequestState] = {}
        self._loading: dict[BlockKey, int] = {}
        self._align = alignment_tokens(groups)
        self._evicted_seen = 0

    # ---------------------------------------------------------------- state

    @property
    def is_ready(self) -> bool:
        """Whether the tier has slots; until then every query is a miss."""
        return self.tier.capacity_blocks > 0 and self.disabled_reason is None

    @property
    def pending_jobs(self) -> int:
        """Transfers that some rank has not answered yet."""
        return len(self._jobs)

    @property
    def open_requests(self) -> int:
        """Requests that have not been dropped."""
        return len(self._requests)

    def request(self, request_id: str) -> RequestState | None:
        """The state of a request opened before."""
        return self._requests.get(request_id)

    def open(self, request_id: str, root: SequenceHash, extra_of_block: Callable[[int], bytes] | None) -> RequestState:
        """Starts to follow a request. ``extra_of_block(i)`` is what block i depends on besides its tokens."""
        chain = TokenChain(root, base_block_tokens(self.groups), extra_of_block)
        state = RequestState(request_id, chain, self.groups)
        self._requests[request_id] = state
        return state

    # ---------------------------------------------------------------- onboard

    def match(self, state: RequestState, tokens: Sequence[int], computed_tokens: int, limit_tokens: int) -> int | None:
        """How many tokens beyond ``computed_tokens`` can be brought up; the blocks found are leased.

        None: another request is loading this prefix right now, ask again. May be called any number of times.
        """
        self._release_match(state)
        state.next_offload = [0] * len(self.groups)
        if computed_tokens % self._align or limit_tokens - computed_tokens < self._align or not self.is_ready:
            return 0
        state.chain.extend(tokens)
        prefix_tokens = longest_prefix_tokens(
            self.groups, state.keys, computed_tokens, limit_tokens, self.tier.match_prefix, self.tier.contains
        )
        if state.onboard_job is None:
            state.queried_blocks = (limit_tokens - computed_tokens) // self._align
        if prefix_tokens <= computed_tokens:
            return 0
        if self._should_wait(state, computed_tokens):
            return None
        state.deferred_since_s = None
        blocks = tuple(needed_blocks(group, computed_tokens, prefix_tokens) for group in self.groups)
        keys = [key for g, span in enumerate(blocks) for key in state.keys(g)[span.start : span.stop]]
        lease = self.tier.lease(state.request_id, keys, self._options.lease_ttl_s)
        if lease is None:
            return 0
        state.match = Match(computed_tokens, prefix_tokens, blocks, lease)
        return prefix_tokens - computed_tokens

    def onboard(self, state: RequestState, num_tokens: int, tables: Sequence[BlockTable]) -> TransferPlan | None:
        """Loads the matched prefix into the device blocks of ``tables``.

        None if the promise cannot be kept (no such match, lease expired, or the engine wants a block that was not
        matched): then nothing is loaded and the caller reports the load as failed.
        """
        match, state.match = state.match, None
        if match is None:
            return None
        moves = self._moves_of(match, num_tokens, tables)
        lease = self.tier.renew(match.lease, self._options.lease_ttl_s) if moves else None
        if moves is None or lease is None:
            self.tier.release(match.lease)
            return None
        job = self._start_job(state, Direction.ONBOARD, lease.keys, moves)
        job.lease = lease
        state.onboard_job = job.job_id
        for key in lease.keys:
            self._loading[key] = self._loading.get(key, 0) + 1
        state.host_hit_blocks = num_tokens // self._align
        self.metrics.matched_tokens(num_tokens)
        return TransferPlan(job.job_id, Direction.ONBOARD, moves)

    def decline(self, state: RequestState) -> None:
        """The engine does not take what was matched: the blocks are let go."""
        self._release_match(state)

    def abandon(self, job_id: int) -> None:
        """A plan that was made and never sent: its job ends as if every rank had refused it."""
        for rank in self._jobs.ranks():
            job = self._jobs.acknowledge(rank, JobAck(job_id, Outcome.REJECTED, 0, 0.0, 0.0))
            if job is not None:
                self._end_job(job)

    def _moves_of(self, match: Match, num_tokens: int, tables: Sequence[BlockTable]) -> tuple[GroupMove, ...] | None:
        if num_tokens != match.prefix_tokens - match.computed_tokens:
            return None
        slots = iter(match.lease.slots)
        moves = []
        for group, table, span in zip(self.groups, tables, match.blocks, strict=True):
            slot_of = {block: next(slots) for block in span}
            first = match.computed_tokens // group.block_size_tokens
            wanted = range(first, match.prefix_tokens // group.block_size_tokens)
            if len(table) < wanted.stop:
                return None
            targets = [block for block in wanted if table[block] != NULL_BLOCK]
            if any(block not in slot_of for block in targets):
                return None
            device = tuple(table[block] for block in targets)
            moves.append(GroupMove(group.index, device, tuple(slot_of[block] for block in targets)))
        return tuple(move for move in moves if move.slots)

    def _should_wait(self, state: RequestState, computed_tokens: int) -> bool:
        if not self._options.share_loads or not self._loading:
            return False
        first_block = computed_tokens // self.groups[0].block_size_tokens
        if not any(state.keys(g)[first_block : first_block + 1][0] in self._loading for g in range(len(self.groups))):
            return False
        now_s = self._clock.now_s()
        if state.deferred_since_s is None:
            state.deferred_since_s = now_s
        return now_s - state.deferred_since_s < self._options.share_wait_s

    # ---------------------------------------------------------------- offload

    def offload(
        self,
        state: RequestState,
        tokens: Sequence[int],
        computed_tokens: int,
        stored_tokens: int,
        tables: Sequence[BlockTable],
    ) -> TransferPlan | None:
        """Writes through the full blocks up to ``stored_tokens`` that no copy below the device exists of.

        ``computed_tokens``: position before this step; windowed groups may already have given up blocks before it.
        """
        if not self.is_ready:
            return None
        state.chain.extend(tokens, stored_tokens)
        wanted: list[tuple[BlockKey, int, int]] = []
        for g, group in enumerate(self.groups):
            keys = state.keys(g)
            end = min(stored_tokens // group.block_size_tokens, len(tables[g]), len(keys))
            start = max(state.next_offload[g], group.first_needed_block(computed_tokens))
            wanted += [(keys[i], g, tables[g][i]) for i in range(start, end) if tables[g][i] != NULL_BLOCK]
            state.next_offload[g] = max(state.next_offload[g], end)
        if not wanted:
            return None
        return self._plan_offload(state, wanted, is_prefill=len(wanted) > len(self.groups))

    def _plan_offload(
        self, state: RequestState, wanted: list[tuple[BlockKey, int, int]], *, is_prefill: bool
    ) -> TransferPlan | None:
        own_chain = state.keys
        reservation = self.tier.reserve(
            [key for key, _, _ in wanted],
            lambda: {key for g in range(len(self.groups)) for key in own_chain(g)},
        )
        self._count_evictions()
        absent = self.tier.absent_of([key for key, _, _ in wanted])
        if absent:
            self.metrics.dropped(DropReason.NO_SPACE, absent)
        if not reservation.keys:
            return None
        slot_of = dict(zip(reservation.keys, reservation.slots, strict=True))
        per_group: dict[int, tuple[list[int], list[int]]] = {}
        for key, g, device_block in wanted:
            slot = slot_of.pop(key, None)
            if slot is not None:
                device, slots = per_group.setdefault(g, ([], []))
                device.append(device_block)
                slots.append(slot)
        moves = tuple(GroupMove(self.groups[g].index, tuple(d), tuple(s)) for g, (d, s) in sorted(per_group.items()))
        job = self._start_job(state, Direction.OFFLOAD, reservation.keys, moves)
        job.reservation = reservation
        job.is_prefill = is_prefill
        state.offload_jobs.add(job.job_id)
        return TransferPlan(job.job_id, Direction.OFFLOAD, moves)

    # ---------------------------------------------------------------- end of a request

    def finish(self, state: RequestState) -> tuple[int, ...]:
        """The engine is done with the request; returns the offloads that still read its device blocks."""
        self._release_match(state)
        state.is_finished = True
        for g in range(len(self.groups)):
            self.tier.touch(state.keys(g))
        self.metrics.request_hits(state.host_hit_blocks, 0, state.queried_blocks)
        self._drop_if_idle(state)
        return tuple(sorted(state.offload_jobs))

    def readers_of(self, device_blocks: list[int]) -> set[int]:
        """Offloads that still read any of these device blocks, which are about to be overwritten."""
        return self._jobs.readers_of(device_blocks)

    def reset(self) -> None:
        """Forgets every block of the tier; what is on its way will not be committed."""
        for state in self._requests.values():
            self._release_match(state)
        self.tier.reset()

    # ---------------------------------------------------------------- what workers said

    def poll(self) -> None:
        """Takes what has arrived since the last call. Never waits."""
        inbox = self._handshake.inbox
        has_news = bool(inbox)
        while inbox:
            event = inbox.popleft()
            if isinstance(event, RankAck):
                job = self._jobs.acknowledge(event.rank, event.ack)
                if job is not None:
                    self._end_job(job)
            elif isinstance(event, SlotsReady):
                self._on_slots(event)
            elif isinstance(event, Disabled):
                self._disable(event.reason)
        self._renew_leases()
        expired = self.tier.expire_leases()
        if expired:
            self.metrics.failure(FailureKind.LEASE_EXPIRED, expired)
        if has_news:
            self.publish_gauges()

    def publish_gauges(self) -> None:
        """How full the tier is, what is pinned, what is under way: now."""
        self.metrics.tier_usage(Tier.HOST, self.tier.resident_blocks, self.tier.capacity_blocks)
        self.metrics.set_pending_jobs(len(self._jobs))
        self.metrics.set_live_leases(self.tier.live_leases)

    def _on_slots(self, event: SlotsReady) -> None:
        if not self.tier.capacity_blocks and event.planned_slots < event.num_device_blocks:
            log.warning(
                "kvbm: the host tier (%d blocks, %.2f GB) is smaller than the device tier (%d blocks, %.2f GB) and will "
                "churn; raise DYN_KVBM_CPU_CACHE_GB",
                event.planned_slots,
                event.planned_slots * event.block_bytes / 1e9,
                event.num_device_blocks,
                event.num_device_blocks * event.block_bytes / 1e9,
            )
        self.layout_fingerprint = event.fingerprint
        self.tier.grow(event.slots)
        if event.slots == event.planned_slots:
            log.info("kvbm: host tier ready: %d blocks, %.2f GB", event.slots, event.slots * event.block_bytes / 1e9)

    def _disable(self, reason: str) -> None:
        if self.disabled_reason is None:
            log.error("kvbm: the host tier is off, the engine serves without it: %s", reason)
        self.disabled_reason = reason
        self.metrics.failure(FailureKind.HANDSHAKE)

    def _start_job(
        self, state: RequestState, direction: Direction, keys: tuple[BlockKey, ...], moves: tuple[GroupMove, ...]
    ) -> Job:
        device_blocks = tuple(block for move in moves for block in move.device_blocks)
        job = Job(
            self._jobs.new_id(), state.request_id, direction, keys, device_blocks, self._jobs.ranks(), self._clock.now_s()
        )
        self._jobs.add(job)
        return job

    def _end_job(self, job: Job) -> None:
        state = self._requests.get(job.request_id)
        if job.direction is Direction.OFFLOAD:
            self._end_offload(job, state)
        else:
            self._end_onboard(job, state)
        if state is not None:
            self._drop_if_idle(state)

    def _end_offload(self, job: Job, state: RequestState | None) -> None:
        assert job.reservation is not None
        committed = False
        if job.outcome is not Outcome.OK:
            self.tier.abort(job.reservation)
            self._count_failure(job)
        elif self.tier.commit(job.reservation):
            committed = True
            self.metrics.offloaded_blocks(len(job.keys), Tier.DEVICE, Tier.HOST)
            self._count_transfer(job)
            if state is not None and job.is_prefill:
                for g in range(len(self.groups)):
                    self.tier.touch(state.keys(g))
        else:
            self.metrics.dropped(DropReason.RESET, len(job.keys))
        if state is not None:
            state.offload_jobs.discard(job.job_id)
        self._on_offload_end(job, state, committed)

    def _end_onboard(self, job: Job, state: RequestState | None) -> None:
        assert job.lease is not None
        for key in job.keys:
            left = self._loading[key] - 1
            if left:
                self._loading[key] = left
            else:
                del self._loading[key]
        if job.outcome is Outcome.OK:
            self.metrics.onboarded_blocks(len(job.device_blocks), Tier.HOST, Tier.DEVICE)
            self._count_transfer(job)
        else:
            # Never offered again: the engine recomputes, and the block is written anew.
            self.tier.forget(job.keys)
            self._count_failure(job)
        self.tier.release(job.lease)
        if state is not None:
            state.onboard_job = None

    def _count_transfer(self, job: Job) -> None:
        self.metrics.bytes_moved(job.direction, sum(ack.num_bytes for ack in job.acks))
        self.metrics.transfer_seconds(job.direction, max(ack.seconds + ack.queued_s for ack in job.acks))

    def _count_failure(self, job: Job) -> None:
        if job.outcome is Outcome.REJECTED:
            # Cancelled before it began, because its device blocks were about to be overwritten.
            self.metrics.dropped(DropReason.PREEMPTED, len(job.keys))
        else:
            self.metrics.failure(f"{job.direction}_{job.outcome}")
            log.warning("kvbm: %s of %d blocks failed (%s); treated as a miss", job.direction, len(job.keys), job.outcome)

    def _count_evictions(self) -> None:
        evicted = self.tier.evicted_blocks_total - self._evicted_seen
        if evicted:
            self._evicted_seen += evicted
            self.metrics.evicted(Tier.HOST, evicted)

    # ---------------------------------------------------------------- leases

    def _renew_leases(self) -> None:
        # A slot is not reused while a worker may still read it: leases of loads in flight are renewed, not outlived.
        half_s = self._options.lease_ttl_s / 2
        for job in self._jobs.jobs():
            if job.lease is not None and job.lease.expires_at_s - self._clock.now_s() < half_s:
                renewed: Lease | None = self.tier.renew(job.lease, self._options.lease_ttl_s)
                job.lease = renewed or job.lease

    def _release_match(self, state: RequestState) -> None:
        if state.match is not None:
            self.tier.release(state.match.lease)
            state.match = None

    def _drop_if_idle(self, state: RequestState) -> None:
        if state.is_finished and not state.offload_jobs and state.onboard_job is None:
            self._requests.pop(state.request_id, None)

    def check_integrity(self) -> None:
        """Raises IntegrityError unless tier and jobs agree with themselves."""
        self.tier.check_integrity()
        self._jobs.check_integrity()
