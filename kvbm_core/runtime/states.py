"""Which states of a request are stored, which blocks count as used, and which go first.

A state costs as much as the KV of thousands of tokens, and a hit uses one alone. KV behind the newest state
of its prefix can end no hit, nor can a state without the KV before it. So where there are states:

* What counts as used is the KV up to the newest state, and that one. KV behind it and older states age.
* A state goes first once the same request has a newer one; unless it is the last one of a prompt, or so far
  behind the last one that stays that who goes on from there saves something.
* States whose KV is gone go first.

Models without states: a ``StateKeeper`` without positions, which changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet

from kvbm_core.runtime.request import RequestState, StateOnDevice, Worth
from kvbm_core.tiers.chain import TierChain
from kvbm_core.tiers.groups import GroupSpec, alignment_tokens, attention_reach_tokens, base_block_tokens
from kvbm_core.tokens.runs import BlockRun
from kvbm_core.types import BlockKey


class StateKeeper:
    """Part of the Leader, on its thread. ``every_tokens``: see LeaderOptions. What it knows of a request is
    in the request's marks.
    """

    def __init__(self, groups: tuple[GroupSpec, ...], chain: TierChain, every_tokens: int) -> None:
        self.positions = tuple(position for position, group in enumerate(groups) if group.is_state)
        """Of the groups that have states."""
        self._groups = groups
        self._chain = chain
        self._every_tokens = every_tokens
        self._align = alignment_tokens(groups)

    # ---------------------------------------------------------------- what is stored

    def chosen(self, state: RequestState, offered: Sequence[StateOnDevice]) -> list[StateOnDevice]:
        """Those of ``offered`` that are to be stored, in prefix order: at ends where a hit may end; of those
        inside a prompt the ones that are far enough from the last one.
        """
        known_tokens = min(
            len(state.keys(g)) * self._groups[g].block_size_tokens for g in range(len(self._groups))
        )
        ends = {
            one.end_tokens
            for one in offered
            if 0 < one.end_tokens <= known_tokens and not one.end_tokens % self._align
        }
        ends = {end for end in sorted(ends) if self._is_wanted(state, end)}
        state.marks.lasting.update(end for end in ends if end <= state.marks.prompt_tokens)
        once = {(one.end_tokens, one.position): one for one in offered if one.end_tokens in ends}
        return [one for _, one in sorted(once.items())]

    def _is_wanted(self, state: RequestState, end_tokens: int) -> bool:
        marks = state.marks
        if end_tokens + 2 * self._align > marks.prompt_tokens:  # the prompt's last one, or of the answer
            return True
        if end_tokens == marks.kept_tokens:  # the rest of its groups
            return True
        if end_tokens - marks.kept_tokens < self._every_tokens:
            return False
        marks.kept_tokens = end_tokens
        return True

    def stored(self, state: RequestState) -> None:
        """A state of the request, or its KV, may be there now: the state before it goes first, unless it
        stays.
        """
        marks, newest = state.marks, self.newest_end(state, self._considered_tokens(state))
        if newest <= marks.spare_tokens:
            return
        if marks.spare_tokens:
            self._chain.demote(self._keys_at(state, marks.spare_tokens))
        is_last_of_prompt = newest <= marks.prompt_tokens < newest + 2 * self._align
        marks.spare_tokens = 0
        if is_last_of_prompt or newest - marks.kept_tokens >= self._every_tokens:
            marks.kept_tokens = max(marks.kept_tokens, newest)
            marks.lasting.add(newest)
            if newest == marks.waiting_tokens and state.worth is Worth.LASTING:
                marks.waiting_tokens = 0
                self._chain.offer(self.runs_at(state, {newest}))
        elif newest > marks.kept_tokens:
            marks.spare_tokens = newest

    def _considered_tokens(self, state: RequestState) -> int:
        return max(
            end * group.block_size_tokens for group, end in zip(self._groups, state.next_offload, strict=True)
        )

    # ---------------------------------------------------------------- what counts as used

    def newest_end(self, state: RequestState, limit_tokens: int) -> int:
        """The last end up to ``limit_tokens`` at which all groups with states have one, and the others their
        KV, which may come later (drafts); 0: none.
        """
        end = self._newest_state(state, limit_tokens)
        while end and not all(map(self._chain.residents.contains, self._kv_at(state, end))):
            end = self._newest_state(state, end - self._align)
        return end

    def _newest_state(self, state: RequestState, limit_tokens: int) -> int:
        """As ``newest_end``, whether there is KV or not."""
        contains = self._chain.residents.contains
        known_tokens = len(state.keys(self.positions[0])) * self._groups[self.positions[0]].block_size_tokens
        end = min(limit_tokens, known_tokens) // self._align * self._align
        while end > 0 and not all(map(contains, self._keys_at(state, end))):
            end -= self._align
        return end

    def used_keys(self, state: RequestState, limit_tokens: int | None = None) -> list[BlockKey]:
        """What of the request's blocks counts as used, in prefix order. ``limit_tokens``: how far; None: as
        far as they were considered for offload.
        """
        if not self.positions:
            return state.chain_keys()
        limit = self._considered_tokens(state) if limit_tokens is None else limit_tokens
        end = self.newest_end(state, limit)
        if not end:
            return []
        ends = [
            ((block + 1) * group.block_size_tokens, key)
            for position, group in enumerate(self._groups)
            if not group.is_state
            for block, key in enumerate(state.keys(position)[: end // group.block_size_tokens])
        ]
        ends.sort(key=lambda entry: entry[0])
        # The states come last, so that they go just before the KV that is of no use without them.
        return [*(key for _, key in ends), *self._keys_at(state, end)]

    def protected_keys(self, state: RequestState) -> AbstractSet[BlockKey]:
        """What must not be evicted for the request's own blocks: its KV, its newest state, and the one before
        while that one's KV is not there.
        """
        if not self.positions:
            return state.own_keys()
        limit = self._considered_tokens(state)
        ends = {self.newest_end(state, limit), self._newest_state(state, limit)} - {0}
        return state.own_keys().union(*(self._keys_at(state, end) for end in ends))

    # ---------------------------------------------------------------- what goes first

    def mind_orphans(self, state: RequestState, computed_tokens: int) -> None:
        """States of this prompt whose KV is in no tier, nor on its way, go first; they stay if a request that
        computes it uses them.
        """
        if not self.positions or self._chain.is_asked:  # nobody knows all of what is in a store
            return
        residents = self._chain.residents
        limit = len(state.chain.hashes) * base_block_tokens(self._groups)
        reach = attention_reach_tokens(self._groups, state.keys, computed_tokens, limit, residents)
        beyond = reach + self._align
        lacking = [
            key
            for position, group in enumerate(self._groups)
            if group.needs_all and beyond <= limit
            for key in state.keys(position)[
                reach // group.block_size_tokens : beyond // group.block_size_tokens
            ]
            if not residents.contains(key)
        ]
        if not lacking or len(self._chain.host.new_of(lacking)) < len(lacking):
            return
        self._chain.demote(
            [
                key
                for position in self.positions
                for key in state.keys(position)[reach // self._groups[position].block_size_tokens :]
            ]
        )

    # ---------------------------------------------------------------- the way to lower tiers

    def offered(self, state: RequestState, runs: Sequence[BlockRun]) -> Sequence[BlockRun]:
        """Of ``runs``, which are new in the host, those that are to be offered to lower tiers now: not a
        state that goes first when there is a newer one, nor one whose KV is not there.
        """
        if not self.positions:
            return runs
        marks, newest = state.marks, self.newest_end(state, self._considered_tokens(state))
        ends = {run.end * run.block_tokens for run in runs if run.is_state}
        marks.waiting_tokens = max((end for end in ends if end > newest), default=marks.waiting_tokens)
        kept_back = {end for end in ends if end > newest or end == marks.spare_tokens}
        return [run for run in runs if not (run.is_state and run.end * run.block_tokens in kept_back)]

    def rest(self, state: RequestState) -> list[BlockRun]:
        """Of a request that will not go on: what ``offered`` has kept back."""
        return self.runs_at(state, {state.marks.spare_tokens})

    def lasting_ends(self, state: RequestState) -> list[int]:
        """Of a request that will not go on: ends of states that are of use to who comes after it."""
        if not self.positions:
            return []
        marks = state.marks
        return [*marks.lasting, marks.kept_tokens, self._newest_state(state, self._considered_tokens(state))]

    def runs_at(self, state: RequestState, ends: Iterable[int]) -> list[BlockRun]:
        """The states at these ends, each a run of its own."""
        runs = []
        for end in sorted(set(ends) - {0}):
            for position in self.positions:
                block = end // self._groups[position].block_size_tokens
                runs.append(state.run(position, block - 1, block))
        return runs

    def _keys_at(self, state: RequestState, end_tokens: int) -> list[BlockKey]:
        return [
            state.keys(position)[end_tokens // self._groups[position].block_size_tokens - 1]
            for position in self.positions
        ]

    def _kv_at(self, state: RequestState, end_tokens: int) -> list[BlockKey]:
        """The last block of KV up to there of each group that has KV."""
        return [
            state.keys(position)[end_tokens // group.block_size_tokens - 1]
            for position, group in enumerate(self._groups)
            if not group.is_state
        ]
