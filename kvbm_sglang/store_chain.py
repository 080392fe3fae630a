"""A disk over a store that machines share, as one BlockStore: for whoever has no leader and no host slots."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from kvbm_core.clock import Clock, SystemClock
from kvbm_core.errors import Outcome
from kvbm_core.observe.labels import DropReason
from kvbm_core.observe.log import TroubleLog
from kvbm_core.observe.metrics import Metrics
from kvbm_core.policy.admission import AdmissionPolicy
from kvbm_core.storage.base import BlockStore, Memory, parts_of
from kvbm_core.storage.host_slab import HostSlab
from kvbm_core.tiers.breaker import Breaker
from kvbm_core.tiers.known import Known, KnownOptions
from kvbm_core.tiers.storing import FAILING, WORDS
from kvbm_core.tiers.written import Unread
from kvbm_core.transfer.movers.store import StoreMover
from kvbm_core.transfer.plan import JobResult, OrderKind, TierOrder
from kvbm_core.types import BlockKey, Direction, Tier

BUFFER_BYTES = 64 << 20
MIN_BUFFERS, MAX_BUFFERS = 16, 1024
"""Memory between the two stores: so many bytes, but so many blocks at least and at most."""
READY_WAIT_S = 10.0
KNOWN = KnownOptions(max_known=100_000)


class Answers(NamedTuple):
    """One outcome per key, and the numbers of those keys whose block is, or came, from the remote store."""

    outcomes: list[Outcome]
    remote: set[int]


@dataclass(eq=False)
class _Order:
    """``is_over``: nobody touches its buffers any more. ``is_left``: nobody here needs them any more.
    ``stands_for``: blocks that are believed to be there if those looked for are.
    """

    order: TierOrder
    is_left: bool
    stands_for: tuple[BlockKey, ...] = ()
    is_over: bool = False
    result: JobResult | None = None

    def outcomes(self) -> list[Outcome]:
        """One per key; TIMED_OUT if there is no answer yet."""
        places = self.order.slots or range(len(self.order.keys))
        if self.result is None:
            return [Outcome.TIMED_OUT] * len(places)
        failed = self.result.failures(places)
        return [failed.get(place, Outcome.OK) for place in places]


class StoreChain:
    """BlockStore over ``disk`` and ``remote``, which it closes. Safe to call from any thread.

    The disk is asked first, and its outcome counts. What is put goes to the remote store too, in the
    background, if ``admission`` lets it; and so does what is found on the disk. What comes from the remote
    store is put on the disk. The remote store sees buffers of the chain's own, never the caller's memory. So
    one that fails, hangs or goes on writing costs misses, and no call takes longer than its own deadline;
    one that fails again and again is left alone for a while. ``io_deadline_s``: of its calls.

    ``head`` of a call whose keys follow each other: the block before them, if somebody knows. What the remote
    store does not have before a block, nor gets, keeps that block out of it.
    """

    def __init__(
        self,
        disk: BlockStore,
        remote: BlockStore,
        payload_bytes: int,
        admission: AdmissionPolicy,
        metrics: Metrics,
        *,
        io_deadline_s: float,
        clock: Clock | None = None,
    ) -> None:
        self._disk, self._remote = disk, remote
        self._payload_bytes = payload_bytes
        self._admission = admission
        self._metrics = metrics
        self._io_deadline_s = io_deadline_s
        self._clock = clock = clock or SystemClock()
        num_buffers = min(max(BUFFER_BYTES // payload_bytes, MIN_BUFFERS), MAX_BUFFERS)
        self._slab = HostSlab(num_buffers, payload_bytes)
        self._slab.wait_ready(READY_WAIT_S)
        self._mover = StoreMover("remote", remote, self._slab, io_deadline_s=io_deadline_s, clock=clock)
        self._to_disk = ThreadPoolExecutor(1, "kvbm-remote-to-disk")
        self._changed = threading.Condition()
        self._breaker = Breaker(clock)
        self._trouble = TroubleLog(clock=clock)
        self._free = list(range(self._slab.ready_slots))
        self._num_late = 0  # buffers of orders that were given up and are not over
        self._known = Known[BlockKey](clock, KNOWN)
        self._unread = Unread[BlockKey](KNOWN.max_known)
        self._looking: set[BlockKey] = set()
        self._storing: set[BlockKey] = set()
        self._last_id = 0
        self._is_closed = False

    # ---------------------------------------------------------------- BlockStore

    def contains_many(self, keys: Sequence[BlockKey], *, deadline_s: float) -> list[Outcome]:
        """See BlockStore."""
        return self.find(keys, deadline_s=deadline_s).outcomes

    def put_many(
        self,
        keys: Sequence[BlockKey],
        payloads: Sequence[Memory],
        *,
        deadline_s: float,
        head: Sequence[BlockKey] | None = None,
    ) -> list[Outcome]:
        """See BlockStore. Waits, within the deadline, for buffers, not for the remote store."""
        ends_at_s = self._clock.now_s() + deadline_s
        outcomes = self._disk.put_many(keys, payloads, deadline_s=deadline_s)
        kept = {keys[i]: payloads[i] for i, outcome in enumerate(outcomes) if outcome is not Outcome.REJECTED}
        self._offer(kept, ends_at_s, keys, head)
        return outcomes

    def get_many(
        self, keys: Sequence[BlockKey], targets: Sequence[Memory], *, deadline_s: float
    ) -> list[Outcome]:
        """See BlockStore."""
        return self.fetch(keys, targets, deadline_s=deadline_s).outcomes

    def remove_many(self, keys: Sequence[BlockKey], *, deadline_s: float) -> list[Outcome]:
        """See BlockStore. Waits for what is on its way between the stores."""
        ends_at_s = self._clock.now_s() + deadline_s
        self.settle(deadline_s)
        with self._changed:
            self._known.learn(dict.fromkeys(keys, Outcome.MISS))
        outcomes = self._disk.remove_many(keys, deadline_s=ends_at_s - self._clock.now_s())
        if not self._is_closed:
            removed = self._remote.remove_many(keys, deadline_s=ends_at_s - self._clock.now_s())
            outcomes = [
                here if below is Outcome.MISS else below
                for here, below in zip(outcomes, removed, strict=True)
            ]
        return outcomes

    def scan(self) -> Iterator[BlockKey]:
        """See BlockStore."""
        on_disk = set(self._disk.scan())
        yield from on_disk
        yield from (key for key in self._remote.scan() if key not in on_disk)

    def close(self) -> None:
        """See BlockStore. It takes some seconds at most."""
        with self._changed:
            if self._is_closed:
                return
            self._is_closed = True
            self._changed.notify_all()
        self._mover.close()
        self._to_disk.shutdown()
        self._disk.close()
        self._slab.close()

    # ---------------------------------------------------------------- where blocks are

    def find(self, keys: Sequence[BlockKey], *, deadline_s: float) -> Answers:
        """As ``contains_many``."""
        ends_at_s = self._clock.now_s() + deadline_s
        outcomes = self._disk.contains_many(keys, deadline_s=deadline_s)
        sought = self._not_here(outcomes)
        if not sought:
            return Answers(outcomes, set())
        order = self._begin(OrderKind.FIND, [keys[i] for i in sought], (), ends_at_s)
        found = {
            i for i, outcome in zip(sought, self._wait(order, ends_at_s), strict=True) if _is_ok(outcome)
        }
        return Answers([Outcome.OK if i in found else o for i, o in enumerate(outcomes)], found)

    def fetch(
        self,
        keys: Sequence[BlockKey],
        targets: Sequence[Memory],
        *,
        deadline_s: float,
        head: Sequence[BlockKey] | None = None,
    ) -> Answers:
        """As ``get_many``."""
        ends_at_s = self._clock.now_s() + deadline_s
        outcomes = self._disk.get_many(keys, targets, deadline_s=deadline_s)
        here = [i for i, outcome in enumerate(outcomes) if _is_ok(outcome)]
        with self._changed:
            self._admission.hit([keys[i] for i in here])
        self._offer({keys[i]: targets[i] for i in here}, None, keys, head)
        sought, begun, came = deque(self._not_here(outcomes)), deque[tuple[list[int], _Order]](), set[int]()
        while sought or begun:
            buffers = self._take(len(sought), None if begun else ends_at_s) if sought else []
            if buffers:
                numbers = [sought.popleft() for _ in buffers]
                order = self._begin(OrderKind.FETCH, [keys[i] for i in numbers], buffers, ends_at_s)
                begun.append((numbers, order))
            elif begun:
                numbers, order = begun.popleft()
                came |= self._bring(order, numbers, targets, ends_at_s)
            else:
                break
        with self._changed:
            self._admission.hit([keys[i] for i in sorted(came)])
        return Answers([Outcome.OK if i in came else o for i, o in enumerate(outcomes)], came)

    def settle(self, timeout_s: float) -> bool:
        """Waits until nothing is on its way between the stores; False if time ran out."""
        with self._changed:
            return self._changed.wait_for(lambda: len(self._free) == self._slab.ready_slots, timeout_s)

    def _not_here(self, outcomes: Sequence[Outcome]) -> list[int]:
        """What to ask the remote store for, if it is to be asked."""
        with self._changed:
            if self._is_closed or self._breaker.is_open:
                return []
        return [i for i, outcome in enumerate(outcomes) if not _is_ok(outcome)]

    # ---------------------------------------------------------------- up

    def _bring(
        self, order: _Order, numbers: Sequence[int], targets: Sequence[Memory], ends_at_s: float
    ) -> set[int]:
        """Waits for a fetch and copies what came: its numbers."""
        ends = list(zip(numbers, order.order.slots, self._wait(order, ends_at_s), strict=True))
        for number, buffer, outcome in ends:
            if _is_ok(outcome):
                at = 0
                for part in parts_of(targets[number]):
                    np.frombuffer(part, np.uint8)[:] = self._buffer(buffer)[at : at + part.nbytes]
                    at += part.nbytes
        came = {number for number, _, outcome in ends if _is_ok(outcome)}
        try:
            self._to_disk.submit(self._keep, order)
        except RuntimeError:  # closed meanwhile
            self._leave(order)
        return came

    def _keep(self, order: _Order) -> None:
        """Puts on the disk what a fetch has brought."""
        outcomes, slots = order.outcomes(), order.order.slots
        came = [i for i, outcome in enumerate(outcomes) if _is_ok(outcome)]
        try:
            memory = [self._buffer(slots[i]).data for i in came]
            self._disk.put_many([order.order.keys[i] for i in came], memory, deadline_s=self._io_deadline_s)
        finally:
            self._leave(order)

    # ---------------------------------------------------------------- down

    def _offer(
        self,
        blocks: dict[BlockKey, Memory],
        ends_at_s: float | None,
        keys: Sequence[BlockKey],
        head: Sequence[BlockKey] | None,
    ) -> None:
        """Those that are admitted are put into the remote store. ``ends_at_s``: how long buffers, and an
        answer, are waited for; None: not at all. ``keys``: all of the call, behind ``head``.
        """
        admitted = self._admitted(blocks)
        if head is not None and admitted:
            admitted = self._behind_heads(set(admitted), keys, head, ends_at_s)
        todo = [(key, blocks[key]) for key in admitted]
        self._look_again(keys)
        while todo:
            buffers = self._take(len(todo), ends_at_s, is_put=True)
            if not buffers:
                self._metrics.dropped(DropReason.QUEUE_FULL, len(todo))
                return
            batch, todo = todo[: len(buffers)], todo[len(buffers) :]
            for (_, payload), buffer in zip(batch, buffers, strict=True):
                at = 0
                for part in parts_of(payload):
                    self._buffer(buffer)[at : at + part.nbytes] = np.frombuffer(part, np.uint8)
                    at += part.nbytes
            self._begin(OrderKind.STORE, [key for key, _ in batch], buffers, None)

    def _admitted(self, blocks: dict[BlockKey, Memory]) -> Sequence[BlockKey]:
        with self._changed:
            if self._is_closed or self._breaker.is_open:
                return []
            return self._admission.admit([key for key in blocks if not self._is_there(key)])

    def _is_there(self, key: BlockKey) -> bool:
        return key in self._storing or self._known.is_kept(key)

    def _behind_heads(
        self,
        admitted: Collection[BlockKey],
        keys: Sequence[BlockKey],
        head: Sequence[BlockKey],
        ends_at_s: float | None,
    ) -> list[BlockKey]:
        """Those of ``admitted`` before which nothing is missing."""
        chosen, has_head = list[BlockKey](), not head or self._has(head[0], ends_at_s)
        with self._changed:
            for key in keys if has_head else ():
                if key in admitted:
                    chosen.append(key)
                elif not self._is_there(key):
                    break
        return chosen

    def _has(self, key: BlockKey, ends_at_s: float | None) -> bool:
        """Whether it is there; if nobody knows, the remote store is asked. Whoever cannot wait for the answer
        finds it the next time.
        """
        with self._changed:
            if self._is_there(key) or self._known.is_present(key) is not None:
                return self._is_there(key)
        order = self._begin(OrderKind.FIND, [key], (), ends_at_s)
        return ends_at_s is not None and _is_ok(self._wait(order, ends_at_s)[0])

    def _look_again(self, keys: Sequence[BlockKey]) -> None:
        """What is kept there may have been removed, or lost, while the disk has it: of what was not seen
        there for a while, and is used here, one block is looked for in place of all.
        """
        with self._changed:
            known = list(filter(self._known.is_kept, keys))
            if not known or self._known.is_present(known[-1]) is not None or known[-1] in self._looking:
                return
            if self._is_closed or self._breaker.is_open:
                return
            self._looking.add(known[-1])
        self._begin(OrderKind.FIND, known[-1:], (), None, stands_for=tuple(known))

    # ---------------------------------------------------------------- buffers

    def _buffer(self, slot: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
        return self._slab.array[slot * self._payload_bytes : (slot + 1) * self._payload_bytes]

    def _take(self, count: int, ends_at_s: float | None, *, is_put: bool = False) -> list[int]:
        """So many buffers at most; none if none came in time, or none can come. Puts leave half of them to
        reads.
        """
        spared = self._slab.ready_slots // 2 if is_put else 0
        with self._changed:
            if ends_at_s is not None:
                self._changed.wait_for(
                    lambda: (
                        len(self._free) > spared
                        or self._slab.ready_slots - self._num_late <= spared
                        or self._is_closed
                        or self._breaker.is_open
                    ),
                    max(0.0, ends_at_s - self._clock.now_s()),
                )
            if self._is_closed or self._breaker.is_open:
                return []
            return [self._free.pop() for _ in range(min(count, max(0, len(self._free) - spared)))]

    def _leave(self, order: _Order) -> None:
        with self._changed:
            order.is_left = True
            self._give_back(order)

    def _give_back(self, order: _Order) -> None:
        if order.is_left and order.is_over:
            self._free += order.order.slots
            self._changed.notify_all()

    # ---------------------------------------------------------------- orders

    def _begin(
        self,
        kind: OrderKind,
        keys: Sequence[BlockKey],
        buffers: Sequence[int],
        ends_at_s: float | None,
        *,
        stands_for: tuple[BlockKey, ...] = (),
    ) -> _Order:
        with self._changed:
            self._last_id += 1
            tier_order = TierOrder(self._last_id, "remote", kind, tuple(keys), tuple(buffers))
            if kind is OrderKind.STORE:
                self._storing.update(keys)
        order = _Order(tier_order, is_left=kind is not OrderKind.FETCH, stands_for=stands_for)
        deadline_s = self._io_deadline_s if ends_at_s is None else ends_at_s - self._clock.now_s()
        self._mover.submit(tier_order, lambda result: self._answered(order, result), deadline_s=deadline_s)
        return order

    def _wait(self, order: _Order, ends_at_s: float) -> list[Outcome]:
        with self._changed:
            timeout_s = max(0.0, ends_at_s - self._clock.now_s())
            self._changed.wait_for(lambda: order.result is not None, timeout_s)
            return order.outcomes()

    def _answered(self, order: _Order, result: JobResult) -> None:
        """In a thread of the mover's; of one that is late, once more when it is over."""
        with self._changed:
            is_first, order.is_over = order.result is None, not result.is_late
            if result.is_late:
                self._num_late += len(order.order.slots)
            elif not is_first:
                self._num_late -= len(order.order.slots)
            if is_first:
                order.result = result
                self._learn(order)
            self._give_back(order)
            self._changed.notify_all()
        if is_first:
            self._count(order, result)

    def _learn(self, order: _Order) -> None:
        kind, keys, outcomes = order.order.kind, order.order.keys, order.outcomes()
        if kind is OrderKind.STORE:
            self._storing.difference_update(keys)
        self._known.learn(dict(zip(keys, outcomes, strict=True)))
        if order.stands_for:
            self._looking.difference_update(keys)
            if not self._known.is_kept(keys[0]):
                self._known.doubt(order.stands_for)
        trouble = next((outcome for outcome in outcomes if outcome in FAILING), None)
        if trouble is not None and self._breaker.failed(kind) and trouble is Outcome.TIMED_OUT:
            line = "kvbm: the %s does not answer: it is left alone for a while, and then tried again"
            self._trouble.failed("answer", trouble, line, WORDS[Tier.REMOTE])
        if trouble is None and self._breaker.succeeded(kind):
            self._trouble.worked("answer", "kvbm: the %s works again", WORDS[Tier.REMOTE])

    def _count(self, order: _Order, result: JobResult) -> None:
        metrics, kind = self._metrics, order.order.kind
        if kind is OrderKind.FIND:
            return
        outcomes, is_write = order.outcomes(), kind is OrderKind.STORE
        num_ok = outcomes.count(Outcome.OK)
        source, target = (Tier.HOST, Tier.REMOTE) if is_write else (Tier.REMOTE, Tier.HOST)
        (metrics.offloaded_blocks if is_write else metrics.onboarded_blocks)(num_ok, source, target)
        metrics.tier_transfer(source, target, result.num_bytes, result.seconds)
        moved = [key for key, outcome in zip(order.order.keys, outcomes, strict=True) if _is_ok(outcome)]
        with self._changed:
            if is_write:
                self._unread.wrote([(key, self._payload_bytes) for key in moved])
            else:
                metrics.read_again(Tier.REMOTE, self._unread.read(moved))
        if num_ok < len(outcomes):
            direction = Direction.OFFLOAD if is_write else Direction.ONBOARD
            metrics.failure(f"{direction}_{result.outcome}")
            metrics.remote_failures(len(outcomes) - num_ok, is_write=is_write)


def _is_ok(outcome: Outcome) -> bool:
    return outcome is Outcome.OK
