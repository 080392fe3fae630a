"""The bookkeeping that every executor needs: queues, deadlines, results, waiting."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Collection, Set
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from kvbm_core.clock import Clock
from kvbm_core.errors import Outcome
from kvbm_core.transfer.plan import JobResult, OrderKind, TierOrder, TransferPlan
from kvbm_core.types import Direction

MAX_QUEUED_JOBS = 4096

logger = logging.getLogger(__name__)


OnDone = Callable[[JobResult], None]
PlanT = TypeVar("PlanT", bound=TransferPlan | TierOrder)


def have_ended(live: Set[int], job_ids: Collection[int] | None) -> bool:
    """Whether none of these jobs (None = all) is ``live``."""
    return not live if job_ids is None else live.isdisjoint(job_ids)


@dataclass
class Job(Generic[PlanT]):
    """A plan on its way. ``token`` is whatever the executor noted when it was submitted. ``on_done``: who
    hears of its end, in place of the board's listener.
    """

    plan: PlanT
    submitted_s: float
    deadline_at_s: float | None
    token: Any = None
    on_done: OnDone | None = None
    started_s: float | None = None


class JobBoard(Generic[PlanT]):
    """Jobs waiting, running and ended. Thread safe; every job ends in exactly one result.

    A result goes to the job's ``on_done`` or the board's, from the thread that ended the job, without any
    lock held.
    """

    def __init__(self, clock: Clock, on_done: OnDone = lambda result: None) -> None:
        self._clock = clock
        self._on_done = on_done
        self._changed = threading.Condition()
        self._onboards: deque[Job[PlanT]] = deque()
        self._offloads: deque[Job[PlanT]] = deque()
        self._live: set[int] = set()
        self._closed = False
        self._is_woken = False

    def add(
        self, plan: PlanT, deadline_s: float | None, token: Any = None, on_done: OnDone | None = None
    ) -> None:
        """Queues a plan; a full or closed board ends it at once. ValueError if the job id is in flight."""
        now_s = self._clock.now_s()
        job = Job(plan, now_s, None if deadline_s is None else now_s + deadline_s, token, on_done)
        with self._changed:
            if plan.job_id in self._live:
                raise ValueError(f"job {plan.job_id} is already in flight")
            self._live.add(plan.job_id)
            refusal: tuple[Outcome, str] | None = None
            if self._closed:
                refusal = (Outcome.REJECTED, "the executor is closed")
            elif len(self._live) > MAX_QUEUED_JOBS:
                refusal = (Outcome.BUSY, f"{MAX_QUEUED_JOBS} jobs are waiting")
            else:
                self._queue_of(job).append(job)
                self._changed.notify_all()
        if refusal is not None:
            self.end(job, *refusal)

    def refuse(self, plan: PlanT, outcome: Outcome, detail: str, on_done: OnDone | None = None) -> None:
        """Ends a plan that was never queued."""
        with self._changed:
            if plan.job_id in self._live:
                raise ValueError(f"job {plan.job_id} is already in flight")
            self._live.add(plan.job_id)
        self.end(Job(plan, self._clock.now_s(), None, on_done=on_done), outcome, detail)

    def take(self, *, timeout_s: float | None = None, onboard_only: bool = False) -> Job[PlanT] | None:
        """The next job to start: onboards first, then the oldest; those past their deadline are ended.

        Waits up to ``timeout_s`` (None = for ever) for one; None if there is none, after ``wake`` or
        ``close``.
        """
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: self._closed or self._is_woken or self._has_job(onboard_only), timeout_s
                )
                self._is_woken = False
                if not self._has_job(onboard_only):
                    return None
                job = (self._onboards or self._offloads).popleft()
                job.started_s = self._clock.now_s()
            if job.deadline_at_s is None or job.started_s <= job.deadline_at_s:
                return job
            self.end(job, Outcome.TIMED_OUT, "the deadline passed before the job could start")

    def end(
        self,
        job: Job[PlanT],
        outcome: Outcome,
        detail: str = "",
        *,
        num_bytes: int = 0,
        is_late: bool = False,
        failed: tuple[tuple[int, Outcome], ...] = (),
    ) -> None:
        """Publishes the result; a job that never started has no seconds, only time in the queue."""
        now_s = self._clock.now_s()
        started_s = now_s if job.started_s is None else job.started_s
        seconds, queued_s = now_s - started_s, started_s - job.submitted_s
        result = JobResult(job.plan.job_id, outcome, num_bytes, seconds, queued_s, detail, is_late, failed)
        try:
            (job.on_done or self._on_done)(result)
        except Exception:  # a bug of the listener must not end the thread that copies
            logger.exception("kvbm: listener failed on the result of job %d", result.job_id)
        with self._changed:
            self._live.discard(result.job_id)
            self._changed.notify_all()

    def cancel(self, job_id: int) -> bool:
        """Ends a waiting job as REJECTED; False if it has started, has ended or is unknown."""
        with self._changed:
            waiting = (*self._onboards, *self._offloads)
            job = next((job for job in waiting if job.plan.job_id == job_id), None)
            if job is None:
                return False
            self._queue_of(job).remove(job)
        self.end(job, Outcome.REJECTED, "cancelled")
        return True

    def wait(self, job_ids: Collection[int] | None, timeout_s: float) -> bool:
        """True once these jobs (None = all) have ended; jobs never seen count as ended."""
        with self._changed:
            return self._changed.wait_for(lambda: have_ended(self._live, job_ids), timeout_s)

    def pause(self, timeout_s: float) -> None:
        """Waits for a new job or for ``timeout_s``."""
        with self._changed:
            self._changed.wait(timeout_s)

    def wake(self) -> None:
        """Lets a ``take`` that waits look around: it answers None."""
        with self._changed:
            self._is_woken = True
            self._changed.notify_all()

    def close(self) -> None:
        """Ends waiting jobs as REJECTED; ``take`` returns None from now on."""
        with self._changed:
            self._closed = True
            waiting = [*self._onboards, *self._offloads]
            self._onboards.clear()
            self._offloads.clear()
            self._changed.notify_all()
        for job in waiting:
            self.end(job, Outcome.REJECTED, "the executor was closed")

    @property
    def has_onboard(self) -> bool:
        """Whether an onboard waits to be started; a glance, without the lock."""
        return bool(self._onboards)

    @property
    def is_closed(self) -> bool:
        """Whether close was called."""
        return self._closed

    def _queue_of(self, job: Job[PlanT]) -> deque[Job[PlanT]]:
        return self._onboards if _goes_up(job.plan) else self._offloads

    def _has_job(self, onboard_only: bool) -> bool:
        return bool(self._onboards) or (bool(self._offloads) and not onboard_only)


def _goes_up(plan: TransferPlan | TierOrder) -> bool:
    if isinstance(plan, TierOrder):
        return plan.kind is OrderKind.FETCH
    return plan.direction is Direction.ONBOARD
