"""TensorRT-LLM's worker callbacks -> the worker. Runs in each rank, on the executor's loop thread.

TensorRT-LLM cannot be told that a load has failed. A request whose blocks hold something else than it was
promised is therefore kept from its forward pass, on all ranks alike: this ends the requests of that batch
with an error, and gives nobody a wrong answer.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

from kvbm_core.errors import LayoutError, Outcome
from kvbm_core.observe.guard import GuardState, guarded
from kvbm_core.observe.labels import FailureKind
from kvbm_core.runtime.request import after
from kvbm_core.runtime.step_offloads import StepOffloads
from kvbm_core.runtime.worker import FENCE_TIMEOUT_S, Worker
from kvbm_trtllm.layout import KvMemory, Ranks, layout_memory, pool_memory
from kvbm_trtllm.metadata import StepPlans, decode
from kvbm_trtllm.notes import Finish, LoadEnded, Note
from kvbm_trtllm.notes import decode as decode_note
from kvbm_trtllm.states import LOAD_TABLE, LoadEvent, LoadStatus

if TYPE_CHECKING:
    import torch

    from kvbm_trtllm.meeting import LeaderPart

log = logging.getLogger("kvbm")

POLL_S = 0.0002
"""How often rank 0, which waits for a load, looks whether the others have answered the leader."""
UNKEPT_WAIT_S = 0.2
"""Copies of blocks that may be a dummy request's now get so much time to end: all ranks wait meanwhile."""


class LoadFailedError(RuntimeError):
    """Raised inside a forward pass, where TensorRT-LLM turns it into an error of the requests in it."""


class EngineFacts(NamedTuple):
    """What is known of the engine before it registers its memory.

    ``find_index_cache(is_latent)``: why a V1 pool is not all that attention reads, None if it is.
    """

    block_tokens: int
    waits_at_register: bool
    find_index_cache: Callable[[bool], str | None] = lambda is_latent: None


class WorkerSide:
    """One rank's worker side. Every callback is guarded, but for the one error that keeps wrong bytes from a
    model.

    ``stores_once``: KV that all ranks have is to be stored by one of them (DYN_KVBM_NCCL_MLA_MODE).
    """

    def __init__(
        self,
        worker: Worker,
        shard: Ranks,
        engine: EngineFacts,
        find_leader: Callable[[], LeaderPart | None],
        *,
        stores_once: bool,
        guard_state: GuardState,
    ) -> None:
        self.worker = worker
        self.guard_state = guard_state
        self._shard = shard
        self._stores_once = stores_once and shard.world_size > 1
        self._is_alone = shard.world_size == 1
        self._engine = engine
        self._find_leader = find_leader
        self._plans: StepPlans | None = None
        self._offloads = StepOffloads(worker)
        self._is_started = True
        self._is_dropped = False
        self._refused: list[str] = []
        # Loads of parked requests: of which request each job is, and how far each request's load is.
        self._loads: dict[int, str] = {}
        self._load_statuses: dict[str, LoadStatus] = {}
        self._sync_onboards: set[int] = set()
        # What TensorRT-LLM waits for.
        self._loading: set[str] = set()
        self._saving: set[str] = set()
        # What the leader has said, and is not taken up yet.
        self._notes: list[Note] = []
        # Loads that this iteration's forward pass waits for: whether all ranks have them, as soon as that is
        # known.
        self._verdicts: dict[int, bool | None] = {}
        worker.on_note(self._start_tail)

    # ---------------------------------------------------------------- set-up

    @guarded("register_kv_caches", lambda self, pool: None)
    def register_pool(self, pool: torch.Tensor) -> None:
        """The V1 manager's pool, ``[num_blocks, num_layers, kv_factor, elements]``."""
        self._register(lambda: self._read_pool(pool))

    @guarded("register_kv_caches", lambda self, layout: None)
    def register_layout(self, layout: Any) -> None:
        """The V2 manager's layer groups."""
        self._register(lambda: layout_memory(layout, self._shard))

    def _read_pool(self, pool: torch.Tensor) -> KvMemory:
        found = pool_memory(pool, self._engine.block_tokens, self._shard)
        reason = self._engine.find_index_cache(found.is_latent)
        if reason is not None:
            raise LayoutError(
                f"kvbm: sparse attention keeps keys in a pool that TensorRT-LLM does not hand to connectors "
                f"({reason}): use kv_cache_config.use_kv_cache_manager_v2=true where there is one"
            )
        return found

    def _register(self, read: Callable[[], KvMemory]) -> None:
        """Says hello; a layout in doubt is refused with one line and nothing is cached."""
        try:
            found = read()
        except LayoutError as error:
            log.error(
                "%s; nothing is cached: report this model and TensorRT-LLM version, or run without kvbm",
                error,
            )
            self.guard_state.metrics.failure(FailureKind.LAYOUT)
            self.worker.refuse(str(error))
            return
        if self._stores_once and not found.is_latent:
            log.warning(
                "kvbm: DYN_KVBM_NCCL_MLA_MODE is set, but it is for MLA models, whose ranks have the same "
                "KV: here each rank stores and loads its own"
            )
        leader = self._find_leader()
        if leader is not None:
            leader.begin(found.groups, is_told=found.is_told)
        part = "all" if self._stores_once and found.is_latent else ""
        self.worker.register(found.memory, found.fingerprint, part=part)
        if leader is not None and self._engine.waits_at_register:
            leader.wait()

    # ---------------------------------------------------------------- one iteration

    @guarded("bind_connector_metadata", lambda self, metadata: None)
    def bind(self, metadata: object) -> None:
        """The plans of this iteration, of which those that were promised are kept until they are reported."""
        self._offloads.abandon()
        if not self._is_dropped:  # else its requests come again
            self._refused = []
        self._is_dropped = False
        self._sync_onboards = set()
        self._plans = plans = decode(metadata)
        self._is_started = plans is None
        if plans is None:
            return
        self._offloads.begin(plans.offloads)
        self._refused += plans.refused
        self._sync_onboards = {plan.job_id for plan in plans.sync_onboards}
        for name, plan in plans.onboards:
            self._loads[plan.job_id] = name
            self._move(name, LoadEvent.BEGIN)
        for name in {*plans.not_loaded}:  # one may be named twice
            self._move(name, LoadEvent.NOT_MADE)

    @guarded("start_load_kv", lambda self: self._fail_unsubmitted())
    def start_load(self) -> None:
        """Stops what uses blocks that belong to others now; starts loads, and waits for those that cannot be
        parked.

        StuckCopyError if a load's copy hangs: TensorRT-LLM ends its loop with it, before the forward pass
        that would share those blocks with the copy.
        """
        plans = self._plans
        if plans is None or self._is_started:
            return
        self._is_started = True
        if plans.fence_all:
            self.worker.fence_all()
        elif plans.fences:
            self.worker.fence({*plans.fences})  # one may be named twice
        if plans.unkept:
            self.worker.wait(plans.unkept, UNKEPT_WAIT_S)
            self.worker.fence(plans.unkept)
        for _, plan in plans.onboards:
            self.worker.submit(plan)
        for plan in plans.sync_onboards:
            self.worker.submit(plan)
        awaited = {*self._sync_onboards, *plans.awaited}
        if awaited:
            self._await(awaited)

    def before_layer(self) -> None:
        """LoadFailedError, once, if this forward pass must not come to an end."""
        refused, self._refused = self._refused, []
        if refused:
            self._offloads.abandon()
            raise LoadFailedError(
                f"kvbm: blocks that were promised to request {', '.join(refused)} could not be "
                "loaded; TensorRT-LLM "
                "cannot compute them instead, and ends what runs with an error: send it again"
            )

    def end_of_forward(self) -> None:
        """As ``before_layer``, where no layer's hook has run (CUDA graphs); then this iteration's offloads
        start.
        """
        self.before_layer()
        self.send_offloads()

    @guarded("wait_for_save", lambda self: self._offloads.abandon())
    def send_offloads(self) -> None:
        """Starts this iteration's offloads behind what the current stream was given; waits for nothing."""
        self._offloads.submit()

    @guarded("get_finished", lambda self, saving, loading: _nothing())
    def get_finished(self, saving: Iterable[int], loading: Iterable[int]) -> tuple[list[int], list[int]]:
        """(finished requests whose copies are over, requests whose load is over); each once for each time
        asked.
        """
        self._saving.update(map(str, saving))
        self._loading.update(map(str, loading))
        leader = self._find_leader()
        if leader is not None:
            leader.poll()
        if not self._is_started:  # the batch could not run
            self._is_dropped = True
            self._refused = []  # these the leader names again
            self.start_load()
        self._offloads.abandon()  # this iteration computed nothing, or did not come to its end
        # A load's result is there before the leader's word on it: in this order none of these words is early.
        self._hear()
        self._take_results()
        self._take_notes()
        if not (self._saving or self._loading):
            return [], []
        saved = self._offloads.take_read()
        loaded = {name for name in self._loading if self._is_loaded(name)}
        self._saving -= saved
        self._loading -= loaded
        return [*map(int, saved)], [*map(int, loaded)]

    def shutdown(self) -> None:
        """Waits for running copies and frees everything."""
        self.worker.close()

    # ---------------------------------------------------------------- inside

    def _await(self, jobs: set[int]) -> None:
        """Waits until all ranks have ended these loads, so that all compute with them, or none."""
        ends_at_s = time.monotonic() + FENCE_TIMEOUT_S
        self._verdicts = dict.fromkeys(jobs)
        if not self.worker.wait(jobs, FENCE_TIMEOUT_S):
            self.worker.fence(
                jobs
            )  # those who wait for them are kept from the forward pass, and lose the blocks
        self._take_results()
        while None in self._verdicts.values() and time.monotonic() < ends_at_s:
            self.worker.wait_note(POLL_S)
            self._hear()
        verdicts, self._verdicts = self._verdicts, {}
        self._refused += [f"of load {job_id}" for job_id, is_done in verdicts.items() if not is_done]

    def _take_results(self) -> None:
        for result in self.worker.take():
            name, is_done = self._loads.pop(result.job_id, None), result.outcome is Outcome.OK
            if self._is_alone and is_done and result.job_id in self._verdicts:  # as the leader will say
                self._verdicts[result.job_id] = True  # a failure it has to know before the batch comes again
            if name is not None:
                self._move(name, LoadEvent.LOADED if is_done else LoadEvent.FAILED)

    def _hear(self) -> None:
        """What the leader has said; it says something when it has heard from all ranks."""
        leader = self._find_leader()
        if leader is not None:
            leader.poll()
        for note in map(decode_note, self.worker.take_notes()):
            if isinstance(note, LoadEnded) and note.job_id in self._verdicts:
                self._verdicts[note.job_id] = note.is_done
            self._notes.append(note)

    def _start_tail(self, content: bytes) -> None:
        """What a request has filled at its end is copied as soon as this is known, on the channel's thread:
        the executor's loop sleeps when it has no request, and takes no notes then.

        The copy needs no order behind a stream: the leader has seen the request's last token on its host, and
        layers end in collectives of all ranks, so that each rank has computed what comes before that token.
        """
        note = decode_note(content)
        if isinstance(note, Finish) and note.plan is not None:
            self.worker.submit(note.plan)

    def _take_notes(self) -> None:
        notes, self._notes = self._notes, []
        for note in notes:
            if isinstance(note, Finish):
                if note.request_id in self._saving:  # else it was said twice, and has been answered
                    self._offloads.keep({note.request_id: note.job_ids})
            elif self._load_statuses.get(note.request_id) is LoadStatus.FAILED:
                # The leader will keep the request from its forward pass; only now may it be scheduled.
                self._move(note.request_id, LoadEvent.TOLD)

    def _is_loaded(self, name: str) -> bool:
        is_over = self._load_statuses.get(name) is LoadStatus.OVER
        if is_over:
            self._move(name, LoadEvent.REPORTED)
        return is_over

    @guarded("load_status", lambda self, name, event: None)
    def _move(self, name: str, event: LoadEvent) -> None:
        """A bug here is counted, and the callback goes on with what else it has."""
        status = after(LOAD_TABLE, self._load_statuses.get(name, LoadStatus.NONE), event)
        if status is LoadStatus.NONE:
            del self._load_statuses[name]
        else:
            self._load_statuses[name] = status

    def _fail_unsubmitted(self) -> None:
        self.worker.fence_all()  # nobody knows how far the fences of this iteration got
        for job_id in [
            job_id for job_id in {*self._loads, *self._sync_onboards} if not self.worker.is_known(job_id)
        ]:
            self.worker.reject(job_id)
        plans = self._plans
        if plans is not None and (plans.sync_onboards or plans.awaited):
            self._refused.append("whose load has not begun")


def _nothing() -> tuple[list[int], list[int]]:
    return [], []
