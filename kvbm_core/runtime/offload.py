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


class _Block(NamedTuple):
    """A full block of group ``position`` on the device; it ends at token ``end_tokens`` of its request."""

    end_tokens: int
    position: int
    key: BlockKey
    device_block: int


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
        wanted: list[_Block] = []
        for g, (group, table) in enumerate(zip(self._groups, tables, strict=True)):
            keys, size = state.keys(g), group.block_size_tokens
            end = min(stored_tokens // size, len(table), len(keys))
            start = max(state.next_offload[g], group.first_needed_block(computed_tokens))
            present = (i for i in range(start, end) if table[i] != NULL_BLOCK)
            wanted += (_Block((i + 1) * size, g, keys[i], table[i]) for i in present)
            state.next_offload[g] = max(state.next_offload[g], end)
        state.next_full_tokens = min(
            (block + 1) * group.block_size_tokens for block, group in zip(state.next_offload, self._groups, strict=True)
        )
        # If the tier is short, all groups shall have the same prefix: one group's blocks are of no use alone.
        if len(self._groups) > 1:
            wanted.sort(key=lambda block: block.end_tokens)
        return self._reserve(state, wanted) if wanted else None

    def _reserve(self, state: RequestState, wanted: list[_Block]) -> Share | None:
        keys = [block.key for block in wanted]
        reservation = self._tier.reserve(keys, lambda: set(state.chain_keys()))
        self._count_evictions()
        if len(reservation.keys) < len(keys):
            self._metrics.dropped(DropReason.NO_SPACE, self._tier.absent_of(keys))
        if not reservation.keys:
            return None
        moves = self._moves(wanted, reservation)
        job = self._open = self._open or self._jobs.start(Direction.OFFLOAD)
        is_prefill = len(wanted) > len(self._groups)
        share = Share(job.job_id, state, reservation.keys, moves, reservation=reservation, is_prefill=is_prefill)
        self._jobs.add(job, share)
        state.offload_jobs.add(job.job_id)
        return share

    def _moves(self, wanted: list[_Block], reservation: Reservation) -> tuple[GroupMove, ...]:
        if len(self._groups) == 1 and len(reservation.keys) == len(wanted):
            return (GroupMove(self._groups[0].index, tuple(block.device_block for block in wanted), reservation.slots),)
        slot_of = dict(zip(reservation.keys, reservation.slots, strict=True))
        per_group: dict[int, tuple[list[int], list[int]]] = {}
        for block in wanted:
            slot = slot_of.pop(block.key, None)
            if slot is not None:
                device_blocks, slots = per_group.setdefault(block.position, ([], []))
                device_blocks.append(block.device_block)
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
        # What came last must go first. Not after each decoded block (the chain is long); once more at the end.
        if share.is_prefill or share.state.is_finished:
            self._tier.touch(share.state.chain_keys())
        return True

    def _count_evictions(self) -> None:
        evicted = self._tier.evicted_blocks_total - self._evicted_seen
        self._evicted_seen += evicted
        self._metrics.evicted(Tier.HOST, evicted)
