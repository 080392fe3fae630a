"""Which ranks answer, and which are silent: a tier needs all of them, for each of its blocks."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping

from kvbm_core.clock import Clock
from kvbm_core.observe.labels import FailureKind
from kvbm_core.observe.metrics import Metrics
from kvbm_core.runtime.handshake import ANSWER_WITHIN_S, Handshake
from kvbm_core.runtime.messages import Ask
from kvbm_core.tiers.jobs import Job

log = logging.getLogger("kvbm")

LOOK_EVERY_S = 1.0
ASK_AFTER_S = 5.0
"""A job that has not been answered for so long is asked for."""


class RankWatch:
    """Part of the Leader, on its thread.

    An engine that is idle, or in a long step, brings no acknowledgements: silence alone says nothing. So a
    rank whose answer is missing is asked, over the channel, which an engine's steps do not hold up. A rank
    that does not answer this either, or whose job is past the deadline, is ``away`` until it answers. Slots
    that it may still touch stay reserved as long as that takes; nothing new is begun meanwhile.
    """

    def __init__(self, handshake: Handshake, clock: Clock, metrics: Metrics, job_deadline_s: float) -> None:
        self.away: frozenset[int] = frozenset()
        self._handshake = handshake
        self._clock = clock
        self._metrics = metrics
        self._job_deadline_s = job_deadline_s
        self._looked_at_s = -math.inf
        # Of ranks that were asked and have not been heard since: when first, and when last.
        self._asked_first_s: dict[int, float] = {}
        self._asked_last_s: dict[int, float] = {}
        self._heard_at_s: dict[int, float] = {}

    def heard(self, rank: int) -> None:
        """The engine has brought something that this rank said."""
        self._heard_at_s[rank] = self._clock.now_s()

    def is_due(self) -> bool:
        """Whether it is time to look; not in most steps."""
        return self._clock.now_s() - self._looked_at_s >= LOOK_EVERY_S

    def look(self, jobs: Iterable[Job]) -> None:
        """Asks for what has not been answered, and settles who is away. ``jobs``: all that were sent."""
        now_s = self._looked_at_s = self._clock.now_s()
        overdue: dict[int, list[tuple[int, float]]] = {}
        for job in jobs:
            age_s = now_s - job.started_at_s
            if age_s >= ASK_AFTER_S:
                for rank in job.waiting_ranks - job.late_ranks:
                    overdue.setdefault(rank, []).append((job.job_id, age_s))
        for rank in [rank for rank in self._asked_first_s if self._was_heard(rank)]:
            del self._asked_first_s[rank]
        away = frozenset(rank for rank, missing in overdue.items() if self._is_away(rank, missing, now_s))
        self._tell_changes(away, overdue)
        self.away = away

    def _was_heard(self, rank: int) -> bool:
        heard_at_s = max(self._handshake.heard_at_s(rank), self._heard_at_s.get(rank, -math.inf))
        return heard_at_s >= self._asked_first_s[rank]

    def _is_away(self, rank: int, missing: list[tuple[int, float]], now_s: float) -> bool:
        oldest_s = max(age_s for _, age_s in missing)
        is_past_deadline = oldest_s >= self._job_deadline_s
        asked_s = now_s - self._asked_last_s.get(rank, -math.inf)
        # After a pause of the engine everything is old, and the first answer to an Ask settles it.
        is_stuck = is_past_deadline and LOOK_EVERY_S <= asked_s < oldest_s
        if asked_s >= ASK_AFTER_S and self._handshake.tell(
            rank, Ask([job_id for job_id, _ in missing], is_last=is_past_deadline)
        ):
            self._asked_last_s[rank] = now_s
            self._asked_first_s.setdefault(rank, now_s)
        return is_stuck or now_s - self._asked_first_s.get(rank, math.inf) >= ANSWER_WITHIN_S

    def _tell_changes(self, away: frozenset[int], overdue: Mapping[int, list[tuple[int, float]]]) -> None:
        for rank in sorted(away - self.away):
            self._metrics.failure(FailureKind.WORKER_LOST)
            log.error(
                "kvbm: rank %d has not answered %d transfers; nothing is loaded or stored until it does, and "
                "the engine serves without hits",
                rank,
                len(overdue[rank]),
            )
        for rank in sorted(self.away - away):
            log.warning("kvbm: rank %d answers again", rank)
