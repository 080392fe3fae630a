"""A rank's offloads of the step under way, and the finished requests whose device blocks they still read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from kvbm_core.runtime.worker import Worker
from kvbm_core.transfer.plan import TransferPlan


class StepOffloads:
    """On the engine's worker thread. Each offload that began a step is submitted or rejected: it is answered.

    ``kept``: finished requests whose blocks the engine keeps, and the jobs that it keeps them for.
    """

    def __init__(self, worker: Worker) -> None:
        self.kept: dict[str, tuple[int, ...]] = {}
        self._worker = worker
        self._waiting: dict[int, TransferPlan] = {}

    def begin(self, plans: Iterable[TransferPlan]) -> None:
        """A new step's, to be submitted after its forward pass. What is left of the step before has no
        source: that step has computed nothing, or did not come to its end.
        """
        new = {plan.job_id: plan for plan in plans}
        for job_id in self._waiting.keys() - new.keys():
            self._worker.reject(job_id)
        self._waiting = new

    def submit(self) -> None:
        """Starts them behind what the current stream was given; waits for nothing."""
        for job_id, plan in list(self._waiting.items()):
            self._worker.submit(plan)
            del self._waiting[job_id]  # not before: what could not be submitted is still to be answered

    def abandon(self) -> None:
        """What has not been submitted will not be."""
        self.begin(())

    def keep(self, requests: Mapping[str, tuple[int, ...]]) -> None:
        """Finished requests, and offloads that still read their blocks."""
        self.kept.update(requests)

    def take_read(self) -> set[str]:
        """Kept requests whose blocks nothing reads any more; each once."""
        read = {request for request, jobs in self.kept.items() if not any(map(self._is_open, jobs))}
        for request in read:
            del self.kept[request]
        return read

    def _is_open(self, job_id: int) -> bool:
        return job_id in self._waiting or self._worker.is_in_flight(job_id)
