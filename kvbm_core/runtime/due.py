"""Which running requests may have filled a block in a step, without a look at those that cannot have."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Generic, TypeVar

STRIDE = 16
RequestId = TypeVar("RequestId", bound=Hashable)


class DueRequests(Generic[RequestId]):
    """A calendar of steps. In most steps each running request gets one token, so the step in which its next
    block is full is known long before; only the requests of that step, and those that got several tokens, are
    looked at.

    Cost of a step: those due, plus one comparison per scheduled request in steps that are not one token each.
    The scheduler's thread only.
    """

    def __init__(self, stride: int = STRIDE) -> None:
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

    def forget(self, request_id: RequestId) -> None:
        """The request is over, or does not run any more."""
        self._due_step.pop(request_id, None)
