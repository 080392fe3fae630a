"""Publishing as the settings say it: where, with which keys, under which name."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from kvbm_core.config import KvbmSettings
from kvbm_core.config.instance import instance_of
from kvbm_core.errors import ConfigError
from kvbm_core.events.log import EventLog
from kvbm_core.events.publisher import EventPublisher, Sink
from kvbm_core.observe.metrics import Metrics
from kvbm_core.types import Tier

if TYPE_CHECKING:
    from kvbm_core.events.consolidator import Consolidator

log = logging.getLogger("kvbm")

DISK_MEDIUM, REMOTE_MEDIUM = "CPU_TIER2", "REMOTE"


def media_of(settings: KvbmSettings) -> Mapping[Tier, str]:
    """What tiers are called in events."""
    return {Tier.HOST: settings.events_medium, Tier.DISK: DISK_MEDIUM, Tier.REMOTE: REMOTE_MEDIUM}


class ConsolidatedEnds(NamedTuple):
    """Where the engine publishes its device's events, and where the consolidator is to publish.
    ``same_hashes``: see Dedup.
    """

    engine_endpoint: str
    endpoint: str
    same_hashes: bool


class EventService:
    """Publishes ``event_log`` for data-parallel rank ``rank`` until ``close``; ``consolidated``: together
    with the engine's events too. What cannot be published is told in one line; the engine serves on.
    """

    def __init__(
        self,
        settings: KvbmSettings,
        event_log: EventLog,
        rank: int,
        metrics: Metrics,
        consolidated: ConsolidatedEnds | None = None,
    ) -> None:
        self.publisher: EventPublisher | None = None
        self.consolidator: Consolidator | None = None
        sinks = [sink for way in settings.event_ways if (sink := _sink(way, settings, rank, metrics))]
        if sinks:
            self.publisher = EventPublisher(event_log, sinks, rank, metrics)
        if consolidated is not None:
            try:
                self.consolidator = _consolidator(settings, event_log, consolidated, rank, metrics)
            except ConfigError as error:
                log.error("%s; KV events are not consolidated", error)

    def close(self) -> None:
        """May be called twice."""
        for part in (self.publisher, self.consolidator):
            if part is not None:
                part.close()


def _consolidator(
    settings: KvbmSettings, event_log: EventLog, ends: ConsolidatedEnds, rank: int, metrics: Metrics
) -> Consolidator:
    from kvbm_core.events.consolidator import Consolidator, Ends
    from kvbm_core.events.merge import Dedup, Passthrough
    from kvbm_core.events.zmq_sink import Place

    mode = settings.kv_events_consolidator_mode
    is_dedup = mode == "dedup"
    merge = Dedup(media_of(settings), same_hashes=ends.same_hashes) if is_dedup else Passthrough()
    place = Place(ends.endpoint, setting="DYN_KVBM_LEADER_ZMQ_PUB_PORT")
    line = "kvbm: KV events of the device (%s) and kvbm's are consolidated (%s) and published at %s"
    log.info(line, ends.engine_endpoint, mode, ends.endpoint)
    return Consolidator(event_log, merge, Ends(ends.engine_endpoint, place, rank), metrics)


def _sink(way: str, settings: KvbmSettings, rank: int, metrics: Metrics) -> Sink | None:
    """None, with a line, if it cannot be had."""
    try:
        return _zmq_sink(settings, rank) if way == "zmq" else _nats_sink(settings, rank, metrics)
    except ConfigError as error:
        log.error("%s; KV events are not published over %s", error, way)
        return None


def _zmq_sink(settings: KvbmSettings, rank: int) -> Sink:
    from kvbm_core.events.zmq_sink import Place, ZmqSink, endpoint_of_rank
    from kvbm_core.fleet.keys import CurveKeys

    place = Place(
        endpoint_of_rank(settings.events_endpoint, rank),
        endpoint_of_rank(settings.events_replay_endpoint, rank),
        settings.events_topic,
    )
    return ZmqSink(place, CurveKeys.from_settings(settings))


def _nats_sink(settings: KvbmSettings, rank: int, metrics: Metrics) -> Sink:
    from kvbm_core.events.nats_sink import NatsSink, login_of, subject

    prefix = subject(settings.fleet, instance_of(settings), rank)
    return NatsSink(login_of(settings), prefix, metrics)
