"""A worker for simulations: its memories are byte arrays, and it does what it is told in any order, or
fails.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from hashlib import blake2b
from random import Random

from kvbm_core.errors import Outcome
from kvbm_core.transfer.plan import JobResult, TransferPlan
from kvbm_core.types import Direction

PAGE_BYTES = 16
HALF_BYTES = PAGE_BYTES // 2
FAILURES = (Outcome.IO_ERROR, Outcome.TIMED_OUT, Outcome.BUSY)


def oracle(rank: int, group: int, prefix: Collection[int]) -> bytes:
    """What a model would put into the block of ``group`` that ends with ``prefix``."""
    return blake2b(bytes([rank, group, *prefix]), digest_size=PAGE_BYTES).digest()


@dataclass
class _Running:
    plan: TransferPlan
    is_overwritten: bool = False
    is_other: bool = False


class SimWorker:
    """One rank. A copy takes two steps, half of each page in each: what changes in between is noticed in the
    bytes.
    """

    def __init__(
        self, rank: int, num_device_blocks: int, num_slots: int, random: Random, failure_rate: float
    ) -> None:
        self.rank = rank
        self.device = bytearray(num_device_blocks * PAGE_BYTES)
        self.host = bytearray(num_slots * PAGE_BYTES)
        self._random = random
        self._failure_rate = failure_rate
        self._waiting: dict[int, TransferPlan] = {}
        self._running: dict[int, _Running] = {}
        self._outcomes: dict[int, Outcome] = {}
        # Said to the leader and not yet heard by it.
        self.acks: list[JobResult] = []

    def submit(self, plan: TransferPlan) -> None:
        """Takes a plan."""
        self._waiting[plan.job_id] = plan

    def drop(self, job_id: int) -> None:
        """The plan of this job was made and is never sent."""
        self._outcomes[job_id] = Outcome.REJECTED

    def outcome(self, job_id: int) -> Outcome | None:
        """How the job ended, or None."""
        return self._outcomes.get(job_id)

    @property
    def is_idle(self) -> bool:
        """Whether nothing is under way."""
        return not self._waiting and not self._running

    def step(self) -> None:
        """Starts, goes on with, or fails one job, whichever."""
        job_ids = sorted([*self._waiting, *self._running])
        if not job_ids:
            return
        job_id = self._random.choice(job_ids)
        plan = self._waiting.pop(job_id, None)
        if plan is None:
            self._finish(job_id)
        elif self._random.random() < self._failure_rate:
            self._end(job_id, self._random.choice([*FAILURES, Outcome.REJECTED]))
        else:
            self._running[job_id] = _Running(plan)
            self._copy(self._running[job_id], 0)

    def fence(self, job_ids: Collection[int], *, times_out: bool) -> None:
        """As Worker.fence: cancels what has not started; waits for what runs, or (``times_out``) in vain."""
        for job_id in sorted(job_ids):
            if self._waiting.pop(job_id, None) is not None:
                self._end(job_id, Outcome.REJECTED)
            elif job_id in self._running and times_out:
                self._running[job_id].is_overwritten = True
            elif job_id in self._running:
                self._finish(job_id)

    def _finish(self, job_id: int) -> None:
        running = self._running.pop(job_id)
        self._copy(running, HALF_BYTES)
        if running.is_overwritten:
            self._end(job_id, Outcome.TIMED_OUT)
        elif self._random.random() < self._failure_rate:
            self._end(job_id, self._random.choice(FAILURES))
        else:
            self._end(job_id, Outcome.CORRUPT if running.is_other else Outcome.OK)

    def _copy(self, running: _Running, offset_bytes: int) -> None:
        plan = running.plan
        for move in plan.moves:
            for block, slot in zip(move.device_blocks, move.slots, strict=True):
                there = slice(slot * PAGE_BYTES + offset_bytes, slot * PAGE_BYTES + offset_bytes + HALF_BYTES)
                here = slice(
                    block * PAGE_BYTES + offset_bytes, block * PAGE_BYTES + offset_bytes + HALF_BYTES
                )
                if plan.compares:
                    running.is_other |= self.host[there] != self.device[here]
                elif plan.direction is Direction.OFFLOAD:
                    self.host[there] = self.device[here]
                else:
                    self.device[here] = self.host[there]

    def _end(self, job_id: int, outcome: Outcome, failed: tuple[tuple[int, Outcome], ...] = ()) -> None:
        self._outcomes[job_id] = outcome
        self.acks.append(JobResult(job_id, outcome, 1, 0.0, 0.0, failed=failed))

    def write(self, block: int, content: bytes) -> None:
        """What the model computes."""
        self.device[block * PAGE_BYTES : (block + 1) * PAGE_BYTES] = content

    def on_device(self, block: int) -> bytes:
        """The bytes of a device block."""
        return bytes(self.device[block * PAGE_BYTES : (block + 1) * PAGE_BYTES])

    def in_slot(self, slot: int) -> bytes:
        """The bytes of a slot."""
        return bytes(self.host[slot * PAGE_BYTES : (slot + 1) * PAGE_BYTES])
