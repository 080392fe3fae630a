"""Puts the linker's parts together: namespace, sizes, folder, tiers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from queue import SimpleQueue
from typing import Any, NamedTuple

from kvbm_core.clock import SystemClock
from kvbm_core.config import KvbmSettings
from kvbm_core.errors import ConfigError, UnsupportedError
from kvbm_core.identity.fields import NOT_ON_DISK, Description
from kvbm_core.identity.weights import WEIGHTS_WAIT_S, WeightsIdentity
from kvbm_core.observe.labels import FailureKind
from kvbm_core.observe.metrics import Metrics
from kvbm_core.runtime.assembly import LowerTiers, evicting, lower_makers, rank_options
from kvbm_core.runtime.local import LocalOptions, LocalTiers
from kvbm_core.runtime.messages import PROTOCOL_VERSION, Hello, Joined
from kvbm_core.runtime.replicas import NOT_ALIKE, ReplicaRank, Role, meet
from kvbm_core.storage.memory_room import available_memory
from kvbm_core.transfer.plan import TierPlace
from kvbm_core.transfer.rank import slot_bytes_of
from kvbm_sglang.device_pool import DevicePages
from kvbm_sglang.events import EventFeed
from kvbm_sglang.following import FollowingTiers
from kvbm_sglang.identity import TP_RANKS, device_namespace_of
from kvbm_sglang.linker_tiers import LinkerTiers, PageRoots
from kvbm_sglang.load_counter import LoadCounter

log = logging.getLogger("kvbm")

LOAD_MARGIN_S = 60.0
"""A load may take so much longer than its deadlines before the engine waits no more."""


_LOOKING_AGAIN = ("lpm", "dfs-weight", "hrrn", "shortest-prefill-first")
"""Scheduling policies with which SGLang looks up all requests that wait, before each of its steps."""


def why_late(settings: KvbmSettings, policy: str) -> str:
    """Why what a shared store has comes too late for requests, as a line for people; empty if it does not."""
    if not settings.has_remote_tier or policy in _LOOKING_AGAIN:
        return ""
    return (
        f"kvbm: KVBM_REMOTE_URL: with --schedule-policy {policy} SGLang looks a request up once, when it "
        "begins to compute it, and what a store has comes too late: set --schedule-policy lpm, or use HiCache"
    )


@dataclass(frozen=True)
class Alike:
    """``rank`` of ``size`` that have the same KV. ``exchange``: see ``meet``."""

    rank: int
    size: int
    exchange: Callable[[Any], list[Any]]


class Part(NamedTuple):
    """What this rank keeps of every page: ``shard``, of as many as ``num_ranks`` store, ``num_here`` of them
    on this machine, all engines of a server together. ``role``: see ReplicaRank.
    """

    shard: Mapping[str, int]
    num_ranks: int
    num_here: int
    role: Role


@dataclass(frozen=True)
class Ranks:
    """``shard``: names and numbers that say which part of the KV this process holds. ``num_ranks``: of one
    engine. ``num_here``: on this machine, of all engines that one server has; 0: as many as of one engine.
    ``number``: this one's among those of all replicas on their machines, for its port.
    ``data_parallel_rank``: which of the KV caches of one server this is a part of. ``alike``: those that
    have the same KV as this one; None if there are none.
    """

    shard: Mapping[str, int]
    num_ranks: int
    num_here: int = 0
    number: int = 0
    data_parallel_rank: int = 0
    alike: Alike | None = None

    @property
    def is_first(self) -> bool:
        """Whether this is the first of those that hold one KV cache together."""
        return not any(number for name, number in self.shard.items() if name.endswith("_rank"))


def assemble(
    pages: DevicePages | None,
    settings: KvbmSettings,
    metrics: Metrics,
    *,
    model: str,
    engine: Description,
    weights: WeightsIdentity,
    ranks: Ranks,
    num_layers: int,
) -> LinkerTiers:
    """The linker's parts; without ``pages``, or if the tiers cannot be had, those that cache nothing.

    ``weights``: not started; closed with what is returned. While it is not known which they are, pages stay
    in the host tier.

    ConfigError, one line, for sizes that hold no page.
    """
    timeout_s = settings.transfer_deadline_s + settings.disk_deadline_s + LOAD_MARGIN_S
    counter = LoadCounter(num_layers, timeout_s)
    part = _part_of(pages, settings, model, engine, ranks)
    if pages is None:
        return LinkerTiers(None, None, None, counter=counter, metrics=metrics, on_close=weights.close)
    namespace = device_namespace_of(model, pages.layout, pages.page_tokens, part.shard, engine)
    if part.role.shard is None and part.role.group is not None:
        following = FollowingTiers(pages.memory, part.role.group)
        roots = PageRoots(namespace, weights, is_lasting=False)
        # What is found and loaded is counted once, by the rank that stores.
        return LinkerTiers(
            following, pages, roots, counter=counter, metrics=Metrics(), on_close=weights.close
        )
    num_slots = settings.host_tier_slots(pages.place_bytes * part.num_ranks)
    fingerprint = namespace.root().hex()  # the keys tell the weights apart
    lower = LowerTiers(settings, part.num_ranks, SystemClock(), model)
    places: list[TierPlace] = []
    if settings.has_lower_tier:
        engine.tell("SGLang", NOT_ON_DISK)
        if engine.is_lasting:
            weights.start()
            block_bytes = slot_bytes_of(pages.memory, has_lower=True) * part.num_ranks
            places = _places_of(lower, block_bytes, fingerprint, metrics)
    events = EventFeed(settings, metrics, pages.page_tokens, ranks.data_parallel_rank, ranks.is_first)
    options = replace(_options_of(settings, num_slots, places, fingerprint), listener=events.log)
    tiers = _tiers_of(pages, settings, part, options, metrics)

    def on_close() -> None:
        weights.close()
        lower.close()
        events.close()

    if tiers is None:
        on_close()
        return LinkerTiers(None, None, None, counter=counter, metrics=metrics)
    if places:
        weights.wait(WEIGHTS_WAIT_S)
    tiers.wait_ready(1, *(place.num_slots for place in places), timeout_s=settings.start_wait_s)
    roots = PageRoots(namespace, weights, is_lasting=engine.is_lasting)
    return LinkerTiers(
        tiers, pages, roots, counter=counter, metrics=metrics, on_close=on_close, events=events
    )


def _tiers_of(
    pages: DevicePages, settings: KvbmSettings, part: Part, options: LocalOptions, metrics: Metrics
) -> LocalTiers | None:
    """None, and a line in the log, if they cannot be had: one rank must not end, or wait for, the others."""
    share_bytes = options.num_slots * slot_bytes_of(pages.memory, has_lower=bool(options.places))
    try:
        room = available_memory().with_siblings()
        room.check(*settings.host_size, share_bytes * part.num_here)
        tiers = LocalTiers(pages.memory, options, metrics, group=part.role.group)
    except (ConfigError, UnsupportedError) as error:
        if part.role.group is not None:
            part.role.group.close()
            part.role.group.discard()
        log.error("%s; nothing is cached", error)
        metrics.failure(FailureKind.OTHER)
        return None
    line = "kvbm: linker: host tier of %d pages, %.2f GB; pages of %d bytes"
    log.info(line, options.num_slots, options.num_slots * pages.page_bytes / 1e9, pages.page_bytes)
    return tiers


def _part_of(
    pages: DevicePages | None, settings: KvbmSettings, model: str, engine: Description, ranks: Ranks
) -> Part:
    """A collective of ranks that are ``alike``."""
    own = Part(ranks.shard, ranks.num_ranks, ranks.num_here or ranks.num_ranks, Role((0, 1), None))
    if ranks.alike is None:
        if settings.nccl_mla_mode and ranks.num_ranks > 1:
            log.warning(NOT_ALIKE)
        return own
    common = {name: number for name, number in ranks.shard.items() if name not in TP_RANKS}
    answers: SimpleQueue[Joined] = SimpleQueue()
    deadline_s = settings.transfer_deadline_s
    replica = ReplicaRank(ranks.alike.rank, settings.nccl_max_ctas, deadline_s, answers.put)
    fingerprint = ""
    if pages is not None and settings.nccl_mla_mode:
        replica.open("latents")
        namespace = device_namespace_of(model, pages.layout, pages.page_tokens, common, engine)
        fingerprint = namespace.root().hex()
    hello = Hello(
        PROTOCOL_VERSION,
        ranks.alike.rank,
        ranks.alike.size,
        0 if pages is None else pages.page_bytes,
        0 if pages is None else pages.num_pages,
        fingerprint,
        part=replica.part,
        machine=replica.machine,
        broadcast_address=replica.address,
    )
    memory = None if pages is None else pages.memory
    replicas, role = meet(hello, replica, answers, memory, ranks.alike.exchange)
    if not replicas.are_shared:
        return own
    num_storing = own.num_ranks * len(replicas.storing()) // ranks.alike.size
    return Part(common, num_storing, max(1, own.num_here // replicas.num_like(hello.rank)), role)


def _options_of(
    settings: KvbmSettings, num_slots: int, places: Sequence[TierPlace], fingerprint: str
) -> LocalOptions:
    names = {place.name for place in places}
    makers = lower_makers(settings, SystemClock())
    return LocalOptions(
        num_slots,
        tuple(make for name, make in makers.items() if name in names),
        tuple(places),
        fingerprint,
        lease_ttl_s=settings.lease_ttl_s,
        memory=rank_options(settings),
        make_policy=evicting(settings),
    )


def _places_of(lower: LowerTiers, block_bytes: int, fingerprint: str, metrics: Metrics) -> list[TierPlace]:
    """Those that can be had. ``block_bytes``: of all ranks together."""
    places: list[TierPlace] = []
    for name, plan in lower.plans().items():
        try:
            places.append(plan(block_bytes, fingerprint))
        except ConfigError as error:
            log.error("%s; the linker serves without its %s tier", error, name)
            metrics.failure(FailureKind.OTHER)
    return places
