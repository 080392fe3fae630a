"""Plans whose blocks are partly in lower tiers: lower tier -> host slot -> device, chunk by chunk; or
straight to the device.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count

from msgspec.structs import replace as changed

from kvbm_core.clock import Clock, SystemClock
from kvbm_core.errors import Outcome
from kvbm_core.transfer.digests import SlotDigests
from kvbm_core.transfer.executor import Copier, StreamMark
from kvbm_core.transfer.jobs import have_ended
from kvbm_core.transfer.movers.base import Mover
from kvbm_core.transfer.movers.disk_direct import DirectLoad, DirectReader
from kvbm_core.transfer.plan import (
    FIRST_DIRECT_SLOT,
    Fetched,
    GroupMove,
    JobResult,
    TierOrder,
    TransferPlan,
    rejected,
)

CHUNK_BYTES = 8 << 20

log = logging.getLogger("kvbm")

OnDone = Callable[[JobResult], None]


@dataclass
class _Read:
    """One lower tier's part of a load. ``chunk_of[i]``: the chunk of block i. ``unheard``: blocks whose end
    has not been heard. ``result`` None: its first result has not come. ``is_over``: nothing of it touches
    memory any more.
    """

    order: TierOrder
    chunk_of: list[int]
    unheard: set[int]
    result: JobResult | None = None
    is_over: bool = False


@dataclass
class _Load:
    """A plan with reads. A chunk of ``copies`` goes up when all of it has been read (``unread``: blocks that
    have not). ``straight``: orders that go to the device, each a part with a number of its own, as copies
    are, and where their blocks go. ``mark``: see Copier. ``failed``: by host slot. ``has_ended``: its first
    result is being told, or was (``is_told``). ``late``: that result, if it was not the last.
    """

    plan: TransferPlan
    reads: list[_Read]
    unread: list[int]
    copies: list[TransferPlan]
    straight: list[tuple[TierOrder, dict[int, tuple[int, int]]]]
    deadline_s: float | None
    submitted_s: float
    fetched: list[Fetched] = field(default_factory=list)
    mark: StreamMark = None
    copying: set[int] = field(default_factory=set)
    failed: dict[int, Outcome] = field(default_factory=dict)
    detail: str = ""
    num_bytes: int = 0
    copy_s: float = 0.0
    is_cancelled: bool = False
    has_ended: bool = False
    is_told: bool = False
    late: JobResult | None = None


class StagedExecutor:
    """Executor: passes plans without reads to the copier; while a chunk of another one is copied, the next is
    read.

    ``movers``: of the lower tiers by name; one that is not there yet may join later, and orders to it are
    REJECTED meanwhile. ``readers``: of those that can be read straight to the device. The copies of a plan
    are jobs of their own, with negative numbers, as are its orders to these. The plan has ended
    when all its parts have; a block that could not be read, and no other, is left out. A plan that is
    cancelled does not wait for its reads: it is over, and late, when nothing of it is copied any more. The
    second result of a late one comes when its reads are over.
    """

    def __init__(
        self,
        make_copier: Callable[[OnDone], Copier],
        movers: Mapping[str, Mover],
        block_bytes: int,
        on_done: OnDone,
        digests: SlotDigests | None = None,
        *,
        readers: Mapping[str, DirectReader] | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._chunk_blocks = max(1, CHUNK_BYTES // block_bytes)
        self._movers = movers
        self._readers: Mapping[str, DirectReader] = {} if readers is None else readers
        self._on_done = on_done
        self._digests = digests
        self._clock = clock or SystemClock()
        self._changed = threading.Condition()
        self._loads: dict[int, _Load] = {}
        self._part_ids = count(-1, -1)
        self._copier = make_copier(on_done)

    def submit(self, plan: TransferPlan, *, deadline_s: float | None = None) -> None:
        """See Executor."""
        if not plan.reads:
            self._copier.submit(plan, deadline_s=deadline_s)
            return
        try:
            load, resident = self._split(plan, deadline_s)
            # Here, as the thread that submits the copies later has another current stream.
            load.mark = self._copier.mark()
        except ValueError as error:  # unequal lengths
            self._on_done(rejected(plan.job_id, str(error)))
            return
        except Exception as error:  # of the device
            self._on_done(rejected(plan.job_id, f"{type(error).__name__}: {error}", Outcome.IO_ERROR))
            return
        with self._changed:
            if plan.job_id in self._loads:
                raise ValueError(f"job {plan.job_id} is already in flight")
            self._loads[plan.job_id] = load
            for read in load.reads:
                if self._digests is not None:  # what lower tiers store has checksums of its own
                    self._digests.forget(read.order.slots)
            parts = [self._part_of(load, resident)] if resident.moves else []
            load.copying.update(order.job_id for order, _ in load.straight)
        for part in parts:
            self._submit_part(load, part)
        for order, targets in load.straight:
            self._submit_straight(load, order, targets)
        for read in load.reads:
            self._submit_read(load, read)
        if not parts and not load.straight and not load.reads:  # nothing of what can be read was wanted
            self._end_if_over(load)

    def _submit_read(self, load: _Load, read: _Read) -> None:
        on_result, mover = partial(self._read_ended, load, read), self._movers.get(read.order.tier)
        if mover is None:
            on_result(rejected(read.order.job_id, f"there is no {read.order.tier} here"))
            return
        on_blocks = partial(self._blocks_read, load, read)
        try:
            mover.submit(read.order, on_result, deadline_s=load.deadline_s, on_blocks=on_blocks)
        except ValueError as error:  # two orders to one tier
            on_result(rejected(read.order.job_id, str(error)))

    def _submit_straight(self, load: _Load, order: TierOrder, targets: Mapping[int, tuple[int, int]]) -> None:
        on_done, reader = partial(self._came_straight, load, order), self._readers.get(order.tier)
        if reader is None:
            on_done(rejected(order.job_id, f"there is no way from the {order.tier} to the device here"))
            return
        reader.submit(order, DirectLoad(targets, load.mark), on_done, deadline_s=load.deadline_s)
        if load.is_cancelled:  # before this
            reader.cancel(order.job_id)

    def cancel(self, job_id: int) -> bool:
        """See Executor."""
        with self._changed:
            load = self._loads.get(job_id)
            if load is not None:
                if load.has_ended:
                    return False
                load.is_cancelled = True
                parts = list(load.copying)
        if load is None:
            return self._copier.cancel(job_id)
        for read in load.reads:
            mover = self._movers.get(read.order.tier)
            if mover is not None:
                mover.cancel(job_id)
        straight = {order.job_id: self._readers.get(order.tier) for order, _ in load.straight}
        for part in parts:
            reader = straight.get(part)
            if reader is not None:
                reader.cancel(part)
            elif part not in straight:
                self._copier.cancel(part)
        self._end_if_over(load)
        with self._changed:
            return not load.copying

    def wait(self, job_ids: Collection[int] | None, timeout_s: float) -> bool:
        """See Executor. What goes down to lower tiers is not waited for: it has nothing to do with device
        memory.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: have_ended(self._open_loads(), job_ids), timeout_s):
                return False
        return self._copier.wait(job_ids, timeout_s)

    def close(self) -> None:
        """See Executor. The movers are closed by whoever made them, before this."""
        with self._changed:
            loads = list(self._loads)
        for job_id in loads:  # what is still read is not waited for by a copy
            self.cancel(job_id)
        self._copier.close()

    def _open_loads(self) -> set[int]:
        """Those whose first result has not been told."""
        return {job_id for job_id, load in self._loads.items() if not load.is_told}

    # ---------------------------------------------------------------- parts

    def _split(self, plan: TransferPlan, deadline_s: float | None) -> tuple[_Load, TransferPlan]:
        """Copies per chunk of reads, in the order of the plan; and what is in its slots already."""
        chunk_of_slot: dict[int, int] = {}
        reads, unread = [], list[int]()
        straight = self._straight_of(plan)
        gone = {slot for _, targets in straight for slot in targets}
        for order in plan.reads:
            if order.is_direct:
                continue
            first = len(unread)
            chunks = [first + i // self._chunk_blocks for i in range(len(order.slots))]
            unread += [0] * (-(-len(order.slots) // self._chunk_blocks))
            for chunk in chunks:
                unread[chunk] += 1
            chunk_of_slot.update(zip(order.slots, chunks, strict=True))
            reads.append(_Read(order, chunks, set(range(len(chunks)))))
        resident = len(unread)
        picked: list[list[GroupMove]] = [[] for _ in range(len(unread) + 1)]
        for move in plan.moves:
            pairs: dict[int, tuple[list[int], list[int]]] = {}
            for device_block, slot in _pairs_of(move):
                if slot in gone:
                    continue
                blocks, own = pairs.setdefault(chunk_of_slot.get(slot, resident), ([], []))
                blocks.append(device_block)
                own.append(slot)
            for chunk, (blocks, own) in pairs.items():
                picked[chunk].append(GroupMove(move.group, tuple(blocks), tuple(own)))
        copies = [replace(plan, moves=tuple(moves), reads=()) for moves in picked]
        resident_part = copies.pop()
        return _Load(plan, reads, unread, copies, straight, deadline_s, self._clock.now_s()), resident_part

    def _straight_of(self, plan: TransferPlan) -> list[tuple[TierOrder, dict[int, tuple[int, int]]]]:
        """Its orders that go to the device, as parts of their own; and of each slot where its block goes.
        What goes nowhere is left out.
        """
        orders = [order for order in plan.reads if order.is_direct]
        if not orders:
            return []
        if plan.compares:
            raise ValueError("what is to be compared has to be in host slots")
        target_of: dict[int, tuple[int, int]] = {}
        for move in plan.moves:
            for device_block, slot in _pairs_of(move):
                if slot >= FIRST_DIRECT_SLOT and slot in target_of:
                    raise ValueError(f"slot {slot} goes to two device blocks")
                target_of[slot] = move.group, device_block
        parts = []
        for order in orders:
            rows = zip(order.keys, order.slots, order.places, strict=True)
            if wanted := [row for row in rows if row[1] in target_of]:
                keys, slots, places = zip(*wanted, strict=True)
                part = replace(order, job_id=next(self._part_ids), keys=keys, slots=slots, places=places)
                parts.append((part, {slot: target_of[slot] for slot in slots}))
        return parts

    def _part_of(self, load: _Load, copies: TransferPlan) -> TransferPlan:
        part = replace(copies, job_id=next(self._part_ids))
        load.copying.add(part.job_id)
        return part

    def _submit_part(self, load: _Load, part: TransferPlan) -> None:
        on_done = partial(self._copied, load, part)
        try:
            self._copier.submit(part, deadline_s=load.deadline_s, after=load.mark, on_done=on_done)
        except Exception as error:  # of the device; the load must end all the same
            log.exception("kvbm: job %d could not be copied", load.plan.job_id)
            on_done(rejected(part.job_id, f"{type(error).__name__}: {error}", Outcome.IO_ERROR))
        if load.is_cancelled:  # between the decision to copy and this
            self._copier.cancel(part.job_id)

    def _blocks_read(
        self, load: _Load, read: _Read, numbers: Sequence[int], outcomes: Sequence[Outcome]
    ) -> None:
        read_chunks: list[int] = []
        with self._changed:
            for number, outcome in zip(numbers, outcomes, strict=True):
                if number not in read.unheard:
                    continue
                read.unheard.discard(number)
                chunk = read.chunk_of[number]
                load.unread[chunk] -= 1
                if not load.unread[chunk]:
                    read_chunks.append(chunk)
                if outcome is not Outcome.OK:
                    load.failed.setdefault(read.order.slots[number], _of_read(load, outcome))
            if load.is_cancelled or load.has_ended:
                return
            copies = [_without(load.copies[chunk], load.failed) for chunk in read_chunks]
            parts = [self._part_of(load, part) for part in copies if part.moves]
        for part in parts:
            self._submit_part(load, part)

    def _read_ended(self, load: _Load, read: _Read, result: JobResult) -> None:
        failures = result.failures(read.order.slots)
        with self._changed:
            unheard = sorted(read.unheard)
        if unheard:
            ended = [failures.get(read.order.slots[number], Outcome.OK) for number in unheard]
            self._blocks_read(load, read, unheard, ended)
        with self._changed:
            read.is_over = not result.is_late
            if read.result is None:
                read.result = result
                load.detail = load.detail or result.detail
                for slot, outcome in failures.items():
                    load.failed.setdefault(slot, _of_read(load, outcome))
        self._end_if_over(load)

    def _copied(self, load: _Load, part: TransferPlan, result: JobResult) -> None:
        slots = [slot for move in part.moves for slot in move.slots]
        with self._changed:
            load.copying.discard(part.job_id)
            load.num_bytes += result.num_bytes
            load.copy_s += result.seconds
            load.detail = load.detail or result.detail
            for slot, outcome in result.failures(slots).items():
                load.failed.setdefault(slot, outcome)
        self._end_if_over(load)

    def _came_straight(self, load: _Load, order: TierOrder, result: JobResult) -> None:
        with self._changed:
            load.copying.discard(order.job_id)
            load.num_bytes += result.num_bytes
            load.fetched.append(Fetched(order.tier, result.num_bytes, result.seconds, is_direct=True))
            load.detail = load.detail or result.detail
            for slot, outcome in result.failures(order.slots).items():
                load.failed.setdefault(slot, outcome)
        self._end_if_over(load)

    # ---------------------------------------------------------------- ends

    def _end_if_over(self, load: _Load) -> None:
        """Tells the load's first result when nothing of it is copied any more, and its last when its reads
        are over.
        """
        with self._changed:
            is_read = load.is_cancelled or all(read.result is not None for read in load.reads)
            if not is_read or load.copying:
                return
            is_over = all(read.is_over for read in load.reads)
            if not load.has_ended:
                load.has_ended = True
                result = self._result_of(load, is_late=not is_over)
            elif is_over and load.late is not None:
                result, load.late = changed(load.late, is_late=False), None
            else:
                return
        try:
            self._on_done(result)
        except Exception:  # a bug of the listener must not end the thread that moves
            log.exception("kvbm: listener failed on the result of job %d", result.job_id)
        with self._changed:
            load.is_told = True
            if result.is_late:
                load.late = result
            else:
                del self._loads[load.plan.job_id]
            self._changed.notify_all()
        if result.is_late:
            self._end_if_over(load)  # its reads may have ended meanwhile

    def _result_of(self, load: _Load, *, is_late: bool) -> JobResult:
        reads = [read.result for read in load.reads if read.result is not None]
        queued_s = max((result.queued_s for result in reads), default=0.0)
        fetched = tuple(
            Fetched(read.order.tier, read.result.num_bytes, read.result.seconds)
            for read in load.reads
            if read.result is not None
        )
        seconds = max(0.0, self._clock.now_s() - load.submitted_s - queued_s)
        result = JobResult(
            load.plan.job_id,
            Outcome.OK,
            load.num_bytes,
            seconds,
            queued_s,
            is_late=is_late,
            fetched=(*fetched, *load.fetched),
            copy_s=load.copy_s,
        )
        if load.is_cancelled:
            return changed(result, outcome=Outcome.REJECTED, detail="cancelled", num_bytes=0)
        if load.failed:
            outcome = next(iter(load.failed.values()))
            return changed(result, outcome=outcome, detail=load.detail, failed=tuple(load.failed.items()))
        return result


def _pairs_of(move: GroupMove) -> list[tuple[int, int]]:
    """(device block, slot) of each block."""
    return list(zip(move.device_blocks, move.slots, strict=True))


def _of_read(load: _Load, outcome: Outcome) -> Outcome:
    """What a read that failed counts as. A tier with a damaged block has not given any KV to compare."""
    return Outcome.MISS if load.plan.compares and outcome is Outcome.CORRUPT else outcome


def _without(plan: TransferPlan, failed: Collection[int]) -> TransferPlan:
    """``plan`` without the blocks of these slots."""
    if not any(slot in failed for move in plan.moves for slot in move.slots):
        return plan
    moves = []
    for move in plan.moves:
        pairs = [p for p in _pairs_of(move) if p[1] not in failed]
        if pairs:
            moves.append(GroupMove(move.group, tuple(p[0] for p in pairs), tuple(p[1] for p in pairs)))
    return replace(plan, moves=tuple(moves))
