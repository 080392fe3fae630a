"""Which running requests may have filled a block in a step, without a look at those that cannot have."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from random import Random
from typing import Generic, TypeVar

from kvbm_core.tiers.groups import GroupSpec, alignment_tokens

STRIDE = 16
RequestId = TypeVar("RequestId", bound=Hashable)


class DueRequests(Generic[RequestId]):
    """A calendar of steps. In most steps each running request gets one token, so the step in which its next
    block is full is known long before; only the requests of that step, and those that got several tokens, are
    looked at.

    Cost of a step: those due, plus one comparison per scheduled request in steps that are not one token each.
    The scheduler's thread only.

    What decoding fills is stored in runs of ``run_tokens``; but block by block where blocks leave a window,
    which would be gone before a whole run is full, and where there are states, of no use without their KV.
    """

    def __init__(self, groups: Sequence[GroupSpec], run_tokens: int, stride: int = STRIDE) -> None:
        self._block_tokens = alignment_tokens(groups)
        must_not_wait = not all(group.needs_all for group in groups)
        self._wait_blocks = 0 if must_not_wait else max(0, run_tokens // self._block_tokens - 1)
        self._random = Random(0)  # noqa: S311 - spreads work, decides nothing
        self._stride = stride
        self._step = 0
        self._due_step: dict[RequestId, int] = {}
        self._calendar: dict[int, list[RequestId]] = {}

    def __len__(self) -> int:
        return len(self._due_step)

    def passes_quietly(self) -> bool:
        """Begins a step of one token each in which nobody is due; else False, and nothing has begun.

        Spares an engine that reports requests one by one from making the mapping that ``next_step`` wants.
        """
        if self._step + 1 in self._calendar:
            return False
        self._step += 1
        return True

    def next_step(self, scheduled_tokens: Mapping[RequestId, int], total_tokens: int) -> list[RequestId]:
        """Begins a step in which requests get ``scheduled_tokens``, ``total_tokens`` in all; those to look at
        now.

        Each of them is forgotten until ``look_again``, and each is given once. One that is due and not
        scheduled is looked at in the step after.
        """
        self._step += 1
        due_step = self._due_step
        entries = dict.fromkeys(
            self._calendar.pop(self._step, ())
        )  # one forgotten and entered again stands there twice
        due = [key for key in entries if due_step.get(key) == self._step]
        late = [key for key in due if key not in scheduled_tokens]
        found = [key for key in due if key in scheduled_tokens] if late else due
        if total_tokens != len(scheduled_tokens):
            found = list(
                dict.fromkeys([*found, *(key for key, tokens in scheduled_tokens.items() if tokens != 1)])
            )
        for key in found:
            due_step.pop(key, None)
        for key in late:
            self.look_again(key, 1)
        return found

    def look_again(self, request_id: RequestId, after_tokens: int, *, may_wait: bool = False) -> None:
        """``request_id`` is of interest when it has got ``after_tokens`` more tokens (at least one is waited
        for).

        ``may_wait``: or up to ``stride - 1`` steps later, together with others.
        """
        step = self._step + max(1, after_tokens)
        if may_wait:
            step = -(-step // self._stride) * self._stride
        self._due_step[request_id] = step
        self._calendar.setdefault(step, []).append(request_id)

    def look_when_full(
        self,
        request_id: RequestId,
        next_full_tokens: int,
        *,
        computed_tokens: int,
        num_scheduled: int,
        num_prompt_tokens: int,
    ) -> None:
        """``request_id`` is of interest when it has ``next_full_tokens``, or in its answer a run's worth
        later. This step computes ``num_scheduled`` of its tokens, beyond ``computed_tokens``.
        """
        wait_tokens = next_full_tokens - computed_tokens - num_scheduled
        may_wait = self._wait_blocks > 0 and computed_tokens + num_scheduled >= num_prompt_tokens
        if may_wait:
            # Requests that began together would all store their runs in one step: their first runs are of
            # any length.
            is_first = computed_tokens < num_prompt_tokens
            blocks = self._random.randint(0, self._wait_blocks) if is_first else self._wait_blocks
            wait_tokens += blocks * self._block_tokens
        self.look_again(request_id, wait_tokens, may_wait=may_wait)

    def forget(self, request_id: RequestId) -> None:
        """The request is over, or does not run any more."""
        self._due_step.pop(request_id, None)
