"""Onboards for ranks that all keep the same KV (MLA): the first one loads a block and sends it to the
others.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace

from kvbm_core.clock import Clock, SystemClock
from kvbm_core.errors import Outcome
from kvbm_core.transfer.executor import DeviceMemory, Executor
from kvbm_core.transfer.executors.broadcast_group import Group, GroupError, Header
from kvbm_core.transfer.executors.device_rows import CHUNK_BYTES, DeviceRows
from kvbm_core.transfer.jobs import MAX_QUEUED_JOBS, have_ended
from kvbm_core.transfer.plan import JobResult, TransferPlan
from kvbm_core.types import Direction

log = logging.getLogger("kvbm")

OnDone = Callable[[JobResult], None]
CLOSE_TIMEOUT_S = 40.0
_ANY_SLOT = 1 << 62
_CANCELLED = (Outcome.REJECTED, "cancelled")


@dataclass(slots=True)
class _Load:
    """An onboard. ``result``: how the first rank's own part of it ended. ``mark``: see DeviceRows.

    ``is_at_device``: its blocks are being gathered or scattered. One that was cancelled keeps its turn, as
    the other ranks share it.
    """

    plan: TransferPlan
    submitted_s: float
    mark: Any
    result: JobResult | None = None
    is_cancelled: bool = False
    is_at_device: bool = False
    is_over: bool = False


def _cancelled(result: JobResult) -> JobResult:
    outcome, detail = _CANCELLED
    return replace(result, outcome=outcome, detail=detail, num_bytes=0)


class BroadcastExecutor:
    """Executor of one rank of a ``group`` that is connected. Every rank must be given the same onboards in
    the same order.

    With ``make_loader`` this is the first rank, which stores: its offloads go to that executor, and its
    onboards too, before their bytes go to the other ranks. Elsewhere an offload is done at once, with 0
    bytes, and an onboard when the first rank's bytes are in place, with 0 bytes too: they did not come from
    a tier. What could not be loaded ends alike everywhere.

    An onboard that is cancelled on one rank touches that rank's device no more; the ranks go through it all
    the same, as they must stay in step. When a rank is gone, is late or expects another job, the group is
    broken for good: ``on_broken`` is told why, and all onboards end as IO_ERROR. ``close`` of one rank breaks
    it for the others, if they still load.

    With ``verifies`` on the first rank, every rank reads back what has come to its blocks: an onboard that
    brought other bytes is CORRUPT there.
    """

    def __init__(
        self,
        device: DeviceMemory,
        group: Group,
        on_done: OnDone,
        *,
        make_loader: Callable[[OnDone], Executor] | None = None,
        on_broken: Callable[[str], None] = lambda reason: None,
        verifies: bool = False,
        clock: Clock | None = None,
    ) -> None:
        self._group = group
        self._on_done = on_done
        self._on_broken = on_broken
        self._verifies = verifies
        self._clock = clock or SystemClock()
        self._changed = threading.Condition()
        self._loads: dict[int, _Load] = {}
        self._queue: deque[_Load] = deque()
        self._broken = ""
        self._is_closed = False
        self._rows = DeviceRows(device, CHUNK_BYTES)
        self._loader = None if make_loader is None else make_loader(self._loaded)
        self._thread = threading.Thread(target=self._work, name="kvbm-broadcast", daemon=True)
        self._thread.start()

    def submit(self, plan: TransferPlan, *, deadline_s: float | None = None) -> None:
        """See Executor. Where nothing is stored, ``deadline_s`` is the first rank's affair."""
        if plan.direction is Direction.OFFLOAD:
            if self._loader is None:
                self._on_done(JobResult(plan.job_id, Outcome.OK, 0, 0.0, 0.0))
            else:
                self._loader.submit(plan, deadline_s=deadline_s)
            return
        load = _Load(plan, self._clock.now_s(), self._rows.mark())
        with self._changed:
            if plan.job_id in self._loads:
                raise ValueError(f"job {plan.job_id} is already in flight")
            refusal = self._refusal()
            self._loads[plan.job_id] = load
            if refusal is None:
                self._queue.append(load)
                self._changed.notify_all()
        if refusal is not None:
            self._end(load, *refusal)
        elif self._loader is not None:
            try:
                self._loader.submit(plan, deadline_s=deadline_s)
            except Exception as error:  # the other ranks have to hear of it
                self._loaded(
                    JobResult(plan.job_id, Outcome.IO_ERROR, 0, 0.0, 0.0, f"{type(error).__name__}: {error}")
                )

    def skip(self, plan: TransferPlan) -> None:
        """Takes the turn of an onboard that this rank cannot have, and reports nothing. On the first rank it
        fails for all; elsewhere what comes for it is dropped, and the plan's device blocks only say how much
        that is.
        """
        load = _Load(plan, self._clock.now_s(), None, is_cancelled=True, is_over=True)
        if self._loader is not None:
            load.result = JobResult(plan.job_id, Outcome.REJECTED, 0, 0.0, 0.0, "skipped")
        with self._changed:
            if self._refusal() is None:
                self._queue.append(load)
                self._changed.notify_all()

    def cancel(self, job_id: int) -> bool:
        """See Executor."""
        with self._changed:
            load = self._loads.get(job_id)
            if load is not None:
                if load.is_over:
                    return False
                load.is_cancelled = True
                is_copying = load.is_at_device or (self._loader is not None and load.result is None)
                if load.result is not None:
                    load.result = _cancelled(load.result)
        if load is not None and not is_copying:
            self._end(load, *_CANCELLED)
            return True
        return self._loader is not None and self._loader.cancel(job_id)

    def wait(self, job_ids: Collection[int] | None, timeout_s: float) -> bool:
        """See Executor."""
        ends_at_s = self._clock.now_s() + timeout_s
        with self._changed:
            if not self._changed.wait_for(lambda: have_ended(self._loads.keys(), job_ids), timeout_s):
                return False
        return self._loader is None or self._loader.wait(job_ids, max(0.0, ends_at_s - self._clock.now_s()))

    def close(self) -> None:
        """See Executor."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._group.close()
        if self._loader is not None:
            self._loader.close()
        # It may be inside NCCL, which knows no end; it has nothing of the slab.
        self._thread.join(CLOSE_TIMEOUT_S)
        if self._thread.is_alive():
            log.error("kvbm: rank %d: the broadcast's thread did not end", self._group.rank)

    # ---------------------------------------------------------------- ends

    def _refusal(self) -> tuple[Outcome, str] | None:
        """Why no onboard is taken or shared any more."""
        if self._is_closed:
            return Outcome.REJECTED, "the executor is closed"
        if self._broken:
            return Outcome.IO_ERROR, self._broken
        if len(self._loads) >= MAX_QUEUED_JOBS:
            return Outcome.BUSY, f"{MAX_QUEUED_JOBS} jobs are waiting"
        return None

    def _loaded(self, result: JobResult) -> None:
        """The first rank's executor has ended a job; a load that failed ends now, and the other ranks hear of
        it in turn.
        """
        with self._changed:
            load = self._loads.get(result.job_id)
            if load is not None:
                if load.is_cancelled and result.outcome is Outcome.OK:
                    result = _cancelled(result)
                load.result = result
                self._changed.notify_all()
            is_off = self._is_closed or bool(self._broken)
        if load is None:
            self._on_done(result)
        elif result.outcome is not Outcome.OK:
            self._publish(load, result)
        elif is_off:
            self._end_unshared(load)

    def _end_unshared(self, load: _Load) -> None:
        self._end(load, *(self._refusal() or (Outcome.IO_ERROR, "not shared")))

    def _end(self, load: _Load, outcome: Outcome, detail: str = "", num_bytes: int = 0) -> None:
        queued_s = 0.0 if load.result is None else load.result.queued_s
        seconds = max(0.0, self._clock.now_s() - load.submitted_s - queued_s)
        result = JobResult(load.plan.job_id, outcome, num_bytes, seconds, queued_s, detail)
        if load.result is not None:
            result = replace(result, fetched=load.result.fetched, copy_s=load.result.copy_s)
        self._publish(load, result)

    def _publish(self, load: _Load, result: JobResult) -> None:
        with self._changed:
            if load.is_over:
                return
            load.is_over = True
        try:
            self._on_done(result)
        except Exception:  # a bug of the listener must not end the thread that shares
            log.exception("kvbm: listener failed on the result of job %d", result.job_id)
        with self._changed:
            del self._loads[load.plan.job_id]
            self._changed.notify_all()

    def _break(self, error: Exception) -> None:
        """Nothing is shared any more. What the first rank still loads ends when that is over."""
        with self._changed:
            reason = str(error) if isinstance(error, GroupError) else f"{type(error).__name__}: {error}"
            if not self._is_closed:
                self._broken = f"the broadcast between the ranks is broken: {reason.splitlines()[0]}"
            ended = [load for load in self._loads.values() if self._loader is None or load.result is not None]
            self._queue.clear()
        self._group.close()
        if self._broken:
            log.error("kvbm: rank %d: %s", self._group.rank, self._broken)
            with suppress(Exception):  # it is told so that nobody asks any more; here we go on without it
                self._on_broken(self._broken)
        for load in ended:
            self._end_unshared(load)

    # ---------------------------------------------------------------- the thread

    def _work(self) -> None:
        try:
            with self._rows.bound():
                share = self._receive if self._loader is None else self._send
                while (load := self._next()) is not None:
                    share(load)
            self._break(GroupError("closed"))
        except (
            Exception
        ) as error:  # of torch, of a connection: whatever it is, the ranks are no longer in step
            self._break(error)
        finally:
            self._group.discard()

    def _next(self) -> _Load | None:
        """The oldest onboard, when the first rank has loaded it or the others may wait for it; None after
        ``close``.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: (
                    self._is_closed or bool(self._queue and (self._loader is None or self._queue[0].result))
                )
            )
            return None if self._is_closed else self._queue.popleft()

    def _send(self, load: _Load) -> None:
        result = load.result
        if result is None:
            raise ValueError(f"job {load.plan.job_id} has not been loaded")
        num_bytes = self._num_bytes(load.plan)
        self._group.announce(Header(load.plan.job_id, num_bytes, result.outcome, self._verifies))
        if result.outcome is not Outcome.OK:
            return
        for group, blocks in self._rows.chunks(load.plan):
            with self._at_device(load) as is_allowed:
                rows = self._rows.gather(group, blocks) if is_allowed else None
            # What is shared for a cancelled load is rubbish: this rank's answer says that it is of no use.
            shared = self._rows.staged(group, len(blocks)) if rows is None else rows
            self._group.share(shared)
            if self._verifies:
                self._group.tell_digest(_digest(shared))
        self._end(load, Outcome.OK, num_bytes=result.num_bytes)

    def _receive(self, load: _Load) -> None:
        header = self._group.hear()
        is_expected = header.job_id == load.plan.job_id and (
            header.outcome is not Outcome.OK
            or (header.num_bytes == self._num_bytes(load.plan) and self._is_possible(load.plan))
        )
        self._group.vote(is_expected)
        if not is_expected:
            raise GroupError(f"job {load.plan.job_id} was to come, and {header.job_id} has been loaded")
        if header.outcome is not Outcome.OK:
            self._end(load, header.outcome, "the first rank could not load it")
            return
        is_equal = True
        for group, blocks in self._rows.chunks(load.plan):
            self._group.share(self._rows.staged(group, len(blocks)))
            expected = self._group.hear_digest() if header.has_digests else b""
            with self._at_device(load) as is_allowed:
                if is_allowed:
                    self._rows.scatter(group, blocks, load.mark)
                if is_allowed and expected and _digest(self._rows.gather(group, blocks)) != expected:
                    is_equal = False
        if is_equal:
            self._end(load, Outcome.OK)
        else:
            self._end(load, Outcome.CORRUPT, "other bytes have come than the first rank sent")

    @contextmanager
    def _at_device(self, load: _Load) -> Iterator[bool]:
        """Whether its blocks may be touched inside; whoever cancels it meanwhile waits for that."""
        with self._changed:
            is_allowed = load.is_at_device = not (load.is_cancelled or self._is_closed)
        try:
            yield is_allowed
        finally:
            with self._changed:
                load.is_at_device = False
                was_cancelled = load.is_cancelled
            if was_cancelled:
                self._end(load, *_CANCELLED)

    def _num_bytes(self, plan: TransferPlan) -> int:
        views = self._rows.views
        return sum(
            len(m.device_blocks) * views[m.group].block_bytes for m in plan.moves if m.group < len(views)
        )

    def _is_possible(self, plan: TransferPlan) -> bool:
        """Whether its device blocks exist here and are named once. The slots are the first rank's affair."""
        views = self._rows.views
        if any(not 0 <= move.group < len(views) for move in plan.moves):
            return False
        try:
            plan.check(min(view.num_blocks for view in views), _ANY_SLOT)
        except ValueError:
            return False
        return True


def _digest(rows: Any) -> bytes:
    import xxhash

    return xxhash.xxh3_128_digest(rows.cpu().numpy().data)
