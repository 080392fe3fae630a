"""An executor whose copies can be held back or made to fail, for tests with whole engines."""

from __future__ import annotations

from collections.abc import Callable, Collection

from kvbm_core.errors import Outcome
from kvbm_core.transfer.executor import Executor
from kvbm_core.transfer.plan import JobResult, TransferPlan
from kvbm_core.types import Direction

BLOCKING_WAIT_S = 1.0
"""A caller that waits at least this long cannot go on before the copy is over; a shorter wait is a look."""


class Gate:
    """The real executor behind a gate: jobs of a direction can be held back, or end as a given failure.

    ``finished`` is told what ends without the real executor.
    """

    def __init__(self, inner: Executor, finished: Callable[[JobResult], None]) -> None:
        self.submitted: list[TransferPlan] = []
        self.before_load: Callable[[], None] = lambda: None
        """Called when an onboard is submitted."""
        self.is_cancellable = True
        """False: a held job counts as running, so that it can only be waited for."""
        self.hangs = False
        """True: and for nothing, as with a GPU that does not answer."""
        self._inner = inner
        self._finished = finished
        self._closed: set[Direction] = set()
        self._held: dict[int, tuple[TransferPlan, float | None]] = {}
        self._failures: dict[Direction, list[Outcome]] = {Direction.ONBOARD: [], Direction.OFFLOAD: []}

    def hold(self, direction: Direction) -> None:
        """Jobs of this direction wait from now on."""
        self._closed.add(direction)

    def release(self, direction: Direction) -> None:
        """Held jobs of this direction start, later ones too."""
        self._closed.discard(direction)
        self._start([job_id for job_id, (plan, _) in self._held.items() if plan.direction is direction])

    def fail_next(self, direction: Direction, outcome: Outcome = Outcome.IO_ERROR, times: int = 1) -> None:
        """The next jobs of this direction move nothing and end like this."""
        self._failures[direction] += [outcome] * times

    def fail_no_more(self) -> None:
        """Takes ``fail_next`` back."""
        for failures in self._failures.values():
            failures.clear()

    @property
    def held(self) -> int:
        """Jobs waiting at the gate."""
        return len(self._held)

    def describe(self) -> str:
        """What waits here and what is closed, for whoever waits in vain."""
        closed = sorted(direction.name for direction in self._closed)
        return f"holds jobs {sorted(self._held)}, closed for {closed}, {len(self.submitted)} came"

    def submitted_of(self, direction: Direction) -> list[TransferPlan]:
        """What was ordered so far."""
        return [plan for plan in self.submitted if plan.direction is direction]

    def submit(self, plan: TransferPlan, *, deadline_s: float | None = None) -> None:
        """See Executor."""
        self.submitted.append(plan)
        if plan.direction is Direction.ONBOARD:
            self.before_load()
        if plan.direction in self._closed:
            self._held[plan.job_id] = (plan, deadline_s)
        else:
            self._pass(plan, deadline_s)

    def _pass(self, plan: TransferPlan, deadline_s: float | None) -> None:
        failures = self._failures[plan.direction]
        if failures:
            self._report(plan.job_id, failures.pop(0))
        else:
            self._inner.submit(plan, deadline_s=deadline_s)

    def _start(self, job_ids: Collection[int]) -> None:
        for plan, deadline_s in [self._held.pop(job_id) for job_id in job_ids]:
            self._pass(plan, deadline_s)

    def _report(self, job_id: int, outcome: Outcome) -> None:
        self._finished(JobResult(job_id, outcome, 0, 0.0, 0.0, "injected"))

    def cancel(self, job_id: int) -> bool:
        """See Executor."""
        if job_id not in self._held:
            return self._inner.cancel(job_id)
        if not self.is_cancellable or self.hangs:
            return False
        del self._held[job_id]
        self._report(job_id, Outcome.REJECTED)
        return True

    def wait(self, job_ids: Collection[int] | None, timeout_s: float) -> bool:
        """See Executor. A held job ends when someone waits for it in earnest."""
        held = [job_id for job_id in self._held if job_ids is None or job_id in job_ids]
        if held and (self.hangs or timeout_s < BLOCKING_WAIT_S):
            return False
        self._start(held)
        return self._inner.wait(job_ids, timeout_s)

    def close(self) -> None:
        """See Executor."""
        for job_id in list(self._held):
            del self._held[job_id]
            self._report(job_id, Outcome.REJECTED)
        self._inner.close()
