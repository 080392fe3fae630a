"""What every adapter puts together in the same way from the settings: the leader's process, lower tiers,
options.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING
from uuid import uuid4

from kvbm_core import __version__
from kvbm_core.blocks.slot_tier import BlockTier, Residency
from kvbm_core.clock import Clock, SystemClock
from kvbm_core.config import Adapter, KvbmSettings
from kvbm_core.config.instance import instance_of
from kvbm_core.config.remote_url import BUCKET_SCHEMES, scheme_of
from kvbm_core.control.desk import About, Controlled, Desk
from kvbm_core.control.pages import Page, PageNote, targets
from kvbm_core.errors import ConfigError, Outcome
from kvbm_core.identity.digest import cache_folder
from kvbm_core.identity.fields import Description
from kvbm_core.identity.weights import WEIGHTS_WAIT_S, WeightsIdentity
from kvbm_core.native import native
from kvbm_core.observe.guard import seams_of
from kvbm_core.observe.labels import FailureKind, PeerTrouble
from kvbm_core.observe.log import CacheStatsLog, setup_logging
from kvbm_core.observe.metrics import Metrics
from kvbm_core.observe.readiness import Readiness, always_ready
from kvbm_core.observe.server import MetricsServer
from kvbm_core.observe.traces import Traces, open_traces
from kvbm_core.policy.admission import AdmissionPolicy, AdmitAll
from kvbm_core.policy.frequency import FrequencyFilter
from kvbm_core.policy.named import PolicyMaker, make_policy
from kvbm_core.runtime.channel import Identity, LeaderChannel
from kvbm_core.runtime.endpoint import Endpoint
from kvbm_core.runtime.handshake import Handshake, PlanTier
from kvbm_core.runtime.leader import Leader, LeaderParts
from kvbm_core.runtime.leader_options import LeaderOptions
from kvbm_core.runtime.messages import GiveBack, Lent, Message, Move, OfPeers, PeerNews, Returned
from kvbm_core.runtime.namesakes import FOLDER, Namesakes
from kvbm_core.runtime.offload import OnPartEnd
from kvbm_core.runtime.recorder import Recorder
from kvbm_core.runtime.replicas import LOAD_GRACE_S
from kvbm_core.runtime.request import NULL_BLOCK
from kvbm_core.runtime.transfer_jobs import JobPart
from kvbm_core.storage.disk.allocate import OFF, FileOptions
from kvbm_core.storage.disk.folder import TOP, DiskFolder
from kvbm_core.storage.disk.record import SECTOR_BYTES
from kvbm_core.storage.memory_room import available_memory
from kvbm_core.storage.remote.login import ServerLogin
from kvbm_core.storage.remote.s3_client import S3Options
from kvbm_core.storage.stores import StoreOptions, extent_bytes
from kvbm_core.tiers.groups import GroupSpec, base_block_tokens
from kvbm_core.tiers.keyed import KeyedOptions, keyed_tier
from kvbm_core.tiers.kinds import kind_of, registered_tier
from kvbm_core.tiers.lower import PEERS, LowerTierMaker
from kvbm_core.tiers.slotted import slotted_tier
from kvbm_core.transfer.plan import BLOCK_FILE, TierOrder, TierPlace
from kvbm_core.transfer.rank import RankOptions
from kvbm_core.types import BlockKey, Tier

if TYPE_CHECKING:
    from kvbm_core.control.service import ControlService
    from kvbm_core.fleet.meeting import LeaderPost
    from kvbm_core.peers.lending import Lender
    from kvbm_core.peers.rank import PeerOptions

log = logging.getLogger("kvbm")


DISK, REMOTE = "disk", "remote"
"""Names of lower tiers: of block files, and of what machines share."""


class LowerTiers:
    """The tiers below the host in the leader's process: which there are, and where.

    ``model``: see DiskFolder's ``identity``. ``is_apart``: ranks may be on other machines than this.
    """

    def __init__(
        self, settings: KvbmSettings, num_ranks: int, clock: Clock, model: str, *, is_apart: bool = False
    ) -> None:
        self._settings = settings
        self._num_ranks = num_ranks
        self._clock = clock
        self._model = model
        self._claim = uuid4().hex if is_apart else ""
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
            place = TierPlace(name, url, model=self._model, kind=kind_of(url))
            plans[name] = partial(self._plan_store, place)
        return plans

    def _plan_store(self, place: TierPlace, block_bytes: int, fingerprint: str) -> TierPlace:
        return place

    def _plan_disk(self, block_bytes: int, fingerprint: str) -> TierPlace:
        slots = self._settings.disk_tier_slots(block_bytes + self._num_ranks * SECTOR_BYTES)
        host = self._settings.host_tier_slots(block_bytes) if self._settings.has_other_measures else 0
        if slots <= host:
            line = "kvbm: the disk tier (%d blocks) is no larger than the host tier (%d blocks); "
            log.warning(line + "a disk pays if it is larger (kvbm plan says how large)", slots, host)
        directory = Path(self._settings.disk_cache_dir)
        self._folder = DiskFolder(directory, fingerprint, self._claim, identity=self._model)
        return TierPlace(DISK, str(self._folder.path), slots, self._folder.claim, kind=BLOCK_FILE)

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
        self._post: LeaderPost | None = None
        self._lender: Lender | None = None
        self._tiers_here = tiers_here
        is_apart = endpoint.apart is not None
        self._lower = LowerTiers(settings, world_size, self.clock, model, is_apart=is_apart)
        self._stats_log = CacheStatsLog(metrics, settings.cache_stats_log_interval_s, engine_name)
        self._handshake = Handshake(
            world_size,
            self._host_slots,
            self._lower.plans(),
            init_timeout_s=settings.leader_worker_init_timeout_s,
            on_overdue=lambda: metrics.failure(FailureKind.HANDSHAKE),
            engine=endpoint.engine,
        )
        self.channel = LeaderChannel(
            endpoint,
            self._handshake.on_message,
            on_bad_frames=lambda: metrics.failure(FailureKind.BAD_MESSAGE),
            on_tick=self._tick,
        )
        self._handshake.connect(self.channel.send)
        self._post = self._tell_where(endpoint)
        self._server: MetricsPage | None = None
        self._desk = Desk()
        metrics.traces = self._traces = traces_of(settings, model)
        self._control: ControlService | None = None
        self._recorder: Recorder | None = None
        self._namesakes: Namesakes | None = None

    def _tell_where(self, endpoint: Endpoint) -> LeaderPost | None:
        """So that ranks on other machines find this leader."""
        if endpoint.apart is None:
            return None
        from kvbm_core.fleet.meeting import LeaderPost

        try:
            post = LeaderPost(endpoint.apart, self.channel.address)
        except ConfigError:
            self.channel.close()
            raise
        self._handshake.describe_missing = post.describe
        return post

    def _tick(self) -> list[tuple[Identity, Message]]:
        """On the channel's thread, so that an engine without requests writes the log line too."""
        self._stats_log.tick()
        if self._post is not None and not self._handshake.missing_ranks():
            self._post.are_met()
        if self._lender is not None:
            self._lender.expire()
        return self._handshake.on_tick()

    def _host_slots(self, block_bytes: int) -> int:
        """For Handshake. ConfigError, one line, if there is too little memory here."""
        slots = self._settings.host_tier_slots(block_bytes)
        if self._tiers_here is not None:
            room = available_memory() if self._tiers_here <= 1 else available_memory().with_siblings()
            room.check(*self._settings.host_size, int(slots * block_bytes * self._tiers_here))
        return slots

    def make_leader(
        self,
        groups: tuple[GroupSpec, ...],
        options: LeaderOptions,
        *,
        listener: Residency | None = None,
        on_offload_end: OnPartEnd = lambda part, committed: None,
        on_onboard_end: Callable[[JobPart, Outcome], None] = lambda part, outcome: None,
    ) -> Leader:
        """The leader, with an empty host tier. One that was made before is not used any more.

        ``listener`` hears what can be matched in all tiers.
        """
        self._recorder = recorder_of(self._settings, groups, self.clock)
        parts = LeaderParts(
            self._lower.makers(),
            self._send_order,
            on_offload_end,
            on_onboard_end,
            self._desk,
            self._recorder,
        )
        host = BlockTier(Tier.HOST, evicting(self._settings)(), self.clock, listener, self._metrics)
        leader = Leader(
            groups,
            host,
            self._handshake,
            clock=self.clock,
            metrics=self._metrics,
            options=options,
            parts=parts,
        )
        if self._settings.has_peers:
            from kvbm_core.peers.lending import Lender  # only where there are peers

            handshake = self._handshake
            self._lender = Lender(
                leader.chain,
                leader.lock,
                self.clock,
                self._metrics,
                lambda: not handshake.has_replaced,
            )
            self._handshake.on_peers = partial(_lend, self._lender, self._metrics)
        return leader

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

    def serve_metrics(self, about: About, readiness: Callable[[], Readiness]) -> None:
        """See ``metrics_server``."""
        self._server = metrics_server(self._settings, self._metrics, about, readiness)

    def poll_with(self, poll: Callable[[], float | None]) -> None:
        """Has ``poll`` take in what workers and operators say while the engine is idle; see LeaderSide."""
        self.channel.poll_with(poll)
        self._desk.nudge = self.channel.wake

    def compare(self, leader: Leader, about: About, description: Description) -> None:
        """With other configurations of this model that were served here, so that misses can name them."""
        if self._namesakes is not None:  # of a leader that is not used any more
            self._namesakes.close()
        block_tokens = base_block_tokens(leader.groups)
        folder = notes_folder(self._settings)
        self._namesakes = Namesakes(folder, about.engine, about.model, block_tokens, description)
        leader.compare_with(self._namesakes)

    def take_orders(self, about: About, readiness: Callable[[], Readiness]) -> None:
        """See ``control_service``."""
        self._control = control_service(
            self._settings, about, self._desk, self._metrics, readiness, served=self._server
        )

    def close(self) -> None:
        """Ends threads and sockets. May be called twice."""
        if self._control is not None:
            self._control.close()
        if self._recorder is not None:
            self._recorder.close()
        if self._namesakes is not None:
            self._namesakes.close()
        if self._post is not None:
            self._post.close()
        self.channel.close()
        if self._server is not None:
            self._server.close()
        if self._traces is not None:
            self._traces.close()
        self._lower.close()


def _lend(lender: Lender, metrics: Metrics, message: OfPeers) -> Message | None:
    """What a rank says for other instances. On the channel's thread."""
    if isinstance(message, GiveBack):
        return Returned(message.number, lender.take_back(message.rank, message.number))
    if isinstance(message, PeerNews):
        counts = zip(PeerTrouble, (message.busy, message.refused, message.bad), strict=False)
        for reason, count_of in counts:
            metrics.unserved_peers(reason, count_of)
        return None
    keys = [BlockKey(key) for key in message.keys]
    if message.is_find:
        return Lent(message.number, *lender.find(keys))
    return Lent(message.number, *lender.lend(message.rank, message.number, keys, message.ttl_s))


def notes_folder(settings: KvbmSettings) -> Path | None:
    """Where it is noted which configurations were served here, if blocks outlive a process. Never in what
    machines share.
    """
    if not settings.why_requests:
        return None
    if settings.has_disk_tier:
        return Path(settings.disk_cache_dir) / TOP / FOLDER
    cache = cache_folder() if settings.has_remote_tier else None
    return None if cache is None else cache / FOLDER


def recorder_of(settings: KvbmSettings, groups: tuple[GroupSpec, ...], clock: Clock) -> Recorder | None:
    """What records requests, if that is wanted and there is a place for it."""
    if not settings.enable_record:
        return None
    try:
        return Recorder(Path(settings.record_dir), base_block_tokens(groups), settings.record_bytes, clock)
    except OSError as error:
        log.error("kvbm: KVBM_RECORD_DIR=%s: requests are not recorded: %s", settings.record_dir, error)
        return None


def lower_makers(settings: KvbmSettings, clock: Clock) -> dict[str, LowerTierMaker]:
    """The tiers below the host by name, in the order of the search."""
    makers: dict[str, LowerTierMaker] = {}
    if settings.has_disk_tier:
        makers[DISK] = slotted_tier(DISK, Tier.DISK, disk_admission(settings, clock), evicting(settings))
    if settings.has_peers:
        from kvbm_core.peers.tier import peer_tier  # only where there are peers

        makers[PEERS] = peer_tier(KeyedOptions(always_loads=settings.remote_load == "always"))
    for name, url in remote_tiers(settings).items():
        options = KeyedOptions(extent_bytes=extent_bytes(url), always_loads=settings.remote_load == "always")
        makers[name] = registered_tier(name, url) or keyed_tier(
            name, Tier.REMOTE, remote_admission(settings, url, clock), options
        )
    return makers


def remote_tiers(settings: KvbmSettings) -> dict[str, str]:
    """The stores that machines share: the URL of each by its tier's name, in the order of the search."""
    names = (REMOTE if number == 1 else f"{REMOTE}-{number}" for number in count(1))
    return dict(zip(names, settings.store_urls, strict=False))


def evicting(settings: KvbmSettings) -> PolicyMaker:
    """Makes what says which blocks go; see make_policy."""
    return partial(make_policy, settings.eviction_policy)


def disk_admission(settings: KvbmSettings, clock: Clock) -> AdmissionPolicy:
    """Which blocks go to the disk."""
    if not settings.has_host_tier:
        log.warning(
            "kvbm: a disk tier without a host tier is experimental; all blocks go to disk, "
            "without a filter, and pass through a little host memory%s",
            "" if settings.way_to_device == OFF else " on their way there",
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
    state_every_tokens: int = 0,
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
        state_every_tokens=state_every_tokens,
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


def peer_options(settings: KvbmSettings, namespace: str, first_rank: int) -> PeerOptions | None:
    """What a rank takes of the settings to meet other instances; None if it is not to. ``first_rank``: that
    many ranks of other engines listen at the ports before. ConfigError for keys that cannot be had.
    """
    if not settings.has_peers:
        return None
    from kvbm_core.fleet.keys import CurveKeys  # only where there are peers
    from kvbm_core.peers.address import address_of_rank
    from kvbm_core.peers.rank import PeerOptions

    return PeerOptions(
        address_of_rank(settings.peer_bind, first_rank) or settings.peer_bind,
        namespace,
        settings.peer_deadline_s,
        settings.peer_export_bytes,
        CurveKeys.from_settings(settings),
        by_nixl=settings.peers == "nixl",
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
        shares_size=settings.remote_cache_gb is None,
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
        why_requests=settings.why_requests,
        seams=seams_of(*guarded_classes),
    )


def traces_of(settings: KvbmSettings, model: str) -> Traces | None:
    """Where spans go, if they are asked for. ConfigError, one line, if they cannot be had."""
    about = {"service.instance.id": instance_of(settings), "kvbm.model": model}
    return open_traces(settings.traces, about)


class MetricsPage:
    """The page for Prometheus, and what says on this machine where it is."""

    def __init__(self, server: MetricsServer, page: Page) -> None:
        self._server = server
        self.page = page
        self._note = PageNote(page)

    def close(self) -> None:
        """May be called twice."""
        self._note.close()
        self._server.close()


def metrics_server(
    settings: KvbmSettings,
    metrics: Metrics,
    about: About,
    readiness: Callable[[], Readiness] = always_ready,
) -> MetricsPage | None:
    """The page for Prometheus, if it is asked for and its port is free. ``readiness``: for /health.

    Engines of one data-parallel group, and ranks with tiers of their own, take neighbouring ports.
    """
    metrics.describe(
        engine=about.engine,
        model=about.model,
        name=instance_of(settings),
        rank=about.rank,
        version=__version__,
    )
    if not settings.metrics:
        return None
    port = settings.metrics_port + about.rank
    server = MetricsServer(port, metrics, settings.metrics_host, readiness, targets)
    if not server.start() or server.bound_port is None:
        return None
    page = Page(host=settings.metrics_host, port=server.bound_port, about=metrics.about())
    return MetricsPage(server, page)


def control_service(
    settings: KvbmSettings,
    about: About,
    controlled: Controlled,
    metrics: Metrics,
    readiness: Callable[[], Readiness] = always_ready,
    *,
    served: MetricsPage | None = None,
) -> ControlService | None:
    """Takes operators' orders, if that is asked for. Else there is neither a socket nor a thread.

    ``served``: the page for Prometheus; etcd is told of it too.
    """
    if not settings.control_ways:
        return None
    from kvbm_core.control.responder import Responder
    from kvbm_core.control.service import ControlService

    responder = Responder(instance_of(settings), about, controlled, metrics, readiness)
    return ControlService(settings, responder, metrics, None if served is None else served.page)
