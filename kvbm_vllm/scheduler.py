"""vLLM's scheduler hooks -> the leader. Runs in the engine-core process, on the scheduler's thread;
while that is idle the channel's thread takes in what workers say (runtime/side.py).

``update_state_after_alloc`` passes all blocks of a request each time it is called: it is only where a load
learns its targets. What a request has on the device is followed in tables.py; requests.py says what it can
be.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from kvbm_core.identity.roots import Roots
from kvbm_core.observe.guard import GuardState, guarded
from kvbm_core.observe.labels import MissReason, UncachedReason
from kvbm_core.observe.log import RateLimitedLogger
from kvbm_core.runtime.due import DueRequests
from kvbm_core.runtime.leader import Leader
from kvbm_core.runtime.request import RequestState, StateOnDevice
from kvbm_core.runtime.side import LeaderSide, exclusive
from kvbm_core.runtime.tenants import Tenant
from kvbm_core.tiers.lower import PEERS
from kvbm_core.transfer.plan import JobResult
from kvbm_vllm.changes import DeviceCache, EngineChanges
from kvbm_vllm.events import EventFeed
from kvbm_vllm.keys import has_lasting_names, multimodal_extras, uncacheable_reason
from kvbm_vllm.metadata import QUIET, DynamoConnectorMetadata, DynamoWorkerMetadata
from kvbm_vllm.pins import DevicePins
from kvbm_vllm.request_params import (
    PREFILLED_AS,
    hinted_peer,
    holds_foreign_blocks,
    is_prefilled_elsewhere,
    is_to_be_decoded_elsewhere,
    opts_out,
    token_limits,
)
from kvbm_vllm.requests import Event, Followed, Status, Tables
from kvbm_vllm.tables import DeviceTables

if TYPE_CHECKING:
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

_UNCACHED = {
    UncachedReason.OPTED_OUT.value: 'its kv_transfer_params say {"kvbm": {"skip": true}}',
    UncachedReason.PROMPT_EMBEDS.value: "its prompt is embeddings, not tokens",
    UncachedReason.STREAMING_SESSION.value: "a streaming session replaces tokens that were computed",
    UncachedReason.ADAPTER.value: "nobody knows what its LoRA adapter holds",
}
"""Why requests are not cached, in words."""
_NO_MATCH: tuple[int | None, bool] = (0, False)
_NOTHING: dict[str, Any] | None = None
_NO_EVENTS: Iterable[KVCacheEvent] = ()
# Ends with all of its tokens' KV written; an aborted request may still have a step in flight.
_COMPLETE = frozenset({"FINISHED_STOPPED", "FINISHED_LENGTH_CAPPED"})


@dataclass(slots=True)
class Step:
    """What is planned for one step. ``announced``: loads promised to vLLM, and the device blocks that they
    fill: each must be made or be reported as failed. ``jobs`` are taken back if the plans cannot be sent.
    """

    plans: DynamoConnectorMetadata = field(default_factory=DynamoConnectorMetadata)
    announced: dict[str, tuple[int, ...]] = field(default_factory=dict)
    jobs: set[int] = field(default_factory=set)


class SchedulerSide(LeaderSide):
    """One engine's scheduler side. Every public method is guarded: an exception here is a miss and a
    count.
    """

    def __init__(
        self,
        leader: Leader,
        roots: Roots,
        events: EventFeed,
        *,
        changes: EngineChanges,
        hold_back_tokens: int,
        decode_run_tokens: int = 0,
        guard_state: GuardState,
    ) -> None:
        super().__init__(leader, guard_state)
        self.leaves_remote_prefills = False
        """Another connector beside this one brings prompts that another worker has computed, whole."""
        self._roots = roots
        roots.on_change = partial(events.renamed, leader)
        self._changes = changes
        self._generation = changes.weights.generation
        self._device_cache = DeviceCache()
        self._events = events
        self._hold_back_tokens = hold_back_tokens
        self._heeds_hints = leader.chain.named(PEERS) is not None
        self._has_states = any(group.is_state for group in leader.groups)
        self._pins = DevicePins(leader.groups)
        self._due = DueRequests[str](leader.groups, decode_run_tokens)
        self._log = RateLimitedLogger()
        # Whether what the workers said has been taken in this step.
        self._has_polled = False
        self._requests: dict[str, Followed] = {}
        # Those that have ended, and whose device blocks vLLM keeps until our own reads of them are over.
        self._copying: dict[str, Tables] = {}
        self._tables = DeviceTables(leader.groups, self._requests)
        self._step = Step()

    # ---------------------------------------------------------------- hooks

    @exclusive
    @guarded("bind_kv_cache_manager", lambda self, pool: None)
    def bind_gpu_block_pool(self, pool: BlockPool) -> None:
        """vLLM's block pool, before the first request."""
        self._pins.bind(pool)
        self._device_cache.bind(pool, self._held_blocks)

    @exclusive
    @guarded("on_new_request", lambda self, request: None)
    def on_new_request(self, request: Request) -> None:
        """Remembers the request; its tokens are read from it as it grows."""
        self._has_polled = False
        self._requests[request.request_id] = Followed(request)

    @exclusive
    @guarded("get_num_new_matched_tokens", lambda self, request, num_computed_tokens: _NO_MATCH)
    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """How many tokens beyond ``num_computed_tokens`` the tiers have; loads are always asynchronous."""
        self._poll()
        followed = self._followed(request)
        state = self._state_from_start(followed, num_computed_tokens)
        if state is None:
            self._pass_by(followed, num_computed_tokens)
            return 0, False
        if request.skip_reading_prefix_cache:
            self._tell_why(followed, num_computed_tokens, MissReason.OPTED_OUT, "it asks not to read caches")
            return 0, False
        if self.leaves_remote_prefills and is_prefilled_elsewhere(request):
            return 0, False
        # One token is left to compute: its logits are what the request is about.
        matched = self.leader.match(state, request.all_token_ids, num_computed_tokens, request.num_tokens - 1)
        if matched and followed.loaded_at == request.num_preemptions:
            # Asked again without a preemption: its load failed. It is not tried twice, or it might go on for
            # ever.
            self.leader.decline(state)
            return 0, False
        return matched, bool(matched)

    @exclusive
    @guarded(
        "update_state_after_alloc", lambda self, request, blocks, n: self._promise_broken(request, blocks, n)
    )
    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """The scheduler has accepted (or not) what was matched, and has blocks for it."""
        followed, step = self._followed(request), self._step
        state = followed.state
        if num_external_tokens == 0:
            if state is not None:
                self.leader.decline(state)
            return
        followed.move(Event.LOAD)
        followed.loaded_at = request.num_preemptions
        tables = blocks.get_block_ids()
        first_token = state.match.computed_tokens if state is not None and state.match is not None else 0
        targets = self._tables.targets(tables, first_token, num_external_tokens)
        step.announced[request.request_id] = targets
        if state is not None:
            self._events.on_match(state)
        plan = self.leader.onboard(state, num_external_tokens, tables) if state is not None else None
        if plan is None:
            step.plans.failed_loads[request.request_id] = targets
            return
        step.jobs.add(plan.job_id)
        step.plans.onboards.append((request.request_id, plan))
        self._tables.note_overwritten(block for move in plan.moves for block in move.device_blocks)

    @exclusive
    @guarded("build_connector_meta", lambda self, scheduler_output: self._fallback_metadata())
    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> DynamoConnectorMetadata:
        """Everything the workers do in this step."""
        self._poll()
        self._mind_changes(is_awake=scheduler_output.total_num_scheduled_tokens > 0)
        # With no job in flight nobody can be reading what is overwritten.
        overwritten = self._tables.follow(scheduler_output, note_grown=self.leader.pending_jobs > 0)
        fences = tuple(sorted(self.leader.readers_of(overwritten))) if overwritten else ()
        self._plan_offloads(scheduler_output)
        if self._has_states:
            self._plan_states(scheduler_output)
        offload = self.leader.take_offloads()
        moved = [offload] if offload is not None else []
        moved += self.leader.take_audits()
        step, plans = self._step, self._step.plans
        step.jobs.update(job.job_id for job in moved)
        for part in (part for job in moved for part in job.parts):
            self._pins.hold(part)
        plans.offloads, plans.fences = [job.plan() for job in moved], fences
        plans.is_idle = scheduler_output.total_num_scheduled_tokens == 0
        self._has_polled = False
        if plans == QUIET:  # most steps: what is planned for the next one begins as empty
            step.jobs.clear()
            return QUIET
        self._step = Step()
        return plans

    @exclusive
    @guarded("request_finished", lambda self, request, tables: self._forget(request.request_id))
    def request_finished(self, request: Request, tables: Tables) -> bool:
        """True: vLLM keeps the device blocks until our own reads of them are over."""
        self._poll()
        self._mind_changes()
        followed = self._followed(request)
        self._forget(request.request_id)
        state, is_loading = followed.state, followed.is_loading
        if state is None:
            return False
        if followed.adapter is not None and not state.is_retired:
            is_same = self._changes.adapter_of(request.lora_request) == followed.adapter
            (self.leader.confirm if is_same else self.leader.disown)(state)
        if not is_loading and request.status.name in _COMPLETE:
            self._offload_rest(state, request, tables)
        jobs = self.leader.finish(state)
        # A request aborted while loading is freed by vLLM when the load is reported; reporting it twice would
        # crash it.
        if not jobs or is_loading:
            return False
        self._step.plans.finishing[request.request_id] = jobs
        self._copying[request.request_id] = tables
        return True

    @exclusive
    @guarded("hand_over", lambda self, request: _NOTHING)
    def hand_over(self, request: Request) -> dict[str, Any] | None:
        """What the request's next worker shall know of its blocks; to be asked before request_finished."""
        state = self._followed(request).state
        if state is None or state.is_retired or not is_to_be_decoded_elsewhere(request):
            return None
        return {PREFILLED_AS: state.chain.root.hex()}

    @exclusive
    @guarded("update_connector_output", lambda self, output: None)
    def update_connector_output(self, output: KVConnectorOutput) -> None:
        """Which finished requests vLLM frees now, and what the workers said."""
        for name in output.finished_sending or ():
            self._copying.pop(name, None)
        for followed in map(self._requests.get, output.finished_recving or ()):
            if followed is not None and followed.is_loading:
                followed.move(Event.REPORTED)
        said = output.kv_connector_worker_meta
        if isinstance(said, DynamoWorkerMetadata):
            for rank, acks in said.acks.items():
                self._acknowledge(rank, acks)
        self._poll()

    @exclusive
    @guarded("has_pending_push_work", lambda self: False)
    def has_pending_push_work(self) -> bool:
        """Keeps the engine stepping while finished requests wait for their copies."""
        return bool(self._copying) or len(self._pins) > 0

    @exclusive
    @guarded("reset_cache", lambda self: False)
    def reset_cache(self) -> bool:
        """Forgets all blocks; True. Who orders it may have changed the weights."""
        self._has_polled = False
        self._poll()
        self._changes.weights.doubt()
        self.leader.reset()
        return True

    @exclusive
    @guarded("take_events", lambda self: _NO_EVENTS)
    def take_events(self) -> Iterable[KVCacheEvent]:
        """Blocks stored in and removed from kvbm's tiers since the last call."""
        return self._events.take()

    # ---------------------------------------------------------------- requests

    def _followed(self, request: Request) -> Followed:
        known = self._requests.get(request.request_id)
        return known or self._requests.setdefault(request.request_id, Followed(request))

    def _state_from_start(self, followed: Followed, device_tokens: int) -> RequestState | None:
        """Of a request that has nothing on the device but ``device_tokens`` of vLLM's own cache."""
        self._mind_changes(is_awake=True)
        if followed.status is Status.MIXED:
            followed.move(Event.ANEW)
            if followed.state is not None:
                self._open(followed)
        if device_tokens and self._device_cache.has_old:
            self._mix(followed)
            return None
        return self._state_of(followed)

    def _state_of(self, followed: Followed) -> RequestState | None:
        if followed.status is not Status.NEW or not self.leader.is_ready:
            return followed.state
        reason = uncacheable_reason(followed.request)
        if reason is None and opts_out(followed.request, self._log):
            reason = UncachedReason.OPTED_OUT.value
        if reason is not None:
            self._leave_out(followed, reason)
        else:
            self._open(followed)
        return followed.state

    def _leave_out(self, followed: Followed, reason: str) -> None:
        followed.move(Event.LEFT_OUT)
        followed.reason = reason
        self.leader.metrics.uncached_request(reason)

    def _pass_by(self, followed: Followed, num_computed_tokens: int) -> None:
        """For who asks why: a request that the tiers are not asked for."""
        why, text = MissReason.NOT_READY, ""
        if followed.status is Status.UNCACHED:
            is_wish = followed.reason == UncachedReason.OPTED_OUT.value
            why = MissReason.OPTED_OUT if is_wish else MissReason.UNCACHED
            text = _UNCACHED.get(followed.reason, followed.reason)
        elif followed.status is Status.MIXED:
            why, text = MissReason.CHANGED, "the engine's own prefix cache has blocks of other weights"
        self._tell_why(followed, num_computed_tokens, why, text)

    def _tell_why(self, followed: Followed, device_tokens: int, reason: MissReason, text: str) -> None:
        request = followed.request
        if not followed.is_explained:
            followed.is_explained = True
            self.leader.pass_by(
                request.request_id,
                request.num_tokens,
                device_tokens,
                reason,
                text,
                trace_headers=request.trace_headers,
            )

    def _open(self, followed: Followed) -> None:
        request = followed.request
        adapter = self._changes.adapter_of(request.lora_request)
        if adapter is None:
            self._leave_out(followed, UncachedReason.ADAPTER.value)
            return
        root = self._roots.of(adapter, request.cache_salt, self.leader.layout_fingerprint)
        is_lasting = root.is_lasting and has_lasting_names(request)
        if holds_foreign_blocks(request, root.hash.hex()):
            is_lasting = False
        # The engine may load the adapter only now, or once more: what it was is known at the end.
        followed.adapter = adapter if is_lasting and request.lora_request is not None else None
        is_lasting = is_lasting and followed.adapter is None
        extras = multimodal_extras(request, self._roots.block_size_tokens)
        lora = request.lora_request
        tenant = Tenant.of("" if lora is None else lora.lora_name, request.cache_salt)
        followed.state = state = self.leader.open(
            request.request_id,
            root.hash,
            extras,
            is_lasting=is_lasting,
            facts=root.facts,
            tenant=tenant,
        )
        followed.move(Event.OPENED)
        state.trace_headers = request.trace_headers
        state.limits = token_limits(request, self._log)
        self._events.follow(request, state)
        if self._heeds_hints:
            state.seeker.source = hinted_peer(request)

    def _forget(self, request_id: str) -> bool:
        self._requests.pop(request_id, None)
        self._due.forget(request_id)
        return False

    # ---------------------------------------------------------------- weights and adapters

    def _mind_changes(self, *, is_awake: bool = False) -> None:
        """Before anything is matched or stored: what has changed, or may have, since the last hook.
        ``is_awake``: the model is about to run, so its weights can be looked at.
        """
        changes, was_reset = self._changes, self._device_cache.was_reset()
        if was_reset and changes.heeds_resets:
            changes.weights.doubt()
        changes.take_model_loads()
        if is_awake:
            changes.look()
        if changes.weights.generation != self._generation:
            self._begin_generation(was_reset=was_reset)
        changed = changes.take_adapters()
        if changed:
            self._events.adapters_changed(self.leader, changed)
        for followed in self._requests.values() if changed else ():
            lora = followed.request.lora_request
            if lora is not None and lora.lora_int_id in changed:
                self._mix(followed)

    def _begin_generation(self, *, was_reset: bool) -> None:
        weights, before = self._changes.weights, self._generation
        self._generation = weights.generation
        if self._generation > before:  # else a doubt is over, and the generation before it goes on
            if not was_reset:
                self._device_cache.weights_changed()
            for followed in self._requests.values():
                load = followed.state.onboard_job if followed.state is not None else None
                if followed.is_loading and load is not None:
                    self._step.plans.revoked += (load,)
                followed.move(Event.CHANGED)
            self.leader.new_generation(keeps_host=weights.doubted_generation is not None)
        self._events.renamed(self.leader)

    def _mix(self, followed: Followed) -> None:
        followed.move(Event.CHANGED)
        if followed.state is not None:
            self.leader.retire(followed.state)

    # ---------------------------------------------------------------- one step

    @guarded("leader_thread", lambda self: None)
    def _take_in(self) -> None:
        self.leader.poll()

    @guarded("update_connector_output", lambda self, rank, acks: None)
    def _acknowledge(self, rank: int, acks: Sequence[JobResult]) -> None:
        """For itself: a bug that one rank's answer meets is not to cost those of the others."""
        self.leader.acknowledge(rank, acks)

    def _held_blocks(self) -> set[int]:
        """Device blocks that vLLM would have free if we read none."""
        tables = (table for tables in self._copying.values() for table in tables)
        return self._pins.held_blocks().union(*tables) - {0}  # the null block

    def _poll(self) -> None:
        # Once per step is enough, and again when a request comes: the engine may have been idle since.
        if not self._has_polled:
            self.leader.poll()
            self._pins.release_ended(self.leader.is_pending)
            self._has_polled = True

    def _plan_offloads(self, scheduler_output: SchedulerOutput) -> None:
        scheduled, cached = scheduler_output.num_scheduled_tokens, scheduler_output.scheduled_cached_reqs
        due = self._due.next_step(scheduled, scheduler_output.total_num_scheduled_tokens)
        if scheduler_output.scheduled_new_reqs or cached.resumed_req_ids:
            new = (new.req_id for new in scheduler_output.scheduled_new_reqs)
            due = list(dict.fromkeys([*due, *new, *cached.resumed_req_ids]))
        if not due:
            return
        computed_of = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        computed_of.update(
            (new.req_id, new.num_computed_tokens) for new in scheduler_output.scheduled_new_reqs
        )
        for request_id in due:
            self._offload_full(request_id, computed_of[request_id], scheduled[request_id])

    def _offload_full(self, request_id: str, computed: int, num_scheduled: int) -> None:
        followed = self._requests.get(request_id)
        state = self._state_of(followed) if followed is not None else None
        if followed is None or state is None or not followed.tables:
            if followed is None or followed.status not in {Status.UNCACHED, Status.MIXED}:
                self._due.look_again(request_id, 1)  # until there are slots
            return
        request = followed.request
        # Tokens that are not known yet (asynchronous scheduling, drafts) are stored when they are.
        stored = min(computed + num_scheduled, request.num_tokens)
        if stored > request.num_prompt_tokens:
            stored = max(request.num_prompt_tokens, stored - self._hold_back_tokens)
        job_id = self.leader.offload(state, request.all_token_ids, computed, stored, followed.tables)
        self._due.look_when_full(
            request_id,
            state.next_full_tokens,
            computed_tokens=computed,
            num_scheduled=num_scheduled,
            num_prompt_tokens=request.num_prompt_tokens,
        )
        self._note(job_id)

    def _plan_states(self, scheduler_output: SchedulerOutput) -> None:
        """The states that this step completes: where they are is said in it, and not in any table."""
        block_state = getattr(scheduler_output, "kv_connector_block_state", None)
        handed_off = block_state.boundary_state_offloads if block_state is not None else {}
        for request_id, entries in handed_off.items():
            followed = self._requests.get(request_id)
            if followed is None or followed.state is None or followed.is_loading:
                continue
            request, state = followed.request, followed.state
            offered = [StateOnDevice(*entry) for entry in entries if entry[2] <= request.num_tokens]
            is_drafting = request_id in scheduler_output.scheduled_spec_decode_tokens
            num_scheduled = 0 if is_drafting else scheduler_output.num_scheduled_tokens.get(request_id, 0)
            known = [
                one
                for one in offered
                if self._pins.is_state_of(request, one)
                and not self._is_passed_by(request, one, num_scheduled)
            ]
            job_id = self.leader.offload_states(
                state, request.all_token_ids, known, request.num_prompt_tokens
            )
            self._note(job_id)

    def _is_passed_by(self, request: Request, state: StateOnDevice, num_scheduled: int) -> bool:
        """Whether this step begins in the middle of the block and goes beyond its end: the block keeps the
        state that the step began with. vLLM 0.32 hands off such ones where prefixes may end inside blocks and
        a prefill exports a checkpoint. With drafts (``num_scheduled`` 0) it copies the state that was passed.
        """
        size = self.leader.groups[state.position].block_size_tokens
        begin = request.num_computed_tokens
        return bool(state.end_tokens - size < begin < state.end_tokens < begin + num_scheduled)

    def _offload_rest(self, state: RequestState, request: Request, tables: Tables) -> None:
        computed = min(request.num_computed_tokens, request.num_tokens - 1)
        self._note(self.leader.offload(state, request.all_token_ids, computed, computed, tables))

    def _note(self, job_id: int | None) -> None:
        if job_id is not None:
            self._step.jobs.add(job_id)

    # ---------------------------------------------------------------- when something broke

    def _promise_broken(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        if num_external_tokens:
            name, plans = request.request_id, self._step.plans
            every = self._tables.targets(blocks.get_block_ids(), 0, request.num_tokens)
            plans.failed_loads[name] = self._step.announced.setdefault(name, every)
            plans.onboards = [entry for entry in plans.onboards if entry[0] != name]

    def _fallback_metadata(self) -> DynamoConnectorMetadata:
        step, self._step, self._has_polled = self._step, Step(), False
        for job_id in step.jobs | {job.job_id for job in self.leader.take_audits()}:
            self.leader.abandon(job_id)
        plans = step.plans
        return DynamoConnectorMetadata(
            failed_loads=step.announced, fence_all=True, finishing=plans.finishing, revoked=plans.revoked
        )
