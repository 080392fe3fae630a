"""Jobs in flight: what each one moves, and which ranks have not answered yet."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from kvbm_core.blocks.lease import Lease
from kvbm_core.clock import Clock
from kvbm_core.errors import Outcome
from kvbm_core.observe.metrics import Metrics
from kvbm_core.runtime.messages import JobAck
from kvbm_core.runtime.request import RequestState
from kvbm_core.tiers.tier import Reservation
from kvbm_core.transfer.plan import DiskPlan, GroupMove, JobResult, TransferPlan
from kvbm_core.types import BlockKey, Direction, Tier


@dataclass(slots=True)
class Share:
    """What one request has in a job: of an onboard slots that are leased.

    An onboard that ``reads`` blocks from the disk (``disk_lease``) has slots reserved for them.
    ``num_tokens``: of an onboard, what the request need not compute. ``is_prefill``: more than one block per
    group.
    """

    job_id: int
    state: RequestState
    keys: tuple[BlockKey, ...]
    moves: tuple[GroupMove, ...]
    reservation: Reservation | None = None
    lease: Lease | None = None
    is_prefill: bool = False
    num_tokens: int = 0
    disk_lease: Lease | None = None
    reads: DiskPlan | None = None


@dataclass(slots=True)
class Job:
    """One TransferPlan: an onboard of one request, or what a step offloads, of any number of requests.

    ``reservation``: slots for the blocks of all shares of an offload, whose fate is one. ``compares``: see
    TransferPlan; such a job has one share, with leases as an onboard's.
    """

    job_id: int
    direction: Direction
    waiting_ranks: set[int]
    started_at_s: float
    late_ranks: set[int] = field(default_factory=set)
    """Have given it up, and answer once nothing of theirs touches its slots any more."""
    is_shared: bool = False
    """Of a load: whether others wait for its end."""
    shares: list[Share] = field(default_factory=list)
    reservation: Reservation | None = None
    acks: list[JobAck] = field(default_factory=list)
    compares: bool = False
    device_blocks: set[int] = field(default_factory=set)
    """Read by an offload, written by an onboard; all groups and requests together."""

    @property
    def num_blocks(self) -> int:
        """Blocks to move, of all requests."""
        return sum(len(share.keys) for share in self.shares)

    @property
    def stores(self) -> bool:
        """Whether it writes slots: an offload that does not only compare."""
        return self.direction is Direction.OFFLOAD and not self.compares

    @property
    def outcome(self) -> Outcome:
        """OK only if every rank said so; else the first trouble."""
        return next((ack.outcome for ack in self.acks if ack.outcome is not Outcome.OK), Outcome.OK)

    def plan(self) -> TransferPlan:
        """The order to the workers; one move per group."""
        if len(self.shares) == 1:
            (share,) = self.shares
            return TransferPlan(self.job_id, self.direction, share.moves, share.reads, self.compares)
        merged: dict[int, tuple[list[int], list[int]]] = {}
        for share in self.shares:
            for move in share.moves:
                device_blocks, slots = merged.setdefault(move.group, ([], []))
                device_blocks += move.device_blocks
                slots += move.slots
        moves = (
            GroupMove(group, tuple(blocks), tuple(slots)) for group, (blocks, slots) in sorted(merged.items())
        )
        return TransferPlan(self.job_id, self.direction, tuple(moves))


def count_transfer(metrics: Metrics, direction: Direction, ends: Sequence[JobAck | JobResult]) -> None:
    """A job between device and host that every rank has done; ``ends``: one of each rank."""
    num_bytes = sum(end.num_bytes for end in ends)
    metrics.bytes_moved(direction, num_bytes)
    metrics.transfer_seconds(direction, max(end.seconds + end.queued_s for end in ends))
    copy_s = max(end.seconds if end.from_disk is None else end.from_disk.copy_s for end in ends)
    if direction is Direction.OFFLOAD:
        metrics.tier_transfer(Tier.DEVICE, Tier.HOST, num_bytes, copy_s)
        return
    metrics.tier_transfer(Tier.HOST, Tier.DEVICE, num_bytes, copy_s)
    reads = [end.from_disk for end in ends if end.from_disk is not None]
    if reads:
        read_s = max(read.read_s for read in reads)
        metrics.tier_transfer(Tier.DISK, Tier.HOST, sum(read.num_bytes for read in reads), read_s)


class JobBook:
    """Jobs by id. Ids are never reused."""

    def __init__(self, world_size: int, clock: Clock) -> None:
        self._world_size = world_size
        self._clock = clock
        self._next_id = 1
        self._jobs: dict[int, Job] = {}
        self.stale_acks_total = 0

    def __len__(self) -> int:
        return len(self._jobs)

    def __contains__(self, job_id: int) -> bool:
        return job_id in self._jobs

    def ranks(self) -> set[int]:
        """Every rank, as the set of those that have to answer."""
        return set(range(self._world_size))

    def start(self, direction: Direction, *, compares: bool = False) -> Job:
        """A new job, empty; waits for the answer of every rank from now on."""
        job = Job(self.new_id(), direction, self.ranks(), self._clock.now_s(), compares=compares)
        self._jobs[job.job_id] = job
        return job

    def new_id(self) -> int:
        """The number of a job, in this book or elsewhere in the leader."""
        self._next_id += 1
        return self._next_id - 1

    @property
    def next_id(self) -> int:
        """What ``new_id`` will answer. Any thread."""
        return self._next_id

    def get(self, job_id: int) -> Job | None:
        """A job in flight."""
        return self._jobs.get(job_id)

    def add(self, job: Job, share: Share) -> None:
        """Adds one request's blocks to a job that has not been sent yet."""
        job.shares.append(share)
        for move in share.moves:
            job.device_blocks.update(move.device_blocks)

    def cancel(self, job: Job) -> None:
        """Takes back a job that has nothing to do."""
        del self._jobs[job.job_id]

    def acknowledge(self, rank: int, ack: JobAck) -> Job | None:
        """Notes one rank's answer; the job, removed, once all have answered. Late and double answers are
        counted.
        """
        job = self._jobs.get(ack.job_id)
        if job is None or rank not in job.waiting_ranks:
            self.stale_acks_total += 1
            return None
        job.waiting_ranks.discard(rank)
        job.acks.append(ack)
        if job.waiting_ranks:
            return None
        del self._jobs[ack.job_id]
        return job

    def readers_of(self, device_blocks: Collection[int]) -> set[int]:
        """Offloads under way that read any of ``device_blocks``. Cost grows with the jobs in
        flight, which are few.
        """
        if not device_blocks:
            return set()
        return {
            job.job_id
            for job in self._jobs.values()
            if job.direction is Direction.OFFLOAD and not job.device_blocks.isdisjoint(device_blocks)
        }

    def writers_of(self, device_blocks: Mapping[int, Collection[int]]) -> set[int]:
        """Onboards under way that write any of ``device_blocks``, which are by group."""
        return {
            job.job_id
            for job in self._jobs.values()
            if job.direction is Direction.ONBOARD
            for share in job.shares
            for move in share.moves
            if not set(device_blocks.get(move.group, ())).isdisjoint(move.device_blocks)
        }

    def jobs(self) -> list[Job]:
        """Those in flight, oldest first."""
        return list(self._jobs.values())
