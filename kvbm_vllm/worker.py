"""vLLM's worker hooks -> the worker. Runs in each rank, on the model runner's thread."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from kvbm_core.errors import LayoutError, Outcome
from kvbm_core.layout.heads import HeadShards
from kvbm_core.observe.guard import GuardState, guarded
from kvbm_core.observe.labels import FailureKind
from kvbm_core.runtime.step_offloads import StepOffloads
from kvbm_core.runtime.worker import Worker
from kvbm_core.transfer.plan import GroupMove, JobResult
from kvbm_vllm.config import KvShard, fails_by_block
from kvbm_vllm.layout import Audited, device_memory
from kvbm_vllm.metadata import DynamoConnectorMetadata, DynamoWorkerMetadata

if TYPE_CHECKING:
    import torch
    from vllm.v1.kv_cache_interface import KVCacheConfig

log = logging.getLogger("kvbm")

# The longest that an otherwise empty step waits for a copy; a new request waits no longer than this.
IDLE_WAIT_S = 0.002


class WorkerSide:
    """One rank's worker side. Every hook is guarded: an exception here ends as a failed load, never as a
    hang.
    """

    def __init__(
        self,
        worker: Worker,
        kv_cache_config: KVCacheConfig,
        audited: Audited,
        shard: KvShard,
        guard_state: GuardState,
        *,
        submits_without_save: bool,
        heads_of: Callable[[dict[str, torch.Tensor]], HeadShards | None] = lambda kv_caches: None,
    ) -> None:
        self.worker = worker
        self.guard_state = guard_state
        self._kv_cache_config = kv_cache_config
        self._audited = audited
        self._fails_by_block = fails_by_block(kv_cache_config)
        self._shard = shard
        self._submits_without_save = submits_without_save
        self._heads_of = heads_of
        self._metadata: DynamoConnectorMetadata | None = None
        self._fenced: DynamoConnectorMetadata | None = None
        self._started: DynamoConnectorMetadata | None = None
        # Loads not reported yet: job -> (request, its device blocks). None of them may be left out of
        # get_finished.
        self._loads: dict[int, tuple[str, tuple[GroupMove, ...]]] = {}
        self._revoked: set[int] = set()
        self._received: set[str] = set()
        self._failed_blocks: set[int] = set()
        self._failed_requests: set[str] = set()
        self._offloads = StepOffloads(worker)

    @guarded("register_kv_caches", lambda self, kv_caches: None)
    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Reads the layout and says hello; a layout in doubt is refused with one line and nothing is
        cached.
        """
        try:
            memory, fingerprint = device_memory(
                kv_caches,
                self._kv_cache_config,
                self._audited,
                self._shard.number,
                self._shard.num_shards,
            )
        except LayoutError as error:
            log.error("%s; nothing is cached: report this model and vLLM version, or run without kvbm", error)
            self.guard_state.metrics.failure(FailureKind.LAYOUT)
            self.worker.refuse(str(error))
            return
        self.worker.register(memory, fingerprint, self._heads_of(kv_caches), part=self._shard.part)

    @guarded("handle_preemptions", lambda self, metadata: self._stop_all())
    def handle_preemptions(self, metadata: DynamoConnectorMetadata) -> None:
        """Before anything is overwritten: reads of blocks that this step reuses are cancelled or waited
        for.
        """
        if self._fenced is metadata:
            return
        self._fenced = metadata
        if metadata.fence_all:
            self.worker.fence_all()
        elif metadata.fences:
            self.worker.fence(metadata.fences)

    def bind(self, metadata: DynamoConnectorMetadata) -> None:
        """The plans of this step."""
        self._metadata = metadata
        self._offloads.begin(metadata.offloads)
        self._offloads.keep(metadata.finishing)
        for request_id, blocks in metadata.failed_loads.items():
            self._end_load(request_id, blocks)
        for request_id, plan in metadata.onboards:
            self._loads[plan.job_id] = (request_id, plan.moves)
        if metadata.revoked:
            self._revoked.update(self._loads.keys() & metadata.revoked)

    def clear(self) -> None:
        """The step is over."""
        self._metadata = None

    @guarded("start_load_kv", lambda self: self._fail_unsubmitted_loads())
    def start_load_kv(self) -> None:
        """Starts this step's loads."""
        metadata = self._metadata
        if metadata is None or self._started is metadata:
            return
        self._started = metadata
        if self._fenced is not metadata:
            self.handle_preemptions(metadata)
        for _, plan in metadata.onboards:
            self.worker.submit(plan)

    @guarded("wait_for_save", lambda self: self._offloads.abandon())
    def wait_for_save(self) -> None:
        """Starts this step's offloads; waits for nothing."""
        self._offloads.submit()

    @guarded("get_finished", lambda self: self._give_up())
    def get_finished(self) -> tuple[set[str], set[str]]:
        """(finished requests whose copies are over, requests whose load is over, failed or not); each id
        once.
        """
        if self._submits_without_save:
            self.wait_for_save()
        if self._metadata is not None and self._metadata.is_idle:
            self._let_copies_run()
        ended = self.worker.take()
        if not (self._loads or self._offloads.kept or self._received):
            return set(), set()  # nobody waits for anything
        for result in ended:
            request_id, moves = self._loads.pop(result.job_id, (None, ()))
            if request_id is not None:
                is_revoked = result.job_id in self._revoked
                self._revoked.discard(result.job_id)
                failed = _blocks_of(moves) if is_revoked else _failed_blocks(moves, result)
                self._end_load(request_id, failed)
        return self._offloads.take_read(), self._take_received()

    def _let_copies_run(self) -> None:
        # A step without tokens has nothing to be late for. Spinning through it would keep the interpreter
        # from the thread that copies; waiting hands it over.
        self.worker.wait(None, IDLE_WAIT_S)

    def _end_load(self, request_id: str, failed: Sequence[int]) -> None:
        """``failed``: the device blocks that were not filled. vLLM computes from the first of them on."""
        self._received.add(request_id)
        if self._fails_by_block:
            self._failed_blocks.update(failed)
        elif failed:
            self._failed_requests.add(request_id)

    def _take_received(self) -> set[str]:
        received, self._received = self._received, set()
        return received

    def take_failed_blocks(self) -> set[int]:
        """Device blocks of loads that failed, for models with one KV cache group; each reported once."""
        blocks, self._failed_blocks = self._failed_blocks, set()
        return blocks

    def take_failed_requests(self) -> set[str]:
        """Requests whose load failed, for models with several groups (block ids are not unique there)."""
        requests, self._failed_requests = self._failed_requests, set()
        return requests

    def take_metadata(self) -> DynamoWorkerMetadata | None:
        """Results for the leader; after ``get_finished`` in each step."""
        results = self.worker.take_results()
        return DynamoWorkerMetadata({self.worker.rank: results}) if results else None

    def unregister_kv_caches(self) -> None:
        """The device cache is about to be unmapped: no copy may touch it any more.

        Not guarded: if that cannot be made sure, vLLM must not go to sleep. StuckCopyError if a copy hangs.
        """
        self.worker.leave_device()

    def shutdown(self) -> None:
        """Waits for running copies and frees everything."""
        self.worker.close()

    # ---------------------------------------------------------------- when something broke

    def _stop_all(self) -> None:
        self.worker.fence_all()

    def _fail_unsubmitted_loads(self) -> None:
        for job_id in [job_id for job_id in self._loads if not self.worker.is_known(job_id)]:
            request_id, moves = self._loads.pop(job_id)
            self._revoked.discard(job_id)
            self._end_load(request_id, _blocks_of(moves))
            self.worker.reject(job_id)

    def _give_up(self) -> tuple[set[str], set[str]]:
        """Ends every load as failed, once no copy can write any more, so that vLLM recomputes instead of
        waiting.
        """
        self.worker.fence(self._loads)
        loads, self._loads = self._loads, {}
        self._revoked.clear()
        for request_id, moves in loads.values():
            self._end_load(request_id, _blocks_of(moves))
        finished = set(self._offloads.kept)
        self._offloads.kept.clear()
        return finished, self._take_received()


def _blocks_of(moves: Sequence[GroupMove]) -> tuple[int, ...]:
    return tuple(block for move in moves for block in move.device_blocks)


def _failed_blocks(moves: Sequence[GroupMove], result: JobResult) -> tuple[int, ...]:
    if result.outcome is Outcome.OK:
        return ()
    pairs = [pair for move in moves for pair in zip(move.device_blocks, move.slots, strict=True)]
    failed = result.failures([slot for _, slot in pairs])
    return tuple(block for block, slot in pairs if slot in failed)
