"""The mover of any BlockStore: puts and gets slab memory, with threads, deadlines and bounds."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from kvbm_core.clock import Clock, SystemClock
from kvbm_core.errors import Outcome
from kvbm_core.storage.base import BlockStore, HasSources
from kvbm_core.storage.extents import Extent, ExtentStore
from kvbm_core.storage.host_slab import HostSlab
from kvbm_core.storage.late import LATE, Span
from kvbm_core.storage.numa import leave_bound_core
from kvbm_core.transfer.movers.base import OnBlocks, OnResult
from kvbm_core.transfer.plan import NO_SLOT, ExtentPart, JobResult, OrderKind, TierOrder, rejected
from kvbm_core.types import BlockKey

NUM_THREADS = 4
BATCH_BLOCKS = 8
"""Blocks in one call of the store, and keys in one look-up of 32 times as many."""
FIND_BLOCKS = 32 * BATCH_BLOCKS
CALL_BYTES = 4 << 20
"""Extents in one call of the store, at least, if there are so many."""
MAX_WAITING_CALLS = 1024
GRACE_S = 1.0
"""A store has to answer within its deadline; what is not back so much later is given up."""
LOOK_S = 0.05
CLOSE_TIMEOUT_S = 3.0

log = logging.getLogger("kvbm")


@runtime_checkable
class WantsCalls(Protocol):
    """A store that says how many calls at once it takes well."""

    concurrency: int


@runtime_checkable
class WantsBatches(Protocol):
    """A store that says how many blocks in one call it takes well."""

    batch_blocks: int


@dataclass(eq=False)
class _Order:
    """``open_calls``: calls that have neither ended nor been given up."""

    order: TierOrder
    on_result: OnResult
    on_blocks: OnBlocks | None
    starts_by_s: float | None
    submitted_s: float
    started_s: float | None = None
    open_calls: int = 0
    failed: dict[int, Outcome] = field(default_factory=dict)
    is_cancelled: bool = False


@dataclass(eq=False)
class _Call:
    """Blocks ``numbers`` of an order, in ``extents`` if it has them. ``given_up_at_s`` None: it has not
    begun.
    """

    owner: _Order
    numbers: range
    extents: Sequence[ExtentPart] = ()
    given_up_at_s: float | None = None
    token: int | None = None
    is_over: bool = False

    def is_overdue(self, now_s: float) -> bool:
        """Whether it has waited too long to begin."""
        return self.owner.starts_by_s is not None and self.owner.starts_by_s < now_s


class StoreMover:
    """Mover of a BlockStore, which it closes; of its extents too, if it is an ExtentStore.

    FETCH goes before FIND, and FIND before STORE. A call that the store does not end in time is given up: its
    blocks are TIMED_OUT and late, and its thread is missing until the call returns. When all threads are
    missing, orders wait for their deadline. FORGET is not the mover's affair: others use the store too.
    """

    def __init__(
        self,
        name: str,
        store: BlockStore,
        host: HostSlab,
        *,
        io_deadline_s: float = 10.0,
        num_threads: int | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._store = store
        self._extent_store = store if isinstance(store, ExtentStore) else None
        self._host = host
        # A slab keeps its memory as long as somebody has an array of it.
        self._memory: npt.NDArray[np.uint8] | None = host.array
        self._base = host.address
        self._batch_blocks = store.batch_blocks if isinstance(store, WantsBatches) else BATCH_BLOCKS
        self._io_deadline_s = io_deadline_s
        self._clock = clock or SystemClock()
        self._changed = threading.Condition()
        self._queues: dict[OrderKind, deque[_Call]] = {
            kind: deque() for kind in (OrderKind.FETCH, OrderKind.FIND, OrderKind.STORE)
        }
        self._running: set[_Call] = set()
        self._is_closed = False
        if num_threads is None:
            num_threads = store.concurrency if isinstance(store, WantsCalls) else NUM_THREADS
        self._threads = [
            threading.Thread(target=self._work, name=f"kvbm-{name}-{i}", daemon=True)
            for i in range(num_threads)
        ]
        self._watcher = threading.Thread(target=self._watch, name=f"kvbm-{name}-watch", daemon=True)
        for thread in (*self._threads, self._watcher):
            thread.start()

    # ---------------------------------------------------------------- Mover

    def submit(
        self,
        order: TierOrder,
        on_result: OnResult,
        *,
        deadline_s: float | None = None,
        on_blocks: OnBlocks | None = None,
    ) -> None:
        """See Mover."""
        if order.kind is OrderKind.FORGET:
            return
        now_s = self._clock.now_s()
        try:
            order.check(self._host.ready_slots)
        except ValueError as error:
            on_result(rejected(order.job_id, str(error)))
            return
        if order.extents and self._extent_store is None:
            on_result(rejected(order.job_id, f"the store of {order.tier} keeps no extents"))
            return
        starts_by_s = None if deadline_s is None else now_s + deadline_s
        owner = _Order(order, on_result, on_blocks, starts_by_s, now_s)
        calls = self._calls_of(owner)
        owner.open_calls = len(calls)
        with self._changed:
            refusal: JobResult | None = None
            if self._is_closed:
                refusal = rejected(order.job_id, "the mover is closed")
            elif len(self._queues[order.kind]) + len(calls) > MAX_WAITING_CALLS:
                refusal = rejected(order.job_id, f"{MAX_WAITING_CALLS} calls wait", Outcome.BUSY)
            else:
                self._queues[order.kind].extend(calls)
                self._changed.notify_all()
        if refusal is not None:
            on_result(refusal)
        elif not calls:
            self._finish(owner)

    def _calls_of(self, owner: _Order) -> list[_Call]:
        order = owner.order
        size = FIND_BLOCKS if order.kind is OrderKind.FIND else self._batch_blocks
        if not order.extents:
            num_keys = len(order.keys)
            return [_Call(owner, range(at, min(at + size, num_keys))) for at in range(0, num_keys, size)]
        if order.kind is not OrderKind.FIND:
            size = max(1, CALL_BYTES // self._host.slot_bytes)
        calls, start, end, parts = list[_Call](), 0, 0, list[ExtentPart]()
        for part in order.extents:
            parts.append(part)
            end += part.num_blocks - part.skipped
            if end - start >= size:
                calls.append(_Call(owner, range(start, end), parts))
                start, parts = end, []
        return [*calls, _Call(owner, range(start, end), parts)] if parts else calls

    def cancel(self, job_id: int) -> bool:
        """See Mover."""
        with self._changed:
            calls = [call for call in self._queues[OrderKind.FETCH] if call.owner.order.job_id == job_id]
            owners = {call.owner for call in calls if call.owner.started_s is None}
            for owner in owners:
                owner.is_cancelled = True
            self._drop(lambda call: call.owner in owners)
        for owner in owners:
            self._tell(owner, Outcome.REJECTED, "cancelled", is_late=False)
        return bool(owners)

    def close(self) -> None:
        """See Mover."""
        with self._changed:
            if self._is_closed:
                return
            self._is_closed = True
            waiting = self._drop(lambda call: True)
            self._changed.notify_all()
        for call in waiting:
            self._end(call, [Outcome.REJECTED] * len(call.numbers))
        ends_at_s = time.monotonic() + CLOSE_TIMEOUT_S
        for thread in self._threads:
            thread.join(max(0.0, ends_at_s - time.monotonic()))
        with self._changed:
            stuck = self._give_up(self._running)
            self._changed.notify_all()
        for call in stuck:
            self._end(call, [Outcome.TIMED_OUT] * len(call.numbers))
        self._watcher.join(CLOSE_TIMEOUT_S)
        closer = threading.Thread(target=self._store.close, name="kvbm-store-close", daemon=True)
        closer.start()
        closer.join(CLOSE_TIMEOUT_S)
        self._memory = None

    def _drop(self, is_meant: Callable[[_Call], bool]) -> list[_Call]:
        """Takes calls out of the queues; under the lock."""
        dropped: list[_Call] = []
        for kind, queue in self._queues.items():
            dropped += [call for call in queue if is_meant(call)]
            self._queues[kind] = deque(call for call in queue if not is_meant(call))
        return dropped

    # ---------------------------------------------------------------- threads

    def _work(self) -> None:
        leave_bound_core()
        while (call := self._next()) is not None:
            if call.given_up_at_s is None:
                self._end(call, [Outcome.TIMED_OUT] * len(call.numbers))
                continue
            try:
                outcomes = self._ask(call)
                if len(outcomes) != len(call.numbers):
                    raise ValueError(f"{len(outcomes)} outcomes for {len(call.numbers)} keys")
            except Exception as error:  # whatever happens to a call is its outcome, and the thread goes on
                log.exception("kvbm: a store failed: %s", type(error).__name__)
                outcomes = [Outcome.IO_ERROR] * len(call.numbers)
            self._returned(call, outcomes)

    def _next(self) -> _Call | None:
        """The next call; with no ``given_up_at_s`` if it has waited too long to begin."""
        with self._changed:
            while True:
                queue = next((queue for queue in self._queues.values() if queue), None)
                if queue is not None:
                    call = queue.popleft()
                    now_s = self._clock.now_s()
                    if call.is_overdue(now_s):
                        return call
                    if call.owner.started_s is None:
                        call.owner.started_s = now_s
                    call.given_up_at_s = now_s + self._io_deadline_s + GRACE_S
                    self._running.add(call)
                    self._changed.notify_all()
                    return call
                if self._is_closed:
                    return None
                self._changed.wait()

    def _ask(self, call: _Call) -> list[Outcome]:
        order, deadline_s = call.owner.order, self._io_deadline_s
        keys = [order.keys[i] for i in call.numbers]
        store = self._store.at(order.source) if isinstance(self._store, HasSources) else self._store
        if order.kind is OrderKind.FIND:
            if self._extent_store is not None and call.extents:
                extents = [Extent(p.num_blocks, (key,)) for p, key in zip(call.extents, keys, strict=True)]
                return self._extent_store.contains_extents(extents, deadline_s=deadline_s)
            return store.contains_many(keys, deadline_s=deadline_s)
        memory = [self._slot(order.slots[i]) for i in call.numbers]
        if self._extent_store is not None and call.extents:
            return _move_extents(self._extent_store, call, keys, memory, deadline_s)
        ask = store.put_many if order.kind is OrderKind.STORE else store.get_many
        return ask(keys, memory, deadline_s=deadline_s)

    def _slot(self, slot: int) -> memoryview:
        if self._memory is None:
            raise ValueError("the mover is closed")
        size = self._host.slot_bytes
        if slot == NO_SLOT:
            return np.empty(size, np.uint8).data
        return self._memory[slot * size : (slot + 1) * size].data

    def _spans(self, slots: Iterable[int]) -> list[Span]:
        size = self._host.slot_bytes
        starts = (self._base + slot * size for slot in slots if slot != NO_SLOT)
        return [(start, start + size) for start in starts]

    def _watch(self) -> None:
        """Gives up what does not return, and what has waited too long."""
        is_over = False
        while not is_over:
            with self._changed:
                if not self._is_closed or self._running:
                    self._changed.wait(self._pause_s())
                now_s = self._clock.now_s()
                stuck = self._give_up(c for c in self._running if (c.given_up_at_s or 0.0) < now_s)
                overdue = self._drop(partial(_Call.is_overdue, now_s=now_s))
                is_over = self._is_closed and all(call.token is not None for call in self._running)
            for call in (*stuck, *overdue):
                self._end(call, [Outcome.TIMED_OUT] * len(call.numbers))

    def _give_up(self, running: Iterable[_Call]) -> list[_Call]:
        """Those of them that were not given up before; their memory is late from now on. Under the lock."""
        stuck = [call for call in running if call.token is None]
        for call in stuck:
            slots = call.owner.order.slots[call.numbers.start : call.numbers.stop]
            call.token = LATE.add(self._spans(slots), self._memory)
        return stuck

    def _pause_s(self) -> float | None:
        """How long the watcher may sleep; None: until something changes."""
        now_s = self._clock.now_s()
        times = [call.given_up_at_s for call in self._running if call.token is None]
        times += [call.owner.starts_by_s for queue in self._queues.values() for call in queue]
        left = [at_s - now_s for at_s in times if at_s is not None]
        return max(LOOK_S, min(left)) if left else None

    # ---------------------------------------------------------------- ends

    def _returned(self, call: _Call, outcomes: Sequence[Outcome]) -> None:
        with self._changed:
            self._running.discard(call)
            token = call.token
            self._changed.notify_all()
        if token is None:
            self._end(call, outcomes)
        else:
            LATE.end(token)

    def _end(self, call: _Call, outcomes: Sequence[Outcome]) -> None:
        owner = call.owner
        with self._changed:
            if call.is_over or owner.is_cancelled:
                return
            call.is_over = True
            places = owner.order.slots or range(len(owner.order.keys))
            for i, outcome in zip(call.numbers, outcomes, strict=True):
                if outcome is not Outcome.OK and places[i] != NO_SLOT:
                    owner.failed[places[i]] = outcome
        if owner.on_blocks is not None:
            try:
                owner.on_blocks(call.numbers, outcomes)
            except Exception:  # a bug of the listener must not end the thread that moves
                log.exception("kvbm: listener failed on blocks of job %d", owner.order.job_id)
        with self._changed:  # not before: the order's result comes after all of its blocks
            owner.open_calls -= 1
            is_last = owner.open_calls == 0
        if is_last:
            self._finish(owner)

    def _finish(self, owner: _Order) -> None:
        outcome = next(iter(owner.failed.values()), Outcome.OK)
        num_bad, num_all = len(owner.failed), _num_wanted(owner.order)
        detail = f"{num_bad} of {num_all} blocks: {outcome} in tier {owner.order.tier}" if num_bad else ""
        tell = partial(self._tell, owner, outcome, detail)
        LATE.tell_when_free(self._spans(owner.order.slots if num_bad else ()), tell)

    def _tell(self, owner: _Order, outcome: Outcome, detail: str, *, is_late: bool) -> None:
        try:
            owner.on_result(self._result_of(owner, outcome, detail, is_late=is_late))
        except Exception:  # a bug of the listener must not end the thread that moves
            log.exception("kvbm: listener failed on the result of job %d", owner.order.job_id)

    def _result_of(self, owner: _Order, outcome: Outcome, detail: str, *, is_late: bool = False) -> JobResult:
        order, now_s = owner.order, self._clock.now_s()
        started_s = now_s if owner.started_s is None else owner.started_s
        num_moved = 0 if order.kind is OrderKind.FIND else _num_wanted(order) - len(owner.failed)
        return JobResult(
            order.job_id,
            outcome,
            num_moved * self._host.slot_bytes if owner.started_s is not None else 0,
            now_s - started_s,
            started_s - owner.submitted_s,
            detail,
            is_late=is_late,
            failed=tuple(owner.failed.items()),
        )


def _num_wanted(order: TierOrder) -> int:
    """Blocks that are to be moved."""
    return len(order.keys) - (order.slots.count(NO_SLOT) if order.extents else 0)


def _move_extents(
    store: ExtentStore,
    call: _Call,
    keys: Sequence[BlockKey],
    memory: Sequence[memoryview],
    deadline_s: float,
) -> list[Outcome]:
    """Puts or gets the extents of a call; one outcome per key."""
    extents, parts = list[Extent](), list[Sequence[memoryview]]()
    start = 0
    for num_blocks, skipped in call.extents:
        end = start + num_blocks - skipped
        extents.append(Extent(num_blocks, tuple(keys[start:end])))
        parts.append(memory[start:end])
        start = end
    if call.owner.order.kind is OrderKind.STORE:
        ends = store.put_extents(extents, parts, deadline_s=deadline_s)
        return [end for end, extent in zip(ends, extents, strict=True) for _ in extent.keys]
    got = store.get_extents(extents, parts, deadline_s=deadline_s)
    if list(map(len, got)) != list(map(len, parts)):
        raise ValueError(f"{len(got)} answers for {len(parts)} extents, or not one outcome per key")
    return [outcome for outcomes in got for outcome in outcomes]
