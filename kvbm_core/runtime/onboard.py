"""The way up: match a prefix, lease its blocks, plan their load, and let go of them when it is over."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import compress

from kvbm_core.blocks.lease import Lease
from kvbm_core.clock import Clock
from kvbm_core.errors import IntegrityError, Outcome
from kvbm_core.observe.metrics import Metrics
from kvbm_core.runtime.audit import AuditedPrefix
from kvbm_core.runtime.disk import DiskTier
from kvbm_core.runtime.jobs import Job, JobBook, Share
from kvbm_core.runtime.request import NULL_BLOCK, BlockTable, Match, RequestState
from kvbm_core.tiers.groups import (
    GroupSpec,
    Residents,
    alignment_tokens,
    longest_prefix_tokens,
    needed_blocks,
)
from kvbm_core.tiers.stack import TierStack
from kvbm_core.tiers.tier import BlockTier
from kvbm_core.transfer.plan import DiskPlan, GroupMove, TransferPlan
from kvbm_core.types import BlockKey, Direction, Tier


class Onboarding:
    """Part of the Leader, on its thread. Times in seconds; ``share_wait_s`` 0: loads under way are not waited
    for.
    """

    def __init__(
        self,
        groups: tuple[GroupSpec, ...],
        tier: BlockTier,
        jobs: JobBook,
        clock: Clock,
        metrics: Metrics,
        *,
        lease_ttl_s: float,
        share_wait_s: float,
        disk: DiskTier | None = None,
        null_block: int = NULL_BLOCK,
    ) -> None:
        self._groups = groups
        self._null_block = null_block
        self._tier = tier
        self._disk = disk
        # Where a prefix may lie; then the host alone, for when there is no room to bring blocks up from the
        # disk.
        self._searched: tuple[Residents, ...] = (tier,) if disk is None else (TierStack((tier, disk)), tier)
        self._jobs = jobs
        self._clock = clock
        self._metrics = metrics
        self._lease_ttl_s = lease_ttl_s
        self._share_wait_s = share_wait_s
        self._align = alignment_tokens(groups)
        self._loading: dict[BlockKey, int] = {}
        self._num_loads = 0

    @property
    def loading_blocks(self) -> int:
        """Blocks that some load under way reads."""
        return len(self._loading)

    def match(
        self, state: RequestState, tokens: Sequence[int], computed_tokens: int, limit_tokens: int
    ) -> int | None:
        """See Leader.match."""
        self.let_go(state)
        if computed_tokens % self._align or limit_tokens - computed_tokens < self._align:
            return 0
        state.chain.extend(tokens)
        state.queried_blocks = max(state.queried_blocks, (limit_tokens - computed_tokens) // self._align)
        attempts = list(self._searched)
        while attempts:
            residents, *rest = attempts
            prefix_tokens = longest_prefix_tokens(
                self._groups, state.keys, computed_tokens, limit_tokens, residents
            )
            if prefix_tokens <= computed_tokens:
                return 0
            blocks = tuple(needed_blocks(group, computed_tokens, prefix_tokens) for group in self._groups)
            if self._should_wait(state, blocks):
                return None
            match = self._promise(state, computed_tokens, prefix_tokens, blocks)
            if isinstance(match, Match):
                state.match = match
                return prefix_tokens - computed_tokens
            if match and len(self._groups) == 1:  # as much as there is room for; each turn asks for less
                limit_tokens = computed_tokens + match * self._align
            else:
                attempts = rest
        return 0

    def _promise(
        self, state: RequestState, computed_tokens: int, prefix_tokens: int, blocks: tuple[range, ...]
    ) -> Match | int:
        """Holds all of these blocks; or none, and says how many leading ones there is room for in the host
        tier.
        """
        keys = [key for g, span in enumerate(blocks) for key in state.keys(g)[span.start : span.stop]]
        owner, ttl_s = state.request_id, self._lease_ttl_s
        lease = self._tier.lease(owner, keys, ttl_s)
        if lease is not None:
            return Match(computed_tokens, prefix_tokens, blocks, keys, lease.slots, lease)
        if self._disk is None:
            return 0
        here = [self._tier.contains(key) for key in keys]
        below = [key for key, is_here in zip(keys, here, strict=True) if not is_here]
        disk_lease = self._disk.tier.lease(owner, below, ttl_s)
        if disk_lease is None:
            return 0
        # Before slots are made free for the rest.
        lease = self._tier.lease(owner, list(compress(keys, here)), ttl_s) if any(here) else None
        # Of several groups a part is of no use.
        reservation = self._tier.reserve(below, lambda _: state.own_keys(), all_or_none=len(self._groups) > 1)
        slot_of = dict(zip(reservation.keys, reservation.slots, strict=True))
        if lease is not None:
            slot_of.update(zip(lease.keys, lease.slots, strict=True))
        match = Match(computed_tokens, prefix_tokens, blocks, keys, (), lease, disk_lease, reservation)
        if len(reservation.keys) < len(below) or len(slot_of) < len(set(keys)):
            self._release(match)
            return next((i for i, key in enumerate(keys) if key not in slot_of), 0)
        return replace(match, slots=[slot_of[key] for key in keys])

    def onboard(
        self, state: RequestState, num_tokens: int, tables: Sequence[BlockTable]
    ) -> TransferPlan | None:
        """See Leader.onboard."""
        match, state.match = state.match, None
        if match is None:
            return None
        moves = self._moves_of(match, num_tokens, tables)
        if not moves or not self._still_holds(match):
            self._release(match)
            return None
        job = self._jobs.start(Direction.ONBOARD)
        share = Share(
            job.job_id,
            state,
            tuple(match.keys),
            moves,
            reservation=match.reservation,
            lease=self._renewed(match.lease, self._tier),
            num_tokens=num_tokens,
            disk_lease=None if self._disk is None else self._renewed(match.disk_lease, self._disk.tier),
            reads=_reads_of(match, job.job_id),
        )
        self._jobs.add(job, share)
        for key in share.keys:
            self._loading[key] = self._loading.get(key, 0) + 1
        job.is_shared = True
        self._num_loads += 1
        state.onboard_job = job.job_id
        state.deferred_since_s = None
        from_disk = 0 if match.reservation is None else len(match.reservation.keys)
        disk_tokens = num_tokens * from_disk // max(1, len(match.keys))
        state.host_hit_blocks = max(state.host_hit_blocks, (num_tokens - disk_tokens) // self._align)
        state.disk_hit_blocks = max(state.disk_hit_blocks, disk_tokens // self._align)
        return job.plan()

    def audit(self, state: RequestState, prefix: AuditedPrefix, tables: Sequence[BlockTable]) -> Job | None:
        """Compares the tiers' blocks of ``prefix`` with those that the engine computes in this step, or has.

        None if not all of them are there any more. What is on the disk is read up first, and stays in the
        host.
        """
        blocks = tuple(needed_blocks(group, *prefix) for group in self._groups)
        match = self._promise(state, *prefix, blocks)
        if not isinstance(match, Match):
            return None
        slots = iter(match.slots)
        moves: list[GroupMove] = []
        for group, table, span in zip(self._groups, tables, blocks, strict=True):
            pairs = [
                (table[block], slot)
                for block, slot in ((block, next(slots)) for block in span)
                if block < len(table) and table[block] != self._null_block
            ]
            if pairs:
                moves.append(GroupMove(group.index, *map(tuple, zip(*pairs, strict=True))))
        if not moves:
            self._release(match)
            return None
        job = self._jobs.start(Direction.OFFLOAD, compares=True)
        share = Share(
            job.job_id,
            state,
            tuple(match.keys),
            tuple(moves),
            reservation=match.reservation,
            lease=match.lease,
            disk_lease=match.disk_lease,
            reads=_reads_of(match, job.job_id),
        )
        self._jobs.add(job, share)
        self._num_loads += 1
        state.offload_jobs.add(job.job_id)
        return job

    def end_audit(self, job: Job) -> None:
        """Every rank has answered: lets go of what was compared."""
        (share,) = job.shares
        self._num_loads -= 1
        if job.outcome is Outcome.OK and share.reservation is not None:
            self._tier.commit(share.reservation)
            share.reservation = None
        if self._disk is not None and share.reads is not None and job.outcome is not Outcome.CORRUPT:
            self._disk.judge(job.outcome, share.reads.keys)
        self._release(share)
        share.state.offload_jobs.discard(job.job_id)

    def _still_holds(self, match: Match) -> bool:
        """Neither lease has expired, and no block was forgotten since: such a one is not to be trusted any
        more.
        """
        for lease, tier in self._leases_of(match):
            if lease is not None and not (tier.is_live(lease) and all(map(tier.contains, lease.keys))):
                return False
        return True

    def _leases_of(self, held: Match | Share) -> list[tuple[Lease | None, BlockTier]]:
        leases = [(held.lease, self._tier)]
        return leases if self._disk is None else [*leases, (held.disk_lease, self._disk.tier)]

    def _renewed(self, lease: Lease | None, tier: BlockTier) -> Lease | None:
        return lease and (tier.renew(lease, self._lease_ttl_s) or lease)

    def _release(self, held: Match | Share) -> None:
        """Gives back what is held; slots that were to be read into are free again."""
        for lease, tier in self._leases_of(held):
            if lease is not None:
                tier.release(lease)
        if held.reservation is not None:
            self._tier.abort(held.reservation)

    def let_go(self, state: RequestState) -> None:
        """Ends the promise that the last match was."""
        if state.match is not None:
            self._release(state.match)
            state.match = None

    def end(self, job: Job) -> bool:
        """Every rank has answered. True if the blocks are on the device."""
        (share,) = job.shares
        state = share.state
        self.stop_sharing(job)
        self._num_loads -= 1
        is_loaded = job.outcome is Outcome.OK
        if is_loaded:
            self._count(share)
            if share.reservation is not None:  # what came up from the disk stays in the host tier
                self._tier.commit(share.reservation)
                share.reservation = None
        else:
            # Never offered again: the engine recomputes, and the blocks are written anew, those too that it
            # had computed and we had taken for stored before this news came.
            self._tier.forget(share.keys)
            state.restart_offload()
            state.host_hit_blocks = state.disk_hit_blocks = 0
        if self._disk is not None:
            if share.reads is not None:
                self._disk.judge(job.outcome, share.reads.keys)
            if is_loaded and state.is_lasting:
                self._disk.hit(share.keys)
        self._release(share)
        state.onboard_job = None
        # Its end has just been used; the part before that, which the device had, must not be evicted first.
        self._tier.touch(state.chain_keys())
        return is_loaded

    def stop_sharing(self, job: Job) -> None:
        """Nobody waits for this load any more: it is over, or nobody knows when it will be. Its slots stay
        held.
        """
        if job.is_shared:
            job.is_shared = False
            for key in (key for share in job.shares for key in share.keys):
                self._loading[key] -= 1
                if not self._loading[key]:
                    del self._loading[key]

    def _count(self, share: Share) -> None:
        read_slots = frozenset(share.reads.slots) if share.reads is not None else frozenset()
        # An engine that takes less than was matched may leave some of what was read.
        from_disk = (
            sum(slot in read_slots for move in share.moves for slot in move.slots) if read_slots else 0
        )
        num_blocks = sum(len(move.slots) for move in share.moves)
        self._metrics.matched_tokens(share.num_tokens)
        self._metrics.onboarded_blocks(num_blocks - from_disk, Tier.HOST, Tier.DEVICE)
        self._metrics.onboarded_blocks(from_disk, Tier.DISK, Tier.DEVICE)

    def renew_leases(self) -> None:
        """A slot is not reused while a worker may still read it: leases of loads in flight do not expire."""
        if not self._num_loads:
            return
        soon_s = self._clock.now_s() + self._lease_ttl_s / 2
        for share in (share for job in self._jobs.jobs() for share in job.shares):
            if share.lease is not None and share.lease.expires_at_s < soon_s:
                share.lease = self._renewed(share.lease, self._tier)
            if (
                share.disk_lease is not None
                and self._disk is not None
                and share.disk_lease.expires_at_s < soon_s
            ):
                share.disk_lease = self._renewed(share.disk_lease, self._disk.tier)

    def check_integrity(self) -> None:
        """Raises IntegrityError unless what is marked as being loaded is what the loads in flight hold a
        lease on.
        """
        expected: dict[BlockKey, int] = {}
        for job in self._jobs.jobs():
            for share in () if job.stores else job.shares:
                if share.lease is None and share.disk_lease is None:
                    raise IntegrityError(f"job {job.job_id} reads slots that nobody holds")
                for key in share.keys if job.is_shared else ():
                    expected[key] = expected.get(key, 0) + 1
        if expected != self._loading:
            raise IntegrityError("blocks are marked as being loaded by no job in flight, or not marked")

    def _moves_of(
        self, match: Match, num_tokens: int, tables: Sequence[BlockTable]
    ) -> tuple[GroupMove, ...] | None:
        last_token = match.computed_tokens + num_tokens
        if not 0 < num_tokens <= match.prefix_tokens - match.computed_tokens or len(tables) != len(
            self._groups
        ):
            return None
        slots = iter(match.slots)
        moves = []
        for group, table, span in zip(self._groups, tables, match.blocks, strict=True):
            slot_of = {block: next(slots) for block in span}
            size = group.block_size_tokens
            wanted = range(match.computed_tokens // size, -(-last_token // size))
            if len(table) < wanted.stop:
                return None
            targets = [block for block in wanted if table[block] != self._null_block]
            if any(block not in slot_of for block in targets):
                return None
            device = tuple(table[block] for block in targets)
            moves.append(GroupMove(group.index, device, tuple(slot_of[block] for block in targets)))
        return tuple(move for move in moves if move.slots)

    def reserved_blocks(self, states: Iterable[RequestState]) -> int:
        """Slots that loads in flight, and promises to these requests, will read into."""
        shares = [share for job in self._jobs.jobs() if not job.stores for share in job.shares]
        reservations = [share.reservation for share in shares]
        reservations += [state.match.reservation for state in states if state.match is not None]
        return sum(len(reservation.keys) for reservation in reservations if reservation is not None)

    def _should_wait(self, state: RequestState, blocks: tuple[range, ...]) -> bool:
        heads = (state.keys(g)[span.start] for g, span in enumerate(blocks) if span)
        if not any(key in self._loading for key in heads):
            state.deferred_since_s = None
            return False
        now_s = self._clock.now_s()
        if state.deferred_since_s is None:
            state.deferred_since_s = now_s
        return now_s - state.deferred_since_s < self._share_wait_s


def _reads_of(match: Match, job_id: int) -> DiskPlan | None:
    if match.reservation is None or match.disk_lease is None:
        return None
    disk_slot_of = dict(zip(match.disk_lease.keys, match.disk_lease.slots, strict=True))
    keys, slots = match.reservation.keys, match.reservation.slots
    return DiskPlan(job_id, Direction.ONBOARD, keys, slots, tuple(disk_slot_of[key] for key in keys))
