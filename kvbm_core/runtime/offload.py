"""The way down: which of a request's blocks are new, slots for them, and their commit when all ranks have them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from kvbm_core.errors import IntegrityError, Outcome
from kvbm_core.observe.labels import DropReason
from kvbm_core.observe.metrics import Metrics
from kvbm_core.runtime.jobs import Job, JobBook, Share
from kvbm_core.runtime.request import NULL_BLOCK, BlockTable, RequestState
from kvbm_core.tiers.groups import GroupSpec
from kvbm_core.tiers.tier import BlockTier, Reservation
from kvbm_core.transfer.plan import GroupMove, TransferPlan
from kvbm_core.types import BlockKey, Direction, Tier

OnShareEnd = Callable[[Share, bool], None]


class _Wanted(NamedTuple):
    """Full blocks on the device, in prefix order: ``keys[i]`` of group ``positions[i]`` is in ``device_blocks[i]``."""

    keys: Sequence[BlockKey]
    device_blocks: Sequence[int]
    positions: Sequence[int]


class Offloading:
    """Part of the Leader, on its thread.

    What requests offload is gathered in one open job until ``take``: one plan per step, and one answer to it,
    however many requests have filled a block. ``on_share_end(share, committed)`` is told of each request's end in it.
    """

    def __init__(
        self, groups: tuple[GroupSpec, ...], tier: BlockTier, jobs: JobBook, metrics: Metrics, on_share_end: OnShareEnd
    ) -> None:
        self._groups = groups
        self._tier = tier
        self._jobs = jobs
        self._metrics = metrics
        self._on_share_end = on_share_end
        self._open: Job | None = None
        self._evicted_seen = 0

    def offload(
        self,
        state: RequestState,
        tokens: Sequence[int],
        computed_tokens: int,
        stored_tokens: int,
        tables: Sequence[BlockTable],
    ) -> Share | None:
        """See Leader.offload."""
        state.chain.extend(tokens, stored_tokens)
        spans = []
        for g, (group, table) in enumerate(zip(self._groups, tables, strict=True)):
            size = group.block_size_tokens
            end = min(stored_tokens // size, len(table), len(state.keys(g)))
            spans.append(range(max(state.next_offload[g], group.first_needed_block(computed_tokens)), end))
            state.next_offload[g] = max(state.next_offload[g], end)
        state.next_full_tokens = min(
            (block + 1) * group.block_size_tokens for block, group in zip(state.next_offload, self._groups, strict=True)
        )
        wanted = self._wanted(state, tables, spans)
        return self._reserve(state, wanted) if wanted.keys else None

    def _wanted(self, state: RequestState, tables: Sequence[BlockTable], spans: list[range]) -> _Wanted:
        if len(spans) == 1:  # most models, and long prompts: slices, no object per block
            (span,), (table,), keys = spans, tables, state.keys(0)
            device_blocks = table[span.start : span.stop]
            if NULL_BLOCK not in device_blocks:
                return _Wanted(keys[span.start : span.stop], device_blocks, ())
        blocks = [
            ((block + 1) * self._groups[g].block_size_tokens, g, block)
            for g, (span, table) in enumerate(zip(spans, tables, strict=True))
            for block in span
            if table[block] != NULL_BLOCK
        ]
        # If the tier is short, all groups shall have the same prefix: one group's blocks are of no use alone.
        blocks.sort()
        return _Wanted(
            [state.keys(g)[block] for _, g, block in blocks],
            [tables[g][block] for _, g, block in blocks],
            [g for _, g, _ in blocks],
        )

    def _reserve(self, state: RequestState, wanted: _Wanted) -> Share | None:
        reservation = self._tier.reserve(wanted.keys, state.own_keys)
        self._count_evictions()
        if len(reservation.keys) < len(wanted.keys):
            self._metrics.dropped(DropReason.NO_SPACE, self._tier.absent_of(wanted.keys))
        if not reservation.keys:
            return None
        job = self._open = self._open or self._jobs.start(Direction.OFFLOAD)
        moves = self._moves(wanted, reservation)
        is_prefill = len(wanted.keys) > len(self._groups)
        share = Share(job.job_id, state, reservation.keys, moves, reservation=reservation, is_prefill=is_prefill)
        self._jobs.add(job, share)
        state.offload_jobs.add(job.job_id)
        return share

    def _moves(self, wanted: _Wanted, reservation: Reservation) -> tuple[GroupMove, ...]:
        if len(self._groups) == 1 and len(reservation.keys) == len(wanted.keys):
            return (GroupMove(self._groups[0].index, tuple(wanted.device_blocks), reservation.slots),)
        slot_of = dict(zip(reservation.keys, reservation.slots, strict=True))
        per_group: dict[int, tuple[list[int], list[int]]] = {}
        positions = wanted.positions or [0] * len(wanted.keys)
        for key, device_block, g in zip(wanted.keys, wanted.device_blocks, positions, strict=True):
            slot = slot_of.pop(key, None)
            if slot is not None:
                device_blocks, slots = per_group.setdefault(g, ([], []))
                device_blocks.append(device_block)
                slots.append(slot)
        return tuple(
            GroupMove(self._groups[g].index, tuple(device_blocks), tuple(slots))
            for g, (device_blocks, slots) in sorted(per_group.items())
        )

    def take(self) -> TransferPlan | None:
        """Closes the open job: its plan, to be sent now. None if there is nothing to offload."""
        job, self._open = self._open, None
        return job.plan() if job is not None else None

    def end(self, job: Job) -> bool:
        """Every rank has answered. True if blocks can be matched from now on."""
        if job is self._open:  # abandoned before it was sent
            self._open = None
        committed = [self._end_share(share, job.outcome) for share in job.shares]
        return any(committed)

    def _end_share(self, share: Share, outcome: Outcome) -> bool:
        if share.reservation is None:
            raise IntegrityError(f"job {share.job_id} writes slots that were not reserved for it")
        share.state.offload_jobs.discard(share.job_id)
        is_committed = self._commit(share) if outcome is Outcome.OK else False
        if outcome is not Outcome.OK:
            self._tier.abort(share.reservation)
        if outcome is Outcome.REJECTED:
            # Cancelled because of one request whose device blocks were wanted back; the others still have theirs.
            share.state.restart_offload()
        self._on_share_end(share, is_committed)
        return is_committed

    def _commit(self, share: Share) -> bool:
        if share.reservation is None or not self._tier.commit(share.reservation):
            self._metrics.dropped(DropReason.RESET, len(share.keys))
            return False
        self._metrics.offloaded_blocks(len(share.keys), Tier.DEVICE, Tier.HOST)
        # What came last must go first. Not after each decoded block (the chain is long); once more at the end. What
        # came all at once is in order.
        chain = share.state.chain_keys()
        if (share.is_prefill or share.state.is_finished) and len(share.keys) < len(chain):
            self._tier.touch(chain)
        return True

    def _count_evictions(self) -> None:
        evicted = self._tier.evicted_blocks_total - self._evicted_seen
        self._evicted_seen += evicted
        self._metrics.evicted(Tier.HOST, evicted)
