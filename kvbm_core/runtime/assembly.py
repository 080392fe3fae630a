"""What every adapter puts together in the same way from the settings: the leader's disk, the worker's
options.
"""

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
from kvbm_core.policy.admission import AdmitAll
from kvbm_core.policy.frequency import FrequencyFilter
from kvbm_core.runtime.channel import LeaderChannel
from kvbm_core.runtime.disk_folder import DiskFolder
from kvbm_core.runtime.endpoint import Endpoint
from kvbm_core.runtime.handshake import Handshake
from kvbm_core.runtime.leader import DiskSetup
from kvbm_core.runtime.messages import DiskShare, Message
from kvbm_core.runtime.rank_watch import WatchOptions
from kvbm_core.runtime.worker import LOAD_GRACE_S, WorkerOptions
from kvbm_core.runtime.worker_disk import WorkerDiskOptions
from kvbm_core.storage.disk.allocate import FileOptions
from kvbm_core.storage.disk.record import SECTOR_BYTES
from kvbm_core.storage.host_slab import available_memory_bytes, taken_by_siblings_bytes

log = logging.getLogger("kvbm")


class LeaderDisk:
    """The disk tier of the leader's process: whether there is one, where, and how its orders leave.

    ``identity``: see DiskFolder.
    """

    def __init__(self, settings: KvbmSettings, world_size: int, clock: Clock, identity: str) -> None:
        self._settings = settings
        self._world_size = world_size
        self._clock = clock
        self._identity = identity
        self._folder: DiskFolder | None = None
        self._channel: LeaderChannel | None = None
        self._handshake: Handshake | None = None

    def setup(self) -> DiskSetup | None:
        """For the leader; None without a disk tier."""
        settings = self._settings
        if not settings.has_disk_tier:
            return None
        is_filtered = settings.has_host_tier and not settings.disable_disk_offload_filter
        admission = FrequencyFilter(self._clock) if is_filtered else AdmitAll()
        if not settings.has_host_tier:
            log.warning(
                "kvbm: a disk tier without a host tier is experimental; all blocks go to disk, "
                "without a filter, and pass through a little host memory"
            )
        return DiskSetup(admission, self._broadcast)

    def connect(self, channel: LeaderChannel, handshake: Handshake) -> None:
        """Orders go to these workers from now on; before, nobody is there to take one."""
        self._channel, self._handshake = channel, handshake

    def _broadcast(self, message: Message) -> None:
        if self._channel is not None and self._handshake is not None:
            for peer in self._handshake.storing_peers():
                self._channel.send(peer, message)

    def plan(self, block_bytes: int, fingerprint: str) -> DiskShare | None:
        """See Handshake."""
        if not self._settings.has_disk_tier:
            return None
        slots = self._settings.disk_tier_slots(block_bytes + self._world_size * SECTOR_BYTES)
        self._folder = DiskFolder(Path(self._settings.disk_cache_dir), fingerprint, identity=self._identity)
        return DiskShare(str(self._folder.path), slots)

    def close(self) -> None:
        """Gives the folder up."""
        if self._folder is not None:
            self._folder.close()


def make_handshake(
    settings: KvbmSettings,
    world_size: int,
    disk: LeaderDisk,
    metrics: Metrics,
    size_tier: Callable[[int], int] | None = None,
) -> Handshake:
    """How the leader learns its workers, and who says when they do not come. ``size_tier``: see Handshake; as
    the settings have it unless given.
    """
    return Handshake(
        world_size,
        size_tier or settings.host_tier_slots,
        disk.plan,
        init_timeout_s=settings.leader_worker_init_timeout_s,
        on_overdue=lambda: metrics.failure(FailureKind.HANDSHAKE),
    )


def open_channel(
    endpoint: Endpoint, handshake: Handshake, disk: LeaderDisk, metrics: Metrics
) -> LeaderChannel:
    """The leader's channel, and its two users connected to it. ConfigError, one line, if it cannot be."""
    channel = LeaderChannel(
        endpoint,
        handshake.on_message,
        on_bad_frames=lambda: metrics.failure(FailureKind.BAD_MESSAGE),
        on_tick=handshake.on_tick,
    )
    handshake.connect(channel.send)
    disk.connect(channel, handshake)
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


def disk_options(
    settings: KvbmSettings, *, deadline_s: float | None = None, check_at_start: bool = False
) -> WorkerDiskOptions:
    """How a rank's file is read and written. ``deadline_s``: where the setting does not fit the engine.

    ``check_at_start``: what the engine needs; a user who made the setting decides otherwise.
    """
    if settings.disk_check_at_start is not None:
        check_at_start = settings.disk_check_at_start
    return WorkerDiskOptions(
        FileOptions.of(settings), deadline_s or settings.disk_deadline_s, settings.disk_io, check_at_start
    )


def worker_options(
    settings: KvbmSettings,
    *,
    engine_carries_acks: bool,
    replicates: bool = False,
    disk_deadline_s: float | None = None,
    check_disk_at_start: bool = False,
) -> WorkerOptions:
    """A rank's options. ``disk_deadline_s`` and ``check_disk_at_start``: see ``disk_options``."""
    return WorkerOptions(
        transfer_deadline_s=settings.transfer_deadline_s,
        max_concurrent_transfers=settings.max_concurrent_transfers,
        max_batch_blocks=settings.max_transfer_batch_size,
        verify=settings.verify_onboard,
        near_memory=not settings.disable_numa,
        disk=disk_options(settings, deadline_s=disk_deadline_s, check_at_start=check_disk_at_start),
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
