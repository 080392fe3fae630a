"""What every adapter puts together in the same way from the settings: lower tiers, options, channel."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from kvbm_core.clock import Clock
from kvbm_core.config import Adapter, KvbmSettings
from kvbm_core.observe.guard import seams_of
from kvbm_core.observe.labels import FailureKind
from kvbm_core.observe.log import setup_logging
from kvbm_core.observe.metrics import Metrics
from kvbm_core.observe.readiness import Readiness, always_ready
from kvbm_core.observe.server import MetricsServer
from kvbm_core.policy.admission import AdmissionPolicy, AdmitAll
from kvbm_core.policy.frequency import FrequencyFilter
from kvbm_core.runtime.channel import LeaderChannel
from kvbm_core.runtime.endpoint import Endpoint
from kvbm_core.runtime.handshake import Handshake, PlanTier
from kvbm_core.runtime.messages import Move
from kvbm_core.runtime.rank_watch import WatchOptions
from kvbm_core.runtime.worker import LOAD_GRACE_S, WorkerOptions
from kvbm_core.storage.disk.allocate import FileOptions
from kvbm_core.storage.disk.folder import DiskFolder
from kvbm_core.storage.disk.record import SECTOR_BYTES
from kvbm_core.storage.host_slab import available_memory_bytes, taken_by_siblings_bytes
from kvbm_core.storage.stores import StoreOptions
from kvbm_core.tiers.keyed import keyed_tier
from kvbm_core.tiers.lower import LowerTierMaker
from kvbm_core.tiers.slotted import slotted_tier
from kvbm_core.transfer.plan import TierOrder, TierPlace
from kvbm_core.transfer.rank import RankOptions
from kvbm_core.types import Tier

log = logging.getLogger("kvbm")


DISK, REMOTE = "disk", "remote"
"""Names of lower tiers: of block files, and of what machines share."""


class LowerTiers:
    """The tiers below the host in the leader's process: which there are, where, and how their orders leave.

    ``identity``: see DiskFolder.
    """

    def __init__(self, settings: KvbmSettings, num_ranks: int, clock: Clock, identity: str) -> None:
        self._settings = settings
        self._num_ranks = num_ranks
        self._clock = clock
        self._identity = identity
        self._folder: DiskFolder | None = None
        self._channel: LeaderChannel | None = None
        self._handshake: Handshake | None = None

    def makers(self) -> tuple[LowerTierMaker, ...]:
        """For the leader, in the order of the search."""
        return tuple(lower_makers(self._settings, self._clock).values())

    def plans(self) -> dict[str, PlanTier]:
        """For the handshake."""
        plans: dict[str, PlanTier] = {}
        if self._settings.has_disk_tier:
            plans[DISK] = self._plan_disk
        if self._settings.remote_url is not None:
            place = TierPlace(REMOTE, self._settings.remote_url, model=self._identity)
            plans[REMOTE] = lambda block_bytes, fingerprint: place
        return plans

    def connect(self, channel: LeaderChannel, handshake: Handshake) -> None:
        """Orders go to these workers from now on; before, nobody is there to take one."""
        self._channel, self._handshake = channel, handshake

    def send(self, order: TierOrder) -> None:
        """To every worker that stores."""
        if self._channel is not None and self._handshake is not None:
            message = Move(order)
            for peer in self._handshake.storing_peers():
                self._channel.send(peer, message)

    def _plan_disk(self, block_bytes: int, fingerprint: str) -> TierPlace:
        slots = self._settings.disk_tier_slots(block_bytes + self._num_ranks * SECTOR_BYTES)
        self._folder = DiskFolder(Path(self._settings.disk_cache_dir), fingerprint, identity=self._identity)
        return TierPlace(DISK, str(self._folder.path), slots)

    def close(self) -> None:
        """Gives the disk's folder up."""
        if self._folder is not None:
            self._folder.close()


def lower_makers(settings: KvbmSettings, clock: Clock) -> dict[str, LowerTierMaker]:
    """The tiers below the host by name, in the order of the search."""
    makers: dict[str, LowerTierMaker] = {}
    if settings.has_disk_tier:
        makers[DISK] = slotted_tier(DISK, Tier.DISK, disk_admission(settings, clock))
    if settings.has_remote_tier:
        admission = FrequencyFilter(clock) if settings.remote_filter == "hit" else AdmitAll()
        makers[REMOTE] = keyed_tier(REMOTE, Tier.REMOTE, admission)
    return makers


def disk_admission(settings: KvbmSettings, clock: Clock) -> AdmissionPolicy:
    """Which blocks go to the disk."""
    if not settings.has_host_tier:
        log.warning(
            "kvbm: a disk tier without a host tier is experimental; all blocks go to disk, "
            "without a filter, and pass through a little host memory"
        )
        return AdmitAll()
    return AdmitAll() if settings.disable_disk_offload_filter else FrequencyFilter(clock)


def make_handshake(
    settings: KvbmSettings,
    world_size: int,
    lower: LowerTiers,
    metrics: Metrics,
    size_tier: Callable[[int], int] | None = None,
) -> Handshake:
    """How the leader learns its workers, and who says when they do not come. ``size_tier``: see Handshake; as
    the settings have it unless given.
    """
    return Handshake(
        world_size,
        size_tier or settings.host_tier_slots,
        lower.plans(),
        init_timeout_s=settings.leader_worker_init_timeout_s,
        on_overdue=lambda: metrics.failure(FailureKind.HANDSHAKE),
    )


def open_channel(
    endpoint: Endpoint, handshake: Handshake, lower: LowerTiers, metrics: Metrics
) -> LeaderChannel:
    """The leader's channel, and its two users connected to it. ConfigError, one line, if it cannot be."""
    channel = LeaderChannel(
        endpoint,
        handshake.on_message,
        on_bad_frames=lambda: metrics.failure(FailureKind.BAD_MESSAGE),
        on_tick=handshake.on_tick,
    )
    handshake.connect(channel.send)
    lower.connect(channel, handshake)
    return channel


def watch_options(settings: KvbmSettings) -> WatchOptions:
    """A worker ends its jobs itself, in time; the leader's patience ends after that."""
    return WatchOptions(job_deadline_s=settings.transfer_deadline_s + LOAD_GRACE_S)


def checked_host_slots(settings: KvbmSettings, block_bytes: int, share_here: float = 1.0) -> int:
    """Slots of the host tier, for ``Handshake``. ConfigError, one line, if there is too little memory here.

    ``share_here``: what the ranks on this machine have together, in the size of one leader's tier: more than
    1 where several have a leader each, who may have begun to take their memory.
    """
    slots = settings.host_tier_slots(block_bytes)
    room_bytes = available_memory_bytes()
    if share_here > 1:
        room_bytes += taken_by_siblings_bytes()
    settings.check_memory(int(slots * block_bytes * share_here), room_bytes)
    return slots


def rank_options(
    settings: KvbmSettings, *, deadline_s: float | None = None, check_at_start: bool = False
) -> RankOptions:
    """A rank's memory and lower tiers. ``deadline_s``: of the disk, where the setting does not fit the
    engine.

    ``check_at_start``: what the engine needs; a user who made the setting decides otherwise.
    """
    if settings.disk_check_at_start is not None:
        check_at_start = settings.disk_check_at_start
    deadline_s = deadline_s or settings.disk_deadline_s
    disk = FileOptions.of(settings, io_deadline_s=deadline_s, check_at_start=check_at_start)
    return RankOptions(
        transfer_deadline_s=settings.transfer_deadline_s,
        max_concurrent_transfers=settings.max_concurrent_transfers,
        max_batch_blocks=settings.max_transfer_batch_size,
        verify=settings.verify_onboard,
        near_memory=not settings.disable_numa,
        disk=disk,
        store=StoreOptions(settings.remote_max_bytes, settings.remote_trust, settings.remote_deadline_s),
    )


def worker_options(
    settings: KvbmSettings,
    *,
    engine_carries_acks: bool,
    replicates: bool = False,
    disk_deadline_s: float | None = None,
    check_disk_at_start: bool = False,
) -> WorkerOptions:
    """A worker's options. ``disk_deadline_s`` and ``check_disk_at_start``: see ``rank_options``."""
    return WorkerOptions(
        memory=rank_options(settings, deadline_s=disk_deadline_s, check_at_start=check_disk_at_start),
        engine_carries_acks=engine_carries_acks,
        replicates=replicates,
        max_ctas=settings.nccl_max_ctas,
    )


def announce(settings: KvbmSettings, adapter: Adapter, *, needs_tier: bool = True) -> None:
    """Sets logging up and says what is odd about the settings. ConfigError if they name no tier, unless the
    engine has one and its adapter says what it needs.
    """
    setup_logging(settings.log_level)
    if needs_tier:
        settings.require_tier()
    for warning in settings.warnings_under(adapter):
        log.warning("%s", warning)


def metrics_of(settings: KvbmSettings, *guarded_classes: type) -> Metrics:
    """The numbers of one engine, or of one of its ranks where each has tiers of its own.

    ``guarded_classes``: those whose methods the engine calls; see ``guard.seams_of``.
    """
    return Metrics(
        settings.cache_stats_max_requests,
        has_host_tier=settings.has_host_tier,
        seams=seams_of(*guarded_classes),
    )


def metrics_server(
    settings: KvbmSettings,
    metrics: Metrics,
    rank: int,
    readiness: Callable[[], Readiness] = always_ready,
) -> MetricsServer | None:
    """The page for Prometheus, if it is asked for and its port is free. ``readiness``: for /health.

    Engines of one data-parallel group, and ranks with tiers of their own, take neighbouring ports.
    """
    if not settings.metrics:
        return None
    port = settings.metrics_port + rank
    server = MetricsServer(port, metrics, settings.metrics_host, readiness)
    return server if server.start() else None
