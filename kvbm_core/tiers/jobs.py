"""Jobs in flight: what every rank has been told to do, and which ranks have not answered yet."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from kvbm_core.clock import Clock
from kvbm_core.errors import Outcome
from kvbm_core.observe.metrics import Metrics
from kvbm_core.transfer.plan import JobResult
from kvbm_core.types import Direction, Tier


@dataclass(slots=True, eq=False)
class Job:
    """One plan or order. ``on_end`` is called when every rank has answered, with the job, which has left the
    table. ``on_late``: a rank has given it up and will answer it once nothing of it touches memory any more.
    """

    job_id: int
    waiting_ranks: set[int]
    started_at_s: float
    on_end: Callable[[], None]
    on_late: Callable[[JobResult], None] = lambda result: None
    late_ranks: set[int] = field(default_factory=set)
    results: list[JobResult] = field(default_factory=list)

    @property
    def num_blocks(self) -> int:
        """Blocks that the job moves."""
        raise NotImplementedError

    @property
    def outcome(self) -> Outcome:
        """OK only if every rank said so; else the first trouble."""
        return next((r.outcome for r in self.results if r.outcome is not Outcome.OK), Outcome.OK)

    def failures(self, slots: Sequence[int]) -> dict[int, Outcome]:
        """Those of ``slots`` that failed on some rank, and how; see JobResult.failed."""
        failed: dict[int, Outcome] = {}
        for result in self.results:
            for slot, outcome in result.failures(slots).items():
                failed.setdefault(slot, outcome)
        return failed

    def verdict(self, slots: Sequence[int]) -> Outcome:
        """That of the first rank in trouble; see JobResult.verdict."""
        verdicts = (result.verdict(slots) for result in self.results)
        return next((verdict for verdict in verdicts if verdict is not Outcome.OK), Outcome.OK)


JobT = TypeVar("JobT", bound=Job)


class JobTable:
    """Jobs by number. Numbers are never used again. The leader's thread only, but for ``next_id``."""

    def __init__(self, num_ranks: int, clock: Clock) -> None:
        self._num_ranks = num_ranks
        self._clock = clock
        self._next_id = 1
        self._jobs: dict[int, Job] = {}
        self.stale_results_total = 0

    def __len__(self) -> int:
        return len(self._jobs)

    def __contains__(self, job_id: int) -> bool:
        return job_id in self._jobs

    def new_id(self) -> int:
        """The number of a new job."""
        self._next_id += 1
        return self._next_id - 1

    @property
    def next_id(self) -> int:
        """What ``new_id`` will answer. Any thread."""
        return self._next_id

    def all_ranks(self) -> set[int]:
        """Every rank, as the set of those that have to answer."""
        return set(range(self._num_ranks))

    def now_s(self) -> float:
        """On the clock by which jobs are timed."""
        return self._clock.now_s()

    def add(self, job: JobT) -> JobT:
        """The job waits for its ranks from now on."""
        self._jobs[job.job_id] = job
        return job

    def cancel(self, job: Job) -> None:
        """Takes back a job that has nothing to do."""
        del self._jobs[job.job_id]

    def acknowledge(self, rank: int, result: JobResult) -> None:
        """One rank's answer. Answers to jobs that are over, and second ones of a rank, are counted."""
        job = self._jobs.get(result.job_id)
        if job is None or rank not in job.waiting_ranks:
            self.stale_results_total += 1
            return
        if result.is_late:  # nothing is freed before the answer that counts
            job.late_ranks.add(rank)
            job.on_late(result)
            return
        job.waiting_ranks.discard(rank)
        job.results.append(result)
        if not job.waiting_ranks:
            del self._jobs[result.job_id]
            job.on_end()

    def jobs(self, kind: type[JobT]) -> list[JobT]:
        """Those of one kind in flight, oldest first."""
        return [job for job in self._jobs.values() if isinstance(job, kind)]


def count_transfer(
    metrics: Metrics, direction: Direction, results: Sequence[JobResult], tier_of: Callable[[str], Tier]
) -> None:
    """A job between device and host that every rank has done; ``results``: one of each rank."""
    num_bytes = sum(result.num_bytes for result in results)
    metrics.bytes_moved(direction, num_bytes)
    of_reads = [fetched for result in results for fetched in result.fetched]
    metrics.transfer_seconds(direction, max(result.seconds + result.queued_s for result in results))
    copy_s = max(result.copy_s if result.fetched else result.seconds for result in results)
    if direction is Direction.OFFLOAD:
        metrics.tier_transfer(Tier.DEVICE, Tier.HOST, num_bytes, copy_s)
        return
    num_bytes -= sum(fetched.num_bytes for fetched in of_reads if fetched.is_direct)
    metrics.tier_transfer(Tier.HOST, Tier.DEVICE, num_bytes, copy_s)
    for name, is_direct in {(fetched.tier, fetched.is_direct) for fetched in of_reads}:
        reads = [read for read in of_reads if (read.tier, read.is_direct) == (name, is_direct)]
        read_bytes, read_s = sum(read.num_bytes for read in reads), max(read.seconds for read in reads)
        target = Tier.DEVICE if is_direct else Tier.HOST
        metrics.tier_transfer(tier_of(name), target, read_bytes, read_s)
