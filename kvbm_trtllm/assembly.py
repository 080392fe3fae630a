"""Puts the parts together for one process's role: settings, channel, leader or worker, callbacks, metrics."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvbm_core.config import Adapter, SettingSource
from kvbm_core.control.desk import About
from kvbm_core.events.log import EventLog
from kvbm_core.events.service import ConsolidatedEnds, EventService, media_of
from kvbm_core.identity.fields import NOT_ON_DISK
from kvbm_core.identity.roots import Roots
from kvbm_core.observe.guard import GuardState
from kvbm_core.observe.log import setup_logging
from kvbm_core.observe.readiness import Readiness
from kvbm_core.runtime.assembly import (
    LeaderProcess,
    announce,
    leader_options,
    metrics_of,
    rank_options,
)
from kvbm_core.runtime.messages import Note
from kvbm_core.runtime.transfer_jobs import JobPart
from kvbm_core.runtime.worker import Worker
from kvbm_core.tiers.groups import GroupSpec
from kvbm_core.types import Tier
from kvbm_trtllm.config import (
    block_tokens_of,
    check_supported,
    endpoint_of,
    index_cache_of,
    pads_graphs,
    read_settings,
    spare_tokens_of,
    tiers_here_of,
    uses_attention_dp,
    world_size_of,
)
from kvbm_trtllm.consolidator_config import endpoints_of
from kvbm_trtllm.contract import BAD_PAGE
from kvbm_trtllm.events import EventFeed, own_hash
from kvbm_trtllm.identity import describe_engine, namespace_of, weights_identity
from kvbm_trtllm.layout import Ranks
from kvbm_trtllm.meeting import data_parallel_rank_of, meet, name_of_engine, rank_of
from kvbm_trtllm.notes import encode
from kvbm_trtllm.scheduler import Options, SchedulerSide
from kvbm_trtllm.weights import EngineChanges
from kvbm_trtllm.worker import EngineFacts, WorkerSide

if TYPE_CHECKING:
    from kvbm_core.errors import Outcome

PATIENT_DISK_DEADLINE_S = 60.0


class LeaderPart:
    """Everything of the leader's role. Made in a thread of TensorRT-LLM's; used by the executor's loop
    thread.

    ``callbacks`` is made anew when the layer groups turn out to be others than one of full attention.
    ConfigError or UnsupportedError, one line, when it cannot serve as configured.
    """

    callbacks: SchedulerSide

    def __init__(self, llm_args: Any, *, has_attention_dp: bool) -> None:
        meeting = meet("leader")
        settings = read_settings()
        announce(settings, Adapter.TRTLLM)
        check_supported(llm_args, has_attention_dp=has_attention_dp)
        self._llm_args = llm_args
        self._description = describe_engine(llm_args)
        if settings.has_lower_tier:
            self._description.tell("TensorRT-LLM", NOT_ON_DISK)
        self._settings = settings
        self._weights = weights_identity(llm_args)
        self._changes = EngineChanges(self._weights)
        self.metrics = metrics_of(settings, SchedulerSide)
        self._process = LeaderProcess(
            settings,
            self.metrics,
            endpoint_of(
                meeting.engine_id,
                settings,
                data_parallel_rank_of(llm_args),
                is_spread=tiers_here_of(llm_args) < 1,
            ),
            world_size=world_size_of(llm_args),
            model=str(getattr(llm_args, "model", "")),
            engine_name=meeting.engine_id[-8:],
            tiers_here=tiers_here_of(llm_args),
        )
        self._events, self._publishing = self._make_events()
        self._groups: tuple[GroupSpec, ...] = (GroupSpec(0, block_tokens_of(llm_args)),)
        self._is_told = False
        rank = data_parallel_rank_of(llm_args)
        self._about = about = About(
            "TensorRT-LLM", str(getattr(llm_args, "model", "")), rank, self._namespace_digest
        )
        self._make_callbacks()
        self._process.poll_with(self._poll_if_quiet)
        self._process.serve_metrics(about, self._readiness)
        self._process.take_orders(about, self._readiness)
        if settings.has_lower_tier:
            self._weights.start()
        meeting.leader = self

    def begin(self, groups: tuple[GroupSpec, ...], *, is_told: bool) -> None:
        """See meeting.LeaderPart."""
        if (groups, is_told) != (self._groups, self._is_told):
            self._groups, self._is_told = groups, is_told
            self._make_callbacks()

    def wait(self) -> None:
        """See meeting.LeaderPart."""
        self._process.wait(self._weights)
        self.callbacks.catch_up()

    def poll(self) -> None:
        """See meeting.LeaderPart."""
        self.callbacks.poll()

    def close(self) -> None:
        """Ends threads and sockets. May be called twice."""
        self._weights.close()
        self._process.close()
        if self._publishing is not None:
            self._publishing.close()

    def _make_events(self) -> tuple[EventFeed, EventService | None]:
        """Nothing but an idle feed, if nobody wants events."""
        settings = self._settings
        ends = None if uses_attention_dp(self._llm_args) else endpoints_of(settings)
        if ends is None and not settings.event_ways:
            return EventFeed(), None
        event_log = EventLog(media_of(settings), own_hash)
        consolidated = None if ends is None else ConsolidatedEnds(*ends, same_hashes=False)
        rank = data_parallel_rank_of(self._llm_args)
        return EventFeed(event_log), EventService(settings, event_log, rank, self.metrics, consolidated)

    def _make_callbacks(self) -> None:
        settings = self._settings
        if self._events.log is not None:  # of a leader that is not used any more
            for tier in (Tier.HOST, Tier.DISK):
                self._events.log.cleared(tier, ())
        # Nobody can be told to ask again, so that loads under way are not waited for.
        options = leader_options(settings, share_loads=False, null_block=BAD_PAGE)
        leader = self._process.make_leader(
            self._groups,
            options,
            listener=self._events.log,
            on_offload_end=self._events.on_end,
            on_onboard_end=self._on_onboard_end,
        )
        self._process.compare(leader, self._about, self._description)
        self.callbacks = SchedulerSide(
            leader,
            Roots(
                namespace_of(self._description, self._groups[0].block_size_tokens),
                self._weights.stamp,
                is_lasting=self._description.is_lasting,
            ),
            self._process.clock,
            lambda note: self._process.send(Note(encode(note))),
            guard_state=GuardState(self.metrics),
            options=Options(
                sync_onboard_bytes=settings.sync_onboard_bytes,
                decode_run_tokens=settings.decode_run_tokens,
                min_priority=settings.host_offload_prefix_min_priority,
                is_told=self._is_told,
                spare_tokens=spare_tokens_of(self._llm_args),
                pads_graphs=pads_graphs(self._llm_args),
                have_changed=self._changes.take,
            ),
            events=self._events,
        )

    def _namespace_digest(self) -> str:
        return namespace_of(self._description, self._groups[0].block_size_tokens).digest

    def _readiness(self) -> Readiness:
        return self.callbacks.leader.readiness()  # that of the groups as they turned out to be

    def _poll_if_quiet(self) -> float | None:
        return self.callbacks.poll_if_quiet()  # those of now

    def _on_onboard_end(self, part: JobPart, outcome: Outcome) -> None:
        self.callbacks.on_onboard_end(part, outcome)


def build_worker_side(llm_args: Any, *, waits_at_register: bool) -> WorkerSide:
    """One rank's role. ConfigError or UnsupportedError, one line, when it cannot serve as configured."""
    rank, world_size = rank_of(llm_args), world_size_of(llm_args)
    meeting = meet("worker") if rank == 0 else None
    engine_id = name_of_engine(llm_args, meeting)
    settings = read_settings()
    setup_logging(settings.log_level)
    is_spread = tiers_here_of(llm_args) < 1
    endpoint = endpoint_of(engine_id, settings, data_parallel_rank_of(llm_args), is_spread=is_spread)
    # A load that is given up costs a whole batch here, and one that takes long nobody but its own request.
    is_default = settings.source("disk_deadline_s") is SettingSource.DEFAULT
    options = rank_options(
        settings,
        deadline_s=PATIENT_DISK_DEADLINE_S if is_default else None,
        check_at_start=True,  # a damaged record is found now, not by a load
    )
    worker = Worker(rank, world_size, endpoint, options, max_ctas=settings.nccl_max_ctas)
    return WorkerSide(
        worker,
        Ranks(rank, world_size),
        EngineFacts(
            block_tokens_of(llm_args),
            waits_at_register,
            lambda is_latent: index_cache_of(llm_args, is_latent=is_latent),
        ),
        lambda: meeting.leader if meeting is not None else None,
        stores_once=settings.nccl_mla_mode,
        guard_state=GuardState(metrics_of(settings, WorkerSide)),
    )
