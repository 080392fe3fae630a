"""The way up: match a prefix, hold its blocks, plan their load, and let go of them when it is over."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvbm_core.clock import Clock
from kvbm_core.errors import IntegrityError, Outcome
from kvbm_core.observe.metrics import Metrics
from kvbm_core.runtime.audit import AuditedPrefix
from kvbm_core.runtime.leader_options import LeaderOptions
from kvbm_core.runtime.offload import Start
from kvbm_core.runtime.request import BlockTable, Match, RequestState, Worth
from kvbm_core.runtime.states import StateKeeper
from kvbm_core.runtime.transfer_jobs import JobPart, TransferJob
from kvbm_core.tiers.chain import Held, TierChain
from kvbm_core.tiers.groups import (
    GroupSpec,
    Residents,
    alignment_tokens,
    longest_prefix_tokens,
    needed_blocks,
)
from kvbm_core.tiers.pace import ComputePace
from kvbm_core.tokens.runs import BlockRun
from kvbm_core.transfer.plan import GroupMove, TransferPlan
from kvbm_core.types import BlockKey, Direction, Tier


class Onboarding:
    """Part of the Leader, on its thread."""

    def __init__(
        self,
        groups: tuple[GroupSpec, ...],
        chain: TierChain,
        start: Start,
        *,
        clock: Clock,
        metrics: Metrics,
        options: LeaderOptions,
        pace: ComputePace,
    ) -> None:
        self._groups = groups
        self._pace = pace
        self._null_block = options.null_block
        self._chain = chain
        self._start = start
        # Where a prefix may lie; then the host alone, for when there is no room to bring blocks up.
        self._searched: tuple[Residents, ...] = (chain.residents,)
        if chain.lower:
            self._searched += (chain.host,)
        self._clock = clock
        self._metrics = metrics
        self._share_wait_s = options.share_wait_s if options.share_loads else 0.0
        self._fetch_wait_s = options.fetch_wait_s
        self._align = alignment_tokens(groups)
        self._keeper = StateKeeper(groups, chain, options.state_every_tokens)
        self._loading: dict[BlockKey, int] = {}
        self._jobs: dict[int, TransferJob] = {}
        """Loads and audits under way: what they hold does not expire."""

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
        waits_for = state.waits_for and self._what_changes(state, computed_tokens, limit_tokens)
        if waits_for and state.waits_for == waits_for and self._has_time(state):
            return None
        state.chain.extend(tokens)
        state.queried_blocks = max(state.queried_blocks, (limit_tokens - computed_tokens) // self._align)
        matched = self._match_held(state, computed_tokens, limit_tokens)
        if matched is not None and self._is_coming(state, computed_tokens + matched, limit_tokens):
            self.let_go(state)
            state.waits_for = self._what_changes(state, computed_tokens, limit_tokens)
            return None
        if self._keeper.positions and matched is not None:
            state.marks.kept_tokens = computed_tokens + matched
            self._keeper.mind_orphans(state, computed_tokens)
        return matched

    def _match_held(self, state: RequestState, computed_tokens: int, limit_tokens: int) -> int | None:
        """What can be held now, and is."""
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
            held = self._hold(state, blocks)
            if isinstance(held, Held):
                state.match = Match(computed_tokens, prefix_tokens, blocks, held)
                return prefix_tokens - computed_tokens
            if held and len(self._groups) == 1:  # as much as there is room for; each turn asks for less
                limit_tokens = computed_tokens + held * self._align
            else:
                attempts = rest
        return 0

    def _is_coming(self, state: RequestState, prefix_tokens: int, limit_tokens: int) -> bool:
        """Whether a lower tier is bringing up more than what can be held now, and there is time to wait."""
        is_sought = state.worth is Worth.LASTING and self._chain.is_asked
        if not is_sought or limit_tokens - prefix_tokens < self._align:
            return False
        runs, asks_again = self._runs_beyond(state, prefix_tokens, limit_tokens), self._fetch_wait_s > 0
        if not self._chain.wanted(runs, state.seeker, asks_again=asks_again):
            state.fetch_wanted_since_s = None
            return False
        if state.fetch_wanted_since_s is None:
            state.fetch_wanted_since_s = self._clock.now_s()
        return self._has_time(state)

    def _has_time(self, state: RequestState) -> bool:
        """Whether a request that waits for lower tiers has not waited too long."""
        since_s = state.fetch_wanted_since_s
        return since_s is not None and self._clock.now_s() - since_s < self._fetch_wait_s

    def _what_changes(self, state: RequestState, computed_tokens: int, limit_tokens: int) -> object:
        """Equal at two asks of a request if nothing has changed in between that the answer depends on."""
        return self._chain.news, computed_tokens, limit_tokens, state.seeker.token_s

    def _runs_beyond(self, state: RequestState, prefix_tokens: int, limit_tokens: int) -> list[BlockRun]:
        """What is needed to use more than ``prefix_tokens``; of states each that may be."""
        spans = []
        for group in self._groups:
            size = group.block_size_tokens
            has_window = group.window_tokens is not None
            first = group.first_needed_block(prefix_tokens) if has_window else prefix_tokens // size
            spans.append(range(first, limit_tokens // size))
        return state.runs(spans)

    def _hold(
        self, state: RequestState, blocks: tuple[range, ...], *, needs_host: bool = False
    ) -> Held | int:
        keys = [key for g, span in enumerate(blocks) for key in state.keys(g)[span.start : span.stop]]
        # Of several groups a part is of no use.
        return self._chain.hold(
            state.request_id,
            keys,
            lambda _: self._keeper.protected_keys(state),
            all_or_none=len(self._groups) > 1,
            needs_host=needs_host,
            tenant=state.tenant,
        )

    def onboard(
        self, state: RequestState, num_tokens: int, tables: Sequence[BlockTable]
    ) -> TransferPlan | None:
        """See Leader.onboard."""
        match, state.match = state.match, None
        if match is None:
            return None
        moves, held = self._moves_of(match, num_tokens, tables), match.held
        if not moves or not self._chain.is_good(held):
            self._chain.release(held)
            return None
        self._chain.renew_due([held])
        job = self._begin(Direction.ONBOARD, JobPart(0, state, tuple(held.keys), moves, held))
        (part,) = job.parts
        part.num_tokens, part.runs = num_tokens, state.runs(match.blocks)
        part.end_tokens = match.computed_tokens + num_tokens
        waits = (self._clock.now_s(), state.deferred_since_s, state.fetch_wanted_since_s)
        part.asked_at_s = min(since_s for since_s in waits if since_s is not None)
        for key in part.keys:
            self._loading[key] = self._loading.get(key, 0) + 1
        job.is_shared = True
        state.onboard_job = job.job_id
        state.deferred_since_s = state.fetch_wanted_since_s = None
        tokens = _tokens_by_tier(num_tokens, held)
        if state.account is not None:
            state.account.host_tokens, state.account.disk_tokens, state.account.remote_tokens = tokens
        host, disk, stores = map(max, state.hit_blocks, (found // self._align for found in tokens))
        state.hit_blocks = host, disk, stores
        return job.plan()

    def audit(
        self, state: RequestState, prefix: AuditedPrefix, tables: Sequence[BlockTable]
    ) -> TransferJob | None:
        """Compares the tiers' blocks of ``prefix`` with those that the engine computes in this step, or has.
        Not states: a table does not say where they are.

        None if not all of them are there any more. What is in lower tiers is brought up first, and stays in
        the host.
        """
        blocks = tuple(
            range(0) if group.is_state else needed_blocks(group, *prefix) for group in self._groups
        )
        held = self._hold(state, blocks, needs_host=True)
        if not isinstance(held, Held):
            return None
        slots = iter(held.slots)
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
            self._chain.release(held)
            return None
        job = self._begin(Direction.OFFLOAD, JobPart(0, state, tuple(held.keys), tuple(moves), held))
        job.compares, job.parts[0].runs = True, state.runs(blocks)
        state.offload_jobs.add(job.job_id)
        return job

    def _begin(self, direction: Direction, part: JobPart) -> TransferJob:
        job = self._start(direction)
        part.job_id = job.job_id
        job.add(part)
        if part.held is not None:
            job.reads = self._chain.reads(part.held, job.job_id)
        self._jobs[job.job_id] = job
        return job

    def end_audit(self, job: TransferJob) -> None:
        """Every rank has answered: lets go of what was compared."""
        (part,) = job.parts
        del self._jobs[job.job_id]
        part.state.offload_jobs.discard(job.job_id)
        if part.held is None:
            return
        if job.outcome is Outcome.OK:
            self._chain.loaded(part.held, {})
        else:  # whoever audits forgets what is wrong; of anything else only what the lower tiers failed at
            self._chain.gave_up(part.held, {} if job.found_wrong else job.failures(part.held.slots))

    def let_go(self, state: RequestState) -> None:
        """Ends the promise that the last match was."""
        if state.match is not None:
            self._chain.release(state.match.held)
            state.match = None

    def end(self, job: TransferJob) -> bool:
        """Every rank has answered. True if all of the blocks are on the device."""
        (part,) = job.parts
        state, held = part.state, part.held
        self.stop_sharing(job)
        del self._jobs[job.job_id]
        slots = [slot for move in part.moves for slot in move.slots]
        failed = {} if held is None else job.failures(held.slots)
        self._count(job, part, [slot for slot in slots if slot not in failed])
        if failed:
            # Never offered again: the engine recomputes, and the blocks are written anew, those too that it
            # had computed and we had taken for stored before this news came.
            state.restart_offload()
            state.hit_blocks = 0, 0, 0
        if held is not None:
            self._chain.loaded(held, failed)
        if not failed:
            state.hit_tokens = part.end_tokens
        state.onboard_job = None
        # Its end has just been used; the part before that, which the device had, must not be evicted first.
        self._chain.host.touch(self._keeper.used_keys(state, part.end_tokens))
        return not failed

    def stop_sharing(self, job: TransferJob) -> None:
        """Nobody waits for this load any more: it is over, or nobody knows when it will be. Its slots stay
        held.
        """
        if job.is_shared:
            job.is_shared = False
            for key in (key for part in job.parts for key in part.keys):
                self._loading[key] -= 1
                if not self._loading[key]:
                    del self._loading[key]

    def late(self, job: TransferJob, outcome: Outcome) -> None:
        """A rank has given the load up, and it is not over."""
        self.stop_sharing(job)
        for part in job.parts:
            if part.held is not None:
                self._chain.note_late(part.held, outcome)

    def _count(self, job: TransferJob, part: JobPart, slots: Sequence[int]) -> None:
        """``slots``: those whose blocks are on the device."""
        if job.outcome is Outcome.OK and part.held is not None:
            _, disk_tokens, remote_tokens = _tokens_by_tier(part.num_tokens, part.held)
            self._metrics.matched_tokens(
                part.num_tokens, disk_tokens=disk_tokens, remote_tokens=remote_tokens
            )
            if self._pace.token_s is not None:
                took_s = self._clock.now_s() - part.asked_at_s
                self._metrics.ttft_saved(part.num_tokens * self._pace.token_s - took_s)
        # An engine that takes less than was matched may leave some of what was fetched.
        left = set(slots)
        for order in job.reads:
            num_blocks = len(left.intersection(order.slots))
            left.difference_update(order.slots)
            self._metrics.onboarded_blocks(num_blocks, self._chain.tier_of(order.tier), Tier.DEVICE)
        self._metrics.onboarded_blocks(len(left), Tier.HOST, Tier.DEVICE)

    def held(self) -> list[Held]:
        """What loads and audits under way hold."""
        parts = (part for job in self._jobs.values() for part in job.parts)
        return [part.held for part in parts if part.held is not None]

    def check_integrity(self) -> None:
        """Raises IntegrityError unless what is marked as being loaded is what the loads in flight hold."""
        expected: dict[BlockKey, int] = {}
        for job in self._jobs.values():
            for part in job.parts:
                if part.held is None:
                    raise IntegrityError(f"job {job.job_id} reads slots that nobody holds")
                for key in part.keys if job.is_shared else ():
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
        slots = iter(match.held.slots)
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
            if group.is_state and targets != list(needed_blocks(group, match.computed_tokens, last_token)):
                return None  # whoever goes on needs the one after the last token, and that alone
            device = tuple(table[block] for block in targets)
            moves.append(GroupMove(group.index, device, tuple(slot_of[block] for block in targets)))
        return tuple(move for move in moves if move.slots)

    def reserved_blocks(self, states: Iterable[RequestState]) -> int:
        """Slots that loads in flight, and promises to these requests, will read into."""
        held = [*self.held(), *(state.match.held for state in states if state.match is not None)]
        return sum(len(one.reservation.keys) for one in held if one.reservation is not None)

    def _should_wait(self, state: RequestState, blocks: tuple[range, ...]) -> bool:
        heads = (state.keys(g)[span.start] for g, span in enumerate(blocks) if span)
        if not any(key in self._loading for key in heads):
            state.deferred_since_s = None
            return False
        now_s = self._clock.now_s()
        if state.deferred_since_s is None:
            state.deferred_since_s = now_s
        return now_s - state.deferred_since_s < self._share_wait_s


def _tokens_by_tier(num_tokens: int, held: Held) -> tuple[int, int, int]:
    """Of a hit of ``num_tokens``, those from the host, from the disk and from remote tiers."""
    num_blocks = max(1, len(held.keys))
    disk = num_tokens * held.num_from_disk // num_blocks
    remote = num_tokens * held.num_from_elsewhere // num_blocks
    return num_tokens - disk - remote, disk, remote
