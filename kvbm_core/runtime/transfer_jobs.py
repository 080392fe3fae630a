"""Jobs of the leader between device and host: what each one moves, and for which requests."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from kvbm_core.blocks.slot_tier import Reservation
from kvbm_core.errors import Outcome
from kvbm_core.runtime.request import RequestState
from kvbm_core.tiers.chain import Held
from kvbm_core.tiers.jobs import Job, JobTable
from kvbm_core.tokens.runs import BlockRun
from kvbm_core.transfer.plan import GroupMove, TierOrder, TransferPlan
from kvbm_core.types import BlockKey, Direction


@dataclass(slots=True)
class JobPart:
    """What one request has in a job: of an onboard, or of an audit, what is ``held`` for it.

    ``num_tokens``: of an onboard, what the request need not compute; ``end_tokens``: where it goes on;
    ``asked_at_s``: when it first asked.
    ``is_prefill``: more than one block per
    group. ``runs``: where in the request's chains ``keys`` lie, if somebody needs that.
    """

    job_id: int
    state: RequestState
    keys: tuple[BlockKey, ...]
    moves: tuple[GroupMove, ...]
    held: Held | None = None
    is_prefill: bool = False
    num_tokens: int = 0
    end_tokens: int = 0
    asked_at_s: float = 0.0
    runs: Sequence[BlockRun] = ()


@dataclass(slots=True, eq=False)
class TransferJob(Job):
    """One TransferPlan: an onboard of one request, or what a step offloads, of any number of requests.

    ``reservation``: slots for the blocks of all parts of an offload, whose fate is one. ``compares``: see
    TransferPlan; such a job has one part, which holds blocks as an onboard's does.
    """

    direction: Direction = Direction.OFFLOAD
    is_shared: bool = False
    """Of a load: whether others wait for its end."""
    parts: list[JobPart] = field(default_factory=list)
    reservation: Reservation | None = None
    reads: tuple[TierOrder, ...] = ()
    compares: bool = False
    device_blocks: set[int] = field(default_factory=set)
    """Read by an offload, written by an onboard; all groups and requests together."""

    @property
    def num_blocks(self) -> int:
        """Blocks to move, of all requests."""
        return sum(len(part.keys) for part in self.parts)

    @property
    def stores(self) -> bool:
        """Whether it writes slots: an offload that does not only compare."""
        return self.direction is Direction.OFFLOAD and not self.compares

    @property
    def found_wrong(self) -> bool:
        """Of a job that only compares: whether some rank found other bytes, whatever else came of it."""
        return any(Outcome.CORRUPT in {r.outcome, *dict(r.failed).values()} for r in self.results)

    def add(self, part: JobPart) -> None:
        """Adds one request's blocks, before the job is sent."""
        self.parts.append(part)
        for move in part.moves:
            self.device_blocks.update(move.device_blocks)

    def plan(self) -> TransferPlan:
        """The order to the workers; one move per group."""
        if len(self.parts) == 1:
            (part,) = self.parts
            return TransferPlan(self.job_id, self.direction, part.moves, self.reads, self.compares)
        merged: dict[int, tuple[list[int], list[int]]] = {}
        for part in self.parts:
            for move in part.moves:
                device_blocks, slots = merged.setdefault(move.group, ([], []))
                device_blocks += move.device_blocks
                slots += move.slots
        moves = (
            GroupMove(group, tuple(blocks), tuple(slots)) for group, (blocks, slots) in sorted(merged.items())
        )
        return TransferPlan(self.job_id, self.direction, tuple(moves))


def readers_of(jobs: JobTable, device_blocks: Collection[int]) -> set[int]:
    """Offloads under way that read any of ``device_blocks``. Cost grows with the jobs in flight, which are
    few.
    """
    if not device_blocks:
        return set()
    return {
        job.job_id
        for job in jobs.jobs(TransferJob)
        if job.direction is Direction.OFFLOAD and not job.device_blocks.isdisjoint(device_blocks)
    }


def writers_of(jobs: JobTable, device_blocks: Mapping[int, Collection[int]]) -> set[int]:
    """Onboards under way that write any of ``device_blocks``, which are by group."""
    return {
        job.job_id
        for job in jobs.jobs(TransferJob)
        if job.direction is Direction.ONBOARD
        for part in job.parts
        for move in part.moves
        if not set(device_blocks.get(move.group, ())).isdisjoint(move.device_blocks)
    }
