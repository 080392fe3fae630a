"""What every adapter puts together in the same way from the settings: the leader's process, lower tiers,
options.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from pathlib import Path

from kvbm_core.blocks.slot_tier import BlockTier
from kvbm_core.clock import Clock, SystemClock
from kvbm_core.config import Adapter, KvbmSettings
from kvbm_core.config.remote_url import BUCKET_SCHEMES, scheme_of
from kvbm_core.errors import Outcome
from kvbm_core.identity.weights import WEIGHTS_WAIT_S, WeightsIdentity
from kvbm_core.native import native
from kvbm_core.observe.guard import seams_of
from kvbm_core.observe.labels import FailureKind
from kvbm_core.observe.log import CacheStatsLog, setup_logging
from kvbm_core.observe.metrics import Metrics
from kvbm_core.observe.readiness import Readiness, always_ready
from kvbm_core.observe.server import MetricsServer
from kvbm_core.policy.admission import AdmissionPolicy, AdmitAll
from kvbm_core.policy.frequency import FrequencyFilter
from kvbm_core.policy.lru import LruPolicy
from kvbm_core.runtime.channel import Identity, LeaderChannel
from kvbm_core.runtime.endpoint import Endpoint
from kvbm_core.runtime.handshake import Handshake, PlanTier
from kvbm_core.runtime.leader import Leader, LeaderParts
from kvbm_core.runtime.leader_options import LeaderOptions
from kvbm_core.runtime.messages import Message, Move
from kvbm_core.runtime.offload import OnPartEnd
from kvbm_core.runtime.request import NULL_BLOCK
from kvbm_core.runtime.transfer_jobs import JobPart
from kvbm_core.runtime.worker import LOAD_GRACE_S
from kvbm_core.storage.disk.allocate import FileOptions
from kvbm_core.storage.disk.folder import DiskFolder
from kvbm_core.storage.disk.record import SECTOR_BYTES
from kvbm_core.storage.host_slab import available_memory_bytes, taken_by_siblings_bytes
from kvbm_core.storage.remote.login import ServerLogin
from kvbm_core.storage.remote.s3_client import S3Options
from kvbm_core.storage.stores import StoreOptions, extent_bytes
from kvbm_core.tiers.groups import GroupSpec
from kvbm_core.tiers.keyed import KeyedOptions, keyed_tier
from kvbm_core.tiers.lower import LowerTierMaker
from kvbm_core.tiers.slotted import slotted_tier
from kvbm_core.transfer.plan import TierOrder, TierPlace
from kvbm_core.transfer.rank import RankOptions
from kvbm_core.types import BlockKey, Tier

log = logging.getLogger("kvbm")


DISK, REMOTE = "disk", "remote"
"""Names of lower tiers: of block files, and of what machines share."""


class LowerTiers:
    """The tiers below the host in the leader's process: which there are, and where.

    ``model``: see DiskFolder's ``identity``.
    """

    def __init__(self, settings: KvbmSettings, num_ranks: int, clock: Clock, model: str) -> None:
        self._settings = settings
        self._num_ranks = num_ranks
        self._clock = clock
        self._model = model
        self._folder: DiskFolder | None = None

    def makers(self) -> tuple[LowerTierMaker, ...]:
        """For the leader, in the order of the search."""
        return tuple(lower_makers(self._settings, self._clock).values())

    def plans(self) -> dict[str, PlanTier]:
        """For the handshake."""
        plans: dict[str, PlanTier] = {}
        if self._settings.has_disk_tier:
            plans[DISK] = self._plan_disk
        for name, url in remote_tiers(self._settings).items():
            plans[name] = partial(self._plan_store, TierPlace(name, url, model=self._model))
        return plans

    def _plan_store(self, place: TierPlace, block_bytes: int, fingerprint: str) -> TierPlace:
        return place

    def _plan_disk(self, block_bytes: int, fingerprint: str) -> TierPlace:
        slots = self._settings.disk_tier_slots(block_bytes + self._num_ranks * SECTOR_BYTES)
        self._folder = DiskFolder(Path(self._settings.disk_cache_dir), fingerprint, identity=self._model)
        return TierPlace(DISK, str(self._folder.path), slots)

    def close(self) -> None:
        """Gives the disk's folder up."""
        if self._folder is not None:
            self._folder.close()


class LeaderProcess:
    """What stands around the leader of one engine: handshake, channel, lower tiers, log line, metrics page.

    ``endpoint``: where its workers come. ``model``: see LowerTiers. ``engine_name``: in the log line.
    ``tiers_here``: how many tiers of this leader's size this machine has room for: less than 1 where some
    ranks are on other machines; more where several have a leader each, who may have begun to take their
    memory. None if there is known to be enough. ConfigError, one line, if the endpoint cannot be had.
    """

    def __init__(
        self,
        settings: KvbmSettings,
        metrics: Metrics,
        endpoint: Endpoint,
        *,
        world_size: int,
        model: str,
        engine_name: str,
        tiers_here: float | None = None,
    ) -> None:
        self.clock = SystemClock()
        self._settings = settings
        self._metrics = metrics
        self._tiers_here = tiers_here
        self._lower = LowerTiers(settings, world_size, self.clock, model)
        self._stats_log = CacheStatsLog(metrics, settings.cache_stats_log_interval_s, engine_name)
        self._handshake = Handshake(
            world_size,
            self._host_slots,
            self._lower.plans(),
            init_timeout_s=settings.leader_worker_init_timeout_s,
            on_overdue=lambda: metrics.failure(FailureKind.HANDSHAKE),
        )
        self.channel = LeaderChannel(
            endpoint,
            self._handshake.on_message,
            on_bad_frames=lambda: metrics.failure(FailureKind.BAD_MESSAGE),
            on_tick=self._tick,
        )
        self._handshake.connect(self.channel.send)
        self._server: MetricsServer | None = None

    def _tick(self) -> list[tuple[Identity, Message]]:
        """On the channel's thread, so that an engine without requests writes the log line too."""
        self._stats_log.tick()
        return self._handshake.on_tick()

    def _host_slots(self, block_bytes: int) -> int:
        """For Handshake. ConfigError, one line, if there is too little memory here."""
        slots = self._settings.host_tier_slots(block_bytes)
        if self._tiers_here is not None:
            room_bytes = available_memory_bytes()
            if self._tiers_here > 1:
                room_bytes += taken_by_siblings_bytes()
            self._settings.check_memory(int(slots * block_bytes * self._tiers_here), room_bytes)
        return slots

    def make_leader(
        self,
        groups: tuple[GroupSpec, ...],
        options: LeaderOptions,
        *,
        on_evict: Callable[[Sequence[BlockKey]], None] | None = None,
        on_offload_end: OnPartEnd = lambda part, committed: None,
        on_onboard_end: Callable[[JobPart, Outcome], None] = lambda part, outcome: None,
    ) -> Leader:
        """The leader, with an empty host tier. One that was made before is not used any more."""
        parts = LeaderParts(self._lower.makers(), self._send_order, on_offload_end, on_onboard_end)
        host = BlockTier(Tier.HOST, LruPolicy(), self.clock, on_evict=on_evict)
        return Leader(
            groups,
            host,
            self._handshake,
            clock=self.clock,
            metrics=self._metrics,
            options=options,
            parts=parts,
        )

    def wait(self, weights: WeightsIdentity) -> None:
        """At start, so that the first request is cached too: until the first slots can be used and
        the weights are known, or time is up. Without an answer the engine serves, and the tier joins later.
        """
        self._handshake.wait(self._settings.start_wait_s)
        weights.wait(WEIGHTS_WAIT_S)

    def send(self, message: Message) -> None:
        """To every worker."""
        for peer in self._handshake.peers():
            self.channel.send(peer, message)

    def _send_order(self, order: TierOrder) -> None:
        """To every worker that stores."""
        message = Move(order)
        for peer in self._handshake.storing_peers():
            self.channel.send(peer, message)

    def serve_metrics(self, rank: int, readiness: Callable[[], Readiness]) -> None:
        """See ``metrics_server``."""
        self._server = metrics_server(self._settings, self._metrics, rank, readiness)

    def close(self) -> None:
        """Ends threads and sockets. May be called twice."""
        self.channel.close()
        if self._server is not None:
            self._server.close()
        self._lower.close()


def lower_makers(settings: KvbmSettings, clock: Clock) -> dict[str, LowerTierMaker]:
    """The tiers below the host by name, in the order of the search."""
    makers: dict[str, LowerTierMaker] = {}
    if settings.has_disk_tier:
        makers[DISK] = slotted_tier(DISK, Tier.DISK, disk_admission(settings, clock))
    for name, url in remote_tiers(settings).items():
        options = KeyedOptions(extent_bytes=extent_bytes(url), always_loads=settings.remote_load == "always")
        makers[name] = keyed_tier(name, Tier.REMOTE, remote_admission(settings, url, clock), options)
    return makers


def remote_tiers(settings: KvbmSettings) -> dict[str, str]:
    """The stores that machines share: the URL of each by its tier's name, in the order of the search."""
    names = (REMOTE if number == 1 else f"{REMOTE}-{number}" for number in count(1))
    return dict(zip(names, settings.store_urls, strict=False))


def disk_admission(settings: KvbmSettings, clock: Clock) -> AdmissionPolicy:
    """Which blocks go to the disk."""
    if not settings.has_host_tier:
        log.warning(
            "kvbm: a disk tier without a host tier is experimental; all blocks go to disk, "
            "without a filter, and pass through a little host memory"
        )
        return AdmitAll()
    return AdmitAll() if settings.disable_disk_offload_filter else FrequencyFilter(clock)


def remote_admission(settings: KvbmSettings, url: str, clock: Clock) -> AdmissionPolicy:
    """Which blocks go to the store with this URL: by default all to a directory, and to a bucket, whose
    requests cost money, what was used again.
    """
    is_bucket = scheme_of(url) in BUCKET_SCHEMES
    is_hit = settings.remote_filter == "hit" or (settings.remote_filter == "auto" and is_bucket)
    return FrequencyFilter(clock) if is_hit else AdmitAll()


def leader_options(
    settings: KvbmSettings,
    *,
    share_loads: bool,
    fetch_wait_s: float = 0.0,
    null_block: int = NULL_BLOCK,
    audit_rate: float = 0.0,
) -> LeaderOptions:
    """A leader's options. A worker ends its jobs itself, in time; the leader's patience ends after that."""
    return LeaderOptions(
        settings.lease_ttl_s,
        settings.share_wait_s,
        share_loads,
        fetch_wait_s,
        null_block,
        settings.transfer_deadline_s + LOAD_GRACE_S,
        audit_rate,
    )


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
        store=store_options(settings),
    )


def store_options(settings: KvbmSettings) -> StoreOptions:
    """What all stores that machines share take of the settings."""
    login = ServerLogin(
        settings.remote_username,
        settings.remote_password_file,
        settings.remote_ca_file,
        settings.remote_cert_file,
    )
    s3 = S3Options(
        settings.object_endpoint,
        settings.object_region,
        settings.object_access_key,
        settings.object_secret_key,
    )
    return StoreOptions(
        settings.remote_max_bytes,
        settings.remote_trust,
        settings.remote_deadline_s,
        settings.remote_secret_file,
        settings.remote_encrypt,
        settings.remote_codec,
        login,
        s3,
    )


def announce(settings: KvbmSettings, adapter: Adapter, *, needs_tier: bool = True) -> None:
    """Sets logging up and says what is odd about the settings. ConfigError if they name no tier, unless the
    engine has one and its adapter says what it needs.
    """
    setup_logging(settings.log_level)
    if needs_tier:
        settings.require_tier()
    if not settings.native and native is not None:
        log.warning("kvbm: KVBM_NATIVE=false: has no effect here; set it in the engine's environment")
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
