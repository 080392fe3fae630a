"""The way down: which of a request's blocks are new, slots for them, and their commit when all ranks have them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvbm_core.errors import IntegrityError, Outcome
from kvbm_core.observe.labels import DropReason
from kvbm_core.observe.metrics import Metrics
from kvbm_core.runtime.jobs import Job, JobBook
from kvbm_core.runtime.request import NULL_BLOCK, BlockTable, RequestState
from kvbm_core.tiers.groups import GroupSpec
from kvbm_core.tiers.tier import BlockTier
from kvbm_core.transfer.plan import GroupMove, TransferPlan
from kvbm_core.types import BlockKey, Direction, Tier


class _Block(NamedTuple):
    """A full block of group ``position`` on the device; it ends at token ``end_tokens`` of its request."""

    end_tokens: int
    position: int
    key: BlockKey
    device_block: int


class Offloading:
    """Part of the Leader, on its thread."""

    def __init__(self, groups: tuple[GroupSpec, ...], tier: BlockTier, jobs: JobBook, metrics: Metrics) -> None:
        self._groups = groups
        self._tier = tier
        self._jobs = jobs
        self._metrics = metrics
        self._evicted_seen = 0

    def offload(
        self,
        state: RequestState,
        tokens: Sequence[int],
        computed_tokens: int,
        stored_tokens: int,
        tables: Sequence[BlockTable],
    ) -> TransferPlan | None:
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
        wanted.sort(key=lambda block: block.end_tokens)
        return self._plan(state, wanted) if wanted else None

    def _plan(self, state: RequestState, wanted: list[_Block]) -> TransferPlan | None:
        keys = [block.key for block in wanted]
        reservation = self._tier.reserve(keys, lambda: set(state.chain_keys()))
        self._count_evictions()
        self._metrics.dropped(DropReason.NO_SPACE, self._tier.absent_of(keys))
        if not reservation.keys:
            return None
        slot_of = dict(zip(reservation.keys, reservation.slots, strict=True))
        per_group: dict[int, tuple[list[int], list[int]]] = {}
        for block in wanted:
            slot = slot_of.pop(block.key, None)
            if slot is not None:
                device_blocks, slots = per_group.setdefault(block.position, ([], []))
                device_blocks.append(block.device_block)
                slots.append(slot)
        moves = tuple(
            GroupMove(self._groups[g].index, tuple(device_blocks), tuple(slots))
            for g, (device_blocks, slots) in sorted(per_group.items())
        )
        job = self._jobs.start(state, Direction.OFFLOAD, reservation.keys, moves)
        job.reservation = reservation
        job.is_prefill = len(wanted) > len(self._groups)
        state.offload_jobs.add(job.job_id)
        return job.plan

    def end(self, job: Job) -> bool:
        """Every rank has answered. True if the blocks can be matched from now on."""
        if job.reservation is None:
            raise IntegrityError(f"job {job.job_id} writes slots that were not reserved for it")
        state = job.state
        state.offload_jobs.discard(job.job_id)
        if job.outcome is not Outcome.OK:
            self._tier.abort(job.reservation)
            return False
        if not self._tier.commit(job.reservation):
            self._metrics.dropped(DropReason.RESET, len(job.keys))
            return False
        self._metrics.offloaded_blocks(len(job.keys), Tier.DEVICE, Tier.HOST)
        # What came last must go first. Not after each decoded block (the chain is long); once more at the end.
        if job.is_prefill or state.is_finished:
            self._tier.touch(state.chain_keys())
        return True

    def _count_evictions(self) -> None:
        evicted = self._tier.evicted_blocks_total - self._evicted_seen
        self._evicted_seen += evicted
        self._metrics.evicted(Tier.HOST, evicted)
