"""The way up: match a prefix, lease its blocks, plan their load, and let go of them when it is over."""

from __future__ import annotations

from collections.abc import Sequence

from kvbm_core.clock import Clock
from kvbm_core.errors import IntegrityError, Outcome
from kvbm_core.observe.metrics import Metrics
from kvbm_core.runtime.jobs import Job, JobBook, Share
from kvbm_core.runtime.request import NULL_BLOCK, BlockTable, Match, RequestState
from kvbm_core.tiers.groups import GroupSpec, alignment_tokens, longest_prefix_tokens, needed_blocks
from kvbm_core.tiers.tier import BlockTier
from kvbm_core.transfer.plan import GroupMove, TransferPlan
from kvbm_core.types import BlockKey, Direction, Tier


class Onboarding:
    """Part of the Leader, on its thread. Times in seconds; ``share_wait_s`` 0: loads under way are not waited for."""

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
    ) -> None:
        self._groups = groups
        self._tier = tier
        self._jobs = jobs
        self._clock = clock
        self._metrics = metrics
        self._lease_ttl_s = lease_ttl_s
        self._share_wait_s = share_wait_s
        self._align = alignment_tokens(groups)
        self._loading: dict[BlockKey, int] = {}

    @property
    def loading_blocks(self) -> int:
        """Blocks that some load under way reads."""
        return len(self._loading)

    def match(self, state: RequestState, tokens: Sequence[int], computed_tokens: int, limit_tokens: int) -> int | None:
        """See Leader.match."""
        self.let_go(state)
        if computed_tokens % self._align or limit_tokens - computed_tokens < self._align:
            return 0
        state.chain.extend(tokens)
        state.queried_blocks = max(state.queried_blocks, (limit_tokens - computed_tokens) // self._align)
        prefix_tokens = longest_prefix_tokens(self._groups, state.keys, computed_tokens, limit_tokens, self._tier)
        if prefix_tokens <= computed_tokens:
            return 0
        blocks = tuple(needed_blocks(group, computed_tokens, prefix_tokens) for group in self._groups)
        if self._should_wait(state, blocks):
            return None
        keys = [key for g, span in enumerate(blocks) for key in state.keys(g)[span.start : span.stop]]
        lease = self._tier.lease(state.request_id, keys, self._lease_ttl_s)
        if lease is None:
            return 0
        state.match = Match(computed_tokens, prefix_tokens, blocks, lease)
        return prefix_tokens - computed_tokens

    def onboard(self, state: RequestState, num_tokens: int, tables: Sequence[BlockTable]) -> TransferPlan | None:
        """See Leader.onboard."""
        match, state.match = state.match, None
        if match is None:
            return None
        moves = self._moves_of(match, num_tokens, tables)
        lease = None
        # A block forgotten since the match stays pinned, and is not to be trusted any more.
        if moves and all(map(self._tier.contains, match.lease.keys)):
            lease = self._tier.renew(match.lease, self._lease_ttl_s)
        if moves is None or lease is None:
            self._tier.release(match.lease)
            return None
        job = self._jobs.start(Direction.ONBOARD)
        self._jobs.add(job, Share(job.job_id, state, lease.keys, moves, lease=lease, num_tokens=num_tokens))
        for key in lease.keys:
            self._loading[key] = self._loading.get(key, 0) + 1
        state.onboard_job = job.job_id
        state.deferred_since_s = None
        state.host_hit_blocks = max(state.host_hit_blocks, num_tokens // self._align)
        return job.plan()

    def let_go(self, state: RequestState) -> None:
        """Ends the promise that the last match was."""
        if state.match is not None:
            self._tier.release(state.match.lease)
            state.match = None

    def end(self, job: Job) -> bool:
        """Every rank has answered. True if the blocks are on the device."""
        (share,) = job.shares
        state = share.state
        for key in share.keys:
            self._loading[key] -= 1
            if not self._loading[key]:
                del self._loading[key]
        is_loaded = job.outcome is Outcome.OK
        if is_loaded:
            self._metrics.matched_tokens(share.num_tokens)
            self._metrics.onboarded_blocks(sum(len(move.slots) for move in share.moves), Tier.HOST, Tier.DEVICE)
        else:
            # Never offered again: the engine recomputes, and the blocks are written anew, those too that it had
            # computed and we had taken for stored before this news came.
            self._tier.forget(share.keys)
            state.restart_offload()
            state.host_hit_blocks = 0
        if share.lease is not None:
            self._tier.release(share.lease)
        state.onboard_job = None
        # Its end has just been used; the part before that, which the device had, must not be evicted first.
        self._tier.touch(state.chain_keys())
        return is_loaded

    def renew_leases(self) -> None:
        """A slot is not reused while a worker may still read it: leases of loads in flight do not expire."""
        if not self._loading:
            return
        now_s = self._clock.now_s()
        for share in (share for job in self._jobs.jobs() for share in job.shares):
            if share.lease is not None and share.lease.expires_at_s - now_s < self._lease_ttl_s / 2:
                share.lease = self._tier.renew(share.lease, self._lease_ttl_s)

    def check_integrity(self) -> None:
        """Raises IntegrityError unless what is marked as being loaded is what the loads in flight hold a lease on."""
        expected: dict[BlockKey, int] = {}
        for job in self._jobs.jobs():
            for share in job.shares if job.direction is Direction.ONBOARD else ():
                if share.lease is None:
                    raise IntegrityError(f"job {job.job_id} reads slots that nobody holds")
                for key in share.keys:
                    expected[key] = expected.get(key, 0) + 1
        if expected != self._loading:
            raise IntegrityError("blocks are marked as being loaded by no job in flight, or not marked")

    def _moves_of(self, match: Match, num_tokens: int, tables: Sequence[BlockTable]) -> tuple[GroupMove, ...] | None:
        if num_tokens != match.prefix_tokens - match.computed_tokens or len(tables) != len(self._groups):
            return None
        slots = iter(match.lease.slots)
        moves = []
        for group, table, span in zip(self._groups, tables, match.blocks, strict=True):
            slot_of = {block: next(slots) for block in span}
            size = group.block_size_tokens
            wanted = range(match.computed_tokens // size, match.prefix_tokens // size)
            if len(table) < wanted.stop:
                return None
            targets = [block for block in wanted if table[block] != NULL_BLOCK]
            if any(block not in slot_of for block in targets):
                return None
            device = tuple(table[block] for block in targets)
            moves.append(GroupMove(group.index, device, tuple(slot_of[block] for block in targets)))
        return tuple(move for move in moves if move.slots)

    def _should_wait(self, state: RequestState, blocks: tuple[range, ...]) -> bool:
        heads = (state.keys(g)[span.start] for g, span in enumerate(blocks) if span)
        if not any(key in self._loading for key in heads):
            state.deferred_since_s = None
            return False
        now_s = self._clock.now_s()
        if state.deferred_since_s is None:
            state.deferred_since_s = now_s
        return now_s - state.deferred_since_s < self._share_wait_s
