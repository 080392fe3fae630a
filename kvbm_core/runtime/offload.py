"""The way down: which of a request's blocks are new, slots for them, and their commit when all ranks have
them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from functools import partial
from typing import NamedTuple

from kvbm_core.blocks.departures import Leave
from kvbm_core.blocks.slot_tier import Reservation
from kvbm_core.blocks.tenants import Tenants
from kvbm_core.errors import IntegrityError, Outcome
from kvbm_core.observe.metrics import Metrics
from kvbm_core.runtime.leader_options import LeaderOptions
from kvbm_core.runtime.request import BlockTable, RequestState, StateOnDevice
from kvbm_core.runtime.states import StateKeeper
from kvbm_core.runtime.transfer_jobs import JobPart, TransferJob
from kvbm_core.tiers.chain import TierChain
from kvbm_core.tiers.groups import GroupSpec, alignment_tokens
from kvbm_core.tiers.jobs import Job, JobTable
from kvbm_core.tokens.runs import BlockRun, consecutive
from kvbm_core.transfer.plan import GroupMove
from kvbm_core.types import BlockKey, Direction

OnPartEnd = Callable[[JobPart, bool], None]
Start = Callable[[Direction], TransferJob]
"""Makes a job, empty, for which the leader waits from now on."""


class _Wanted(NamedTuple):
    """Full blocks on the device, in prefix order: ``keys[i]`` is block ``blocks[i]`` of group
    ``positions[i]``, and in ``device_blocks[i]``.
    """

    keys: Sequence[BlockKey]
    device_blocks: Sequence[int]
    blocks: Sequence[int]
    positions: Sequence[int]
    """Empty: all are of the first group."""

    def only(self, places: list[int]) -> _Wanted:
        """Those at ``places``."""
        positions = [self.positions[i] for i in places] if self.positions else ()
        blocks = [self.blocks[i] for i in places]
        return _Wanted(
            [self.keys[i] for i in places], [self.device_blocks[i] for i in places], blocks, positions
        )

    def with_others(self, other: _Wanted, state: RequestState) -> _Wanted:
        """These and ``other``, of the same request, in prefix order."""
        places = [*self._places(state), *other._places(state)]
        keys, blocks = [*self.keys, *other.keys], [*self.device_blocks, *other.device_blocks]
        order = sorted(range(len(places)), key=places.__getitem__)
        return _Wanted(
            [keys[i] for i in order],
            [blocks[i] for i in order],
            [places[i][2] for i in order],
            [places[i][1] for i in order],
        )

    def _places(self, state: RequestState) -> list[tuple[int, int, int]]:
        """Where each one ends, its group's position, and its number."""
        positions = self.positions or [0] * len(self.blocks)
        return [
            ((block + 1) * state.groups[g].block_size_tokens, g, block)
            for g, block in zip(positions, self.blocks, strict=True)
        ]

    def runs(self, state: RequestState) -> list[BlockRun]:
        """Where in the chains of ``state`` they lie."""
        if isinstance(self.blocks, range):  # most models, as a rule: no loop
            return [state.run(0, self.blocks.start, self.blocks.stop)]
        per_group: dict[int, list[int]] = {}
        for block, position in zip(self.blocks, self.positions or [0] * len(self.blocks), strict=True):
            per_group.setdefault(position, []).append(block)
        return [
            state.run(position, first, end)
            for position, blocks in sorted(per_group.items())
            for first, end in consecutive(blocks)
        ]


def _own_keys(
    states: list[RequestState], keeper: StateKeeper, new_keys: Sequence[BlockKey]
) -> AbstractSet[BlockKey]:
    """What must not be evicted for ``new_keys``, which are of these requests: their prefixes would have
    holes.
    """
    if len(new_keys) == sum(state.num_keys for state in states):
        return frozenset()  # nothing of them is there yet
    return keeper.protected_keys(states[0]) if len(states) == 1 else _OwnKeys(states, keeper)


def _tenants(gathered: Sequence[tuple[RequestState, _Wanted]]) -> Tenants:
    """Whose the blocks are that these requests offload, one after the other."""
    first = gathered[0][0].tenant
    if all(state.tenant == first for state, _ in gathered):
        return first
    return [state.tenant for state, wanted in gathered for _ in wanted.keys]


class _OwnKeys(AbstractSet[BlockKey]):
    """The keys of several requests; a set of sets, as one set of all would have to be made anew in each
    step.
    """

    def __init__(self, states: list[RequestState], keeper: StateKeeper) -> None:
        self._sets = [keeper.protected_keys(state) for state in states]

    def __contains__(self, key: object) -> bool:
        return any(key in keys for keys in self._sets)

    def __bool__(self) -> bool:
        return True  # without counting them

    def __iter__(self) -> Iterator[BlockKey]:
        return iter(set().union(*self._sets))

    def __len__(self) -> int:
        return len(set().union(*self._sets))


class Offloading:
    """Part of the Leader, on its thread.

    What requests offload is gathered until ``take``, which makes one job of it: slots for all blocks at once,
    one plan per step and one answer to it, however many requests have filled a block. ``on_part_end(part,
    committed)`` is told of each request's end in it; a part without blocks had nothing new, or found no
    room.
    """

    def __init__(
        self,
        groups: tuple[GroupSpec, ...],
        chain: TierChain,
        jobs: JobTable,
        start: Start,
        *,
        metrics: Metrics,
        on_part_end: OnPartEnd,
        options: LeaderOptions,
    ) -> None:
        self._groups = groups
        self._null_block = options.null_block
        self._align = alignment_tokens(groups)
        self._is_plain = len(groups) == 1 and not groups[0].is_state
        self.keeper = StateKeeper(groups, chain, options.state_every_tokens)
        self._chain = chain
        self._jobs = jobs
        self._start = start
        self._metrics = metrics
        self._on_part_end = on_part_end
        # The next job, which has its number as soon as somebody waits for it, and what it will read.
        self._open: TransferJob | None = None
        self._gathered: list[tuple[RequestState, _Wanted]] = []

    def offload(
        self,
        state: RequestState,
        tokens: Sequence[int],
        computed_tokens: int,
        stored_tokens: int,
        tables: Sequence[BlockTable],
    ) -> int | None:
        """See Leader.offload."""
        state.chain.extend(tokens, stored_tokens)
        allowed_tokens = stored_tokens if state.limits.offload is None else state.limits.offload
        limits = (computed_tokens, min(stored_tokens, allowed_tokens))
        if self._is_plain and len(tables) == 1:  # most models: no loops for each request of each step
            span, state.next_full_tokens = self._next_span(state, 0, tables[0], limits)
            wanted = self._of_one_group(state, tables[0], span)
        else:
            spans = [
                (range(0), 0) if group.is_state else self._next_span(state, g, tables[g], limits)
                for g, group in enumerate(self._groups)
            ]
            state.next_full_tokens = min(
                (
                    full_tokens
                    for group, (_, full_tokens) in zip(self._groups, spans, strict=True)
                    if not group.is_state
                ),
                default=(stored_tokens // self._align + 1) * self._align,
            )
            wanted = self._wanted(state, tables, [span for span, _ in spans])
        if allowed_tokens < stored_tokens:  # what it has more is not stored; looked at as often as others are
            state.next_full_tokens = (stored_tokens // self._align + 1) * self._align
        return self._gather(state, wanted)

    def offload_states(
        self,
        state: RequestState,
        tokens: Sequence[int],
        states: Sequence[StateOnDevice],
        num_prompt_tokens: int,
    ) -> int | None:
        """See Leader.offload_states."""
        limit = state.limits.offload
        real = [
            one
            for one in states
            if one.device_block != self._null_block and (limit is None or one.end_tokens <= limit)
        ]
        if not real:
            return None
        state.marks.prompt_tokens = num_prompt_tokens
        state.chain.extend(tokens, max(one.end_tokens for one in real))
        chosen = self.keeper.chosen(state, real)
        numbered = [
            (one, one.end_tokens // self._groups[one.position].block_size_tokens - 1) for one in chosen
        ]
        wanted = _Wanted(
            [state.keys(one.position)[block] for one, block in numbered],
            [one.device_block for one in chosen],
            [block for _, block in numbered],
            [one.position for one in chosen],
        )
        for one, block in numbered:
            state.next_offload[one.position] = max(state.next_offload[one.position], block + 1)
        return self._gather(state, wanted)

    def _gather(self, state: RequestState, wanted: _Wanted) -> int | None:
        if not wanted.keys:
            return None
        if self._open is None:
            self._open = self._start(Direction.OFFLOAD)
        if self._open.job_id in state.offload_jobs:  # its states, or what came before them: one part has all
            at = next(i for i, (other, _) in enumerate(self._gathered) if other is state)
            self._gathered[at] = (state, self._gathered[at][1].with_others(wanted, state))
        else:
            self._gathered.append((state, wanted))
            state.offload_jobs.add(self._open.job_id)
        return self._open.job_id

    def _next_span(
        self, state: RequestState, g: int, table: BlockTable, limits: tuple[int, int]
    ) -> tuple[range, int]:
        """Blocks of group ``g`` to consider now, which are considered from here on, and when the next one is
        full.
        """
        computed_tokens, stored_tokens = limits
        group, next_block = self._groups[g], state.next_offload[g]
        size = group.block_size_tokens
        end = min(stored_tokens // size, len(table), len(state.keys(g)))
        first = (
            max(next_block, group.first_needed_block(computed_tokens)) if group.window_tokens else next_block
        )
        if end > next_block:
            state.next_offload[g] = next_block = end
        return range(first, end), (next_block + 1) * size

    def _of_one_group(self, state: RequestState, table: BlockTable, span: range) -> _Wanted:
        device_blocks = table[span.start : span.stop]  # long prompts: slices, no object per block
        if self._null_block in device_blocks:
            return self._wanted(state, (table,), [span])
        return _Wanted(state.keys(0)[span.start : span.stop], device_blocks, span, ())

    def _wanted(self, state: RequestState, tables: Sequence[BlockTable], spans: list[range]) -> _Wanted:
        blocks = [
            ((block + 1) * self._groups[g].block_size_tokens, g, block)
            for g, (span, table) in enumerate(zip(spans, tables, strict=True))
            for block in span
            if table[block] != self._null_block
        ]
        # If the tier is short, all groups shall have the same prefix: one group's blocks are of no use alone.
        blocks.sort()
        return _Wanted(
            [state.keys(g)[block] for _, g, block in blocks],
            [tables[g][block] for _, g, block in blocks],
            [block for _, _, block in blocks],
            [g for _, g, _ in blocks],
        )

    @property
    def has_gathered(self) -> bool:
        """Whether there is something to take."""
        return bool(self._gathered)

    def is_gathering(self, job: Job) -> bool:
        """Whether the job has not been sent yet."""
        return job is self._open

    def gathered_states(self) -> list[RequestState]:
        """The requests that have something to offload."""
        return [state for state, _ in self._gathered]

    def take(self) -> TransferJob | None:
        """Closes the open job, to be sent now. None if there is nothing to offload."""
        job, self._open = self._open, None
        gathered, self._gathered = self._gathered, []
        if job is None:
            return None
        keys: Sequence[BlockKey] = gathered[0][1].keys
        if len(gathered) > 1:
            keys = [key for _, wanted in gathered for key in wanted.keys]
        reservation = self._chain.reserve(
            keys, partial(_own_keys, [state for state, _ in gathered], self.keeper), _tenants(gathered)
        )
        if len(reservation.keys) < len(keys):
            lacking = self._chain.new_of(keys)
            self._chain.host.note_left_out(lacking, reservation.over_quota, self._metrics)
        for part in self._parts(
            job.job_id, gathered, reservation, is_whole=len(reservation.keys) == len(keys)
        ):
            if part.keys:
                job.add(part)
            else:
                part.state.offload_jobs.discard(job.job_id)
                self._end_parts([part], is_committed=False)
        job.reservation = reservation
        if job.parts:
            return job
        self._jobs.cancel(job)
        return None

    def _parts(
        self,
        job_id: int,
        gathered: list[tuple[RequestState, _Wanted]],
        reservation: Reservation,
        *,
        is_whole: bool,
    ) -> Iterator[JobPart]:
        slot_of = {} if is_whole else dict(zip(reservation.keys, reservation.slots, strict=True))
        end = 0
        for state, wanted in gathered:
            start, end = end, end + len(wanted.keys)
            keys, slots, picked = reservation.keys[start:end], reservation.slots[start:end], wanted
            if not is_whole:  # some are there already, on their way, or find no room
                found = [(i, slot_of.pop(key, None)) for i, key in enumerate(wanted.keys)]
                places = [i for i, slot in found if slot is not None]
                slots = tuple(slot for _, slot in found if slot is not None)
                keys = tuple(wanted.keys[i] for i in places)
                picked = wanted.only(places)
            is_prefill = len(wanted.keys) > len(self._groups)
            runs = picked.runs(state) if keys and self._chain.needs_runs else ()
            moves = self._moves(picked, slots)
            yield JobPart(job_id, state, keys, moves, is_prefill=is_prefill, runs=runs)

    def _moves(self, wanted: _Wanted, slots: tuple[int, ...]) -> tuple[GroupMove, ...]:
        if not wanted.positions:
            return (GroupMove(self._groups[0].index, tuple(wanted.device_blocks), slots),) if slots else ()
        per_group: dict[int, tuple[list[int], list[int]]] = {}
        for device_block, g, slot in zip(wanted.device_blocks, wanted.positions, slots, strict=True):
            blocks, group_slots = per_group.setdefault(g, ([], []))
            blocks.append(device_block)
            group_slots.append(slot)
        return tuple(
            GroupMove(self._groups[g].index, tuple(blocks), tuple(group_slots))
            for g, (blocks, group_slots) in sorted(per_group.items())
        )

    def forget_gathered(self) -> None:
        """What has been gathered is not to be stored any more; its job stays, empty, for those who wait for
        it.
        """
        self._gathered = [(state, _Wanted((), (), (), ())) for state, _ in self._gathered]

    def end(self, job: TransferJob) -> bool:
        """Every rank has answered. True if blocks can be matched from now on."""
        if job is self._open:  # abandoned before it was sent
            self._open = None
            gathered, self._gathered = self._gathered, []
            for state, _ in gathered:
                state.restart_offload()
                state.offload_jobs.discard(job.job_id)
                job.parts.append(JobPart(job.job_id, state, (), ()))
            self._end_parts(job.parts, is_committed=False)
            return False
        if job.reservation is None:
            raise IntegrityError(f"job {job.job_id} writes slots that were not reserved for it")
        outcome = job.outcome
        is_committed = self._chain.stored(job.reservation, outcome)
        if outcome is not Outcome.OK:
            why = Leave.PREEMPTED if outcome is Outcome.REJECTED else Leave.FAILED
            self._chain.host.departures.note(job.reservation.keys, why)
        for part in job.parts:
            part.state.offload_jobs.discard(job.job_id)
            if outcome is Outcome.REJECTED:
                # Cancelled because of one request whose device blocks were wanted back; the others still have
                # theirs.
                part.state.restart_offload()
        self._end_parts(job.parts, is_committed=is_committed)
        return is_committed

    def _end_parts(self, parts: Sequence[JobPart], *, is_committed: bool) -> None:
        # What came last must go first. Not after each decoded block (the chain is long); once more at the
        # end, which Leader.finish leaves to the last offload. What came all at once is in order.
        used: list[BlockKey] = []
        has_states = bool(self.keeper.positions)
        for part in parts:
            state = part.state
            if has_states and is_committed:  # chains have few blocks there: as long as a state is large
                self.keeper.stored(state)
            is_worth = part.is_prefill or has_states
            is_due = (is_worth and is_committed) or (state.is_finished and not state.offload_jobs)
            if is_due and not (is_committed and len(part.keys) == state.num_keys):
                used += self.keeper.used_keys(state)
        if used:
            self._chain.host.touch(used)
        for part in parts:
            self._on_part_end(part, is_committed)
