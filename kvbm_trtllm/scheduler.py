"""TensorRT-LLM's scheduler callbacks -> the leader. Runs on rank 0, on the executor's loop thread; never
blocks.

That thread sleeps while there is no request, and then polls nothing: what workers say meanwhile is taken in
by the channel's thread (runtime/side.py).

Loads are asynchronous: TensorRT-LLM parks the request until every rank has reported it. Only small loads of
blocks in host memory may be waited for instead (KVBM_SYNC_ONBOARD_BYTES).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from kvbm_core.clock import Clock
from kvbm_core.errors import Outcome
from kvbm_core.identity.roots import Roots
from kvbm_core.observe.guard import GuardState, guarded
from kvbm_core.observe.labels import FailureKind, MissReason
from kvbm_core.runtime.leader import Leader
from kvbm_core.runtime.side import LeaderSide, exclusive
from kvbm_core.runtime.tenants import Tenant
from kvbm_core.runtime.transfer_jobs import JobPart
from kvbm_core.tiers.groups import alignment_tokens
from kvbm_trtllm.block_size import BlockSizeCheck
from kvbm_trtllm.contract import has_other_inputs, identity_of, may_run_dummy, new_tables
from kvbm_trtllm.events import EventFeed
from kvbm_trtllm.follow import Follower
from kvbm_trtllm.identity import adapter_of
from kvbm_trtllm.metadata import NO_PLANS, QUIET, StepPlans, encode
from kvbm_trtllm.notes import Finish, LoadEnded, Note
from kvbm_trtllm.requests import DeviceBlocks, Followed, Given, Requests
from kvbm_trtllm.states import RequestEvent, RequestStatus

NO_MATCH = (0, False)
SWEEP_STEPS = 512


@dataclass(frozen=True)
class Options:
    """``sync_onboard_bytes``: a load from host memory of no more than that, all ranks together, is waited
    for.

    ``min_priority``: offload of a request stops at its first block of lower retention priority. ``is_told``:
    TensorRT-LLM has said how many tokens a block holds (KVCacheManagerV2). ``spare_tokens``: room that it
    keeps in a block table beyond a request's tokens. ``pads_graphs``: it fills batches up with a request that
    it made up. ``have_changed``: whether the weights are others than when it was last asked.
    """

    sync_onboard_bytes: int = 0
    decode_run_tokens: int = 0
    min_priority: int = 0
    is_told: bool = True
    spare_tokens: int = 0
    pads_graphs: bool = False
    have_changed: Callable[[], bool] = lambda: False


class SchedulerSide(LeaderSide):
    """One engine's leader side. Every public method is guarded: an exception here is a miss and a count.

    ``send`` reaches every worker between the engine's iterations.
    """

    def __init__(
        self,
        leader: Leader,
        roots: Roots,
        clock: Clock,
        send: Callable[[Note], None],
        *,
        guard_state: GuardState,
        options: Options,
        events: EventFeed | None = None,
    ) -> None:
        super().__init__(leader, guard_state)
        self._events = events or EventFeed()
        self._roots = roots
        roots.on_change = partial(self._events.renamed, leader)
        self._clock = clock
        self._send = send
        self._options = options
        self._block_tokens = alignment_tokens(leader.groups)
        self._requests = Requests()
        self._blocks = DeviceBlocks(leader.groups)
        self._block_size = BlockSizeCheck(
            self._block_tokens,
            is_told=options.is_told,
            spare_tokens=options.spare_tokens,
            on_mismatch=self._refuse_all,
        )
        self._follower = Follower(
            leader,
            self._requests,
            self._block_size,
            options.decode_run_tokens,
            options.min_priority,
        )
        self._plans = StepPlans()
        # Blocks that were given to somebody in this iteration, by group.
        self._overwritten: list[list[int]] = [[] for _ in leader.groups]
        # Loads that workers wait for before a forward pass.
        self._awaited: set[int] = set()
        # Plans made for this iteration, to be taken back if its metadata cannot be built.
        self._planned: list[int] = []
        # Finished requests whose blocks TensorRT-LLM keeps for these jobs.
        self._finishing: dict[int, tuple[int, ...]] = {}
        # Offloads of requests that are gone without a word: nobody keeps their blocks.
        self._unkept: set[int] = set()
        self._steps = 0

    @guarded("leader_thread", lambda self: None)
    def _take_in(self) -> None:
        self.leader.poll()

    @exclusive
    def poll(self) -> None:
        """Takes in what workers have said, outside of callbacks too."""
        self._take_in()

    @exclusive
    @guarded("leader_thread", lambda self: None)
    def catch_up(self) -> None:
        """As ``poll``, with everything that has been found on disk so far; at start."""
        self.leader.catch_up()

    # ---------------------------------------------------------------- callbacks

    @exclusive
    @guarded("get_num_new_matched_tokens", lambda self, request, num_computed_tokens: NO_MATCH)
    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """How many tokens beyond ``num_computed_tokens`` will be brought up, and whether the request waits
        parked.
        """
        self._take_changes()
        self.leader.poll()
        followed = self._begin(request, num_computed_tokens)
        state = followed.state
        # A partial match of the device ends within a block; TensorRT-LLM can turn these off.
        if state is None or num_computed_tokens % self._block_tokens:
            return NO_MATCH
        # One token is left to compute: its logits are what the request is about.
        matched = (
            self.leader.match(state, followed.tokens, num_computed_tokens, len(followed.tokens) - 1) or 0
        )
        self._events.on_match(state)
        followed.matched_tokens = matched
        followed.is_async = bool(matched) and not self._is_quick(followed)
        return matched, followed.is_async

    @exclusive
    @guarded("update_state_after_alloc", lambda self, request, tables: self._lose(request, tables))
    def update_state_after_alloc(self, request: Any, tables: Sequence[Sequence[int]]) -> None:
        """The request has device blocks: those found on the device, then those to be loaded or computed."""
        followed = self._requests.get(int(request.request_id))
        if followed is None:  # never queried: generation only
            self._overwrite(tables)
            return
        followed.tables = [list(ids) for ids in tables]
        if len(followed.tables) == 1:  # V1 makes the table for the whole prompt at once
            self._block_size.see(len(followed.tokens), len(followed.tables[0]))
        self._take_over([(followed.number, self._split(followed)[1])])
        self._fence_overwritten()  # before a load of our own fills them
        if followed.state is not None and has_other_inputs(request):  # which the query did not show
            self._refuse(followed)
        if not followed.matched_tokens or followed.state is None:
            return
        # KVCacheManagerV2 may take less than it was offered.
        position = getattr(request, "context_current_position", None)
        offered = followed.matched_tokens
        taken = (
            offered if position is None else min(offered, max(0, int(position) - followed.computed_tokens))
        )
        self._load(followed, taken)

    @exclusive
    @guarded("build_connector_meta", lambda self, output: self._fallback_metadata(), last_resort=QUIET)
    def build_connector_meta(self, output: Any) -> bytes:
        """Everything the workers do in this iteration."""
        self._take_changes()
        self.leader.poll()
        for data in output.new_requests:
            self._hear_first(data)
        given = self._follower.hear(output.cached_requests)
        if given:
            self._take_over(given)
        self._refuse_again(output.cached_requests)
        if self.leader.pending_jobs:
            self._fence_unkept(output)
        self._fence_overwritten()
        self._planned += self._follower.offload_due()
        offload = self.leader.take_offloads()
        self._steps += 1
        if self._steps % SWEEP_STEPS == 0:
            self._sweep()
        if offload is not None:
            self._plans.offloads.append(offload.plan())
        if self._plans == NO_PLANS:
            self._planned = []
            return QUIET
        metadata = encode(self._plans)
        self._plans, self._planned = StepPlans(), []
        return metadata

    @exclusive
    @guarded("request_finished", lambda self, request, tables: False)
    def request_finished(self, request: Any, tables: Sequence[Sequence[int]]) -> bool:
        """True: TensorRT-LLM keeps the device blocks until all ranks have reported that nothing of ours uses
        them.

        Asked again, it answers by what is true then.
        """
        self._take_changes()
        self.leader.poll()
        number = int(request.request_id)
        followed = self._forget(number)
        if followed is None or followed.state is None:
            jobs = tuple(job for job in self._finishing.get(number, ()) if self.leader.is_pending(job))
            return self._finish(number, jobs, None)
        tokens = request.get_tokens(0)
        # Each token of the answer says that all before it are computed. Without one the request was ended in
        # its prompt (1.1 says that too), and what is computed of it has been reported before.
        has_answer = len(tokens) > followed.num_prompt_tokens
        if has_answer and followed.status is RequestStatus.RUNNING and all(tables):
            self._follower.offload(followed, tokens, len(tokens) - 1, len(tokens) - 1, tables)
        offload = self.leader.take_offloads()
        load = followed.state.onboard_job
        jobs = (*self.leader.finish(followed.state), *([] if load is None else [load]))
        return self._finish(number, jobs, offload.plan() if offload is not None else None)

    def on_onboard_end(self, part: JobPart, outcome: Outcome) -> None:
        """Every rank has answered; called by the leader."""
        name = part.state.request_id
        followed = self._requests.get(int(name))
        is_done = outcome is Outcome.OK
        if followed is not None and followed.state is part.state:
            self._move(followed, RequestEvent.LOADED if is_done else RequestEvent.FAILED)
        for move in () if is_done else part.moves:
            self._blocks.taint(move.group, move.device_blocks, int(name))
        if not is_done or part.job_id in self._awaited:
            self._awaited.discard(part.job_id)
            self._send(LoadEnded(name, part.job_id, is_done))

    # ---------------------------------------------------------------- requests

    def _take_changes(self) -> None:
        """Of requests that run across a change of weights nothing is stored from now on."""
        if self._options.have_changed():
            self.leader.new_generation(keeps_host=False)

    def _begin(self, request: Any, num_computed_tokens: int) -> Followed:
        number = int(request.request_id)
        tokens = list(request.get_tokens(0))
        state = None
        identity = identity_of(request)
        if identity.refusal is not None:
            self.leader.metrics.uncached_request(identity.refusal)
            why: tuple[MissReason, str] = (MissReason.UNCACHED, identity.refusal)
            self.leader.pass_by(str(number), len(tokens), num_computed_tokens, *why)
        elif not self.leader.is_ready and not identity.is_dummy:
            self.leader.pass_by(str(number), len(tokens), num_computed_tokens, MissReason.NOT_READY)
        elif not identity.is_dummy:
            adapter = adapter_of(identity.adapter)
            root = self._roots.of(adapter, identity.salt, self.leader.layout_fingerprint)
            salt = None if identity.salt is None else identity.salt[1:]  # after the letter of its kind
            state = self.leader.open(
                str(number),
                root.hash,
                None,
                is_lasting=root.is_lasting,
                facts=root.facts,
                tenant=Tenant.of(identity.adapter, salt),
            )
            state.foreign_tokens = num_computed_tokens
            state.restart_offload()
        followed = Followed(number, state, tokens, len(tokens), computed_tokens=num_computed_tokens)
        followed.heard_at_s = self._clock.now_s()
        followed.is_private = identity.salt is not None or bool(identity.adapter)
        self._requests.add(followed)
        self._events.follow(followed)
        return followed

    def _begin_again(self, former: Followed | None, data: Any) -> Followed:
        """A request that was not queried: one that TensorRT-LLM made up, or the replay of one that has been
        loaded while it was parked. KVCacheManagerV2 neither queries that again nor tells its new blocks.
        """
        number, state, tokens = int(data.request_id), former.state if former else None, list(data.new_tokens)
        followed = Followed(number, state, tokens, len(tokens), computed_tokens=data.computed_position)
        followed.tables = [list(ids) for ids in new_tables(data)]
        followed.heard_at_s = self._clock.now_s()
        if state is not None:
            state.foreign_tokens = followed.computed_tokens
            state.restart_offload()
        self._requests.add(followed)
        if former is not None:  # what is refused stays so
            followed.status, followed.is_private = former.status, former.is_private
            self._move(followed, RequestEvent.AGAIN)
            self._events.follow(followed)
        self._take_over([(number, self._split(followed)[1])])
        return followed

    def _is_quick(self, followed: Followed) -> bool:
        match = followed.state.match if followed.state is not None else None
        if match is None or match.held.num_fetched:
            return False
        return len(match.held.keys) * self.leader.block_bytes <= self._options.sync_onboard_bytes

    def _split(self, followed: Followed) -> tuple[list[list[int]], list[list[int]]]:
        """What the device had, and what is new to the request, by group. A partly filled block is copied:
        new.
        """
        sizes = [group.block_size_tokens for group in self.leader.groups]
        ends = [followed.computed_tokens // size for size in sizes]
        pairs = list(zip(followed.tables, ends, strict=True))
        return [table[:end] for table, end in pairs], [table[end:] for table, end in pairs]

    def _refuse_all(self, reason: str) -> None:
        if self.leader.disabled_reason is None:
            self.leader.disable(reason)
            self.leader.metrics.failure(FailureKind.LAYOUT)

    def _refuse(self, followed: Followed) -> None:
        """It depends on more than its tokens: what it was promised is another request's."""
        self.leader.metrics.uncached_request("multimodal")
        if followed.matched_tokens:
            self._lose_match(followed)
        self._close(followed)

    def _fence_unkept(self, output: Any) -> None:
        """Offloads of blocks that may be taken without a word in this iteration."""
        if may_run_dummy(output):
            # All: a cancelled request that lost one block to somebody is forgotten, and its other blocks are
            # free.
            self._plans.unkept += self.leader.offloads()
        elif self._options.pads_graphs:
            self._plans.unkept += self._unkept_in(output)

    def _unkept_in(self, output: Any) -> set[int]:
        """Offloads of requests that do not run any more, and were not said to have finished: cancelled
        ones.
        """
        self._unkept = unkept = {job for job in self._unkept if self.leader.is_pending(job)}
        if len(self._requests) > len(output.new_requests) + len(output.cached_requests):
            running = {data.request_id for data in (*output.new_requests, *output.cached_requests)}
            unkept = unkept | self._requests.offloads_but_of(running)
        return unkept

    def _take_over(self, given: Sequence[Given]) -> None:
        """These blocks are overwritten from now on: whoever used them has to stop first."""
        for number, group, block in self._blocks.give(given):
            former = self._requests.get(number)
            if former is not None and former.has(group, block):
                self._close(self._forget(number))
        if self.leader.pending_jobs:  # else nobody does
            for _, fresh in given:
                self._overwrite(fresh)

    def _overwrite(self, tables: Sequence[Sequence[int]]) -> None:
        for overwritten, blocks in zip(self._overwritten, tables, strict=True):
            overwritten.extend(blocks)

    def _fence_overwritten(self) -> None:
        if any(self._overwritten):
            overwritten, self._overwritten = self._overwritten, [[] for _ in self.leader.groups]
            readers = self.leader.readers_of([block for blocks in overwritten for block in blocks])
            self._plans.fences += readers | self.leader.writers_of(dict(enumerate(overwritten)))

    def _load(self, followed: Followed, num_tokens: int) -> None:
        state = followed.state
        if state is not None and 0 < num_tokens < followed.matched_tokens:
            # A window looks back from where the prefix ends: less may take other blocks.
            self.leader.match(
                state, followed.tokens, followed.computed_tokens, followed.computed_tokens + num_tokens
            )
        plan = (
            self.leader.onboard(state, num_tokens, followed.tables)
            if state is not None and num_tokens
            else None
        )
        if not followed.is_async:
            followed.added_tokens = num_tokens
        if plan is not None:
            self._planned.append(plan.job_id)
            if followed.is_async:
                self._move(followed, RequestEvent.LOAD)
                self._plans.onboards.append((followed.name, plan))
            else:
                self._plans.sync_onboards.append(plan)
                self._awaited.add(plan.job_id)
            return
        if state is not None:
            self.leader.decline(state)
        if followed.is_async:  # it waits, even for nothing
            self._plans.not_loaded.append(followed.name)
        if num_tokens:
            self._break(followed, num_tokens)
            self.leader.metrics.failure(FailureKind.OTHER)

    def _break(self, followed: Followed, num_tokens: int) -> None:
        """Nothing fills the blocks of the ``num_tokens`` that it was promised."""
        self._move(followed, RequestEvent.FAILED)
        last_token = followed.computed_tokens + num_tokens
        for group, table in zip(self.leader.groups, followed.tables, strict=True):
            size = group.block_size_tokens
            blocks = table[followed.computed_tokens // size : -(-last_token // size)]
            self._blocks.taint(group.index, blocks, followed.number)

    def _hear_first(self, data: Any) -> None:
        followed = self._requests.get(int(data.request_id))
        if followed is None or followed.status in {RequestStatus.RUNNING, RequestStatus.REFUSED}:
            followed = self._begin_again(followed, data)
        self._check_found(followed)
        self._move(followed, RequestEvent.SCHEDULED)
        if followed.status is RequestStatus.REFUSED:
            self._plans.refused.append(followed.name)
            self._close(followed)
        fresh = self._follower.hear_first(followed, data)
        self._take_over([(followed.number, fresh)])

    def _check_found(self, followed: Followed) -> None:
        """What the device had for it must be complete and right: a cancelled load may have left it, or be at
        it.
        """
        found, _ = self._split(followed)
        # A part of a block was copied from nobody knows where.
        is_doubtful = followed.computed_tokens % self._block_tokens and self._blocks.num_tainted
        if is_doubtful or self._blocks.are_tainted(found):
            self._move(followed, RequestEvent.FAILED)
        if self.leader.pending_jobs:
            writers = self.leader.writers_of(dict(enumerate(found)))
            self._plans.awaited += writers
            self._awaited |= writers

    @guarded("request_status", lambda self, followed, event: None)
    def _move(self, followed: Followed, event: RequestEvent) -> None:
        """A bug here is counted, and the callback goes on: a request is broken from any state."""
        self._requests.move(followed, event)

    def _refuse_again(self, reports: Sequence[Any]) -> None:
        """The batch in which they were refused has not run, and comes again."""
        broken = self._requests.broken
        for data in reports if broken else ():
            followed = self._requests.get(data.request_id) if data.request_id in broken else None
            if followed is not None:
                if followed.status is RequestStatus.BROKEN:  # its first report came to nothing here
                    self._move(followed, RequestEvent.SCHEDULED)
                self._plans.refused.append(followed.name)

    def _close(self, followed: Followed | None) -> None:
        """Nothing of it is cached from now on; what moves for it ends by itself."""
        if followed is not None and followed.state is not None:
            self._unkept.update(self.leader.finish(followed.state))
            followed.state = None

    def _forget(self, number: int) -> Followed | None:
        followed = self._requests.forget(number)
        if followed is not None:
            self._follower.forget(number)
        return followed

    def _finish(self, number: int, jobs: tuple[int, ...], plan: Any) -> bool:
        if not jobs:
            self._finishing.pop(number, None)
            return False
        self._finishing[number] = jobs
        self._send(Finish(str(number), jobs, plan))
        return True

    def _sweep(self) -> None:
        """Requests that were aborted, and of which nobody said anything."""
        for followed in self._requests.silent(self._clock.now_s()):
            self._close(self._forget(followed.number))
        self._unkept = {job for job in self._unkept if self.leader.is_pending(job)}
        self._finishing = {
            number: jobs for number, jobs in self._finishing.items() if any(map(self.leader.is_pending, jobs))
        }

    # ---------------------------------------------------------------- when something broke

    def _lose(self, request: Any, tables: Sequence[Sequence[int]]) -> None:
        followed = self._requests.get(int(request.request_id))
        if followed is None or not followed.matched_tokens:
            return
        followed.tables = [list(ids) for ids in tables]
        self._blocks.give([(followed.number, self._split(followed)[1])])
        self._lose_match(followed)

    def _lose_match(self, followed: Followed) -> None:
        self._break(followed, followed.matched_tokens)
        if followed.is_async and all(name != followed.name for name, _ in self._plans.onboards):
            self._plans.not_loaded.append(followed.name)

    def _fallback_metadata(self) -> bytes:
        plans, self._plans = self._plans, StepPlans()
        planned, self._planned = self._planned, []
        for job_id in planned:
            self.leader.abandon(job_id)  # which breaks the requests of loads
        not_loaded = [*plans.not_loaded, *(name for name, _ in plans.onboards)]
        refused = sorted({*plans.refused, *map(str, self._requests.broken)})
        return encode(
            StepPlans(fence_all=True, awaited=plans.awaited, not_loaded=not_loaded, refused=refused)
        )
