"""What the executors that copy between device memory and the slab have in common."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable

import numpy as np
import numpy.typing as npt

from kvbm_core.clock import Clock, SystemClock
from kvbm_core.errors import Outcome
from kvbm_core.storage.host_slab import HostSlab
from kvbm_core.transfer.compare import is_other
from kvbm_core.transfer.digests import SlotDigests, gather
from kvbm_core.transfer.executor import DeviceMemory, StreamMark, detail_of, refusal_of
from kvbm_core.transfer.jobs import Job, JobBoard, OnDone
from kvbm_core.transfer.plan import TransferPlan
from kvbm_core.types import Direction

Content = tuple[int, int, npt.NDArray[np.uint8]]
"""KV cache group, slot, and the bytes of the device block that belongs to it."""


class BoardExecutor(ABC):
    """What executors with one board and one thread have in common; see Executor for the rules.

    ``_thread`` is to be started when all that it uses is there.
    """

    def __init__(
        self,
        thread_name: str,
        device: DeviceMemory,
        host: HostSlab,
        *,
        on_done: OnDone,
        digests: SlotDigests | None,
        clock: Clock | None,
    ) -> None:
        self._device = device
        self._host = host
        self._digests = digests
        self._board: JobBoard[TransferPlan] = JobBoard(clock or SystemClock(), on_done)
        self._thread = threading.Thread(target=self._work, name=thread_name, daemon=True)

    @abstractmethod
    def _work(self) -> None:
        """Copies until the board is closed."""

    @abstractmethod
    def mark(self) -> StreamMark:
        """See Copier."""

    def submit(
        self,
        plan: TransferPlan,
        *,
        deadline_s: float | None = None,
        after: StreamMark = None,
        on_done: OnDone | None = None,
    ) -> None:
        """See Copier."""
        refusal = refusal_of(plan, self._device, self._host)
        if refusal is None:
            try:
                after = self.mark() if after is None else after
            except Exception as error:  # whatever happens to a job is its outcome
                refusal = (Outcome.IO_ERROR, f"{type(error).__name__}: {error}")
        if refusal is None:
            self._board.add(plan, deadline_s, after, on_done)
        else:
            self._board.refuse(plan, *refusal, on_done)

    def cancel(self, job_id: int) -> bool:
        """See Executor."""
        return self._board.cancel(job_id)

    def wait(self, job_ids: Collection[int] | None, timeout_s: float) -> bool:
        """See Executor."""
        return self._board.wait(job_ids, timeout_s)

    def close(self) -> None:
        """See Executor."""
        self._board.close()
        self._thread.join()

    # ---------------------------------------------------------------- after the copies

    def _finish(self, job: Job[TransferPlan], num_bytes: int, contents: Iterable[Content]) -> None:
        """Ends a job whose copies are over. ``contents``: of its device blocks, which are asked for only if
        they are to be compared with what is stored, or noted.
        """
        is_checked = job.plan.compares or self._digests is not None
        wrong = [one[1] for one in contents if self._is_wrong(job.plan, *one)] if is_checked else []
        if wrong:
            self._board.end(job, Outcome.CORRUPT, detail_of(job.plan, wrong))
        else:
            self._board.end(job, Outcome.OK, num_bytes=num_bytes)

    def _is_wrong(self, plan: TransferPlan, group: int, slot: int, content: npt.NDArray[np.uint8]) -> bool:
        """Whether ``slot`` holds other bytes than were offloaded to it, or computed again. Notes what was
        offloaded.
        """
        if plan.compares:
            stored = gather(self._host.view(content.nbytes), [self._host.array], slot)
            dtype, parts = self._device.dtype_of(group), self._device.audited_of(group)
            return any(is_other(stored[part], content[part], dtype) for part in parts)
        if self._digests is not None and plan.direction is Direction.OFFLOAD:
            self._digests.record(slot, content)
            return False
        return self._digests is not None and not self._digests.matches(slot, content)
