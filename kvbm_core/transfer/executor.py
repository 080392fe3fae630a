"""What moves bytes (Executor), and what it moves them between."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np

from kvbm_core.errors import LayoutError, Outcome
from kvbm_core.layout.view import BlockView
from kvbm_core.storage.host_slab import HostSlab
from kvbm_core.transfer.compare import can_compare
from kvbm_core.transfer.plan import JobResult, TransferPlan


@dataclass
class DeviceMemory:
    """The engine's KV cache of one rank: a view per KV cache group over common storages.

    A storage is a 1-D uint8 numpy array (CPU) or torch tensor (CUDA), all of one kind. ``dtypes``: of each
    view's numbers, such as "bfloat16"; "" where they are not all of one type, or not known.
    ``audited``: which parts of each view's content an audit compares; None: all of it. Only an audit asks for
    these two.
    """

    views: tuple[BlockView, ...]
    storages: list[Any]
    dtypes: tuple[str, ...] = ()
    audited: tuple[tuple[slice, ...] | None, ...] = ()

    def __post_init__(self) -> None:
        if not self.views or not self.storages:
            raise LayoutError("kvbm: device memory without views or storages")
        sizes = [int(storage.nbytes) for storage in self.storages]
        for view in self.views:
            view.check(sizes)

    def dtype_of(self, group: int) -> str:
        """The type of the numbers in blocks of ``group``; "" if it is not known."""
        return self.dtypes[group] if group < len(self.dtypes) else ""

    def audited_of(self, group: int) -> tuple[slice, ...]:
        """Which parts of the content of blocks of ``group`` an audit compares."""
        parts = self.audited[group] if group < len(self.audited) else None
        return (slice(None),) if parts is None else parts

    @property
    def is_cpu(self) -> bool:
        """Whether the storages are ordinary memory."""
        return all(isinstance(storage, np.ndarray) for storage in self.storages)


class Executor(Protocol):
    """Moves blocks between device memory and the host slab. Safe to call from any thread.

    A transfer either ends OK, with every byte in place, or not OK, with garbage in its targets. Nothing is
    raised for what happens to a job: it is an outcome. Onboards start before offloads, each kind in order of
    submission; jobs may overlap, so a caller must not submit a job that reads what another one still writes.

    A job waits, copies, and is over. What waits can be cancelled at any time, also while its bytes are still
    being read from a lower tier; what copies is over soon, as it waits for memory alone. So whoever is about
    to give the device blocks of a job away cancels it, and waits for it if that came too late.
    """

    def submit(self, plan: TransferPlan, *, deadline_s: float | None = None) -> None:
        """Queues a plan and returns at once.

        A job that has not started ``deadline_s`` seconds from now is TIMED_OUT (None = it may wait for ever).
        An unusable plan is REJECTED, one that names slots not ready yet is BUSY. On CUDA the copies start
        after everything that the calling thread's current stream has been given so far. ValueError if the
        job id is in flight.
        """

    def cancel(self, job_id: int) -> bool:
        """True: nothing of the job touches device memory from now on; it is reported as REJECTED.

        False: what has begun still copies, or the job is over or unknown; ``wait`` says when it is over. Of a
        job in several parts none begins after this, whatever the answer. A job whose host slots a lower
        tier may still write into is reported with ``is_late``.
        """

    def wait(self, job_ids: Collection[int] | None, timeout_s: float) -> bool:
        """Waits until these jobs (None = all) have ended, in whatever way; False after ``timeout_s``."""

    def close(self) -> None:
        """Rejects what waits, lets what runs end, ends all threads; idempotent. Later plans are REJECTED."""


StreamMark: TypeAlias = Any
"""A point in the work of an engine's stream; None where there are no streams."""


class Copier(Executor, Protocol):
    """An Executor whose plans may be submitted by another thread than the engine's."""

    def mark(self) -> StreamMark:
        """What the calling thread's current stream has been given so far. An error of the device is
        raised.
        """

    def submit(
        self,
        plan: TransferPlan,
        *,
        deadline_s: float | None = None,
        after: StreamMark = None,
        on_done: Callable[[JobResult], None] | None = None,
    ) -> None:
        """See Executor; with ``after``, the copies start after that mark, whatever the calling thread.
        ``on_done`` hears of this plan's end in place of the executor's listener.
        """


def refusal_of(plan: TransferPlan, device: DeviceMemory, host: HostSlab) -> tuple[Outcome, str] | None:
    """Why the plan cannot be executed, or None."""
    if plan.reads:
        return Outcome.REJECTED, "there is no lower tier here to read from"
    if any(not 0 <= move.group < len(device.views) for move in plan.moves):
        return Outcome.REJECTED, f"there are {len(device.views)} KV cache groups"
    why = _incomparable(plan, device) if plan.compares else ""
    if why:
        return Outcome.INCOMPATIBLE, why
    try:
        plan.check(min(view.num_blocks for view in device.views), host.num_slots)
    except ValueError as error:
        return Outcome.REJECTED, str(error)
    highest = max((slot for move in plan.moves for slot in move.slots), default=-1)
    if highest >= host.ready_slots:
        return Outcome.BUSY, f"slot {highest} is not ready yet ({host.ready_slots} are)"
    return None


def _incomparable(plan: TransferPlan, device: DeviceMemory) -> str:
    groups = sorted({move.group for move in plan.moves})
    unknown = [group for group in groups if not can_compare(device.dtype_of(group))]
    if unknown:
        return f"numbers of KV cache group {unknown[0]} cannot be compared"
    return "" if any(map(device.audited_of, groups)) else "no layer is known to be the model's own"


def detail_of(plan: TransferPlan, wrong_slots: list[int]) -> str:
    """What a CORRUPT result says."""
    what = "hold other KV than was computed" if plan.compares else "came back with other bytes"
    return f"slots {wrong_slots[:8]} {what}"
