"""The side of an engine that calls a leader. One thread at a time does: the engine's own in its hooks, and
the channel's while those are quiet, as an idle engine makes no step and workers still say something.
"""

from __future__ import annotations

import functools
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Concatenate, ParamSpec, TypeVar

from kvbm_core.observe.guard import GuardState
from kvbm_core.runtime.leader import Leader

QUIET_S = 0.02
"""The engine is taken to be idle when it has called no hook for so long."""

P = ParamSpec("P")
S = TypeVar("S", bound="LeaderSide")
T = TypeVar("T")


def exclusive(method: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[S, P], T]:
    """Decorates what the engine calls: the leader's lock is held meanwhile."""

    @functools.wraps(method)
    def call(self: S, /, *args: P.args, **kwargs: P.kwargs) -> T:
        with self.leader.lock:
            try:
                return method(self, *args, **kwargs)
            finally:
                self.called_at_s = time.monotonic()

    return call


class LeaderSide(ABC):
    """The base of adapters' scheduler sides."""

    called_at_s = float("-inf")
    """When the engine's last call ended, by the machine's monotonic clock."""

    def __init__(self, leader: Leader, guard_state: GuardState) -> None:
        self.leader = leader
        self.guard_state = guard_state

    @abstractmethod
    def _take_in(self) -> None:
        """Polls the leader, guarded."""

    def poll_if_quiet(self) -> float | None:
        """Takes in what workers and operators have said, if the engine is idle; never waits. Answers in how
        many seconds to ask again, None if nothing is left to take in. Any thread.
        """
        if not self.leader.has_news:
            return None
        awake_s = self.called_at_s + QUIET_S - time.monotonic()
        if awake_s > 0:
            return awake_s
        if self.leader.lock.acquire(blocking=False):
            try:
                self._take_in()
            finally:
                self.leader.lock.release()
        return QUIET_S if self.leader.has_news else None
