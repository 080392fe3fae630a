"""Takes in what TensorRT-LLM reports of running requests in each iteration, and says which blocks are to be
stored.

Reports are increments: tokens and blocks since the last one. Most requests get one token per iteration and
fill no block; those cost an extended list and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvbm_core.runtime.due import STRIDE, DueRequests
from kvbm_core.runtime.leader import Leader
from kvbm_core.tiers.groups import alignment_tokens
from kvbm_trtllm.block_size import BlockSizeCheck
from kvbm_trtllm.contract import new_tables, priorities_of
from kvbm_trtllm.requests import Followed, Given, Requests

MAX_STRIDE = 64
DEFAULT_PRIORITY = 35
"""TensorRT-LLM's own, of a block without a retention priority."""


class Follower:
    """Running requests, from report to report. The leader's thread only."""

    def __init__(
        self,
        leader: Leader,
        requests: Requests,
        block_size: BlockSizeCheck,
        decode_run_tokens: int,
        min_priority: int,
    ) -> None:
        self._leader = leader
        self._requests = requests
        self._block_size = block_size
        self._min_priority = min_priority
        self._block_tokens = alignment_tokens(leader.groups)
        self._num_groups = len(leader.groups)
        stride = max(STRIDE, min(self._block_tokens, MAX_STRIDE))
        self._due = DueRequests[int](leader.groups, decode_run_tokens, stride)
        self._tokens: dict[int, list[int]] = {}
        # To be looked at in this iteration: request, position before it, tokens that it computes.
        self._now: list[tuple[Followed, int, int]] = []

    def hear_first(self, followed: Followed, data: Any) -> list[list[int]]:
        """A request's first report: all of its tokens and blocks. The blocks that were not known, by
        group.
        """
        if len(data.new_tokens) >= len(followed.tokens):
            followed.tokens[:] = data.new_tokens
        self._tokens[followed.number] = followed.tokens
        tables = new_tables(data)
        known = followed.tables or [[] for _ in tables]
        fresh = [
            list(ids[len(table) :] if list(ids[: len(table)]) == table else ids)
            for ids, table in zip(tables, known, strict=True)
        ]
        followed.tables = [list(ids) for ids in tables]
        self._keep(followed, priorities_of(data), first_block=0)
        computed = data.computed_position + followed.added_tokens
        followed.added_tokens = 0
        self._now.append((followed, computed, data.num_scheduled_tokens if self._are_counted(data) else 0))
        return fresh

    def hear(self, reports: Sequence[Any]) -> list[Given]:
        """Later reports of an iteration; the blocks that they give to requests."""
        if not reports:
            return []
        grown = self._take(reports)
        # Who gets several tokens at once is looked at each time (prompts in chunks) or somewhat later
        # (drafts).
        if not self._due.passes_quietly():
            self._look_at_due(reports)
        return self._grow(grown)

    def offload_due(self) -> list[int]:
        """Offloads what this iteration's requests have filled; the jobs in which it will be."""
        now, self._now = self._now, []
        return [job for entry in now if (job := self._offload_full(*entry)) is not None]

    def offload(
        self,
        followed: Followed,
        tokens: Sequence[int],
        computed: int,
        stored: int,
        tables: Sequence[Sequence[int]],
    ) -> int | None:
        """Offloads the full blocks below ``stored``, as far as they are to be kept. See Leader.offload."""
        if followed.state is None or not self._block_size.is_known:
            return None
        if followed.kept_tokens is not None:
            stored = min(stored, followed.kept_tokens)
        return self._leader.offload(followed.state, tokens, computed, stored, tables)

    def forget(self, number: int) -> None:
        """The request is over."""
        self._tokens.pop(number, None)
        self._due.forget(number)
        self._now = [entry for entry in self._now if entry[0].number != number]

    # ---------------------------------------------------------------- inside

    def _take(self, reports: Sequence[Any]) -> list[Any]:
        """Takes in the tokens of all reports, in one pass over them; those that bring blocks."""
        tokens_of, rest = self._tokens, iter(reports)
        grown: list[Any] = []
        while True:
            try:
                for data in rest:
                    tokens_of[data.request_id].extend(data.new_tokens)  # += would store the list again
                    if data.new_block_ids:
                        grown.append(data)
            except KeyError:  # one that nobody follows; it gets blocks all the same
                if data.new_block_ids:
                    grown.append(data)
                continue
            return grown if self._num_groups == 1 else [data for data in reports if any(new_tables(data))]

    @staticmethod
    def _are_counted(data: Any) -> bool:
        # TensorRT-LLM before 1.2.0rc2 does not say: what an iteration computes is stored in the next one.
        return hasattr(data, "num_scheduled_tokens")

    def _look_at_due(self, reports: Sequence[Any]) -> None:
        by_number = {data.request_id: data for data in reports}
        counted = self._are_counted(reports[0])
        scheduled = {
            number: data.num_scheduled_tokens if counted else 0 for number, data in by_number.items()
        }
        for number in self._due.next_step(scheduled, len(scheduled)):
            followed = self._requests.get(number)
            if followed is not None:
                self._now.append((followed, by_number[number].computed_position, scheduled[number]))

    def _grow(self, grown: Sequence[Any]) -> list[Given]:
        given: list[Given] = []
        is_flat, get = self._num_groups == 1, self._requests.get
        for data in grown:
            followed = get(data.request_id)
            fresh = (data.new_block_ids,) if is_flat else new_tables(data)
            given.append((data.request_id, fresh))
            if followed is None:
                continue
            if self._min_priority:
                self._keep(followed, priorities_of(data), len(followed.tables[0]))
            if is_flat:
                followed.tables[0].extend(fresh[0])
                # The overlap scheduler makes room for a token that is not known yet.
                self._block_size.see(len(followed.tokens), len(followed.tables[0]), lag_tokens=1)
            else:
                for table, ids in zip(followed.tables, fresh, strict=True):
                    table.extend(ids)
        return given

    def _keep(self, followed: Followed, priorities: Sequence[int] | None, first_block: int) -> None:
        """Offload stops at the first block of too low a priority, for good: what follows needs it."""
        if self._min_priority and followed.kept_tokens is None:
            if priorities is None:
                low = 0 if self._min_priority > DEFAULT_PRIORITY else None
            else:
                low = next((i for i, value in enumerate(priorities) if value < self._min_priority), None)
            if low is not None:
                followed.kept_tokens = (first_block + low) * self._block_tokens

    def _offload_full(self, followed: Followed, computed: int, num_scheduled: int) -> int | None:
        state = followed.state
        if state is None:
            return None
        # What is computed and not known yet (the overlap scheduler, drafts) is stored when it is.
        stored = min(computed + num_scheduled, len(followed.tokens))
        # The overlap scheduler is one token ahead of what it reports of decoding, and windows move along with
        # it.
        window_end = computed + 1 if num_scheduled == 1 else computed
        job_id = self.offload(followed, followed.tokens, window_end, stored, followed.tables)
        if followed.kept_tokens is not None and stored >= followed.kept_tokens:
            return job_id  # the rest of it is not kept
        if computed + num_scheduled < followed.num_prompt_tokens:
            self._due.look_again(followed.number, 1)  # the next chunk
        else:
            self._due.look_when_full(
                followed.number,
                state.next_full_tokens,
                computed_tokens=computed,
                num_scheduled=num_scheduled,
                num_prompt_tokens=followed.num_prompt_tokens,
            )
        return job_id
